"""Concurrency and start-rate limits of tenants in a running engine."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from timebell import Arrived, Every, JobSpec, Timebell
from timebell.model.job import JobState
from timebell.sim.world import World as Simulation
from timebell.store.tenancy import tenants

from .test_queue_limits import SIMULATED, Busy
from .world import START, Log, World, after, engine, jobs, virtual


async def limit(app: Timebell, tenant: str, **limits: int | None) -> None:
    await app.open()
    await app.store.run(tenants.upsert_tenant, tenant, limits, START)


def of(tenant: str, count: int, **more: object) -> list[JobSpec]:
    return [JobSpec(topic="t", payload=tenant, tenant_id=tenant, **more) for _ in range(count)]  # type: ignore[arg-type]


@virtual
async def test_a_tenant_concurrency_limit_spans_queues_and_does_not_delay_other_tenants(world: World) -> None:
    app, busy = world.app(), Busy(10)
    app.on("t")(busy)
    await limit(app, "acme", jobs_at_once=2)
    await app.schedule_many([*of("acme", 4), *of("acme", 3, queue="other"), *of("beta", 5)])
    async with engine(app):
        await world.advance(seconds=60)
    assert busy.most == {"acme": 2, "beta": 5}
    assert [at for tenant, at in busy.order if tenant == "acme"] == [0, 0, 10, 10, 20, 20, 30]
    assert {job.state.value for job in await jobs(app)} == {"completed"}
    assert {job.attempt for job in await jobs(app)} == {1}


@virtual
async def test_jobs_that_start_when_they_are_fired_count_towards_the_concurrency_limit(world: World) -> None:
    app, busy = world.app(), Busy(10)
    app.on("t")(busy)
    await limit(app, "acme", jobs_at_once=1)
    for n in range(4):
        await app.schedule_repeat("t", Every("PT1H", START), name=f"s{n}", payload="acme", tenant_id="acme")
    async with engine(app):
        await world.advance(hours=1, minutes=1)
    assert busy.most == {"acme": 1}
    assert len(busy.order) == 4


@virtual
async def test_a_tenant_start_rate_includes_retries(world: World) -> None:
    app, log = world.app(), Log()

    @app.on("t", retry={"attempts": 2, "delay": 1, "jitter": 0.0})
    async def fails_once(event: Arrived) -> None:
        await log(event)
        if event.payload == "acme" and event.attempt == 1:
            raise RuntimeError("once")

    await limit(app, "acme", starts_per_minute=3)
    await app.schedule_many([*of("acme", 3), *of("beta", 4)])
    async with engine(app):
        await world.advance(seconds=150)
    mine = [at for tenant, at in zip(log.payloads, log.fired, strict=True) if tenant == "acme"]
    assert mine[:3] == [0, 0, 0]
    assert len(mine) == 6
    assert all(60 <= at <= 61 for at in mine[3:])


@pytest.mark.parametrize("at", [7, 12.5, None])
def test_tenant_limits_hold_across_nodes_despite_a_crash(at: float | None) -> None:
    with Simulation(start=SIMULATED, nodes=3) as world:
        app, busy = world.new_app(), Busy(5)
        app.on("t", retry={"attempts": 9, "delay": 1})(busy)
        world.run(limit(app, "acme", jobs_at_once=3))
        world.run(app.schedule_many(of("acme", 30)))
        if at is not None:
            world.at(SIMULATED + timedelta(seconds=at), lambda: world.crash("node-2"))
        world.run(world.advance(minutes=10))
        assert [run.state for run in world.history()] == [JobState.COMPLETED] * 30
        assert busy.most == {"acme": 3}


@virtual
async def test_waiting_jobs_start_when_the_limit_is_raised_or_removed(world: World) -> None:
    app, busy = world.app(), Busy(1000)
    app.on("t", timeout=3600)(busy)
    await limit(app, "acme", jobs_at_once=1)
    await app.schedule_many([*of("acme", 4), *of("acme", 1, run_at=after(seconds=30))])
    async with engine(app):
        await world.advance(seconds=10)
        assert sum(job.hold is not None for job in await jobs(app)) == 3
        waits = next(job for job in await jobs(app) if job.hold is not None)
        assert (waits.hold, waits.attempt, waits.state.value) == ("tenant", 0, "pending")
        assert await app.cancel(waits.id)
        await limit(app, "acme", jobs_at_once=2)
        await world.advance(seconds=10)
        assert busy.now["acme"] == 2
        await limit(app, "acme", jobs_at_once=None)
        await world.advance(seconds=10)
        assert busy.now["acme"] == 3
        await world.advance(seconds=10)
        assert busy.now["acme"] == 4
        assert await asyncio.wait_for(app.repair(), 60)
