"""The simulated world: reproducible bytes from a seed, crashes, outages, several nodes, and free idle time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from timebell import Arrived, Cron, Every
from timebell.model.job import JobState
from timebell.sim.database import FAULT_POINTS
from timebell.sim.world import World
from timebell.store import transaction

START = datetime(2027, 3, 1, 12, tzinfo=UTC)
ROOT = Path(__file__).parents[2]

SCENARIO = """
import asyncio, sys
from datetime import UTC, datetime, timedelta
from timebell import Cron, Every
from timebell.sim.world import World

start = datetime(2027, 3, 1, 12, tzinfo=UTC)
with World(start=start, seed=int(sys.argv[1]), nodes=3) as world:
    app = world.new_app(timezone="Europe/Berlin")

    @app.on("slow.*", retry={"attempts": 3, "delay": 20})
    async def slow(event):
        await asyncio.sleep(40)
        if event.attempt == 1:
            raise RuntimeError("the first time it fails")
        return event.fired_at.isoformat()

    @app.on("plain")
    def plain(event):
        return event.attempt

    async def make():
        await app.schedule_repeat("slow.a", Every("PT1M"), overlap="queue")
        await app.schedule_repeat("slow.b", Cron("*/7 * * * *"))
        await app.schedule_repeat("plain", Cron("*/2 * * * * *"), overlap="allow")

    world.run(make())
    world.outage(start + timedelta(minutes=9), start + timedelta(minutes=11))
    world.outage(start + timedelta(minutes=14), start + timedelta(minutes=15), of="database")
    world.at(start + timedelta(minutes=20, seconds=30), lambda: world.crash("node-2"))
    world.crash(at="complete_serial.commit")
    world.run(world.advance(minutes=25))
    sys.stdout.buffer.write(world.dump_rows())
