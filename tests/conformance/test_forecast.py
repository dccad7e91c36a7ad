"""The number of pending jobs per minute, for the forecast."""

from __future__ import annotations

from datetime import timedelta

from timebell.model.job import Hold
from timebell.store.jobs import queues
from timebell.store.schedules import forecast

from .helpers import T0, Store, after, create, job, stored


async def count(store: Store, tenant_id: str = "default", **span: float) -> dict[float, int]:
    """Return the numbers of jobs by minute after T0, within `span`."""
    found = await store.run(forecast.count_pending_by_minute, tenant_id, T0, after(**span), 1000)
    return {(minute - T0) / timedelta(minutes=1): number for minute, number in found.counts.items()}


@stored
async def test_pending_jobs_are_counted_by_minute_and_lane(store: Store) -> None:
    await create(store, job(run_at=after(seconds=-1)), job(run_at=T0), job(run_at=after(seconds=59.9)))
    await create(store, job(run_at=after(minutes=1), priority=3), job(run_at=after(minutes=1), queue="mail"))
    await create(store, job(run_at=after(hours=20)), job(run_at=after(days=1)), job(run_at=after(days=400)))
    assert await count(store, days=1) == {0: 2, 1: 2, 1200: 1}
    assert await count(store, minutes=1) == {0: 2}
    assert await count(store, seconds=30) == {0: 1}
    assert await count(store, "other", days=1) == {}


@stored
async def test_held_jobs_and_those_of_paused_queues_do_not_count(store: Store) -> None:
    await create(store, job(run_at=after(minutes=5), hold=Hold.OVERLAP), job(run_at=after(minutes=5), queue="off"))
    await create(store, job(run_at=after(minutes=7)))
    await store.run(queues.pause, "off", None)
    assert await count(store, days=1) == {7: 1}
    await store.run(queues.pause, "*", None)
    assert await count(store, days=1) == {}


@stored
async def test_a_tenant_counts_only_its_own_jobs(store: Store) -> None:
    await create(store, job(run_at=after(minutes=1)))  # before there is another tenant
    await create(store, *[job(run_at=after(minutes=1), tenant_id="acme") for _ in range(3)])
    await create(store, job(run_at=after(minutes=2)), job(run_at=after(minutes=2), tenant_id="acme"))
    assert await count(store, hours=1) == {1: 1, 2: 1}
    assert await count(store, "acme", hours=1) == {1: 3, 2: 1}
    assert await count(store, "unknown", hours=1) == {}


@stored
async def test_the_entries_that_were_read_are_reported(store: Store) -> None:
    await create(store, *[job(run_at=after(minutes=n), tenant_id=("default", "acme")[n % 2]) for n in range(6)])
    found = await store.run(forecast.count_pending_by_minute, "default", T0, after(minutes=4), 1000)
    assert (sum(found.counts.values()), found.scanned) == (2, 4)
