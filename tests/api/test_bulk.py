"""`POST /jobs/bulk`: lines in, an operation out; safe to repeat, and one bad line stops nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest

from timebell.api import bulk
from timebell.ids import new_id
from timebell.model.operation import STALLED, OperationState
from timebell.store.audit import audit_log
from timebell.store.cluster import operations

from .test_jobs import at
from .web import Web, is_problem

Make = Callable[..., Any]


def ndjson(*lines: Any) -> bytes:
    return b"".join((line if isinstance(line, bytes) else orjson.dumps(line)) + b"\n" for line in lines)


async def send(web: Web, body: Any, query: str = "", **headers: str) -> Any:
    given = {"content_type": "application/x-ndjson", **headers}
    named = {name.replace("_", "-"): value for name, value in given.items()}
    return await web.client.post(f"/jobs/bulk{query}", content=body, headers=named)


def counted(made: Any) -> tuple[int, int, int]:
    assert made.status_code == 201, made.text
    progress = made.json()["progress"]
    assert made.json()["state"] == "completed"
    assert progress["total"] == progress["done"] + progress["skipped"] + progress["failed"]
    return progress["done"], progress["skipped"], progress["failed"]


async def all_jobs(web: Web) -> list[dict[str, Any]]:
    found, cursor = [], ""
    while cursor is not None:
        page = (await web.get(f"/jobs?limit=500{cursor and '&cursor=' + cursor}")).json()
        found, cursor = found + page["items"], page["nextCursor"]
    return found


async def test_every_line_becomes_a_job_and_again_none(make: Make) -> None:
    async with make() as web:
        lines = [{"topic": "t", "runAt": at(web, days=1), "payload": {"n": n}} for n in range(2500)]
        made = await send(web, ndjson(*lines))
        assert counted(made) == (2500, 0, 0)
        assert (await web.get(made.headers["location"].removeprefix("/api/v1"))).json() == made.json()
        assert sorted(job["payload"]["n"] for job in await all_jobs(web)) == list(range(2500))
        assert counted(await send(web, ndjson(*lines, {**lines[0], "payload": {"n": -1}}))) == (1, 2500, 0)
        assert len(await all_jobs(web)) == 2501
        records = list(await web.app.store.run(audit_log.page, "default", 50, None))
        assert [(one.action, one.subject) for one in records][1:] == [("jobs.import", made.json()["id"])]


async def test_bad_lines_are_refused_by_number_and_the_others_taken(make: Make) -> None:
    async with make() as web:
        good = {"topic": "t", "timezone": "UTC"}
        body = ndjson(
            b"\xef\xbb\xbf" + orjson.dumps({**good, "payload": 1}), b"", b"{", {**good, "topik": "x"}, b"[]",
            {**good, "topic": "no spaces"}, {"topic": "t"}, {**good, "runAt": "2001-01-01T00:00:00Z"},
            b"\xff", b'{"a":' * 40, b"x" * 1_100_000,
            {**good, "payload": "\u00e9"},
        )[:-1]  # fmt: skip
        made = await send(web, body)
        assert counted(made) == (2, 0, 9)
        assert [(one["line"], one["code"]) for one in made.json()["errors"]] == [
            (3, "JSON_INVALID"), (4, "UNKNOWN_FIELD"), (5, "LINE_NOT_JSON"), (6, "TOPIC_INVALID"),
            (7, "TIMEZONE_MISSING"), (8, "SCHEDULE_IN_THE_PAST"), (9, "JSON_INVALID"), (10, "PAYLOAD_TOO_DEEP"),
            (11, "LINE_TOO_LONG"),
        ]  # fmt: skip
        assert all(one["detail"] for one in made.json()["errors"])
        assert {str(job["payload"]) for job in await all_jobs(web)} == {"1", "\u00e9"}


async def test_the_first_hundred_errors_are_listed(make: Make) -> None:
    async with make() as web:
        made = await send(web, b"{\n" * 2300)
        assert counted(made) == (0, 0, 2300)
        assert [one["line"] for one in made.json()["errors"]] == list(range(1, 101))


async def test_past_and_timezone(make: Make) -> None:
    async with make() as web:
        past = {"topic": "t", "runAt": "2001-01-01T00:00:00"}
        assert counted(await send(web, ndjson(past), "?timezone=Asia/Seoul")) == (0, 0, 1)
        assert counted(await send(web, ndjson(past), "?timezone=Asia/Seoul&past=skip")) == (0, 1, 0)
        assert counted(await send(web, ndjson(past), "?timezone=Asia/Seoul&past=now")) == (1, 0, 0)
        (job,) = await all_jobs(web)
        assert (job["timezone"], job["runAt"] <= at(web)) == ("Asia/Seoul", True)
        is_problem(await send(web, b"", "?past=later"), 422, "FIELDS_INVALID")
        is_problem(await send(web, b"", "?timezone=Mars"), 422, "INVALID_TIMEZONE")
        is_problem(await send(web, b"", content_type="application/json"), 415, "MEDIA_TYPE_UNSUPPORTED")
        is_problem(await send(web, b"", content_encoding="gzip"), 415, "MEDIA_TYPE_UNSUPPORTED")
        assert len((await web.get("/operations?kind=import")).json()["items"]) == 3


async def test_lines_of_other_tenants_are_refused(make: Make) -> None:
    async with make(open_here=False) as web:
        key = await web.key("editor", "ours")
        lines = [{"topic": "t", "timezone": "UTC", "metadata": {"tenantId": name}} for name in ("ours", "theirs")]
        made = await send(web, ndjson(*lines), authorization=f"Bearer {key}")
        assert counted(made) == (1, 0, 1)
        assert made.json()["errors"][0]["code"] == "TENANT_NOT_YOURS"
        viewer = await web.key("operator", "ours")
        is_problem(await send(web, b"", authorization=f"Bearer {viewer}"), 403, "ROLE_TOO_LOW")


async def test_lines_cut_anywhere_are_the_same_lines(make: Make) -> None:
    async with make() as web:
        body = ndjson(*({"topic": "t", "timezone": "UTC", "payload": n} for n in range(40)))

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 7):
                yield body[start : start + 7]

        assert counted(await send(web, pieces())) == (40, 0, 0)


async def broken_off(web: Web, *parts: bytes) -> None:
    """A request whose client goes away after these parts."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.disconnect"})

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def respond(message: Any) -> None:
        pass

    await web.site(
        {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/api/v1/jobs/bulk", "raw_path": b"/api/v1/jobs/bulk", "query_string": b"", "root_path": "",
            "headers": [(b"host", b"127.0.0.1:8700"), (b"content-type", b"application/x-ndjson")],
            "client": ("127.0.0.1", 50_000), "server": ("127.0.0.1", 8700),
        },
        receive, respond,
    )  # fmt: skip