"""


def simulated(seed: int, hash_seed: int) -> bytes:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, "-c", SCENARIO, str(seed)], env=environment, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_the_same_seed_gives_the_same_bytes_in_another_process() -> None:
    first, again, other = simulated(7, 1), simulated(7, 2), simulated(8, 1)
    assert first == again
    assert first != other
    assert first.count(b'"state":"completed"') > 500


def nothing(_: Arrived) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    "point",
    [
        "fire_due_schedules.1",
        "fire_due_schedules.commit",
        "fire_due_schedules.done",
        "claim_batch.1",
        "claim_batch.done",
    ],
)
def test_a_crash_at_a_fault_point_neither_loses_nor_duplicates_an_occurrence(point: str) -> None:
    with World(start=START) as world:
        app = world.new_app()
        keys: list[tuple[str, int]] = []

        def plain(event: Arrived) -> None:
            keys.append((event.occurrence_key, event.attempt))

        async def tick(event: Arrived) -> None:
            plain(event)

        # An occurrence of an async handler starts as it fires; one of a plain handler is claimed.
        app.on("tick")(plain if point.startswith("claim") else tick)
        world.run(app.schedule_repeat("tick", Every("PT1M"), overlap="allow"))
        world.run(world.advance(minutes=2))
        world.crash(at=point, down=5)
        world.run(world.advance(minutes=3))
        runs = world.history()
    assert [run.scheduled_at for run in runs] == [START + timedelta(minutes=n) for n in range(1, 6)]
    assert {run.state for run in runs} == {JobState.COMPLETED}
    assert len(keys) == len(set(keys)) == 5
    late = max((run.fired_at or START) - run.scheduled_at for run in runs)
    assert timedelta(seconds=5) <= late < timedelta(seconds=6), "the crash happened, and the node was back after 5 s"


def test_a_crash_between_the_effect_and_its_commit_runs_the_job_again_as_the_next_attempt() -> None:
    with World(start=START) as world:
        app = world.new_app()
        seen: list[tuple[str, int]] = []

        @app.on("pay")
        async def pay(event: Arrived) -> None:
            seen.append((event.occurrence_key, event.attempt))

        job = world.run(app.schedule_at("pay"))
        world.crash(at="complete_jobs.commit")
        world.run(world.advance(minutes=1))
        assert seen == [(job.id, 1), (job.id, 2)]
        assert [run.state for run in world.history()] == [JobState.COMPLETED]


def test_fault_points_match_the_statements_of_their_operations() -> None:
    passed: Counter[str] = Counter()
    transaction.probe = lambda point: passed.update([point])
    try:
        with World(start=START) as world:
            app = world.new_app()
            app.queue("narrow", concurrency=2, rate=100, concurrency_per_group=1)

            @app.on("flaky", retry={"attempts": 2, "delay": 1})
            async def flaky(event: Arrived) -> None:
                if event.attempt == 1:
                    raise RuntimeError("the first time it fails")

            @app.on("within")
            async def within(event: Arrived) -> None:
                async with event.transaction():
                    pass

            async def make() -> None:
                await app.schedule_at("flaky")
                for tenant in ("acme", "default"):
                    await app.schedule_at("flaky", tenant_id=tenant)
                    await app.schedule_at("flaky", queue="narrow", group="g")
                await app.schedule_repeat("flaky", Every("PT1M"))
                for topic in ("flaky", "within"):
                    delay = Every("PT1M", since="last_end")
                    await app.schedule_repeat(topic, delay, queue="narrow", group="g")

            world.run(world.advance(seconds=1))
            world.crash(down=5.0)  # so that due jobs are late
            world.run(make())
            world.run(world.advance(minutes=3))
    finally:
        transaction.probe = None
    most = dict.fromkeys(FAULT_POINTS, 0)
    for point in passed:
        operation, _, number = point.partition(".")
        if operation in FAULT_POINTS and number.isdigit():
            most[operation] = max(most[operation], int(number))
    assert most == FAULT_POINTS
    with World() as world, pytest.raises(ValueError, match="not a fault point"):
        world.crash(at="fire_due_schedules.9")


def test_another_node_takes_over_after_a_lease_when_one_crashes_in_a_handler() -> None:
    with World(start=START, nodes=2) as world:
        app = world.new_app()
        starts: list[tuple[float, int]] = []

        @app.on("long", timeout=600)
        async def long(event: Arrived) -> None:
            starts.append(((event.fired_at - START).total_seconds(), event.attempt))
            await asyncio.sleep(100)

        world.run(app.schedule_at("long"))
        world.run(world.advance(seconds=50))
        (holder,) = {job.node_id for job in world.run(app.list(status="running"))}
        name = next(life.name for life in world._running if life.service and life.service.node.id == holder)
        world.crash(name, down=3600)
        world.run(world.advance(minutes=5))
        assert [attempt for _, attempt in starts] == [1, 2]
        assert 50 + 15 <= starts[1][0] <= 50 + 15 + 5, "after its lease of 15 s, noticed at a heartbeat"
        assert [run.state for run in world.history()] == [JobState.COMPLETED]


@pytest.mark.parametrize("struck", range(50, 57))
def test_a_lease_that_expires_between_heartbeats_is_noticed_immediately(struck: int) -> None:
    with World(start=START, nodes=2, heartbeat=7.0) as world:
        app = world.new_app()
        starts: list[float] = []

        @app.on("long", timeout=600)
        async def long(event: Arrived) -> None:
            starts.append((event.fired_at - START).total_seconds())
            await asyncio.sleep(100)

        world.run(world.advance(seconds=struck - 1))
        world.run(app.schedule_at("long"))
        world.run(world.advance(seconds=1))
        (holder,) = {job.node_id for job in world.run(app.list(status="running"))}
        world.crash(
            next(life.name for life in world._running if life.service and life.service.node.id == holder), down=60
        )
        world.run(world.advance(minutes=5))
        assert starts[1] - struck <= 7 + 15, "at most one heartbeat until it is noticed, then its lease"


def test_a_long_job_keeps_its_lease_while_heartbeats_are_skipped() -> None:
    with World(start=START, nodes=3) as world:
        app = world.new_app()
        attempts: list[int] = []

        @app.on("long", timeout=30 * 86_400)
        async def long(event: Arrived) -> None:
            attempts.append(event.attempt)
            await asyncio.sleep(20 * 86_400)

        world.run(app.schedule_at("long"))
        world.run(world.advance(days=21))
        assert attempts == [1]
        assert [run.state for run in world.history()] == [JobState.COMPLETED]
        assert world.clock.skipped_seconds > 20 * 86_400


def test_an_outage_of_the_nodes_and_catch_up() -> None:
    with World(start=START) as world:
        app = world.new_app()
        app.on("hourly")(nothing)
        world.run(app.schedule_repeat("hourly", Cron("30 * * * *")))
        world.outage(START + timedelta(hours=1), START + timedelta(hours=5))
        world.run(world.advance(hours=6))
        runs = sorted(world.history(), key=lambda run: run.scheduled_at)
        assert [(run.scheduled_at.hour, run.state.value) for run in runs] == [
            (12, "completed"), (13, "skipped"), (14, "skipped"), (15, "skipped"), (16, "completed"), (17, "completed"),
        ]  # fmt: skip


def test_an_outage_of_the_database_delays_and_loses_nothing() -> None:
    with World(start=START) as world:
        app = world.new_app()
        app.on("tick")(nothing)
        world.run(app.schedule_repeat("tick", Every("PT1M")))
        world.outage(START + timedelta(seconds=30), START + timedelta(seconds=90), of="database")
        world.run(world.advance(minutes=3))
        runs = world.history()
    assert [run.state for run in runs] == [JobState.COMPLETED] * 3
    assert timedelta(seconds=30) <= (runs[0].fired_at or START) - runs[0].scheduled_at < timedelta(seconds=33)


def test_a_fixed_delay_continues_on_another_node_on_time() -> None:
    with World(start=START, nodes=2) as world:
        app = world.new_app()
        app.on("delay")(nothing)
        world.run(app.schedule_repeat("delay", Every("PT1H", since="last_end")))
        world.run(world.advance(minutes=61))
        (busy,) = [life.name for life in world._running if life.service and life.service.node.counters.started]
        world.crash(busy, down=86_400)
        world.run(world.advance(hours=1))
        assert [run.fired_at for run in world.history()] == [START + timedelta(hours=1), START + timedelta(hours=2)]


def test_unhandled_jobs_are_held_within_a_heartbeat_as_in_production() -> None:
    with World(start=START) as world:
        app = world.new_app()
        world.run(app.schedule_at("nobody", run_at=START + timedelta(days=3)))
        world.run(world.advance(days=3, seconds=10))
        (job,) = world.run(app.list())
        assert job.hold == "unhandled"


def test_idle_time_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    operations: Counter[str] = Counter()
    with World(start=START, nodes=2) as world:
        app = world.new_app()
        app.on("yearly")(nothing)
        world.run(app.schedule_repeat("yearly", Cron("0 0 1 1 *")))
        world.run(world.start())
        transaction.probe = lambda point: operations.update([point])
        try:
            world.run(world.advance(days=365 * 50))
        finally:
            transaction.probe = None
        assert len(world.history()) == 50
    assert operations["announce.done"] < 20, "no heartbeats are simulated for fifty years"
    assert 0 < operations["scan_lanes.done"] < 50 * 10


def test_time_cannot_go_back_and_outages_must_be_in_the_future() -> None:
    with World(start=START) as world:
        with pytest.raises(ValueError, match="cannot go back"):
            world.run(world.until(START - timedelta(seconds=1)))
        with pytest.raises(ValueError, match="must be in the future"):
            world.outage(START - timedelta(hours=1), START + timedelta(hours=1))
