"""Connections: tokens that are kept, renewed before they end by one node, lost, and given anew; on both stores."""

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
from timebell.engine.triggers import connection_tokens as renewing
from timebell.engine.triggers.connection_tokens import ConnectionToken
from timebell.errors import SourceFailed, StoreUnreachable
from timebell.model.connection import is_refused
from timebell.observe.counters import Counters
from timebell.store.triggers import connections as connection_rows
from timebell.store.triggers.tables import connections
from timebell.triggers import monday as boards

from .test_reports import until
from .web import SECRET, Web, is_problem

Make = Callable[..., Any]
LOST = "Token expired and refresh failed - re-authorization required"
SLOWLY = {"attempts": 3, "backoff": "fixed", "delay": 60}
FRESH = {"access_token": "fresh", "refresh_token": "next", "expires_in": 3600}


@pytest.fixture
def monday(monkeypatch: pytest.MonkeyPatch) -> Iterator[Monday]:
    monkeypatch.setattr("timebell.engine.triggers.source_poller.AGAIN", 0.5)
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
async def followed(make: Make, monday: Monday, **more: Any) -> AsyncIterator[tuple[Web, list[Arrived]]]:
    """A board that is read by a connection, and what comes due of it."""
    async with make(timezone="UTC") as web:
        heard: list[Arrived] = []

        @web.app.on("item.due")
        async def due(event: Arrived) -> None:
            heard.append(event)

        assert (await web.post("/connections", tokens(monday, **more))).status_code == 201
        options = {"token": {"connection": "monday"}, "boardId": "77", "url": monday.url, "everySeconds": 0.2}
        made = await web.post("/sources", {"name": "board", "kind": "monday", "options": options})
        assert made.status_code == 201, made.text
        trigger = {"name": "due", "source": "board", "column": "due", "topic": "item.due", "retry": SLOWLY}
        assert (await web.post("/triggers", trigger)).status_code == 201
        async with web.app.running(heartbeat=0.1):
            yield web, heard


def soon(web: Web, **spans: float) -> datetime:
    return (web.app.clock.now() + timedelta(**spans)).replace(microsecond=0)  # type: ignore[no-any-return]


async def pending(web: Web) -> int:
    return len(await web.app.list(status="pending"))


async def test_tokens_are_kept_encrypted_and_shown_to_nobody(make: Make, monday: Monday) -> None:
    async with make(open_here=False) as web:
        admin, platform = await web.key("admin", "acme"), await web.key("platform", None)
        given = tokens(monday, accessToken="access-in-the-clear", refreshToken="refresh-in-the-clear")
        is_problem(await web.post("/connections", given, key=admin), 403, "ROLE_TOO_LOW")  # it says where they are sent
        made = await web.post("/connections", given, key=platform, timebell_tenant="acme")
        assert (made.status_code, made.json()["state"], made.json()["version"]) == (201, "ready", 1)
        is_problem(
            await web.post("/connections", given, key=platform, timebell_tenant="acme"), 409, "CONNECTION_EXISTS"
        )
        shown = [made.text, (await web.get("/connections", key=admin)).text]
        shown.append((await web.get("/connections/monday", key=admin)).text)
        again = {"accessToken": "another-in-the-clear", "refreshToken": "refresh-in-the-clear"}
        given_anew = await web.post("/connections/monday/reauthorize", again, key=admin)
        assert (given_anew.json()["version"], given_anew.json()["expiresAt"]) == (2, None)
        shown.append(given_anew.text)
        kept = await web.app.store.run(lambda tx: str(tx.execute(select(connections)).all()))
        for text in (*shown, kept, repr(await web.app.connections.get("monday", tenant_id="acme"))):
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


async def test_s3_60_a_token_is_renewed_before_it_ends_so_that_none_is_ever_refused(make: Make, monday: Monday) -> None:
    async with followed(make, monday, expiresInSeconds=0.5) as (web, heard):
        monday.put(1, soon(web, seconds=2))
        await until(lambda: heard)
        (sent,) = monday.renewals
        assert sent == {
            "grant_type": "refresh_token", "refresh_token": "once", "client_id": "app", "client_secret": "hush",
        }  # fmt: skip
        found = (await web.get("/connections/monday")).json()
        assert (found["state"], found["version"], found["fault"]) == ("ready", 2, None)
        assert web.app.service is not None
        assert web.app.service.node.counters.refreshes.values[("ok",)] == 1
        # One that is refused before its time is renewed, too, with the refresh token that came.
        monday.tokens, monday.renews = {"fresher"}, (200, {"access_token": "fresher"})
        monday.put(2, soon(web, days=1))
        await until(lambda: pending(web))
        assert [one["refresh_token"] for one in monday.renewals] == ["once", "next"]


