"""`timebell audit` and `timebell why` on a database."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

from sqlalchemy import delete

from timebell import Every, Timebell
from timebell.clock import system_now
from timebell.model.planned_job import build_job
from timebell.recurrence.instants import format_instant
from timebell.store.schedules import schedules
from timebell.store.schema import finished


async def _create_history(url: str, damaged: bool) -> list[str]:
    """Create ten minutes of history of a schedule that has ended, and return its instants."""
    end = system_now() - timedelta(minutes=5)
    start = end - timedelta(minutes=10)
    app = Timebell(url, timezone="UTC")
    await app.open()
    every = Every("PT1M", start)
    draft = app.schedules.draft("t", every, {"name": "minutely", "end": end, "catch_up": "skip"}, start)
    await app.store.run(schedules.upsert_schedule, draft, build_job, start, replace=False)
    await app.store.run(schedules.fire_due_schedules, build_job, system_now(), 10)
    if damaged:
        await app.store.run(_delete_occurrence, start + timedelta(minutes=3))
    await app.close()
    return [format_instant(start + timedelta(minutes=minute)) for minute in range(11)]


def _delete_occurrence(tx: Any, at: Any) -> None:
    tx.execute(delete(finished).where(finished.c.scheduled_at == at))


def test_intact_history_reports_no_difference(cli: Any, sqlite_url: str) -> None:
    instants = asyncio.run(_create_history(sqlite_url, damaged=False))
    between = ("--from", instants[0], "--to", instants[10], "--database", sqlite_url)
    done = cli("audit", *between)
    assert (done.code, done.out) == (0, "")
    assert "1 schedule; 9 expected; skipped: 9 missed. 0 differences." in done.err
    assert json.loads(cli("audit", *between, "-o", "json").out) == []


def test_difference_is_listed_and_sets_the_exit_code(cli: Any, sqlite_url: str) -> None:
    instants = asyncio.run(_create_history(sqlite_url, damaged=True))
    between = ("--from", instants[0], "--to", instants[10], "--database", sqlite_url)
    done = cli("audit", *between, "--schedule", "minutely")
    assert done.code == 7
    assert instants[3] in done.out and "missing" in done.out
    (one,) = json.loads(cli("audit", *between, "-o", "json").out)
    assert (one["finding"], one["at"], one["count"], one["schedule"]) == ("missing", instants[3], 1, "minutely")
    why = json.loads(cli("why", "minutely", instants[3], "--database", sqlite_url, "-o", "json").out)
    assert why["outcome"] == "lost"
    explained = cli("why", "minutely", instants[4], "--database", sqlite_url)
    assert (explained.code, explained.err) == (0, "")
    assert "It was skipped (missed)" in explained.out
    local = cli("why", "minutely", instants[4].removesuffix("Z").replace("+00:00", ""), "--database", sqlite_url)
    assert local.out == explained.out  # the zone of the schedule is UTC
    by_id = cli("why", why["scheduleId"], instants[4].removesuffix("Z"), "--database", sqlite_url)
    assert by_id.out == explained.out


def test_missing_database_schedule_or_record_sets_the_exit_code(cli: Any, sqlite_url: str) -> None:
    between = ("--from", format_instant(system_now() - timedelta(hours=1)), "--to", format_instant(system_now()))
    assert cli("audit", *between, "--database", "sqlite:///nowhere.db").code == 6
    assert cli("audit", *between, "--database", sqlite_url, "--schedule", "none").code == 3
    assert cli("why", "none", between[1], "--database", sqlite_url).code == 3
    assert cli("why", "none", "yesterday", "--database", sqlite_url).code == 2
    old = ("--from", "2020-01-01T00:00:00Z", "--to", "2020-01-02T00:00:00Z")
    done = cli("audit", *old, "--database", sqlite_url)
    assert done.code == 2 and "AUDIT_TOO_OLD" in done.err
