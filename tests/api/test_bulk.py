"""`POST /jobs/bulk`: lines become jobs, the import can be repeated, and an invalid line does not stop it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest

from timebell.api import bulk
from timebell.features import FEATURES
from timebell.ids import new_id
from timebell.model.operation import STALL_TIMEOUT, OperationState
from timebell.store.audit import audit_log
from timebell.store.cluster import operations

from .test_jobs import at
from .web import Web, is_problem

Make = Callable[..., Any]


def ndjson(*lines: Any) -> bytes:
    return b"".join((line if isinstance(line, bytes) else orjson.dumps(line)) + b"\n" for line in lines)


async def send(web: Web, body: Any, query: str = "", **headers: str) -> Any:
    by_keyword = {"content_type": "application/x-ndjson", **headers}
    by_name = {name.replace("_", "-"): value for name, value in by_keyword.items()}
    return await web.client.post(f"/jobs/bulk{query}", content=body, headers=by_name)


def counted(created: Any) -> tuple[int, int, int]:
    assert created.status_code == 201, created.text
    progress = created.json()["progress"]
    assert created.json()["state"] == "completed"
    assert progress["total"] == progress["done"] + progress["skipped"] + progress["failed"]
    return progress["done"], progress["skipped"], progress["failed"]


async def all_jobs(web: Web) -> list[dict[str, Any]]:
    found, cursor = [], ""
    while cursor is not None:
        page = (await web.get(f"/jobs?limit=500{cursor and '&cursor=' + cursor}")).json()
        found, cursor = found + page["items"], page["nextCursor"]
    return found


async def test_a_repeated_import_creates_each_job_once(make: Make) -> None:
    async with make() as web:
        lines = [{"topic": "t", "runAt": at(web, days=1), "payload": {"n": n}} for n in range(2500)]
        created = await send(web, ndjson(*lines))
        assert counted(created) == (2500, 0, 0)
        assert (await web.get(created.headers["location"].removeprefix("/api/v1"))).json() == created.json()
        assert sorted(job["payload"]["n"] for job in await all_jobs(web)) == list(range(2500))
        assert counted(await send(web, ndjson(*lines, {**lines[0], "payload": {"n": -1}}))) == (1, 2500, 0)
        assert len(await all_jobs(web)) == 2501
        records = list(await web.app.store.run(audit_log.list_records, "default", 50, None))
        assert [(one.action, one.subject) for one in records][1:] == [("jobs.import", created.json()["id"])]


async def test_invalid_lines_are_reported_by_number_and_the_others_imported(make: Make) -> None:
    async with make() as web:
        good = {"topic": "t", "timezone": "UTC"}
        body = ndjson(
            b"\xef\xbb\xbf" + orjson.dumps({**good, "payload": 1}), b"", b"{", {**good, "topik": "x"}, b"[]",
            {**good, "topic": "no spaces"}, {"topic": "t"}, {**good, "runAt": "2001-01-01T00:00:00Z"},
            b"\xff", b'{"a":' * 40, b"x" * 1_100_000,
            {**good, "payload": "\u00e9"},
        )[:-1]  # fmt: skip
        created = await send(web, body)
        assert counted(created) == (2, 0, 9)
        assert [(one["line"], one["code"]) for one in created.json()["errors"]] == [
            (3, "INVALID_JSON"), (4, "UNKNOWN_FIELD"), (5, "LINE_NOT_JSON"), (6, "INVALID_TOPIC"),
            (7, "TIMEZONE_MISSING"), (8, "SCHEDULE_IN_THE_PAST"), (9, "INVALID_JSON"), (10, "PAYLOAD_TOO_DEEP"),
            (11, "LINE_TOO_LONG"),
        ]  # fmt: skip
        assert all(one["detail"] for one in created.json()["errors"])
        assert {str(job["payload"]) for job in await all_jobs(web)} == {"1", "\u00e9"}


async def test_the_first_hundred_errors_are_listed(make: Make) -> None:
    async with make() as web:
        created = await send(web, b"{\n" * 2300)
        assert counted(created) == (0, 0, 2300)
        assert [one["line"] for one in created.json()["errors"]] == list(range(1, 101))


async def test_past_times_and_the_default_timezone(make: Make) -> None:
    async with make() as web:
        past = {"topic": "t", "runAt": "2001-01-01T00:00:00"}
        assert counted(await send(web, ndjson(past), "?timezone=Asia/Seoul")) == (0, 0, 1)
        assert counted(await send(web, ndjson(past), "?timezone=Asia/Seoul&past=skip")) == (0, 1, 0)
        assert counted(await send(web, ndjson(past), "?timezone=Asia/Seoul&past=now")) == (1, 0, 0)
        (job,) = await all_jobs(web)
        assert (job["timezone"], job["runAt"] <= at(web)) == ("Asia/Seoul", True)
        is_problem(await send(web, b"", "?past=later"), 422, "INVALID_FIELDS")
        is_problem(await send(web, b"", "?timezone=Mars"), 422, "INVALID_TIMEZONE")
        is_problem(await send(web, b"", content_type="application/json"), 415, "MEDIA_TYPE_UNSUPPORTED")
        is_problem(await send(web, b"", content_encoding="gzip"), 415, "MEDIA_TYPE_UNSUPPORTED")
        assert len((await web.get("/operations?kind=import")).json()["items"]) == 3


async def test_lines_of_other_tenants_are_refused(make: Make) -> None:
    async with make(open_here=False) as web:
        key = await web.key("editor", "ours")
        lines = [{"topic": "t", "timezone": "UTC", "metadata": {"tenantId": name}} for name in ("ours", "theirs")]
        created = await send(web, ndjson(*lines), authorization=f"Bearer {key}")
        assert counted(created) == (1, 0, 1)
        assert created.json()["errors"][0]["code"] == "TENANT_FORBIDDEN"
        viewer = await web.key("operator", "ours")
        is_problem(await send(web, b"", authorization=f"Bearer {viewer}"), 403, "ROLE_TOO_LOW")


async def test_lines_split_between_body_chunks_are_joined(make: Make) -> None:
    async with make() as web:
        body = ndjson(*({"topic": "t", "timezone": "UTC", "payload": n} for n in range(40)))

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 7):
                yield body[start : start + 7]

        assert counted(await send(web, pieces())) == (40, 0, 0)


async def send_and_disconnect(web: Web, *parts: bytes, path: str = "/api/v1/jobs/bulk") -> None:
    """Send these parts of a request body, then disconnect."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.disconnect"})

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def respond(message: Any) -> None:
        pass

    await web.site(
        {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"host", b"127.0.0.1:8700"), (b"content-type", b"application/x-ndjson")],
            "client": ("127.0.0.1", 50_000), "server": ("127.0.0.1", 8700),
        },
        receive, respond,
    )  # fmt: skip