@pytest.mark.parametrize("says", [(400, {"error": "invalid_grant"})])
async def test_s3_57_what_is_due_waits_for_new_tokens_and_goes_on_with_them(
    make: Make, monday: Monday, says: tuple[int, Any]
) -> None:
    async with followed(make, monday, expiresInSeconds=3600, accessToken="fresh") as (web, heard):
        await web.app.pause_queue("default")  # the first is not due before its token is lost
        monday.put(1, soon(web, seconds=1))
        monday.put(2, soon(web, days=1))

        async def both() -> bool:
            return await pending(web) == 2

        await until(both)
        monday.tokens, monday.renews = set(), says

        async def shown() -> bool:
            trigger = (await web.get("/triggers/due")).json()
            return (trigger["state"], trigger["unauthorisedReason"]) == ("reauthorise", LOST)

        await until(shown)
        for path in ("/sources/board", "/connections/monday"):
            found = (await web.get(path)).json()
            assert (found["state"], found["fault"]) == ("reauthorise", LOST)
        await web.app.resume_queue("default")

        async def waits() -> Any:
            jobs = [one for one in await web.app.list(status="pending") if one.payload["itemId"] == "1"]
            ends = [(one["code"], one["error"]) for job in jobs for one in job.attempts]  # none while it is being tried
            return ends and set(ends) == {("SOURCE_UNAUTHORIZED", LOST)}

        await until(waits)
        asked = len(monday.renewals)
        await until(waits)
        assert (heard, asked, len(monday.renewals)) == ([], 1, 1)  # nobody asks again what was refused
        monday.tokens = {"given"}
        began = time.monotonic()
        given = {"accessToken": "given", "refreshToken": "new", "expiresInSeconds": 3600}
        assert (await web.post("/connections/monday/reauthorize", given)).json()["state"] == "ready"
        await until(lambda: heard)
        assert time.monotonic() - began < 45  # at once, and not at the end of its pause

        async def ready() -> bool:
            return (await web.get("/triggers/due")).json()["state"] == "ready"

        await until(ready)
        assert len(heard) == 1


@pytest.mark.parametrize("says", [(503, {})])
async def test_s3_58_other_failures_fall_back_to_the_stored_token(
    make: Make, monday: Monday, says: tuple[int, Any]
) -> None:
    monday.tokens, monday.renews = {"stale"}, says
    async with followed(make, monday, expiresInSeconds=0) as (web, heard):
        monday.put(1, soon(web, seconds=1))
        await until(lambda: heard)
        found = (await web.get("/connections/monday")).json()
        assert (found["state"], found["version"]) == ("failing", 1)
        assert found["fault"].startswith("The token could not be renewed")
        assert len(monday.renewals) == 1  # it is not asked again with each question
        assert (await web.get("/triggers/due")).json()["state"] == "ready"


def test_what_a_token_endpoint_says_is_told_apart() -> None:
    for says in ((400, {"error": "invalid_grant"}), (400, {"error": "invalid_client"}), (401, {}), (403, None)):
        assert is_refused(*says), says
    for says in (
        (500, {"error": "invalid_grant"}),
        (429, {}),
        (400, {"error": "invalid_request"}),
        (400, None),
        (0, "x"),
    ):
        assert not is_refused(*says), says


@pytest.mark.parametrize("says", [(200, {"odd": 1}), (200, []), (200, {"access_token": "two\nlines"}), (400, {})])
async def test_an_answer_without_a_token_changes_nothing(monday: Monday, tmp_path: Path, says: tuple[int, Any]) -> None:
    app = Timebell(f"sqlite:///{tmp_path}/ours.db")
    app.settings = replace(app.settings, secret_key=SECRET)
    try:
        url = f"{monday.url}/token"
        await app.connections.put("monday", "stale", "once", expires_in=0, token_url=url)
        monday.renews = says
        node: Any = SimpleNamespace(store=app.store, clock=app.clock, secret_key=SECRET, counters=Counters())
        assert await ConnectionToken(node, "default", "monday")() == "stale"
        found = await app.connections.get("monday")
        assert (found.state, found.version) == ("failing", 1)
        # It ends with a time of its own, and with no refresh token there is nothing to try.
        await app.connections.put("monday", "other", expires_in=0, replace=True)
        with pytest.raises(SourceFailed, match=LOST):
            await ConnectionToken(node, "default", "monday")()
    finally:
        await app.close()


@asynccontextmanager
async def endless(every: float, part: bytes) -> AsyncIterator[str]:
    """The address of a server whose answer has no end: a part of it comes every so many seconds."""

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
        await asyncio.sleep(0)  # what was broken off is closed in the loop's next turn


