"""The event stream: no event is missed, repeated or from another tenant, and no connection is held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert
from starlette.requests import ClientDisconnect

from timebell.api import events, server
from timebell.ids import new_id
from timebell.store.schema import finished
from timebell.store.transaction import Transaction

from .live import Live, listening, serve
from .web import NIGHTLY, is_problem

Make = Callable[..., Any]


def _insert_finished(
    tx: Transaction, at: datetime, id_: str, tenant: str = "default", topic: str = "mail.send", state: str = "completed"
) -> None:
    """Insert a finished job, as a node writes it."""
    tx.execute(insert(finished).values(
        id=id_, tenant_id=tenant, topic=topic, kind="once", scheduled_at=at, run_at=at, timezone="UTC", payload="null",
        queue="default", priority=0, serial=False, state=state, attempt=1, attempts_used=1, created_at=at,
        started_at=at, finished_at=at,
    ))  # fmt: skip


async def _finish_job(live: Live, seconds_ago: float = 0, **more: Any) -> str:
    now = live.web.app.clock.now()
    id_ = new_id(now)
    await live.web.app.store.run(_insert_finished, now - timedelta(seconds=seconds_ago), id_, **more)
    return id_


async def test_finished_jobs_and_schedule_changes_are_streamed(make: Make) -> None:
    async with make() as web, serve(web) as live, listening(live) as listener:
        id_ = (await web.post("/schedules", NIGHTLY)).json()["id"]
        _, created = await listener.next()
        assert (created["type"], created["schedule"], created["actor"]) == ("schedule.create", {"id": id_}, "local")
        job = await web.app.schedule_at("mail.send", web.app.clock.now() + timedelta(hours=1), owner_id="u1")
        await web.app.cancel(job.id)
        _, ended = await listener.next()
        assert (ended["type"], ended["job"]["id"], ended["job"]["topic"]) == ("job.cancelled", job.id, "mail.send")
        assert ended["job"]["ownerId"] == "u1"


async def test_a_reconnecting_client_gets_missed_events_once(make: Make) -> None:
    async with make() as web, serve(web) as live:
        async with listening(live) as listener:
            created = [await _finish_job(live) for _ in range(3)]
            seen = [await listener.next() for _ in range(3)]
            assert [event["job"]["id"] for _, event in seen] == created
        created += [await _finish_job(live)]
        async with listening(live, last=seen[1][0]) as listener:
            assert [(await listener.next())[1]["job"]["id"] for _ in range(2)] == created[2:]
            with pytest.raises(TimeoutError):
                await listener.next(2.5)


async def test_events_committed_late_are_not_missed(make: Make) -> None:
    async with make() as web, serve(web) as live:
        async with listening(live) as listener:
            await asyncio.sleep(2)
            first = await _finish_job(live)
            assert (await listener.next())[1]["job"]["id"] == first
            late = await _finish_job(live, seconds_ago=1)
            place, event = await listener.next()
            assert event["job"]["id"] == late
        later = await _finish_job(live, seconds_ago=1.5)
        async with listening(live, last=place) as listener:
            seen = [(await listener.next())[1]["job"]["id"]]
            while seen[-1] != later and len(seen) < 3:
                seen.append((await listener.next())[1]["job"]["id"])
            assert later in seen


async def test_events_are_filtered(make: Make) -> None:
    async with make() as web, serve(web) as live:
        schedule = (await web.post("/schedules", NIGHTLY)).json()["id"]
        async with (
            listening(live, "?topic=mail.*&type=job.failed") as failures,
            listening(live, f"?scheduleId={schedule}") as mine,
            listening(live, "?type=schedule.*") as changes,
        ):
            await _finish_job(live)
            await _finish_job(live, topic="other.topic", state="failed")
            failed = await _finish_job(live, state="failed")
            await web.post("/schedules", {**NIGHTLY, "name": "other"})
            await web.post(f"/schedules/{schedule}/pause")
            assert (await failures.next())[1]["job"]["id"] == failed
            assert (await mine.next())[1]["type"] == "schedule.pause"
            assert [(await changes.next())[1]["type"] for _ in range(2)] == ["schedule.create", "schedule.pause"]


async def test_events_of_other_tenants_are_not_streamed(make: Make) -> None:
    async with make(open_here=False) as web, serve(web) as live:
        ours = await web.key("viewer", "ours")
        async with listening(live, key=ours) as listener:
            await _finish_job(live, tenant="theirs")
            await web.post("/schedules", NIGHTLY, key=await web.key("admin", "theirs"))
            mine = await _finish_job(live, tenant="ours")
            assert (await listener.next())[1]["job"]["id"] == mine
        async with listening(live, "?tenant=theirs", key=ours) as listener:
            assert listener.status == 403
        async with listening(live) as listener:
            assert listener.status == 401


async def test_a_stream_ends_when_its_key_is_revoked(make: Make) -> None:
    async with make(open_here=False) as web, serve(web) as live:
        admin, viewer = await web.key("admin"), await web.key("viewer")
        async with listening(live, key=viewer) as listener:
            await web.ask("DELETE", f"/keys/{viewer.split('_')[2]}", key=admin)
            assert await listener.ended(20)


async def test_streams_hold_no_connection_and_end_with_the_server(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SHUTDOWN_GRACE_SECONDS", 30)  # longer than the test allows
    async with make() as web:
        async with serve(web) as live:
            listeners = [listening(live) for _ in range(30)]
            opened = [await one.__aenter__() for one in listeners]
            # More streams than the connection pool has connections.
            assert (await asyncio.wait_for(web.get("/schedules"), 20)).status_code == 200
            began = web.app.clock.monotonic()
        assert web.app.clock.monotonic() - began < 20
        for one in opened:
            assert await one.ended()
        for one in listeners:
            await one.__aexit__(None, None, None)
        assert not web.site.authenticator._open_streams


async def test_streams_per_tenant_are_limited(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_STREAMS_PER_TENANT", 1)
    async with make() as web, serve(web) as live:
        async with listening(live) as first:
            assert first.status == 200
            assert is_problem(await web.get("/events"), 429, "LIMIT_REACHED")["limit"] == {"name": "streams", "max": 1}
        is_problem(await web.get("/events", last_event_id="nonsense"), 422, "INVALID_LAST_EVENT_ID")


@pytest.mark.parametrize("spec", ["2.3", "2.4"])
async def test_a_client_that_disconnects_early_is_not_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    monkeypatch.setattr(events, "MAX_STREAMS_PER_TENANT", 1)

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        raise OSError("the client has disconnected")

    async with make() as web:
        for _ in range(2):
            messages = [{"type": "http.request", "body": b""}]
            scope = {
                "type": "http", "asgi": {"version": "3.0", "spec_version": spec}, "http_version": "1.1",
                "method": "GET", "scheme": "http", "path": "/api/v1/events", "raw_path": b"/api/v1/events",
                "root_path": "", "query_string": b"", "headers": [(b"host", b"127.0.0.1:8700")],
                "client": ("127.0.0.1", 50_000), "server": ("127.0.0.1", 8700),
            }  # fmt: skip
            with suppress(ClientDisconnect, OSError):
                await web.site(scope, receive, send)
        async with serve(web) as live, listening(live) as listener:
            assert listener.status == 200


async def test_job_starts_are_streamed_under_the_requested_types(make: Make) -> None:
    types = "type=schedule.arrived&type=schedule.billing.due.arrived&type=job.completed"
    async with make() as web:

        @web.app.on("*", handles=True)
        async def handle(event: Any) -> None: ...

        async with web.app.running(), serve(web) as live, listening(live, f"?{types}") as listener:
            names: dict[str, Any] = {}
            wanted = {"schedule.arrived", "schedule.billing.due.arrived", "job.completed"}
            async with asyncio.timeout(60):
                while wanted - names.keys():
                    await web.app.schedule_at("billing.due", payload={"n": 0}, owner_id="ana", timezone="UTC")
                    with suppress(TimeoutError):  # the stream may not receive arrivals yet: then another job is needed
                        while wanted - names.keys():
                            _, event = await listener.next(1)
                            names[event["type"]] = event
            job = names["schedule.arrived"]["job"]
            assert (job["topic"], job["payload"], job["metadata"]) == ("billing.due", {"n": 0}, {"ownerId": "ana"})
            assert names["schedule.arrived"]["at"] == job["firedAt"]
