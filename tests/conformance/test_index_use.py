"""Each index of live and finished jobs is used by the operation that docs/reference/database.md lists beside it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert, text

from tests.docs.pages import DOCS, code_words, rows
from timebell.ids import lowest_id_at
from timebell.model.job import FINISHED, LIVE
from timebell.model.routes import ALL_ROUTES
from timebell.recurrence import installed_release
from timebell.store.cluster import problems
from timebell.store.dialects.base import Store
from timebell.store.jobs import dead_letters, repository, unhandled_topics
from timebell.store.jobs.dead_letters import DeadLetterFilter
from timebell.store.schedules import queries, tzdata_replan
from timebell.store.schema import finished, jobs, schedules
from timebell.store.tenancy import tenant_limits

from .helpers import NODE, T0, after

ROWS = 10_000  # of each table of jobs
SCHEDULES = 100
LANE, GROUP, TENANT = ("default", 0), ("default", "default", "group1"), {"tenant_id": "default"}
INDEX_OF_SQLITE = re.compile(r"INDEX (timebell_\w+)")


def _id(n: int) -> str:
    return lowest_id_at(T0 - timedelta(seconds=ROWS - n))


def _common(n: int) -> dict[str, Any]:
    at = T0 - timedelta(seconds=ROWS - n)
    return {
        "id": _id(n), "tenant_id": f"tenant{n % 50}" if n % 3 == 0 else "default", "topic": f"topic{n % 50}",
        "schedule_id": _id(n % SCHEDULES) if n % 10 == 0 else None, "kind": "once", "scheduled_at": at, "run_at": at,
        "timezone": "UTC", "payload": "null", "owner_id": f"owner{n % 20}" if n % 20 < 2 else None,
        "key": f"key{n}" if n % 20 == 0 else None, "queue": "default", "priority": 0, "serial": False, "attempt": 0,
        "attempts_used": 0, "created_at": at,
    }  # fmt: skip


def _live(n: int) -> dict[str, Any]:
    """Return a live job: of 100, 2 are running, 2 dispatched, 6 held, 10 at a local time."""
    state = {0: "running", 1: "dispatched"}.get(n % 50, "pending")
    hold = {2: "unhandled", 3: "group", 4: "tenant"}.get(n % 50)
    return _common(n) | {
        "state": state, "hold": hold, "route": "topic", "heartbeat": n, "shared": n % 2 == 0,
        "group_name": f"group{n % 5}" if hold == "group" else None,
        "local_time": "2027-03-14T09:00:00" if n % 10 == 7 else None, "tzdata": "1970a" if n % 10 == 7 else None,
        "run_at": T0 - timedelta(hours=1) if n % 25 == 9 else T0 + timedelta(hours=1, seconds=n),
    }  # fmt: skip


def _finished(n: int) -> dict[str, Any]:
    """Return a finished job: of 100, 2 failed, 2 were missed."""
    state = {0: "failed", 1: "skipped"}.get(n % 50, "completed")
    return _common(n) | {
        "state": state, "reason": "missed" if state == "skipped" else None, "finished_at": _common(n)["run_at"]
    }  # fmt: skip


def _schedule(n: int) -> dict[str, Any]:
    return {
        "id": _id(n), "tenant_id": "default", "name": f"schedule{n}", "recurrence": "{}", "action": "{}",
        "policies": "{}", "created_at": T0, "updated_at": T0,
    }  # fmt: skip


def _list_live(**filters: str) -> Callable[[Any], object]:
    return lambda tx: repository.list_jobs(tx, TENANT | filters, LIVE, 50, None)


def _list_finished(**filters: str) -> Callable[[Any], object]:
    return lambda tx: repository.list_jobs(tx, TENANT | filters, FINISHED, 50, None)


OPERATIONS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "timebell_jobs_claim": (
        "list_upcoming", lambda tx: tx.dialect.list_upcoming(tx, LANE, ALL_ROUTES, T0, after(days=1), 50)
    ),
    "timebell_jobs_shared": (
        "claim_fair_shares",
        lambda tx: tx.dialect.claim_fair_shares(tx, LANE, ALL_ROUTES, NODE, T0, ["tenant3", "tenant6"], 10),
    ),
    "timebell_jobs_group": ("release_next_of_groups", lambda tx: tx.dialect.release_next_of_groups(tx, {GROUP})),
    "timebell_jobs_of_tenant": ("release_held", lambda tx: tenant_limits._release_first(tx, "default", 10)),
    "timebell_jobs_running": ("list_running", lambda tx: tx.dialect.list_running(tx)),
    "timebell_jobs_dispatched": (
        "list_overdue_dispatched", lambda tx: tx.dialect.list_overdue_dispatched(tx, T0, 10)
    ),
    "timebell_jobs_held": ("release_handled", lambda tx: unhandled_topics.release_handled(tx, ALL_ROUTES)),
    "timebell_jobs_occurrence": ("count_live_jobs", lambda tx: tx.dialect.count_live_jobs(tx, [_id(0), _id(10)])),
    "timebell_jobs_key": ("list_jobs", _list_live(key="key20")),
    "timebell_jobs_tenant": ("list_jobs", _list_live()),
    "timebell_jobs_owner": ("list_jobs", _list_live(owner_id="owner1")),
    "timebell_jobs_topic": ("list_jobs", _list_live(topic="topic7")),
    "timebell_jobs_local": (
        "replan_jobs", lambda tx: tzdata_replan.replan_jobs(tx, installed_release(), T0, 10)
    ),
    "timebell_finished_id": ("find_job", lambda tx: repository.find_job(tx, "default", _id(7), finished_only=True)),
    "timebell_finished_at": ("list_recently_finished", lambda tx: repository.list_recently_finished(tx, 50)),
    "timebell_finished_tenant": ("list_jobs", _list_finished()),
    "timebell_finished_owner": ("list_jobs", _list_finished(owner_id="owner1")),
    "timebell_finished_topic": ("list_jobs", _list_finished(topic="topic7")),
    "timebell_finished_key": ("list_jobs", _list_finished(key="key20")),
    "timebell_finished_dead": (
        "list_page", lambda tx: dead_letters.list_page(tx, "default", DeadLetterFilter(), 50, None)
    ),
    "timebell_finished_missed": ("list_problems", lambda tx: problems._list_missed(tx, T0)),
    "timebell_finished_schedule": (
        "list_recent_outcomes", lambda tx: queries.list_recent_outcomes(tx, [_id(0), _id(10)], 5)
    ),
}  # fmt: skip
"""For each index, an operation that needs it."""


def test_the_page_lists_the_operation_of_each_index() -> None:
    page = DOCS / "reference" / "database.md"
    listed = {code_words(row[0])[0]: code_words(row[1]) for row in rows(page, "Indexes of jobs")}
    assert listed == {index: [name] for index, (name, _) in OPERATIONS.items()}
    assert listed.keys() == {str(index.name) for table in (jobs, finished) for index in table.indexes}


SCANS = """
SELECT COALESCE(parent.relname, index.relname) AS name, sum(pg_stat_get_xact_numscans(index.oid)) AS scans
FROM pg_class index LEFT JOIN pg_inherits ON inhrelid = index.oid LEFT JOIN pg_class parent ON parent.oid = inhparent
WHERE index.relkind = 'i' AND index.relname LIKE 'timebell%' GROUP BY 1
"""


def _used_indexes(tx: Any, operation: Callable[[Any], object]) -> set[str]:
    """Execute an operation and return the indexes that its statements read."""
    if tx.dialect.name == "sqlite":
        statements: list[str] = []
        tx.driver.set_trace_callback(statements.append)
        operation(tx)
        tx.driver.set_trace_callback(None)
        plans = [row[3] for statement in statements for row in tx.driver.execute(f"EXPLAIN QUERY PLAN {statement}")]
        return {name for line in plans for name in INDEX_OF_SQLITE.findall(line)}
    before = {row.name: row.scans for row in tx.execute(text(SCANS))}
    operation(tx)
    return {row.name for row in tx.execute(text(SCANS)) if row.scans > before[row.name]}


@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
def test_each_index_is_used_by_its_operation(store: Store, runner: asyncio.Runner) -> None:
    tables = ((jobs, _live, ROWS), (finished, _finished, ROWS), (schedules, _schedule, SCHEDULES))
    for table, build, count in tables:
        batch = [build(n) for n in range(count)]
        runner.run(store.run(lambda tx, table=table, batch=batch: tx.execute(insert(table), batch)))
    if store.url.startswith("postgresql"):  # as autovacuum does
        analyze = text("ANALYZE timebell_jobs, timebell_finished, timebell_schedules")
        runner.run(store.run(lambda tx: tx.execute(analyze)))
    unused = {
        index: used
        for index, (_, operation) in OPERATIONS.items()
        if index not in (used := runner.run(store.run(_used_indexes, operation)))
    }
    assert unused == {}
