"""Leases of remote workers on virtual time."""

from __future__ import annotations

from timebell.engine.waiting_claims import ClaimRequest
from timebell.model.routes import Routes
from timebell.store.cluster.workers import RemoteWorker, worker_id

from .world import START, World, engine, virtual


@virtual
async def test_a_late_job_whose_worker_is_lost_is_retried_at_once(world: World) -> None:
    app = world.app()
    late = await app.schedule_at("mail.send", timeout=60, retry={"attempts": 2, "delay": 3600})
    routes = Routes(frozenset({"mail.send"}))
    worker = RemoteWorker(worker_id(None, "w"), "w", routes, None, 1, START, START)
    async with engine(app, heartbeat=5.0) as service:
        await world.advance(minutes=10)  # longer than the timeout, which counts from the start of the attempt
        (claimed,) = (await service.remote_workers.claim(ClaimRequest(worker, None, 1, 10.0, 10.0))).jobs
        assert claimed.delivery.job_id == late.id
        await world.advance(seconds=30)
        found = await app.get(late.id)
        assert [attempt["code"] for attempt in found.attempts] == ["LEASE_LOST"]
        assert found.run_at <= world.clock.now()
