"""Rates, groups and fair shares of tenants in a running engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from timebell import Arrived, Cancel, Every, JobSpec, Snooze
from timebell.errors import InvalidInput
from timebell.model.job import JobState
from timebell.sim.world import World as Simulation
from timebell.store import transaction

from .world import START, Log, World, after, engine, jobs, offset, virtual

SIMULATED = datetime(2027, 3, 1, 12, tzinfo=UTC)


class Busy:
    """A handler that takes some time and records the maximum concurrency of each group."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.order: list[tuple[str, float]] = []

    async def __call__(self, event: Arrived) -> None:
        group = event.payload
        self.order.append((group, offset(event.fired_at)))
        self.now[group] += 1
        self.most[group] = max(self.most[group], self.now[group])
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.now[group] -= 1


# Rates.


@virtual
async def test_a_rate_spreads_a_burst_and_the_node_sleeps_until_the_next_start(world: World) -> None:
    app, log = world.app(), Log()
    app.on("t")(log)
    app.queue("mail", rate=3, per=timedelta(seconds=10))
    points: Counter[str] = Counter()
    async with engine(app, poll=3600.0, heartbeat=3600.0, lease=10_800.0):
        await app.schedule_many([JobSpec(topic="t", queue="mail") for _ in range(8)])
        await world.advance(seconds=1)
        transaction.probe = lambda point: points.update([point])
        try:
            await world.advance(seconds=60)
        finally:
            transaction.probe = None
    assert log.fired == [0, 0, 0, 10, 10, 10, 20, 20]
    assert 0 < points["scan_lanes.1"] <= 8, "it scanned again and again while nothing could start"
    assert points["claim_limited.1"] == 2


@virtual
async def test_a_rate_does_not_delay_other_queues_or_later_jobs(world: World) -> None:
    app, log = world.app(), Log()
    app.on("t")(log)
    app.queue("mail", rate=1, per=10)
    await app.schedule_many([
        *(JobSpec(topic="t", queue="mail", payload=f"mail {n}") for n in range(2)),
        JobSpec(topic="t", run_at=after(seconds=4), payload="other"),
        JobSpec(topic="t", queue="mail", run_at=after(seconds=31.5), payload="later"),
    ])  # fmt: skip
    async with engine(app):
        await world.advance(seconds=60)
    assert list(zip(log.payloads, log.fired, strict=True)) == [
        ("mail 0", 0), ("other", 4), ("mail 1", 10), ("later", 31.5),
    ]  # fmt: skip


@virtual
async def test_a_rate_outlives_a_restart_and_counts_retries(world: World) -> None:
    app, log = world.app(), Log()

    @app.on("t", retry={"attempts": 2, "delay": 1, "jitter": 0.0})
    async def fails_once(event: Arrived) -> None:
        await log(event)
        if event.attempt == 1:
            raise RuntimeError("once")

    app.queue("mail", rate=1, per=60)
    await app.schedule_at("t", queue="mail")
    async with engine(app):
        await world.advance(seconds=10)
    async with engine(app):
        await world.advance(minutes=2)
    assert log.fired == [0, 60]


@virtual
async def test_wait_until_idle_waits_for_jobs_delayed_by_a_rate(world: World) -> None:
    app, log = world.app(), Log()
    app.on("t")(log)
    app.queue("mail", rate=1, per=5)
    await app.schedule_many([JobSpec(topic="t", queue="mail") for _ in range(3)])
    async with engine(app) as service:
        await service.wait_until_idle()
    assert log.fired == [0, 5, 10]


# Groups.


@virtual
async def test_jobs_of_a_group_run_one_after_another_and_groups_in_parallel(world: World) -> None:
    app, busy = world.app(), Busy(10)
    app.on("report")(busy)
    app.queue("reports", concurrency_per_group=1)
    names = ["ana", "ana", "ana", "bob", "bob"]
    await app.schedule_many([JobSpec(topic="report", queue="reports", group=name, payload=name) for name in names])
    await app.schedule_at("report", queue="reports", payload="alone")
    async with engine(app, heartbeat=3600.0, poll=3600.0, lease=10_800.0):
        await world.advance(seconds=60)
    assert busy.most == {"ana": 1, "bob": 1, "alone": 1}
    starts = sorted((name, round(at, 1)) for name, at in busy.order)
    assert starts == [("alone", 0), ("ana", 0), ("ana", 10), ("ana", 20), ("bob", 0), ("bob", 10)]


@virtual
async def test_a_snooze_a_retry_and_a_cancel_release_the_next_job_of_the_group(world: World) -> None:
    app, log = world.app(), Log()

    @app.on("t", retry={"attempts": 2, "delay": 100, "jitter": 0.0})
    async def act(event: Arrived) -> None:
        await log(event)
        await asyncio.sleep(1)
        if event.attempt == 1 and event.payload == "snooze":
            raise Snooze(50)
        if event.attempt == 1 and event.payload == "fail":
            raise RuntimeError
        if event.payload == "cancel":
            raise Cancel("enough")

    app.queue("q", concurrency_per_group=1)
    acts = ["snooze", "fail", "cancel", "work"]
    await app.schedule_many([
        JobSpec(topic="t", queue="q", group="g", payload=one, run_at=after(milliseconds=n))
        for n, one in enumerate(acts)
    ])  # fmt: skip
    async with engine(app, heartbeat=3600.0, poll=3600.0, lease=10_800.0):
        await world.advance(minutes=10)
    began = list(zip(log.payloads, (round(at) for at in log.fired), strict=True))
    assert began == [("snooze", 0), ("fail", 1), ("cancel", 2), ("work", 3), ("snooze", 51), ("fail", 102)]