async def test_a_disconnected_client_leaves_a_failed_operation(make: Make) -> None:
    async with make() as web:
        whole = ndjson(*({"topic": "t", "timezone": "UTC", "payload": n} for n in range(3)))
        await send_and_disconnect(web, whole[:-20], whole[-20:-5])
        (found,) = (await web.get("/operations")).json()["items"]
        assert (found["state"], found["progress"]["done"]) == ("failed", 2)
        assert "line 2" in found["errors"][-1]["detail"]
        assert counted(await send(web, whole)) == (1, 2, 0)


async def test_a_disconnected_import_of_devices_has_stored_what_it_reports(make: Make) -> None:
    async with make() as web:
        whole = ndjson(*({"token": f"phone-number-{n:05}"} for n in range(2500)))  # more than two batches
        await send_and_disconnect(web, whole[:50_000], whole[50_000:-5], path="/api/v1/devices/bulk")
        (found,) = (await web.get("/operations")).json()["items"]
        assert (found["state"], found["progress"]["done"]) == ("failed", 2499)
        assert "up to line 2499" in found["errors"][-1]["detail"]
        assert await web.app.devices.count() == 2499


async def test_an_idle_client_times_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BODY_IDLE_TIMEOUT_SECONDS", 0.5)
    async with make() as web:

        async def silent() -> AsyncIterator[bytes]:
            yield ndjson({"topic": "t", "timezone": "UTC"})
            await asyncio.Event().wait()

        created = await send(web, silent())
        assert (created.json()["state"], created.json()["progress"]["done"]) == ("failed", 1)


async def test_an_import_can_be_cancelled(make: Make) -> None:
    async with make() as web:
        stopped = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            n = 0
            while True:
                yield ndjson(*({"topic": "t", "timezone": "UTC", "payload": n + i} for i in range(bulk.BATCH_SIZE)))
                n += bulk.BATCH_SIZE
                if n == 2 * bulk.BATCH_SIZE:
                    await stopped.wait()

        sending = asyncio.create_task(send(web, endless()))
        while not (items := (await web.get("/operations")).json()["items"]) or not items[0]["progress"]["done"]:
            await asyncio.sleep(0.01)
        await web.post(f"/operations/{items[0]['id']}/cancel")
        stopped.set()
        created = await sending
        assert (created.status_code, created.json()["state"]) == (201, "cancelled")
        assert len(await all_jobs(web)) == created.json()["progress"]["done"] < 10 * bulk.BATCH_SIZE


async def test_an_import_of_a_dead_process_is_marked_failed(make: Make) -> None:
    async with make() as web:
        created = (await send(web, b"")).json()
        store, now = web.app.store, web.app.clock.now()
        found = await store.run(operations.find_operation, "default", created["id"])
        found.id, found.created_at, found.updated_at = new_id(now), now, now
        await store.run(operations.create, found)
        assert (await store.run(operations.advance, found.id, now, FEATURES)) is None  # it was completed
        found.id, found.state = new_id(now), OperationState.RUNNING
        await store.run(operations.create, found)
        assert await store.run(operations.advance, found.id, now, FEATURES) == now + STALL_TIMEOUT
        assert await store.run(operations.advance, found.id, now + STALL_TIMEOUT, FEATURES) is None
        seen = (await web.get(f"/operations/{found.id}")).json()
        assert (seen["state"], "has stopped" in seen["errors"][0]["detail"]) == ("failed", True)
