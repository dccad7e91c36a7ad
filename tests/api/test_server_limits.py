"""Limits of the server: the size, number and time of headers and bodies, and the number of concurrent changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from timebell.api import admission, connections, route, server

from .live import serve
from .web import NIGHTLY, is_problem, wait_until

Make = Callable[..., Any]
GET = b"GET /api/v1/schedules HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /api/v1/schedules HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


async def test_header_size_and_count_are_limited(make: Make) -> None:
    async with make() as web, serve(web) as live:
        many = b"".join(b"X-%d: 1\r\n" % number for number in range(10_000))
        assert (await live.send(GET + many + b"\r\n")).split()[1] in (b"400", b"431")
        some = b"".join(b"X-%d: 1\r\n" % number for number in range(100))
        refused = await live.send(GET + some + b"Connection: close\r\n\r\n")
        assert refused.split()[1] == b"431"
        assert b"TOO_MANY_HEADERS" in refused
        assert (await live.send(GET + b"X: " + b"x" * 200_000)).split()[1] == b"431"
        close = b"\r\nConnection: close\r\n\r\n"
        url = b"GET /livez?" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: 127.0.0.1"
        for head in (GET + b"X: " + b"x" * 20_000 + close, url + close):
            assert b"HEAD_TOO_LARGE" in await live.send(head)
        assert (await live.send(GET + b"Connection: close\r\n\r\n")).split()[1] == b"200"


async def test_a_slow_request_head_is_cut_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_SECONDS", 0.3)
    async with make() as web, serve(web) as live:
        began = web.app.clock.monotonic()
        assert await live.send(GET) == b""
        assert await live.send(b"") == b""
        # The limit also applies to the second request of a connection; the first one is in time.
        monkeypatch.setattr(connections, "HEAD_TIMEOUT_SECONDS", 1.0)
        assert (await live.send(GET + b"\r\n" + GET)).split()[1] == b"200"
        assert web.app.clock.monotonic() - began < 20  # each would last 10 s by default


async def test_slow_and_oversized_bodies_are_cut_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "BODY_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(server, "SMALL_BODY_TIMEOUT_SECONDS", 0.3)
    async with make() as web, serve(web) as live:
        slow = await live.send(POST + b'Content-Length: 100\r\n\r\n{"name":')
        assert slow.split()[1] == b"408"
        assert b"BODY_TOO_SLOW" in slow
        slow = await live.send(POST + b"Content-Length: 2000\r\n\r\n{")
        assert slow.split()[1] == b"408"
        large = await live.send(POST + b"Content-Length: 999999999\r\n\r\n{")
        assert large.split()[1] == b"413"
        padded = POST + b"Connection: close\r\nContent-Length: " + b"0" * 5000 + b"2\r\n\r\n{}"
        assert (await live.send(padded)).split()[1] in (b"400", b"422")
        endless = POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b"x" * 65_536 + b"\r\n"
        assert (await live.send(endless + (b"10000\r\n" + b"x" * 65_536 + b"\r\n") * 5)).split()[1] == b"413"
        assert (await web.get("/schedules")).json()["items"] == []


async def test_anonymous_clients_learn_no_versions_or_metrics(make: Make) -> None:
    async with make(open_here=False) as web, serve(web) as live:
        raw = (await live.send(GET + b"Connection: close\r\n\r\n")).lower()
        assert raw.split()[1] == b"401"
        assert b"server:" not in raw
        for word in (b"uvicorn", b"python", b"timebell/", b"traceback"):
            assert word not in raw
        is_problem(await web.get("/metrics"), 404, "NOT_FOUND")


async def test_responses_carry_cache_and_security_headers(make: Make) -> None:
    async with make() as web:
        created = await web.post("/schedules", NIGHTLY)
        for answer in (
            created,
            await web.get("/schedules"),
            await web.get("/nothing"),
            await web.post("/schedules", {}),
        ):
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["request-id"]
        assert created.headers["etag"] == '"1"'
        assert {"ratelimit", "ratelimit-policy"} <= created.headers.keys()


async def test_waiting_changes_are_limited_per_tenant(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_CONCURRENT_CHANGES", 4)
    monkeypatch.setattr(admission, "MAX_WAITING_PER_OWNER", 3)
    async with make(open_here=False) as web:
        ours, theirs = await web.key("admin", "ours"), await web.key("admin", "theirs")
        begin, go, waiting = web.app.store.begin, asyncio.Event(), asyncio.Semaphore(0)

        @asynccontextmanager
        async def held() -> AsyncIterator[Any]:
            waiting.release()
            await go.wait()
            async with begin() as connection:
                yield connection

        monkeypatch.setattr(web.app.store, "begin", held)
        job = {"topic": "a", "timezone": "UTC", "runAt": "2090-01-01T00:00:00Z"}
        first = [asyncio.create_task(web.post("/jobs", job, key=ours)) for _ in range(2 + 3 + 1)]
        done, _ = await asyncio.wait(first, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        [refused] = [one.result() for one in done]
        is_problem(refused, 503, "TOO_BUSY")
        assert refused.headers["retry-after"] == "1"
        assert (await web.get("/jobs", key=ours)).status_code == 200  # reads have slots of their own
        other = asyncio.create_task(web.post("/jobs", job, key=theirs))
        async with asyncio.timeout(60):
            for _ in range(3):  # two of our tenant, and the other one, which found a slot
                await waiting.acquire()
        go.set()
        assert (await other).status_code == 201
        assert sorted([(await one).status_code for one in first]) == [201] * 5 + [503]


async def test_reads_of_one_tenant_delay_no_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_CONCURRENT_READS", 3)
    async with make(open_here=False) as web:
        ours, theirs = await web.key("viewer", "ours"), await web.key("viewer", "theirs")
        reads = web.site.authenticator.capacity.reads
        async with reads.hold("ours"):
            waiting = [asyncio.create_task(web.get("/jobs", key=ours)) for _ in range(20)]
            await wait_until(lambda: reads.waiting == 20)
            assert (await web.get("/jobs", key=theirs)).status_code == 200
        assert {(await one).status_code for one in waiting} == {200}


async def test_half_sent_bodies_delay_nobody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ARRIVING_PER_OWNER", 5)
    monkeypatch.setattr(route, "BODY_TIMEOUT_SECONDS", 120.0)
    job = {"topic": "a", "timezone": "UTC", "runAt": "2090-01-01T00:00:00Z"}
    async with make() as web, serve(web) as live:
        slow = [await live.connect() for _ in range(20)]
        for _, writer in slow:
            writer.write(POST.replace(b"schedules", b"schedules/preview") + b"Content-Length: 2000\r\n\r\n{")
        bodies = web.site.authenticator.capacity.bodies
        await wait_until(lambda: bodies.count == 2 * 5)  # of the address, and of the tenant
        for _ in range(10):
            assert (await web.post("/jobs", job)).status_code == 201
        for _, writer in slow:
            writer.close()
        await wait_until(lambda: not bodies.count)


async def test_a_small_body_is_waited_for_before_anything_else(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    job = b'{"topic":"a","timezone":"UTC","runAt":"2090-01-01T00:00:00Z"}'
    head = POST.replace(b"schedules", b"jobs") + b"Content-Length: %d\r\n\r\n" % len(job)
    async with make() as web, serve(web) as live:
        assert (await web.get("/jobs")).status_code == 200  # the app is open now
        authenticated = asyncio.Event()
        authenticate = web.site.authenticator.authenticate

        async def note(request: Any) -> Any:
            authenticated.set()
            return await authenticate(request)

        monkeypatch.setattr(web.site.authenticator, "authenticate", note)
        reader, writer = await live.connect()
        writer.write(head + job[:-1])
        _, left = await live.connect()
        left.write(head)
        left.close()
        later = GET.replace(b"schedules", b"nothing") + b"Connection: close\r\n\r\n"
        assert (await live.send(later)).split()[1] == b"404"
        assert not authenticated.is_set()
        writer.write(job[-1:])
        assert (await reader.readline()).split()[1] == b"201"
        writer.close()
        assert len((await web.get("/jobs")).json()["items"]) == 1


async def test_a_change_of_a_client_that_left_is_not_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_CONCURRENT_CHANGES", 3)
    job = b'{"topic":"a","timezone":"UTC","runAt":"2090-01-01T00:00:00Z"}'
    raw = POST.replace(b"schedules", b"jobs") + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(job) + job
    async with make() as web, serve(web) as live:
        changes = web.site.authenticator.capacity.changes
        async with changes.hold("default"):
            _, writer = await live.connect()
            writer.write(raw)
            await wait_until(lambda: changes.waiting)
            writer.close()
            await writer.wait_closed()
            await wait_until(lambda: not changes.waiting)
        assert (await web.get("/jobs")).json()["items"] == []
        assert (await live.send(raw)).split()[1] == b"201"


async def test_ambiguous_body_lengths_are_refused_and_the_connection_closed(make: Make) -> None:
    body = b'{"topic":"a","timezone":"UTC","runAt":"2090-01-01T00:00:00Z"}'
    lengths = [b"Content-Length: %d\r\n" % len(body), b"Transfer-Encoding: chunked\r\n"]
    chunked = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    async with make() as web, serve(web) as live:
        for first, second in (lengths, lengths[::-1]):
            raw = POST.replace(b"schedules", b"jobs") + first + second + b"\r\n" + chunked
            response = await live.send(raw + GET + b"\r\n")
            assert response.split()[1] == b"400"
            assert b"AMBIGUOUS_BODY_LENGTH" in response
            assert response.count(b"HTTP/1.1 ") == 1  # the second request is not read
        assert (await web.get("/jobs")).json()["items"] == []


async def test_a_flood_of_changes_leaves_connections_to_the_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make() as web:
        await web.app.open()
        begin, concurrent, most = web.app.store.begin, 0, 0

        @asynccontextmanager
        async def counted() -> AsyncIterator[Any]:
            nonlocal concurrent, most
            concurrent += 1
            most = max(most, concurrent)
            try:
                async with begin() as connection:
                    yield connection
            finally:
                concurrent -= 1

        monkeypatch.setattr(web.app.store, "begin", counted)
        job = {"topic": "a", "timezone": "UTC", "runAt": "2090-01-01T00:00:00Z"}
        created = await asyncio.gather(*(web.post("/jobs", job) for _ in range(60)))
        assert {one.status_code for one in created} == {201}
        assert 1 < most <= admission.MAX_CONCURRENT_CHANGES
