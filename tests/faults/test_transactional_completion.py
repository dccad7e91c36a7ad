"""kill -9 around the commit of a handler's transaction: its rows are those of completed jobs, one each."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.faults.harness import NodeProcess, ask, jobs, lines, wait_until
from tests.rotation import rotated
from timebell import Every, JobSpec, Timebell
from timebell.model.job import JobState
from timebell.store.transaction import Transaction

Start = Callable[..., NodeProcess]
POINTS = {"one": (2, 1, 2), "serial": (4, 4, 6)}
"""Number of statements that complete a one-time and a serial job on (SQLite, PostgreSQL, MariaDB)."""


def _rows(url: str) -> list[tuple[str, int]]:
    def read(tx: Transaction) -> list[tuple[str, int]]:
        return sorted((row.job, row.attempt) for row in tx.execute(text("SELECT job, attempt FROM orders")))

    async def ask_for(app: Timebell) -> list[tuple[str, int]]:
        await app.open()
        return await app.store.run(read)

    return ask(url, ask_for)


async def _table(app: Timebell) -> None:
    def create(tx: Transaction) -> None:
        tx.execute(text("CREATE TABLE orders (job VARCHAR(40), attempt INTEGER)"))

    await app.open()
    await app.store.run(create)


def _completed(url: str) -> list[tuple[str, int]]:
    return sorted((job.id, job.attempt) for job in jobs(url, status=["completed"]))


@pytest.mark.parametrize("topic", rotated(["order", "plain-order"], ["order"]))
@pytest.mark.parametrize("kind", POINTS)
def test_rows_of_handlers_match_completed_jobs_wherever_a_node_is_killed(
    kind: str, topic: str, store_url: str, node: Start, effects: Path
) -> None:
    ask(store_url, _table)
    statements = POINTS[kind][("sqlite", "postgresql", "mariadb").index(store_url.partition(":")[0])]
    points = [*map(str, range(1, statements + 1)), "commit", "done"]
    if kind == "serial":
        spec = Every("PT1S", since="last_end")
        ask(store_url, lambda app: app.schedule_repeat(topic, spec, name="turns"))
    for nth, point in enumerate(points):
        if kind == "one":
            ask(store_url, lambda app: app.schedule_many([JobSpec(topic=topic) for _ in range(3)]))
        struck = node(store_url, ready=False, FAULT=f"complete_one.{point}:kill")
        assert struck.died() == -signal.SIGKILL, f"the fault at {point} did not bite"
        assert len(lines(effects, "fault")) == nth + 1
        # A commit that was sent at that moment may become visible shortly after the death of the node.
        wait_until(lambda: _rows(store_url) == _completed(store_url), f"the rows of completed jobs, killed at {point}")
    last = node(store_url)
    if kind == "one":
        wait_until(lambda: len(_completed(store_url)) == 3 * len(points), "every job is completed")
    else:
        before = len(_completed(store_url))
        wait_until(lambda: len(_completed(store_url)) >= before + 2, "serial jobs continue")
    assert last.terminate()[0] == 0
    assert _rows(store_url) == _completed(store_url)
    assert len({job for job, _ in _rows(store_url)}) == len(_rows(store_url)), "a job has two rows"
    assert {job.state for job in jobs(store_url)} <= {JobState.COMPLETED, JobState.PENDING}


def test_a_node_frozen_before_its_commit_writes_nothing_when_it_wakes(
    nodes_url: str, node: Start, effects: Path
) -> None:
    ask(nodes_url, _table)
    ask(nodes_url, lambda app: app.schedule_at("order"))
    frozen = node(nodes_url, FAULT="complete_one.1:stop")
    wait_until(lambda: frozen.state == "T", "frozen in the handler's transaction")
    node(nodes_url)
    ((_, attempt),) = wait_until(lambda: _completed(nodes_url), "the other completed it")
    assert attempt >= 2
    frozen.signal(signal.SIGCONT)
    assert frozen.terminate()[0] == 0
    assert _rows(nodes_url) == _completed(nodes_url)
