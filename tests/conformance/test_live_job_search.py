"""Search of live jobs by period."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from timebell.ids import new_id
from timebell.model.job import Hold, JobState
from timebell.store.jobs import repository, search
from timebell.store.jobs.search import JobSearch

from .helpers import T0, Store, after, create, job, started, stored
from .test_history_plans import count_reads

DEFAULT = {"tenant_id": "default"}


@pytest.mark.parametrize("narrow", [0, 100_000])
@stored
async def test_a_period_has_the_same_live_jobs_however_it_is_read(
    store: Store, monkeypatch: pytest.MonkeyPatch, narrow: int
) -> None:
    monkeypatch.setattr(search, "NARROW_PERIOD_ROWS", narrow)
    running = await started(store, at=after(minutes=4), run_at=after(minutes=4))
    pending = [job(id=new_id(after(minutes=n)), run_at=after(minutes=n)) for n in range(10)]
    others = [
        job(run_at=after(minutes=3), queue="mail"), job(run_at=after(minutes=3), priority=3),
        job(run_at=after(minutes=3), hold=Hold.OVERLAP), job(run_at=after(minutes=8), hold=Hold.OVERLAP),
        job(run_at=after(minutes=3), tenant_id="acme"),
    ]  # fmt: skip
    await create(store, *pending, *others)
    period = JobSearch(start=after(minutes=3), end=after(minutes=8))

    async def find(*states: JobState, limit: int = 100, cursor: str | None = None, **filters: Any) -> list[str]:
        page = await store.run(search.search_jobs, DEFAULT | filters, states, period, limit, cursor)
        rest = await find(*states, limit=limit, cursor=page.next_cursor, **filters) if page.next_cursor else []
        return [found.id for found in page] + rest

    in_period = [*pending[3:8], *others[:3]]
    newest_first = sorted([running.id, *(each.id for each in in_period)], reverse=True)
    assert await find() == newest_first
    assert await find(limit=2) == newest_first
    assert await find(JobState.PENDING) == [id_ for id_ in newest_first if id_ != running.id]
    assert await find(JobState.RUNNING) == [running.id]
    assert await find(queue="mail") == [others[0].id]
    assert await find(tenant_id="acme") == [others[4].id]
    await store.run(repository.cancel_matching, DEFAULT, T0, None, 100)


@stored
async def test_a_narrow_period_reads_a_bounded_number_of_live_jobs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "NARROW_PERIOD_ROWS", 100)
    await create(store, *[job(run_at=after(minutes=n)) for n in range(12_000)], bulk=True)
    if store.url.startswith("postgresql"):  # as autovacuum does
        await store.run(lambda tx: tx.execute(text("ANALYZE timebell_jobs")))
    period = JobSearch(start=after(minutes=100), end=after(minutes=150))
    reads = await store.run(
        count_reads, lambda tx: search.search_jobs(tx, DEFAULT, [JobState.PENDING], period, 60, None), "timebell_jobs"
    )
    assert reads < 1_000