@virtual
async def test_a_waiting_job_of_a_group_has_a_hold_and_can_be_cancelled(world: World) -> None:
    app, busy = world.app(), Busy(10)
    app.on("t")(busy)
    app.queue("q", concurrency_per_group=1)
    made = [await app.schedule_at("t", queue="q", group="g", payload="g") for _ in range(3)]
    assert made[0].group == "g"
    async with engine(app):
        await world.advance(seconds=1)
        holds = [(await app.get(job.id)).hold for job in made]
        assert sorted(map(str, holds)) == ["None", "group", "group"]
        waiting = [job.id for job, hold in zip(made, holds, strict=True) if hold is not None]
        assert (await app.cancel(waiting[0])).outcome == "prevented"
        await world.advance(seconds=30)
    assert len(busy.order) == 2


@virtual
async def test_schedules_of_one_group_alternate(world: World) -> None:
    app, busy = world.app(), Busy(90)
    app.on("t")(busy)
    app.queue("q", concurrency_per_group=1)
    for name in ("a", "b"):
        await app.schedule_repeat("t", Every("PT5M"), name=name, queue="q", group="g", payload="g")
    async with engine(app, heartbeat=60.0, lease=200.0):
        await world.until(after(minutes=12))
    assert busy.most == {"g": 1}
    assert [round(at) for _, at in busy.order] == [300, 390, 600, 690]
    assert (await app.schedules.get(name="a")).action.group == "g"


@pytest.mark.heartbeats
@pytest.mark.parametrize(
    "at", ["claim_limited.6", "claim_limited.commit", "complete_serial.commit", "schedule_group_retries.2", ""]
)
def test_a_crash_neither_blocks_a_group_nor_runs_two_of_its_jobs(at: str) -> None:
    with Simulation(start=SIMULATED, nodes=3) as world:
        app, busy = world.new_app(), Busy(2)
        app.queue("q", concurrency_per_group=1)

        @app.on("t", retry={"attempts": 9, "delay": 1})
        async def work(event: Arrived) -> None:
            await busy(event)
            if event.attempt == 1:
                raise RuntimeError("once")

        specs = [JobSpec(topic="t", queue="q", group=f"g{n % 4}", payload=f"g{n % 4}") for n in range(40)]
        world.run(app.schedule_many(specs))
        if at:
            world.crash(at=at)
        else:
            world.at(SIMULATED + timedelta(seconds=7), lambda: world.crash("node-2"))
        world.run(world.advance(minutes=10))
        assert [run.state for run in world.history()] == [JobState.COMPLETED] * 40
        assert set(busy.most.values()) == {1}


# Fairness.


@virtual
async def test_a_tenant_with_many_jobs_delays_another_by_at_most_its_share(world: World) -> None:
    app, busy = world.app(), Busy(0.5)
    app.on("t")(busy)
    await app.schedule_many([JobSpec(topic="t", tenant_id="flood", payload="flood") for _ in range(2000)])
    async with engine(app, slots=4, batch_size=4):
        for n in range(20):
            await app.schedule_at("t", tenant_id=f"small-{n % 3}", payload="small")
            await world.advance(seconds=1)
    late = [at - n for n, (_, at) in enumerate(one for one in busy.order if one[0] == "small")]
    assert len(late) == 20
    assert max(late) <= 1.5
    assert 100 < len(busy.order) <= 164, "slots were idle"


@virtual
async def test_a_queue_with_many_jobs_does_not_take_all_slots_from_another_of_its_priority(world: World) -> None:
    app, busy = world.app(), Busy(0.5)
    app.on("t")(busy)
    await app.schedule_many([JobSpec(topic="t", queue="bulk", payload="bulk") for _ in range(2000)])
    async with engine(app, slots=2, batch_size=4):
        for _ in range(5):
            await app.schedule_at("t", queue="mail", payload="mail")
            await world.advance(seconds=2)
    late = [at - 2 * n for n, (_, at) in enumerate(one for one in busy.order if one[0] == "mail")]
    assert len(late) == 5
    assert max(late) <= 1


@virtual
async def test_priorities_stay_strict(world: World) -> None:
    app, busy = world.app(), Busy(0.5)
    app.on("t")(busy)
    specs = [JobSpec(topic="t", tenant_id=one, payload=one, priority=n) for n, one in enumerate("ab") for _ in range(8)]
    await app.schedule_many(specs)
    async with engine(app, slots=2):
        await world.advance(seconds=10)
    assert [name for name, _ in busy.order] == ["a"] * 8 + ["b"] * 8


# Bad input.


@virtual
async def test_an_invalid_group_is_refused(world: World) -> None:
    app = world.app()
    for given in ("", "g" * 201, 5):
        with pytest.raises(InvalidInput) as refused:
            await app.schedule_at("t", group=given)
        assert refused.value.code == "INVALID_GROUP"
        with pytest.raises(InvalidInput) as refused:
            await app.schedule_repeat("t", Every("PT1H"), group=given)
        assert refused.value.code == "INVALID_GROUP"
    assert await jobs(app) == []
    assert world.clock.now() == START
