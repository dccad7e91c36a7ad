"""Lists of finished jobs read an index range, or a bounded number of rows, however long the history is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import delete, insert, text

from timebell.ids import lowest_id_at
from timebell.model.job import JobState
from timebell.store.audit import overview
from timebell.store.dialects.base import Store
from timebell.store.jobs import dead_letters, repository, search
from timebell.store.jobs.dead_letters import DeadLetterFilter
from timebell.store.jobs.search import JobSearch
from timebell.store.schema import finished, requests

from .helpers import T0

HISTORY, MAX_EXAMINED, NARROW = 40_000, 500, 100
STEP = timedelta(seconds=10)
ALL_DEAD, DEFAULT = DeadLetterFilter(), {"tenant_id": "default"}
LARGEST_READ = 4_000  # rows; the history has ten times as many
SQLITE_STEPS_PER_ROW = 60  # of SQLite's virtual machine


def _id(n: int) -> str:
    return lowest_id_at(T0 - STEP * (HISTORY - n))


def _history() -> list[dict[str, Any]]:
    """Return rows of the finished table: every 200th failed, every 1000th has a key, every 100th is of a tenant."""
    rows = []
    for n in range(HISTORY):
        at = T0 - STEP * (HISTORY - n)
        rows.append({
            "id": _id(n), "tenant_id": "small" if n % 100 == 1 else "default", "topic": f"topic.{n % 7}",
            "kind": "once", "scheduled_at": at, "run_at": at, "timezone": "UTC", "payload": "null", "queue": "default",
            "key": f"k{n}" if n % 1000 == 0 else None, "priority": 0, "serial": False,
            "state": "failed" if n % 200 == 0 else "completed", "attempt": 1, "attempts_used": 1, "created_at": at,
            "started_at": at, "finished_at": at, "error_code": "ValueError", "error_group": f"{n % 3}",
        })  # fmt: skip
    return rows


def _period(first: int, last: int, **fields: Any) -> JobSearch:
    return JobSearch(start=T0 - STEP * (HISTORY - first), end=T0 - STEP * (HISTORY - last), **fields)


def _listing(filters: dict[str, Any], *states: JobState) -> Callable[[Any], Any]:
    return lambda tx: repository.list_jobs(tx, {**DEFAULT, **filters}, states, 50, None)


def _search(search_filter: JobSearch, *states: JobState, **filters: Any) -> Callable[[Any], Any]:
    return lambda tx: search.search_jobs(tx, {**DEFAULT, **filters}, states, search_filter, 50, None)


READS: dict[str, Callable[[Any], Any]] = {
    "jobs": _listing({}),
    "jobs_of_topic": _listing({"topic": "topic.3"}),
    "jobs_with_key": _listing({"key": "k3000"}),
    "jobs_of_unknown_queue": _listing({"queue": "none"}),
    "jobs_of_small_tenant": _listing({"tenant_id": "small"}),
    "narrow_period_long_ago": _search(_period(1000, 1090)),
    "wide_period_long_ago": _search(_period(1000, 9000)),
    "wide_period_of_small_tenant": _search(_period(1000, 39_000), tenant_id="small"),
    "cancelled_in_wide_period": _search(_period(1000, 39_000), JobState.CANCELLED),
    "text_in_narrow_period": _search(_period(1000, 1090, error="none")),
    "text_in_wide_period": _search(_period(1000, 39_000, error="none")),
    "client_request_id": _search(JobSearch(request_id="r-1")),
    "dead_letter_groups": lambda tx: dead_letters.list_groups(
        tx, "default", ALL_DEAD, ("topic", "error_code", "error_group"), 50
    ),
    "dead_letters_of_topic": lambda tx: dead_letters.list_page(
        tx, "default", DeadLetterFilter(topic="topic.3"), 50, None
    ),
    "manual_retries": lambda tx: overview.get_names_and_retry_counts(
        tx, "default", [_id(n) for n in range(0, 8000, 200)], ()
    ),
}


def count_reads(tx: Any, read: Callable[[Any], Any], table: str = "timebell_finished") -> int:
    """Return the number of rows of a table that a read fetches; on SQLite an estimate, on MariaDB of all tables."""
    if tx.dialect.name == "sqlite":
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 100

        tx.driver.set_progress_handler(step, 100)
        read(tx)
        tx.driver.set_progress_handler(None, 0)
        return steps // SQLITE_STEPS_PER_ROW
    counters = {
        "postgresql": "SELECT sum(seq_tup_read + idx_tup_fetch) FROM pg_stat_xact_user_tables"
        f" WHERE relname LIKE '{table}%'",
        "mysql": "SELECT sum(variable_value) FROM information_schema.session_status"
        " WHERE variable_name LIKE 'Handler_read%'",
    }
    query = text(counters["postgresql" if "postgres" in type(tx).__module__ else "mysql"])
    before = tx.execute(query).scalar() or 0
    read(tx)
    return int((tx.execute(query).scalar() or 0) - before)


def test_lists_of_the_history_read_a_bounded_number_of_rows(
    store: Store, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "MAX_EXAMINED", MAX_EXAMINED)
    monkeypatch.setattr(search, "NARROW_PERIOD_ROWS", NARROW)
    rows = _history()
    for first in range(0, HISTORY, 4000):
        runner.run(store.run(lambda tx, batch=rows[first : first + 4000]: tx.execute(insert(finished), batch)))
    if store.url.startswith("postgresql"):  # as autovacuum does; without statistics, ids count as hardly selective
        runner.run(store.run(lambda tx: tx.execute(text("ANALYZE timebell_finished"))))
    request = {"tenant_id": "default", "request_id": "r-1", "job_id": _id(7)}
    runner.run(store.run(lambda tx: tx.execute(insert(requests), [request])))
    reads = {name: runner.run(store.run(count_reads, read)) for name, read in READS.items()}
    print(reads)
    assert {name: count for name, count in reads.items() if count > LARGEST_READ} == {}


@pytest.mark.parametrize("narrow", [0, 100_000])
def test_a_period_has_the_same_jobs_however_it_is_read(
    store: Store, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, narrow: int
) -> None:
    monkeypatch.setattr(search, "NARROW_PERIOD_ROWS", narrow)
    rows = _history()[:300]
    clock_ahead = rows[150]["finished_at"] + timedelta(minutes=50)
    late = rows[0] | {"id": lowest_id_at(clock_ahead), "finished_at": rows[150]["finished_at"]}
    runner.run(store.run(lambda tx: tx.execute(insert(finished), [*rows, late])))
    expected = [row["id"] for row in [*rows[100:200], late] if row["tenant_id"] == "default"]
    found: list[str] = []
    cursor = None
    while True:
        page = runner.run(store.run(search.search_jobs, DEFAULT, (), _period(100, 200), 30, cursor))
        found += [job.id for job in page]
        if (cursor := page.next_cursor) is None:
            break
    assert found == sorted(expected, reverse=True)
    runner.run(store.run(lambda tx: tx.execute(delete(finished))))


def test_pages_of_a_queue_have_all_of_its_jobs(
    store: Store, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "MAX_EXAMINED", 20)
    rows = [row | {"queue": "rare" if n % 70 == 0 else "default"} for n, row in enumerate(_history()[:300])]
    runner.run(store.run(lambda tx: tx.execute(insert(finished), rows)))
    found, pages, cursor = list[str](), 0, None
    while pages < 100:
        page = runner.run(store.run(repository.list_jobs, {**DEFAULT, "queue": "rare"}, (), 3, cursor))
        found += [job.id for job in page]
        pages += 1
        if (cursor := page.next_cursor) is None:
            break
    assert found == [_id(n) for n in range(280, -1, -70)]
    assert 3 < pages < 100