async def test_a_client_that_breaks_off_leaves_a_failed_operation(make: Make) -> None:
    async with make() as web:
        whole = ndjson(*({"topic": "t", "timezone": "UTC", "payload": n} for n in range(3)))
        await broken_off(web, whole[:-20], whole[-20:-5])
        (found,) = (await web.get("/operations")).json()["items"]
        assert (found["state"], found["progress"]["done"]) == ("failed", 2)
        assert "line 2" in found["errors"][-1]["detail"]
        assert counted(await send(web, whole)) == (1, 2, 0)


async def test_a_client_that_falls_silent_is_not_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "PATIENCE", 0.5)
    async with make() as web:

        async def silent() -> AsyncIterator[bytes]:
            yield ndjson({"topic": "t", "timezone": "UTC"})
            await asyncio.Event().wait()

        made = await send(web, silent())
        assert (made.json()["state"], made.json()["progress"]["done"]) == ("failed", 1)


async def test_it_can_be_stopped(make: Make) -> None:
    async with make() as web:
        stopped = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            n = 0
            while True:
                yield ndjson(*({"topic": "t", "timezone": "UTC", "payload": n + i} for i in range(bulk.BATCH)))
                n += bulk.BATCH
                if n == 2 * bulk.BATCH:
                    await stopped.wait()

        sending = asyncio.create_task(send(web, endless()))
        while not (items := (await web.get("/operations")).json()["items"]) or not items[0]["progress"]["done"]:
            await asyncio.sleep(0.01)
        await web.post(f"/operations/{items[0]['id']}/cancel")
        stopped.set()
        made = await sending
        assert (made.status_code, made.json()["state"]) == (201, "cancelled")
        assert len(await all_jobs(web)) == made.json()["progress"]["done"] < 10 * bulk.BATCH


async def test_an_import_whose_process_died_is_found(make: Make) -> None:
    async with make() as web:
        made = (await send(web, b"")).json()
        store, now = web.app.store, web.app.clock.now()
        found = await store.run(operations.find, "default", made["id"])
        found.id, found.created_at, found.updated_at = new_id(now), now, now
        await store.run(operations.create, found)
        assert (await store.run(operations.advance, found.id, now)) is None  # it was over
        found.id, found.state = new_id(now), OperationState.RUNNING
        await store.run(operations.create, found)
        assert await store.run(operations.advance, found.id, now) == now + STALLED
        assert await store.run(operations.advance, found.id, now + STALLED) is None
        seen = (await web.get(f"/operations/{found.id}")).json()
        assert (seen["state"], "gone" in seen["errors"][0]["detail"]) == ("failed", True)