@pytest.mark.parametrize("answers", [{"every": 0.02, "part": b" "}, {"every": 0.0, "part": b" " * 2**16}])
async def test_an_answer_without_end_is_broken_off(
    answers: dict[str, Any], sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answers["every"]:
        monkeypatch.setattr(renewing, "WITHIN", 0.3)
        monkeypatch.setattr(boards, "ALL_WITHIN", 0.3)
    monkeypatch.setattr(boards, "LONGEST", 2**20)
    app = Timebell(sqlite_url)
    app.settings = replace(app.settings, secret_key=SECRET)
    reader = None
    try:
        async with asyncio.timeout(20), endless(**answers) as url:
            reader = boards.Board({"token": "x", "boardId": "1", "url": url})
            with pytest.raises(SourceFailed):
                await reader.page(None, 10)
            await app.connections.put("monday", "stale", "once", expires_in=0, token_url=url)
            node: Any = SimpleNamespace(store=app.store, clock=app.clock, secret_key=SECRET, counters=Counters())
            assert await ConnectionToken(node, "default", "monday")() == "stale"
            assert (await app.connections.get("monday")).state == "failing"
    finally:
        if reader is not None:
            await reader.close()
        await app.close()


async def test_one_node_renews_and_the_others_read_it_again(make: Make, monday: Monday) -> None:
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
            SimpleNamespace(store=web.app.store, clock=web.app.clock, secret_key=SECRET, counters=Counters())
            for web in (one, two)
        ]
        asking = [ConnectionToken(nodes[number % 2], "default", "monday") for number in range(20)]
        assert set(await asyncio.gather(*(token() for token in asking))) == {"fresh"}
        assert len(monday.renewals) == 1
        # With a token that has not ended the others do not even wait.
        again = {"accessToken": "good yet", "refreshToken": "once", "expiresInSeconds": 100}
        await one.post("/connections/monday/reauthorize", again)
        given = one.app.clock.now() - timedelta(seconds=500)  # so it is in the last fifth of its life
        await one.app.store.run(lambda tx: tx.execute(update(connections).values(renewed_at=given)))
        answers.clear()
        going = [asyncio.create_task(token()) for token in asking]
        await until(lambda: sum(map(asyncio.Task.done, going)) == len(going) - 1)
        answers.set()
        assert sorted(await asyncio.gather(*going)) == ["fresh", *["good yet"] * (len(going) - 1)]
        assert len(monday.renewals) == 2
        # Of two that lose it, both say so.
        await one.post("/connections/monday/reauthorize", {"accessToken": "x", "expiresInSeconds": 0})
        for token in asking[:2]:
            with pytest.raises(SourceFailed, match=LOST):
                await token()


async def test_who_gives_up_while_it_is_renewed_loses_nothing(make: Make, monday: Monday) -> None:
    def slowly(sent: dict[str, str]) -> tuple[int, Any]:
        time.sleep(0.3)
        return 200, {**FRESH, "expires_in": 0}  # and one that has ended when it comes is not renewed for ever

    monday.renews = slowly
    async with make() as web:
        await web.post("/connections", tokens(monday))
        node: Any = SimpleNamespace(store=web.app.store, clock=web.app.clock, secret_key=SECRET, counters=Counters())
        token = ConnectionToken(node, "default", "monday")
        asking = asyncio.create_task(token())
        await until(lambda: monday.renewals)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await token.close()
        assert (await web.app.connections.get("monday")).version == 2
        assert await token() == "fresh"
        assert [one["refresh_token"] for one in monday.renewals] == ["once", "next"]


async def test_new_tokens_are_kept_though_the_store_is_away_as_they_come(make: Make, monday: Monday) -> None:
    async with make() as web:
        await web.post("/connections", tokens(monday))
        away = 3

        class Store:
            async def run(self, operation: Any, *given: Any) -> Any:
                nonlocal away
                if operation is connection_rows.renewed and away:
                    away -= 1
                    raise StoreUnreachable("The database does not answer.")
                return await web.app.store.run(operation, *given)

        node: Any = SimpleNamespace(store=Store(), clock=web.app.clock, secret_key=SECRET, counters=Counters())
        assert await ConnectionToken(node, "default", "monday")() == "fresh"
        assert (away, len(monday.renewals)) == (0, 1)


async def test_a_secret_that_was_replaced_is_read_again_when_the_old_one_is_refused(make: Make, monday: Monday) -> None:
    async with make(timezone="UTC") as web:
        await web.post("/secrets", {"name": "token", "value": "old"})
        options = {"token": {"secret": "token"}, "boardId": "77", "url": monday.url, "everySeconds": 0.2}
        await web.post("/sources", {"name": "board", "kind": "monday", "options": options})
        async with web.app.running(heartbeat=0.1):

            async def state(wanted: str) -> bool:
                return (await web.get("/sources/board")).json()["state"] == wanted  # type: ignore[no-any-return]

            await until(lambda: state("reauthorise"))
            await web.ask("PUT", "/secrets/token", {"value": "fresh"})
            await until(lambda: state("ready"))
