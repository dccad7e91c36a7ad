"""Queues over HTTP, and pausing all queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timebell.store.audit import audit_log

from .web import Web, is_problem, wait_until

Make = Callable[..., Any]


async def state(web: Web, id_: str) -> str:
    return (await web.get(f"/jobs/{id_}")).json()["status"]  # type: ignore[no-any-return]


async def test_a_queue_is_limited_paused_and_resumed(make: Make) -> None:
    async with make() as web:

        @web.app.on("t")
        async def handle(event: Any) -> None:
            pass

        assert (await web.get("/queues")).json() == {
            "items": [], "nextCursor": None, "exact": True, "globalPause": {"paused": False, "pauseReason": None},
        }  # fmt: skip
        assert (await web.ask("PUT", "/queues/q", {"concurrency": 2})).json()["concurrency"] == 2
        paused = (await web.post("/queues/q/pause", {"reason": "moving"})).json()
        assert (paused["paused"], paused["pauseReason"], paused["concurrency"]) == (True, "moving", 2)
        async with web.app.running(heartbeat=0.1) as service:
            held = (await web.post("/jobs", {"topic": "t", "timezone": "UTC", "queue": "q"})).json()["id"]
            free = (await web.post("/jobs", {"topic": "t", "timezone": "UTC"})).json()["id"]
            await service.wait_until_idle()
            assert (await state(web, held), await state(web, free)) == ("pending", "completed")
            (queue,) = (await web.get("/queues")).json()["items"]
            assert (queue["name"], queue["pending"], queue["running"]) == ("q", 1, 0)
            assert (await web.post("/queues/q/resume")).json()["paused"] is False

            async def done() -> bool:
                return await state(web, held) == "completed"

            await wait_until(done)
        unlimited = (await web.ask("PUT", "/queues/q", {"concurrency": None})).json()
        assert unlimited["concurrency"] is None
        records = [one.action for one in await web.app.store.run(audit_log.list_records, "default", 50, None)]
        assert [one for one in records if one.startswith("queue")] == [
            "queue.put", "queue.resume", "queue.pause", "queue.put",
        ]  # fmt: skip


async def test_pause_all_stops_all_jobs(make: Make) -> None:
    async with make() as web:

        @web.app.on("t")
        async def handle(event: Any) -> None:
            pass

        stopped = (await web.post("/pause-all", {"reason": "fire drill"})).json()
        assert stopped == {"paused": True, "pauseReason": "fire drill"}
        assert (await web.get("/queues")).json()["globalPause"] == stopped
        async with web.app.running(heartbeat=0.1) as service:
            id_ = (await web.post("/jobs", {"topic": "t", "timezone": "UTC"})).json()["id"]
            await service.wait_until_idle()
            assert await state(web, id_) == "pending"
            assert (await web.post("/resume-all")).json() == {"paused": False, "pauseReason": None}

            async def done() -> bool:
                return await state(web, id_) == "completed"

            await wait_until(done)


async def test_only_the_platform_changes_shared_queues(make: Make) -> None:
    async with make(open_here=False) as web:
        admin = await web.key("admin")
        for method, path, body in (
            ("PUT", "/queues/q", {"concurrency": 1}), ("POST", "/queues/q/pause", None), ("POST", "/pause-all", None),
        ):  # fmt: skip
            is_problem(await web.ask(method, path, body, key=admin), 403, "ROLE_TOO_LOW")
        assert (await web.get("/queues", key=admin)).json()["items"] == []
        await web.post("/jobs", {"topic": "t", "timezone": "UTC", "queue": "theirs"}, key=await web.key("admin", "b"))
        assert (await web.get("/queues", key=admin)).json()["items"] == []


async def test_invalid_names_and_limits_are_refused(make: Make) -> None:
    async with make() as web:
        is_problem(await web.ask("PUT", "/queues/*", {"concurrency": 1}), 422, "INVALID_QUEUE")
        is_problem(await web.ask("PUT", "/queues/q", {"concurrency": 0}), 422, "INVALID_FIELDS")
        is_problem(await web.ask("PUT", "/queues/q", {"rate": 1, "per": 2}), 422, "UNKNOWN_FIELD")
        is_problem(await web.post(f"/queues/{'x' * 101}/pause"), 422, "INVALID_QUEUE")
        assert (await web.get("/queues")).json()["items"] == []
