"""Claims of remote workers: dispatched in the transaction of the claim, repeatable, and fenced like all attempts."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from timebell.model.job import Attempt
from timebell.model.routes import Routes
from timebell.store.cluster import workers
from timebell.store.cluster.workers import RemoteWorker
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import external_reports, queue_limits, remote_claims, unhandled_topics
from timebell.store.jobs.remote_claims import RemoteClaim, Renewal
from timebell.store.tenancy.tenant_limits import AdmittedClaim
from timebell.store.transaction import Transaction

from .helpers import T0, JobState, Store, after, ending, get, lane, one, stored


def worker(name: str = "w", tenant_id: str | None = None, **fields: object) -> RemoteWorker:
    routes = Routes(frozenset({"t"}), tenant_id=tenant_id)
    record = RemoteWorker(workers.worker_id(tenant_id, name), name, routes, None, 10, T0, T0)
    return dataclasses.replace(record, **fields)  # type: ignore[arg-type]


def _claim(tx: Transaction, claimant: RemoteWorker, limit: int) -> AdmittedClaim:
    tenants = [] if claimant.tenant_id is None else [claimant.tenant_id]
    args = (lane(), claimant.routes, claimant.id, limit, T0, tenants)
    return AdmittedClaim(queue_limits.claim_fair_shares(tx, *args), 0)


async def claim(
    store: Store, claimant: RemoteWorker, claim_id: str | None = None, limit: int = 10, lease: float = 30
) -> RemoteClaim:
    await store.run(workers.announce, claimant, claim_id)
    return await store.run(
        remote_claims.claim_for_worker, claimant.id, claim_id,
        lambda attempt: attempt.started_at + timedelta(seconds=lease), _claim, (claimant, limit), {},
    )  # fmt: skip


def lease_end(attempt: Attempt) -> object:
    return after(seconds=100)


@stored
async def test_a_claimed_job_is_dispatched_until_the_end_of_its_lease(store: Store) -> None:
    id_ = await one(store)
    (attempt,) = (await claim(store, worker())).attempts
    assert (attempt.id, attempt.number, attempt.state) == (id_, 1, JobState.DISPATCHED)
    job = await get(store, id_)
    assert (job.state, job.node_id) == (JobState.DISPATCHED, worker().id)
    assert await store.run_autocommit(job_claim.list_overdue_dispatched, 10, after(seconds=29)) == []
    (overdue,) = await store.run_autocommit(job_claim.list_overdue_dispatched, 10, after(seconds=30))
    assert (overdue.id, overdue.started_at) == (id_, T0)


@stored
async def test_repeating_the_last_claim_returns_its_live_jobs(store: Store) -> None:
    ids = {await one(store) for _ in range(3)}
    first = await claim(store, worker(), "c1", limit=2)
    again = await claim(store, worker(), "c1", limit=2)
    assert again.is_repeated
    assert {each.id for each in again.attempts} == {each.id for each in first.attempts}
    done = ending(first.attempts[0], expected_state=JobState.DISPATCHED)
    assert await store.run(external_reports.apply_reports, [done]) == {done.id}
    assert [each.id for each in (await claim(store, worker(), "c1")).attempts] == [first.attempts[1].id]
    other = await claim(store, worker(), "c2")
    assert {each.id for each in other.attempts} == ids - {each.id for each in first.attempts}


@stored
async def test_a_worker_that_drains_or_was_removed_gets_nothing(store: Store) -> None:
    await one(store)
    await store.run(workers.announce, worker(), None)
    assert await store.run(workers.request_drain, worker().id)
    assert (await claim(store, worker())).attempts == []
    assert (await store.run(workers.announce, worker(), None)).draining
    assert await store.run(workers.touch, [worker().id], T0) == {worker().id}
    await store.run(workers.remove_workers, [worker().id])
    assert await store.run(workers.list_workers) == []
    assert not await store.run(workers.request_drain, worker().id)


@stored
async def test_renewals_are_fenced_and_tell_of_a_requested_cancel(store: Store) -> None:
    id_ = await one(store)
    (attempt,) = (await claim(store, worker(), lease=5)).attempts
    stale, current = Renewal(id_, 2), Renewal(id_, 1)
    assert await store.run(remote_claims.renew, None, [stale], lease_end) == {}
    assert await store.run(remote_claims.renew, "other", [current], lease_end) == {}
    renewed = await store.run(remote_claims.renew, "default", [current], lease_end)
    assert renewed == {id_: (after(seconds=100), False)}
    assert await store.run_autocommit(job_claim.list_overdue_dispatched, 10, after(seconds=99)) == []
    reported = ending(attempt, expected_state=JobState.DISPATCHED)
    assert await store.run(external_reports.apply_reports, [reported]) == {id_}
    assert await store.run(remote_claims.renew, None, [current], lease_end) == {}


@stored
async def test_a_worker_of_a_tenant_claims_only_its_jobs(store: Store) -> None:
    before = await one(store)  # created while there is one tenant
    ours = [await one(store, tenant_id="ours") for _ in range(2)]
    theirs = await one(store, tenant_id="theirs")
    routes = worker(tenant_id="ours").routes
    lanes = await store.run_autocommit(job_claim.list_lanes, routes, T0)
    assert [each.next_due for each in lanes] == [T0]
    assert {each.id for each in (await claim(store, worker(tenant_id="ours"))).attempts} == set(ours)
    lanes = await store.run_autocommit(job_claim.list_lanes, routes, T0)
    assert [each for each in lanes if each.next_due is not None] == []
    assert [each.id for each in (await claim(store, worker(tenant_id="default"))).attempts] == [before]
    assert [each.id for each in (await claim(store, worker())).attempts] == [theirs]


@stored
async def test_jobs_are_handled_while_a_worker_of_their_tenant_and_queue_lives(store: Store) -> None:
    ids = {
        (tenant, queue): await one(store, tenant_id=tenant, queue=queue)
        for tenant in ("ours", "theirs") for queue in ("default", "bulk")
    }  # fmt: skip
    live = [worker(tenant_id="ours", queues=("bulk",))]
    report = await store.run(unhandled_topics.process_unhandled, Routes(), T0, live)
    assert report.held == 3
    assert (await get(store, ids["ours", "bulk"])).hold is None
    assert await store.run(unhandled_topics.release_handled, Routes(), [worker(tenant_id="theirs")]) == 2
    assert (await get(store, ids["ours", "default"])).hold is not None


@stored
async def test_reports_of_a_batch_are_fenced_one_by_one(store: Store) -> None:
    for _ in range(3):
        await one(store)
    first, second, third = (await claim(store, worker())).attempts
    reports = [
        ending(first, expected_state=JobState.DISPATCHED),
        ending(second, JobState.PENDING, expected_state=JobState.DISPATCHED, run_at=after(seconds=9), error="bad"),
        dataclasses.replace(ending(third, expected_state=JobState.DISPATCHED), attempt=2),
    ]
    assert await store.run(external_reports.apply_reports, reports) == {first.id, second.id}
    states = [(await get(store, each.id)).state for each in (first, second, third)]
    assert states == [JobState.COMPLETED, JobState.PENDING, JobState.DISPATCHED]
