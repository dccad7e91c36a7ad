"""Connections: tokens are stored, renewed by one node before they expire, lost and replaced; on both stores."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select, update

from tests.monday_stand_in import Monday, board
from timebell import Arrived, Timebell
from timebell.errors import SourceFailed, StoreUnreachable
from timebell.features import FEATURES
from timebell.features.triggers.engine import connection_tokens as connection_tokens
from timebell.features.triggers.engine.connection_tokens import ConnectionToken
from timebell.features.triggers.model.connection import is_permanent_refusal
from timebell.features.triggers.sources import monday as boards
from timebell.features.triggers.store import connections as connection_rows
from timebell.features.triggers.store.tables import connections
from timebell.observe.counters import Counters

from .web import SECRET, Web, is_problem, wait_until

Make = Callable[..., Any]
LOST_MESSAGE = "Token expired and refresh failed - re-authorization required"
SLOW_RETRY = {"attempts": 3, "backoff": "fixed", "delay": 60}
FRESH = {"access_token": "fresh", "refresh_token": "next", "expires_in": 3600}


@pytest.fixture
def monday(monkeypatch: pytest.MonkeyPatch) -> Iterator[Monday]:
    monkeypatch.setattr("timebell.features.triggers.engine.source_poller.RETRY_DELAY_SECONDS", 0.5)
    with board() as fake:
        fake.tokens = {"fresh"}
        fake.renews = 200, FRESH
        yield fake


def tokens(monday: Monday, **more: Any) -> dict[str, Any]:
    return {
        "name": "monday", "accessToken": "stale", "refreshToken": "once", "expiresInSeconds": 0, "clientId": "app",
        "clientSecret": "hush", "tokenUrl": f"{monday.url}/token", **more,
    }  # fmt: skip


@asynccontextmanager
async def polled_board(make: Make, monday: Monday, **more: Any) -> AsyncIterator[tuple[Web, list[Arrived]]]:
    """Poll a board through a connection; yield the app and the received due events."""
    async with make(timezone="UTC") as web:
        received: list[Arrived] = []

        @web.app.on("item.due")
        async def due(event: Arrived) -> None:
            received.append(event)

        assert (await web.post("/connections", tokens(monday, **more))).status_code == 201
        options = {
            "token": {"connection": "monday"},
            "boardId": "77",
            "url": monday.url,
            "everySeconds": 0.2,
            "dailyCalls": 10**9,
        }
        created = await web.post("/sources", {"name": "board", "kind": "monday", "options": options})
        assert created.status_code == 201, created.text
        trigger = {"name": "due", "source": "board", "column": "due", "topic": "item.due", "retry": SLOW_RETRY}
        assert (await web.post("/triggers", trigger)).status_code == 201
        async with web.app.running(heartbeat=0.1):
            yield web, received


def soon(web: Web, **spans: float) -> datetime:
    return (web.app.clock.now() + timedelta(**spans)).replace(microsecond=0)  # type: ignore[no-any-return]


async def pending(web: Web) -> int:
    return len(await web.app.list(status="pending"))


async def test_tokens_are_stored_encrypted_and_never_returned(make: Make, monday: Monday) -> None:
    async with make(open_here=False) as web:
        admin, platform = await web.key("admin", "acme"), await web.key("platform", None)
        fields = tokens(monday, accessToken="access-in-the-clear", refreshToken="refresh-in-the-clear")
        # A token URL requires the platform role.
        is_problem(await web.post("/connections", fields, key=admin), 403, "ROLE_TOO_LOW")
        created = await web.post("/connections", fields, key=platform, timebell_tenant="acme")
        assert (created.status_code, created.json()["state"], created.json()["version"]) == (201, "ready", 1)
        is_problem(
            await web.post("/connections", fields, key=platform, timebell_tenant="acme"), 409, "CONNECTION_EXISTS"
        )
        texts = [created.text, (await web.get("/connections", key=admin)).text]
        texts.append((await web.get("/connections/monday", key=admin)).text)
        again = {"accessToken": "another-in-the-clear", "refreshToken": "refresh-in-the-clear"}
        reauthorized = await web.post("/connections/monday/reauthorize", again, key=admin)
        assert (reauthorized.json()["version"], reauthorized.json()["expiresAt"]) == (2, None)
        texts.append(reauthorized.text)
        stored = await web.app.store.run(lambda tx: str(tx.execute(select(connections)).all()))
        for text in (*texts, stored, repr(await web.app.connections.get("monday", tenant_id="acme"))):
            assert "in-the-clear" not in text
            assert "hush" not in text
        odd = {"name": "odd", "accessToken": "two\nlines"}
        problem = is_problem(await web.post("/connections", odd, key=admin), 422, "INVALID_CONNECTION")
        assert "lines" not in str(problem)
        of = {"kind": "monday", "options": {"token": {"connection": "monday"}, "boardId": "77"}}
        await web.post("/sources", {"name": "board", **of}, key=admin)
        is_problem(await web.ask("DELETE", "/connections/monday", key=admin), 409, "CONNECTION_IN_USE")
        await web.ask("DELETE", "/sources/board", key=admin)
        assert (await web.ask("DELETE", "/connections/monday", key=admin)).status_code == 200
        is_problem(await web.post("/connections/monday/reauthorize", again, key=admin), 404, "CONNECTION_NOT_FOUND")


async def test_a_token_is_renewed_before_it_expires(make: Make, monday: Monday) -> None:
    async with polled_board(make, monday, expiresInSeconds=0.5) as (web, received):
        monday.put(1, soon(web, seconds=2))
        await wait_until(lambda: received)
        (sent,) = monday.renewals
        assert sent == {
            "grant_type": "refresh_token", "refresh_token": "once", "client_id": "app", "client_secret": "hush",
        }  # fmt: skip
        found = (await web.get("/connections/monday")).json()
        assert (found["state"], found["version"], found["error"]) == ("ready", 2, None)
        assert web.app.service is not None
        assert web.app.service.node.counters.of_features["timebell_connection_refreshes_total"].values[("ok",)] == 1
        # A token that is refused before it expires is renewed with the new refresh token.
        monday.tokens, monday.renews = {"fresher"}, (200, {"access_token": "fresher"})
        monday.put(2, soon(web, days=1))
        await wait_until(lambda: pending(web))
        assert [one["refresh_token"] for one in monday.renewals] == ["once", "next"]
        # A response without a refresh token does not replace the known one.
        monday.renews, monday.tokens = (200, {"access_token": "freshest"}), {"freshest"}
        monday.put(3, soon(web, days=1))

        async def both() -> bool:
            return await pending(web) == 2

        await wait_until(both)
        assert [one["refresh_token"] for one in monday.renewals] == ["once", "next", "next"]


@pytest.mark.parametrize("response", [(400, {"error": "invalid_grant"})])
async def test_due_jobs_wait_for_new_tokens_and_then_run(make: Make, monday: Monday, response: tuple[int, Any]) -> None:
    async with polled_board(make, monday, expiresInSeconds=3600, accessToken="fresh") as (web, received):
        await web.app.pause_queue("default")  # the first job must not be due before its token is lost
        monday.put(1, soon(web, seconds=1))
        monday.put(2, soon(web, days=1))

        async def both() -> bool:
            return await pending(web) == 2

        await wait_until(both)
        monday.tokens, monday.renews = set(), response

        async def needs_reauthorization() -> bool:
            trigger = (await web.get("/triggers/due")).json()
            return (trigger["state"], trigger["unauthorizedReason"]) == ("reauthorize", LOST_MESSAGE)

        await wait_until(needs_reauthorization)
        for path in ("/sources/board", "/connections/monday"):
            found = (await web.get(path)).json()
            assert (found["state"], found["error"]) == ("reauthorize", LOST_MESSAGE)
        await web.app.resume_queue("default")

        async def waits() -> Any:
            jobs = [one for one in await web.app.list(status="pending") if one.payload["itemId"] == "1"]
            ends = [(one["code"], one["error"]) for job in jobs for one in job.attempts]  # empty while an attempt runs
            return ends and set(ends) == {("SOURCE_UNAUTHORIZED", LOST_MESSAGE)}

        await wait_until(waits)
        renewals_before = len(monday.renewals)
        await wait_until(waits)
        assert (received, renewals_before, len(monday.renewals)) == ([], 1, 1)  # a permanent refusal is not repeated
        monday.tokens = {"given"}
        began = time.monotonic()
        fields = {"accessToken": "given", "refreshToken": "new", "expiresInSeconds": 3600}
        assert (await web.post("/connections/monday/reauthorize", fields)).json()["state"] == "ready"
        await wait_until(lambda: received)
        assert time.monotonic() - began < 45  # immediately, not after the retry delay

        async def ready() -> bool:
            return (await web.get("/triggers/due")).json()["state"] == "ready"

        await wait_until(ready)
        assert len(received) == 1


@pytest.mark.parametrize("response", [(503, {})])
async def test_temporary_renewal_failures_use_the_stored_token(
    make: Make, monday: Monday, response: tuple[int, Any]
) -> None:
    monday.tokens, monday.renews = {"stale"}, response
    async with polled_board(make, monday, expiresInSeconds=0) as (web, received):
        monday.put(1, soon(web, seconds=1))
        await wait_until(lambda: received)
        found = (await web.get("/connections/monday")).json()
        assert (found["state"], found["version"]) == ("failing", 1)
        assert found["error"].startswith("The token could not be renewed")
        assert len(monday.renewals) == 1  # a failed renewal is not repeated for every read
        assert (await web.get("/triggers/due")).json()["state"] == "ready"


def test_permanent_refusals_of_a_token_endpoint_are_recognized() -> None:
    for response in ((400, {"error": "invalid_grant"}), (400, {"error": "invalid_client"}), (401, {}), (403, None)):
        assert is_permanent_refusal(*response), response
    for response in (
        (500, {"error": "invalid_grant"}),
        (429, {}),
        (400, {"error": "invalid_request"}),
        (400, None),
        (0, "x"),
    ):
        assert not is_permanent_refusal(*response), response


@pytest.mark.parametrize("response", [(200, {"odd": 1}), (200, []), (200, {"access_token": "two\nlines"}), (400, {})])
async def test_a_response_without_a_token_changes_nothing(
    monday: Monday, tmp_path: Path, response: tuple[int, Any]
) -> None:
    app = Timebell(f"sqlite:///{tmp_path}/ours.db")
    app.settings = replace(app.settings, secret_key=SECRET)
    try:
        url = f"{monday.url}/token"
        await app.connections.put("monday", "stale", "once", expires_in=0, token_url=url)
        monday.renews = response
        node: Any = SimpleNamespace(
            store=app.store, clock=app.clock, secret_key=SECRET, counters=Counters.for_features(FEATURES)
        )
        assert await ConnectionToken(node, "default", "monday")() == "stale"
        found = await app.connections.get("monday")
        assert (found.state, found.version) == ("failing", 1)
        # An expired token without a refresh token cannot be renewed.
        await app.connections.put("monday", "other", expires_in=0, replace=True)
        with pytest.raises(SourceFailed, match=LOST_MESSAGE):
            await ConnectionToken(node, "default", "monday")()
    finally:
        await app.close()


@asynccontextmanager
async def endless(every: float, part: bytes) -> AsyncIterator[str]:
    """Serve an endless response, one part every `every` seconds; yield its URL."""

    answering = set[Any]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
                while True:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(every)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()
        for each in answering:
            each.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
        await asyncio.sleep(0)  # aborted connections close in the next iteration of the loop


@pytest.mark.parametrize("answers", [{"every": 0.02, "part": b" "}, {"every": 0.0, "part": b" " * 2**16}])
async def test_an_endless_response_is_aborted(
    answers: dict[str, Any], sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answers["every"]:
        monkeypatch.setattr(connection_tokens, "TOKEN_ENDPOINT_TIMEOUT_SECONDS", 0.3)
        monkeypatch.setattr(boards, "REQUEST_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(boards, "MAX_RESPONSE_BYTES", 2**20)
    app = Timebell(sqlite_url)
    app.settings = replace(app.settings, secret_key=SECRET)
    reader = None
    try:
        async with asyncio.timeout(20), endless(**answers) as url:
            reader = boards.Board({"token": "x", "boardId": "1", "url": url})
            with pytest.raises(SourceFailed):
                await reader.read_page(None, 10)
            await app.connections.put("monday", "stale", "once", expires_in=0, token_url=url)
            node: Any = SimpleNamespace(
                store=app.store, clock=app.clock, secret_key=SECRET, counters=Counters.for_features(FEATURES)
            )
            assert await ConnectionToken(node, "default", "monday")() == "stale"
            assert (await app.connections.get("monday")).state == "failing"
    finally:
        if reader is not None:
            await reader.close()
        await app.close()


async def test_one_node_renews_a_token_and_the_others_reload_it(make: Make, monday: Monday) -> None:
    answers = threading.Event()
    answers.set()

    def slowly(sent: dict[str, str]) -> tuple[int, Any]:
        time.sleep(0.3)
        answers.wait(40)
        return (200, FRESH) if sent["refresh_token"] == "once" else (400, {"error": "invalid_grant"})

    monday.renews = slowly
    async with make() as one, make() as two:
        await one.post("/connections", tokens(monday))
        await two.app.open()
        nodes: list[Any] = [
            SimpleNamespace(
                store=web.app.store, clock=web.app.clock, secret_key=SECRET, counters=Counters.for_features(FEATURES)
            )
            for web in (one, two)
        ]
        asking = [ConnectionToken(nodes[number % 2], "default", "monday") for number in range(20)]
        assert set(await asyncio.gather(*(token() for token in asking))) == {"fresh"}
        assert len(monday.renewals) == 1
        # While the token is still valid, the others do not wait for the renewal.
        again = {"accessToken": "still valid", "refreshToken": "once", "expiresInSeconds": 100}
        await one.post("/connections/monday/reauthorize", again)
        fields = one.app.clock.now() - timedelta(seconds=500)  # so the token is in the last fifth of its lifetime
        await one.app.store.run(lambda tx: tx.execute(update(connections).values(renewed_at=fields)))
        answers.clear()
        going = [asyncio.create_task(token()) for token in asking]
        await wait_until(lambda: sum(map(asyncio.Task.done, going)) == len(going) - 1)
        answers.set()
        assert sorted(await asyncio.gather(*going)) == ["fresh", *["still valid"] * (len(going) - 1)]
        assert len(monday.renewals) == 2
        # Both nodes report a lost token.
        await one.post("/connections/monday/reauthorize", {"accessToken": "x", "expiresInSeconds": 0})
        for token in asking[:2]:
            with pytest.raises(SourceFailed, match=LOST_MESSAGE):
                await token()


async def test_a_cancelled_caller_does_not_lose_the_renewed_token(make: Make, monday: Monday) -> None:
    def slowly(sent: dict[str, str]) -> tuple[int, Any]:
        time.sleep(0.3)
        return 200, {**FRESH, "expires_in": 0}  # a new token that is already expired is not renewed endlessly

    monday.renews = slowly
    async with make() as web:
        await web.post("/connections", tokens(monday))
        node: Any = SimpleNamespace(
            store=web.app.store, clock=web.app.clock, secret_key=SECRET, counters=Counters.for_features(FEATURES)
        )
        token = ConnectionToken(node, "default", "monday")
        asking = asyncio.create_task(token())
        await wait_until(lambda: monday.renewals)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await token.close()
        assert (await web.app.connections.get("monday")).version == 2
        assert await token() == "fresh"
        assert [one["refresh_token"] for one in monday.renewals] == ["once", "next"]


async def test_renewed_tokens_survive_a_brief_store_outage(make: Make, monday: Monday) -> None:
    async with make() as web:
        await web.post("/connections", tokens(monday))
        failures_left = 3

        class Store:
            async def run(self, operation: Any, *fields: Any) -> Any:
                nonlocal failures_left
                if operation is connection_rows.store_renewed_tokens and failures_left:
                    failures_left -= 1
                    raise StoreUnreachable("The database does not answer.")
                return await web.app.store.run(operation, *fields)

        node: Any = SimpleNamespace(
            store=Store(), clock=web.app.clock, secret_key=SECRET, counters=Counters.for_features(FEATURES)
        )
        assert await ConnectionToken(node, "default", "monday")() == "fresh"
        assert (failures_left, len(monday.renewals)) == (0, 1)


async def test_a_replaced_secret_is_reloaded_after_a_refusal(make: Make, monday: Monday) -> None:
    async with make(timezone="UTC") as web:
        await web.post("/secrets", {"name": "token", "value": "old"})
        options = {
            "token": {"secret": "token"},
            "boardId": "77",
            "url": monday.url,
            "everySeconds": 0.2,
            "dailyCalls": 10**9,
        }
        await web.post("/sources", {"name": "board", "kind": "monday", "options": options})
        async with web.app.running(heartbeat=0.1):

            async def state(wanted: str) -> bool:
                return (await web.get("/sources/board")).json()["state"] == wanted  # type: ignore[no-any-return]

            await wait_until(lambda: state("reauthorize"))
            await web.ask("PUT", "/secrets/token", {"value": "fresh"})
            await wait_until(lambda: state("ready"))
