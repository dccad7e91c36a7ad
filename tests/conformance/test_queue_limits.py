"""Rates, groups, fair shares and tenant limits: jobs that a claim holds back, and their release."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import delete

from timebell.ids import new_id
from timebell.model.job import Attempt, Hold
from timebell.model.limits import Limits
from timebell.store.cluster import repair
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import complete, dead_letters, queue_limits, queues, repository, serial, unhandled_topics
from timebell.store.schema import finished
from timebell.store.schema import jobs as table_of_jobs
from timebell.store.tenancy import tenant_limits, tenants

from .helpers import (
    ALL_ROUTES,
    NODE,
    OTHER_NODE,
    T0,
    JobState,
    Overlap,
    Routes,
    Store,
    after,
    again,
    claim,
    create,
    ending,
    everything,
    execute,
    fire,
    get,
    job,
    lane,
    minutes,
    one,
    put,
    replace,
    schedule,
    stored,
)


async def _limit(store: Store, **given: Any) -> None:
    await store.run(queues.set_limits, "q", Limits(**given))


async def _take(
    store: Store,
    at: datetime = T0,
    *,
    most: int = 100,
    node: str = NODE,
    routes: Routes = ALL_ROUTES,
    priority: int = 0,
) -> list[Attempt]:
    return await store.run(queue_limits.claim_limited, lane("q", priority), routes, node, most, at)


async def _lane(store: Store, at: datetime = T0) -> job_claim.QueueLane:
    (found,) = await store.run_autocommit(job_claim.list_lanes, ALL_ROUTES, at)
    return found


async def _add(store: Store, count: int = 1, **fields: Any) -> list[str]:
    new = [job(**{"queue": "q", "run_at": after(milliseconds=n), **fields}) for n in range(-count, 0)]
    await create(store, *new)
    return [one.id for one in new]


# Rates.


@stored
async def test_the_rate_of_a_queue_holds_in_any_period_over_all_nodes(store: Store) -> None:
    await _limit(store, rate=3, per=10.0)
    await _add(store, 9)
    assert len(await _take(store, most=2)) == 2
    assert len(await _take(store, after(seconds=4), node=OTHER_NODE)) == 1
    for late in (timedelta(seconds=9, microseconds=999_999), timedelta(seconds=5)):
        assert await _take(store, T0 + late) == []
    assert len(await _take(store, after(seconds=10))) == 2
    assert await _take(store, after(seconds=13)) == []
    assert len(await _take(store, after(seconds=14), node=OTHER_NODE)) == 1


@stored
async def test_a_lane_has_the_instant_at_which_its_rate_allows_the_next_start(store: Store) -> None:
    await _limit(store, rate=1, per=10.0)
    await _add(store, 3)
    found = await _lane(store)
    assert (found.has_limits, found.free_capacity, found.rate_limited_until, found.earliest_start) == (
        True,
        None,
        T0,
        T0,
    )
    await _take(store)
    found = await _lane(store, after(seconds=1))
    assert (found.rate_limited_until, found.earliest_start) == (after(seconds=10), after(seconds=10))
    assert found.next_due is not None
    assert found.next_due < T0
    await create(store, job(queue="q", run_at=after(minutes=1), priority=1))
    later = {
        found.priority: found.earliest_start
        for found in await store.run_autocommit(job_claim.list_lanes, ALL_ROUTES, after(seconds=1))
    }
    assert later == {0: after(seconds=10), 1: after(minutes=1)}


@stored
async def test_a_rate_counts_all_attempts_of_all_priorities_across_changes(store: Store) -> None:
    await _limit(store, rate=2, per=10.0)
    (id_,) = await _add(store)
    (attempt,) = await _take(store)
    await store.run_autocommit(complete.schedule_retries, [again(attempt, T0)])
    await _add(store, 3, priority=1)
    assert [one.number for one in await _take(store, after(seconds=1))] == [2]
    assert await _take(store, after(seconds=2), priority=1) == []
    await _limit(store, rate=3, per=10.0)
    assert len(await _take(store, after(seconds=2), priority=1)) == 1
    await _limit(store)
    assert len(await _take(store, after(seconds=2), priority=1)) == 2
    assert (await _lane_or_none(store)) is None
    assert (await get(store, id_)).state == JobState.RUNNING


async def _lane_or_none(store: Store) -> job_claim.QueueLane | None:
    found = await store.run_autocommit(job_claim.list_lanes, ALL_ROUTES, T0)
    return found[0] if found else None


@stored
async def test_expired_jobs_do_not_use_up_a_rate(store: Store) -> None:
    await _limit(store, rate=2, per=10.0)
    await _add(store, 4, run_at=after(seconds=-9), expires_at=T0)
    ids = await _add(store, 3)
    assert [len(await _take(store)) for _ in range(2)] == [2, 2]
    assert [one.id for one in await _take(store)] == ids[:2]
    assert await _take(store) == []


@stored
async def test_a_rate_holds_under_simultaneous_claims_and_with_a_concurrency_limit(store: Store) -> None:
    await _limit(store, rate=5, per=60.0, concurrency=7)
    await _add(store, 40)
    nodes = [new_id(T0) for _ in range(8)]
    taken = await asyncio.gather(*(_take(store, most=3, node=node) for node in nodes))
    assert sum(map(len, taken)) == 5
    assert len(await _take(store, after(seconds=60))) == 2  # 7 run


# Groups.


@stored
async def test_a_group_runs_up_to_its_limit_and_a_completion_releases_the_next(store: Store) -> None:
    await _limit(store, concurrency_per_group=1)
    first, second, third = await _add(store, 3, group="a")
    (other,) = await _add(store, group="b")
    (lone,) = await _add(store)
    taken = await _take(store)
    assert {one.id for one in taken} == {first, other, lone}
    assert [(await get(store, id_)).hold for id_ in (second, third)] == [Hold.GROUP, Hold.GROUP]
    assert await _lane_or_none(store) is None
    (attempt,) = [one for one in taken if one.id == first]
    await _end(store, attempt)
    assert [(await get(store, id_)).hold for id_ in (second, third)] == [None, Hold.GROUP]
    assert [one.id for one in await _take(store)] == [second]


async def _end(store: Store, *attempts: Attempt, state: JobState = JobState.COMPLETED) -> None:
    ends = [replace(ending(one, state), group_queue="q") for one in attempts]
    assert await store.run(serial.complete_serial, ends, []) == {one.id for one in attempts}


@stored
async def test_groups_are_separate_per_queue_and_tenant(store: Store) -> None:
    await _limit(store, concurrency_per_group=1)
    await store.run(queues.set_limits, "r", Limits(concurrency_per_group=1))
    for fields in ({}, {"tenant_id": "acme"}, {"group": "b"}, {"queue": "r"}):
        await _add(store, 2, **{"group": "a", **fields})
    assert len(await _take(store)) == 3
    assert len(await store.run(queue_limits.claim_limited, lane("r"), ALL_ROUTES, NODE, 9, T0)) == 1


@stored
async def test_simultaneous_completions_of_a_group_release_as_many_by_priority(store: Store) -> None:
    await _limit(store, concurrency_per_group=3)
    low = await _add(store, 6, group="a", priority=5)
    running = await _take(store, priority=5)
    assert [one.id for one in running] == low[:3]
    high = await _add(store, 2, group="a", priority=1)
    assert await _take(store, priority=1) == []
    await _end(store, *running)
    assert [(await get(store, id_)).hold for id_ in (*high, *low[3:])] == [None, None, None, Hold.GROUP, Hold.GROUP]


Way = Callable[[Store, Attempt], Awaitable[Any]]


async def _retried(store: Store, attempt: Attempt) -> None:
    back = replace(again(attempt, after(hours=1)), group_queue="q")
    assert await store.run(serial.schedule_group_retries, [back]) == {attempt.id}


async def _cancelled(store: Store, attempt: Attempt) -> None:
    assert (await store.run(repository.cancel, None, attempt.id, T0)).outcome == "in_flight"  # type: ignore[union-attr]
    await _end(store, attempt, state=JobState.FAILED)


async def _within(store: Store, attempt: Attempt) -> None:
    assert await store.run(serial.complete_one, replace(ending(attempt), group_queue="q")) == {attempt.id}


WAYS: dict[str, Way] = {
    "completed in the handler's transaction": _within,
    "completed": _end,
    "failed": lambda store, attempt: _end(store, attempt, state=JobState.FAILED),
    "retried, snoozed or lost": _retried,
    "cancelled": _cancelled,
}


@pytest.mark.parametrize("way", WAYS)
@stored
async def test_any_completion_releases_the_next_job_of_the_group(store: Store, way: str) -> None:
    await _limit(store, concurrency_per_group=1)
    _, second = await _add(store, 2, group="a")
    (attempt,) = await _take(store)
    await WAYS[way](store, attempt)
    assert [one.id for one in await _take(store)] == [second]


async def _cancel(store: Store, id_: str) -> None:
    await store.run(repository.cancel, None, id_, T0)


async def _sweep(store: Store, id_: str) -> None:
    await store.run(repository.cancel_matching, {"key": "k"}, T0, None, 10)


async def _reschedule(store: Store, id_: str) -> None:
    when = {"run_at": after(hours=1), "timezone": "UTC"}
    new = await store.run(repository.reschedule, None, id_, new_id(T0), lambda _: when, T0)
    assert new is not None
    assert (new.group, new.hold) == ("a", None)


async def _replace(store: Store, id_: str) -> None:
    await create(store, job(queue="q", key="k", run_at=after(hours=1)), on_conflict="replace")


async def _unheard(store: Store, id_: str) -> None:
    settled = await store.run(unhandled_topics.process_unhandled, Routes(frozenset({"t"})), after(seconds=1))
    assert settled.held == 1


@pytest.mark.parametrize("way", [_cancel, _sweep, _reschedule, _replace, _unheard])
@stored
async def test_a_released_job_that_never_starts_releases_the_next(
    store: Store, way: Callable[[Store, str], Awaitable[None]]
) -> None:
    await _limit(store, concurrency_per_group=1)
    await _add(store, group="a", run_at=after(seconds=-9))
    await _add(store, group="a", key="k", topic="nobody", run_at=after(seconds=-5))
    (last,) = await _add(store, group="a")
    (attempt,) = await _take(store)
    await _end(store, attempt)
    (released,) = [one for one in await everything(store) if one.key == "k"]
    assert released.hold is None
    assert (await get(store, last)).hold == Hold.GROUP
    await way(store, released.id)
    assert [one.id for one in await _take(store)] == [last]


@stored
async def test_a_claim_returns_jobs_released_beyond_the_limit(store: Store) -> None:
    await _limit(store, concurrency_per_group=1)
    ids = await _add(store, 4, group="a")
    await _take(store)
    await _cancel(store, ids[3])  # a held job, whose cancel releases another
    assert (await get(store, ids[1])).hold is None
    assert await _take(store) == []
    assert [(await get(store, id_)).hold for id_ in ids[1:3]] == [Hold.GROUP, Hold.GROUP]


@stored
async def test_raising_or_removing_a_limit_releases_held_jobs(store: Store) -> None:
    await _limit(store, concurrency_per_group=1)
    await _add(store, 6, group="a")
    assert len(await _take(store)) == 1
    await _limit(store, concurrency_per_group=3)
    assert len(await _take(store)) == 2
    await _limit(store, concurrency_per_group=2)
    assert await _take(store) == []
    await _limit(store)
    assert len(await _take(store)) == 3


@stored
async def test_a_held_job_without_predecessor_is_released(store: Store) -> None:
    """Causes are a rolled-back transaction that had locked the next job, or a node of an older release."""
    await _limit(store, concurrency_per_group=1)
    for fields in ({"group": "a"}, {"group": "b"}, {"group": "a", "tenant_id": "acme"}, {"group": "c"}):
        await _add(store, 2, hold=Hold.GROUP, **fields)
    await _add(store, group="c", run_at=after(seconds=-9))
    assert [one.group for one in await _take(store)] == ["c"]
    assert (await store.run(repair.repair_holds)).repairs["turn"] == 3
    taken = await _take(store)
    assert sorted((one.tenant_id, one.group) for one in taken) == [("acme", "a"), ("default", "a"), ("default", "b")]
    assert (await store.run(repair.repair_holds)).repaired == 0


@stored
async def test_a_full_group_at_the_head_does_not_block_later_jobs(store: Store) -> None:
    await _limit(store, concurrency_per_group=1)
    crowd = [job(queue="q", group="a", run_at=after(seconds=-60)) for _ in range(1300)]
    await create(store, *crowd, bulk=True)
    (other,) = await _add(store)
    taken = await _take(store, most=2)
    assert [one.group for one in taken] == ["a", None]
    assert taken[1].id == other


@stored
async def test_jobs_without_group_or_group_limit_are_not_limited(store: Store) -> None:
    await create(store, *(job(group="a") for _ in range(3)), bulk=True)
    await one(store, group="a", local_time="2027-03-01T12:00:00", tzdata="2026a")
    taken = await claim(store)
    assert [attempt.group for attempt in taken] == ["a"] * 4
    assert (await get(store, taken[0].id)).group == "a"
    await store.run(complete.complete_jobs, [ending(taken[0])])
    assert (await get(store, taken[0].id)).group == "a"


@stored
async def test_occurrences_belong_to_the_group_of_their_schedule(store: Store) -> None:
    await _limit(store, concurrency_per_group=1)
    for name in ("s", "r"):
        await put(store, schedule(name=name, queue="q", group="a", overlap=Overlap.ALLOW))
    for at in minutes(1, 3):
        await fire(store, at)
    assert len(await _take(store, after(minutes=3))) == 1
    assert [one.group for one in await everything(store)] == ["a"] * 6


@stored
async def test_a_manually_retried_job_belongs_to_its_group(store: Store) -> None:
    await _limit(store, concurrency_per_group=1)
    first, second = await _add(store, 2, group="a")
    (attempt,) = await _take(store)
    await _end(store, attempt, state=JobState.FAILED)
    assert [one.id for one in await _take(store)] == [second]
    await store.run(dead_letters.retry, None, first, T0)
    assert await _take(store) == []
    assert (await get(store, first)).hold == Hold.GROUP


@stored
async def test_a_simultaneous_claim_and_completion_leave_no_job_held_forever(store: Store) -> None:
    await _limit(store, concurrency_per_group=1)
    for _ in range(15):
        first, second = await _add(store, 2, group="a")
        (attempt,) = await _take(store, most=1)
        assert attempt.id == first
        taken, _ = await asyncio.gather(_take(store), _end(store, attempt))
        taken = taken or await _take(store)
        assert [one.id for one in taken] == [second]
        await _end(store, *taken)


KINDS = ["add", "add", "take", "take", "end", "retry", "cancel", "reschedule", "limit", "settle", "settle", "replay"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), min_size=30, max_size=60)


class _Walk:
    """Random steps on a queue with groups; after each, every held job must have a live predecessor."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = T0
        self.running: list[Attempt] = []

    async def step(self, what: str, n: int) -> None:
        store, self.now = self.store, self.now + timedelta(seconds=1)
        waiting = [one for one in await everything(store) if one.state == JobState.PENDING]
        picked = self.running[n % len(self.running)] if self.running else None
        chosen = waiting[n % len(waiting)].id if waiting else None
        match what:
            case "add":
                group, topic = "ab"[n == 5], "t" if n % 2 else "nobody"
                await create(store, *(job(queue="q", group=group, topic=one, run_at=self.now) for one in (topic, "t")))
            case "take":
                routes = ALL_ROUTES if n else Routes(frozenset({"t"}))
                self.running += await _take(store, self.now, most=n + 1, routes=routes)
            case "end" if picked:
                self.running.remove(picked)
                state = JobState.FAILED if n else JobState.COMPLETED
                await store.run(serial.complete_serial, [replace(ending(picked, state), group_queue="q")], [])
            case "retry" if picked:
                self.running.remove(picked)
                later = self.now + timedelta(seconds=n)
                await store.run(serial.schedule_group_retries, [replace(again(picked, later), group_queue="q")])
            case "cancel" if chosen:
                await store.run(repository.cancel, None, chosen, self.now)
            case "reschedule" if chosen:
                when = {"run_at": self.now, "timezone": "UTC"}
                await store.run(repository.reschedule, None, chosen, new_id(self.now), lambda _: when, self.now)
            case "limit":
                await _limit(store, concurrency_per_group=1 + n // 3)
            case "settle":
                heard = Routes(frozenset({"t"} if n else {"t", "nobody"}))
                await store.run(unhandled_topics.process_unhandled, heard, self.now)
            case "replay":
                failed = [one for one in await everything(store) if one.state == JobState.FAILED]
                if failed:
                    await store.run(dead_letters.retry, None, failed[n % len(failed)].id, self.now)

    async def check(self) -> None:
        found = await everything(self.store)
        going = Counter(one.group for one in found if one.state == JobState.RUNNING)
        due = [one for one in found if one.state == JobState.PENDING and one.hold is None and one.run_at <= self.now]
        free = Counter(one.group for one in due)
        for one_ in found:
            if one_.hold == Hold.GROUP:
                assert going[one_.group] + free[one_.group] > 0, "held without a live predecessor"


@stored
async def test_no_sequence_of_events_leaves_a_group_member_held_forever(store: Store) -> None:
    walks: list[list[tuple[str, int]]] = []

    @settings(max_examples=12 if store.multi_node else 25, deadline=None, derandomize=True, database=None)
    @given(STEPS)
    def collect(steps: list[tuple[str, int]]) -> None:
        walks.append(steps)

    collect()
    for steps in walks:
        for table in (table_of_jobs, finished):
            await execute(store, delete(table))
        walk = _Walk(store)
        await _limit(store, concurrency_per_group=1)
        for what, n in steps:
            await walk.step(what, n)
            await walk.check()
        # Finally all jobs run.
        for _ in range(200):
            walk.now += timedelta(seconds=10)
            taken = walk.running + await _take(store, walk.now)
            walk.running = []
            if not taken:
                break
            await store.run(serial.complete_serial, [replace(ending(one_), group_queue="q") for one_ in taken], [])
        left = [one_ for one_ in await everything(store) if one_.state in (JobState.PENDING, JobState.RUNNING)]
        assert not [one_ for one_ in left if one_.hold != Hold.UNHANDLED]


# Fair shares of tenants.


async def _tenants(store: Store, after_: str = "", most: int = 100, at: datetime = T0) -> tuple[list[str], str]:
    return await store.run_autocommit(queue_limits.next_tenants, lane("q"), after_, most, at)


async def _share(store: Store, tenants: list[str], most: int, at: datetime = T0) -> Counter[str]:
    taken = await store.run(queue_limits.claim_fair_shares, lane("q"), ALL_ROUTES, NODE, most, at, tenants)
    assert len(taken) <= most
    return Counter(one.tenant_id for one in taken)


async def _crowd(store: Store, **counts: int) -> None:
    for tenant, count in counts.items():
        await create(store, *(job(queue="q", tenant_id=tenant) for _ in range(count)), bulk=count > 1)


@stored
async def test_a_lane_is_crowded_if_it_is_late_and_shared_by_tenants(store: Store) -> None:
    await _crowd(store, a=3)
    assert not (await _lane(store, after(seconds=9))).needs_fair_sharing
    await _crowd(store, b=1)
    assert not (await _lane(store, after(seconds=0.4))).needs_fair_sharing
    assert (await _lane(store, after(seconds=0.5))).needs_fair_sharing


@stored
async def test_the_default_tenant_shares_once_there_are_others(store: Store) -> None:
    await one(store, queue="q")
    await _crowd(store, a=2)
    assert not (await _lane(store, after(seconds=9))).needs_fair_sharing  # created when there was only one tenant
    await one(store, queue="q")
    assert (await _lane(store, after(seconds=9))).needs_fair_sharing
    await _crowd(store, default=2)
    assert (await _tenants(store))[0] == ["a", "default"]
    assert (await _share(store, ["default"], 9))["default"] == 4


@stored
async def test_tenants_are_served_round_robin(store: Store) -> None:
    await _crowd(store, a=5, b=1, c=2, d=1)
    await create(store, job(queue="q", tenant_id="e", run_at=after(hours=1)))
    await create(store, job(queue="other", tenant_id="f"))
    assert await _tenants(store) == (["a", "b", "c", "d"], "e")
    assert await _tenants(store, "b") == (["c", "d", "a", "b"], "b")
    assert await _tenants(store, "b", 2) == (["c", "d"], "d")
    assert await _tenants(store, "zz", 1) == (["a"], "a")
    assert await _tenants(store, "d", 1) == (["a"], "a")


@stored
async def test_a_single_tenant_gets_all_slots(store: Store) -> None:
    assert await _tenants(store) == ([], "")
    await _crowd(store, a=3)
    assert (await _tenants(store))[0] == []


@stored
async def test_each_tenant_gets_a_share_and_the_longest_waiting_the_rest(store: Store) -> None:
    await _crowd(store, flood=900)
    for tenant in ("b", "c"):
        await create(store, *(job(queue="q", tenant_id=tenant, run_at=after(seconds=9)) for _ in range(40)))
    now = after(seconds=10)
    assert await _share(store, ["b", "c", "flood"], 90, now) == {"b": 30, "c": 30, "flood": 30}
    assert await _share(store, ["b", "c", "flood"], 90, now) == {"b": 10, "c": 10, "flood": 70}
    assert await _share(store, ["b", "c"], 2, now) == {"flood": 2}
    assert await _share(store, [], 10, now) == {"flood": 10}


@stored
async def test_fewer_slots_than_tenants_serve_the_next_tenants_in_order(store: Store) -> None:
    await _crowd(store, a=9, b=9, c=9)
    served, after_ = Counter[str](), ""
    for _ in range(6):
        turn, after_ = await _tenants(store, after_, 1)
        served += await _share(store, turn, 1)
    assert served == {"a": 2, "b": 2, "c": 2}


@stored
async def test_shares_respect_routes_due_times_and_limits(store: Store) -> None:
    await _limit(store, concurrency=6, rate=4, per=60.0)
    await _crowd(store, a=50, b=50)
    for fields in ({"topic": "deaf"}, {"run_at": after(hours=1)}, {"hold": Hold.OVERLAP}):
        await create(store, *(job(queue="q", tenant_id="b", **fields) for _ in range(5)))
    what = (lane("q"), Routes(frozenset({"t"})), NODE, 50)
    taken = await store.run(queue_limits.claim_limited, *what, T0, ["a", "b"])
    assert Counter(one.tenant_id for one in taken) == {"a": 2, "b": 2}
    taken = await store.run(queue_limits.claim_limited, *what, after(seconds=60), ["a", "b"])
    assert Counter(one.tenant_id for one in taken) == {"a": 1, "b": 1}


@stored
async def test_groups_are_shared_between_tenants_too(store: Store) -> None:
    await _limit(store, concurrency_per_group=1)
    for n in range(600):
        await create(store, *(job(queue="q", tenant_id="a", group=f"g{n % 50}") for _ in range(1)), bulk=True)
    await create(store, *(job(queue="q", tenant_id="b", group="g", run_at=after(seconds=9)) for _ in range(3)))
    taken = await store.run(queue_limits.claim_limited, lane("q"), ALL_ROUTES, NODE, 6, after(seconds=10), ["a", "b"])
    assert Counter(one.tenant_id for one in taken)["b"] == 1
    assert len(taken) == 6


# Concurrency of a tenant over all queues.


@stored
async def test_jobs_above_a_tenant_limit_are_held_and_released_with_free_capacity(store: Store) -> None:
    await store.run(tenants.upsert_tenant, "acme", {"jobs_at_once": 2}, T0)
    mine = await _add(store, 5, tenant_id="acme")
    others = await _add(store, 2, tenant_id="beta")
    assert await store.run(tenant_limits.list_limited_tenants) == {"acme"}
    given = (queue_limits.claim_fair_shares, lane("q"), ALL_ROUTES, NODE, 100, T0, [])
    taken, put_back = await store.run(tenant_limits.claim_within_limits, {"acme"}, T0, *given)
    assert {one.id for one in taken} == {*mine[:2], *others}
    assert put_back == 3
    waits = await get(store, mine[2])
    assert (waits.state, waits.hold, waits.attempt, waits.node_id) == (JobState.PENDING, Hold.TENANT, 0, None)
    assert await store.run(tenant_limits.release_held, T0) == 0
    await store.run_autocommit(complete.complete_jobs, [ending(next(one for one in taken if one.id == mine[0]))])
    assert await store.run(tenant_limits.release_held, T0) == 1
    assert (await store.run(tenant_limits.claim_within_limits, {"acme"}, T0, *given))[0][0].id == mine[2]
    await store.run(tenants.upsert_tenant, "acme", {"jobs_at_once": None}, T0)
    assert await store.run(tenant_limits.list_limited_tenants) == set()
    assert {one.id for one in await claim(store, at=T0, queue="q")} == set(mine[3:])


@stored
async def test_jobs_with_external_workers_count_towards_the_limit_of_a_tenant(store: Store) -> None:
    await store.run(tenants.upsert_tenant, "acme", {"jobs_at_once": 2}, T0)
    await _add(store, 3, tenant_id="acme")
    given = (queue_limits.claim_fair_shares, lane("q"), ALL_ROUTES, NODE, 100, T0, [])
    taken, _ = await store.run(tenant_limits.claim_within_limits, {"acme"}, T0, *given)
    assert len(taken) == 2
    handed_over = [ending(attempt, JobState.DISPATCHED, run_at=after(minutes=5)) for attempt in taken]
    assert len(await store.run_autocommit(complete.dispatch, handed_over)) == 2
    assert await store.run(tenant_limits.release_held, T0) == 0
    assert (await store.run(tenant_limits.claim_within_limits, {"acme"}, T0, *given))[0] == []


@stored
async def test_simultaneous_claims_do_not_exceed_the_limit_of_a_tenant(store: Store) -> None:
    await store.run(tenants.upsert_tenant, "acme", {"jobs_at_once": 3, "starts_per_minute": 5}, T0)
    await _add(store, 40, tenant_id="acme")

    async def take(node: str) -> list[Attempt]:
        given = (queue_limits.claim_fair_shares, lane("q"), ALL_ROUTES, node, 4, T0, [])
        return list((await store.run(tenant_limits.claim_within_limits, {"acme"}, T0, *given))[0])

    async def end(attempts: list[Attempt]) -> None:
        await store.run_autocommit(complete.complete_jobs, [ending(attempt) for attempt in attempts])

    first = [attempt for taken in await asyncio.gather(*map(take, [NODE, OTHER_NODE] * 4)) for attempt in taken]
    assert len(first) == 3
    await end(first)
    assert await store.run(tenant_limits.release_held, T0) == 2  # the rate allows two more in this minute
