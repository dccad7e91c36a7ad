"""Boards of monday.com, against a server that speaks as much GraphQL as the adapter asks for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from timebell import Arrived, Timebell
from timebell.errors import InvalidInput, SourceFailed, SourceGone
from timebell.triggers import adapter
from timebell.triggers.monday import Board, value_of

from .test_sql_sources import soon, until

ORPHANED = {"errors": [{"message": "gone", "extensions": {"code": "ResourceNotFoundException", "status_code": 404}}]}
FORBIDDEN = {"error_code": "UserUnauthorizedException", "error_message": "no", "status_code": 403}


class Monday:
    """One board. `says` is what it answers instead, if anything: a status and a body."""

    def __init__(self) -> None:
        self.items: dict[int, dict[str, Any]] = {}
        self.says: tuple[int, Any] | None = None
        self.after: int | None = None
        """So many answers before it says so."""
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    def put(self, id_: int, at: datetime | None, people: tuple[int, ...] = (), status: str = "open") -> None:
        date = None if at is None else {"date": f"{at:%Y-%m-%d}", "time": f"{at:%H:%M:%S}"}
        persons = {"personsAndTeams": [{"id": one, "kind": "person"} for one in people]}
        columns = {"due": date, "people": persons, "status": status}
        self.items[id_] = {
            "id": str(id_), "name": f"Item {id_}", "board": {"id": "77"},
            "column_values": [{"id": name, "value": json.dumps(value)} for name, value in columns.items()],
        }  # fmt: skip

    def answer(self, asked: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(asked)
        if self.after is not None:
            self.after -= 1
        if self.says is not None and (self.after is None or self.after < 0):
            return self.says
        given = asked["variables"]
        if "ids" in given:
            return 200, {"data": {"items": [self.items[int(id_)] for id_ in given["ids"] if int(id_) in self.items]}}
        start = int(given.get("cursor", "0"))
        ids = sorted(id_ for id_ in self.items if id_ > start)[: given["limit"]]
        more = any(id_ > ids[-1] for id_ in self.items) if ids else False
        page = {"cursor": str(ids[-1]) if more else None, "items": [self.items[id_] for id_ in ids]}
        if "cursor" in given:
            return 200, {"data": {"next_items_page": page}}
        return 200, {"data": {"boards": [{"items_page": page}]}}


@pytest.fixture
def monday() -> Iterator[Monday]:
    fake = Monday()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, said = (401, {}) if self.headers["authorization"] != "secret" else fake.answer(body)
            sent = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *said: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        fake.url = f"http://127.0.0.1:{server.server_port}/v2"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield fake
        server.shutdown()


def board(monday: Monday, **options: Any) -> dict[str, Any]:
    return {"token": "secret", "boardId": 77, "url": monday.url, "everySeconds": 0.2, **options}


async def follow(app: Timebell, monday: Monday, **options: Any) -> list[Arrived]:
    heard: list[Arrived] = []

    @app.on("item.due")
    async def due(event: Arrived) -> None:
        heard.append(event)

    await app.triggers.put_source("board", "monday", board(monday, **options))
    await app.triggers.put("due", "board", "due", "item.due", payload={"do": "notify"})
    return heard


async def count(app: Timebell, many: int, status: str = "pending") -> bool:
    return len(await app.list(status=status, limit=500)) == many


def test_a_board_is_read_in_pages_followed_and_fires(monday: Monday, tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        for number in range(1, 1202):
            monday.put(number, soon(days=1))
        heard = await follow(app, monday)
        try:
            async with app.running(heartbeat=0.1):
                await until(lambda: count_all(app, 1201))
                del monday.items[2]
                monday.put(1, soon(seconds=2))
                await until(lambda: bool(heard))
                await until(lambda: count_all(app, 1199))
        finally:
            await app.close()
        (event,) = heard
        assert event.payload["boardId"] == "77"
        assert (event.payload["itemId"], event.payload["action"]) == ("1", {"do": "notify"})

    asyncio.run(body())


async def count_all(app: Timebell, many: int) -> bool:
    found, cursor = 0, None
    while True:
        page = await app.list(status="pending", limit=500, cursor=cursor)
        found += len(page)
        if (cursor := page.next_cursor) is None:
            return found == many


@pytest.mark.parametrize("says", [(200, ORPHANED), (200, FORBIDDEN), (200, {"data": {"boards": []}}), (404, {})])
def test_a_board_that_is_gone_skips_for_free_and_comes_back(monday: Monday, tmp_path: Path, says: Any) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        monday.put(1, soon(seconds=2))
        monday.put(2, soon(hours=1))
        heard = await follow(app, monday)
        try:
            async with app.running(heartbeat=0.1):
                await until(lambda: count(app, 2))
                monday.says = says
                await until(lambda: count(app, 1, "skipped"))
                (skipped,) = await app.list(status="skipped")
                code = 403 if says[1] == FORBIDDEN else 404
                assert (skipped.reason, skipped.error) == ("orphaned", f"Board orphaned ({code})")
                assert (await app.triggers.get("due")).orphaned == f"Board orphaned ({code})"
                assert heard == []
                monday.says = None
                monday.put(2, soon(seconds=1))
                # Somebody edits the source, which is looked at at once then.
                await app.triggers.put_source("board", "monday", board(monday, everySeconds=0.3))
                await until(lambda: bool(heard))
                assert (await app.triggers.get("due")).orphaned is None
        finally:
            await app.close()

    asyncio.run(body())


def test_a_board_that_goes_while_it_is_read_takes_nothing_along(monday: Monday, tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        for number in range(1, 1202):
            monday.put(number, soon(days=1))
        await follow(app, monday)
        try:
            async with app.running(heartbeat=0.1):
                await until(lambda: count_all(app, 1201))
                monday.after, monday.says = 1, (200, ORPHANED)

                async def orphaned() -> bool:
                    return (await app.triggers.source("board")).orphaned_at is not None

                await until(orphaned)
                assert await count_all(app, 1201)
        finally:
            await app.close()

    asyncio.run(body())


def test_what_is_wrong_is_told_apart(monday: Monday) -> None:
    async def body() -> None:
        reader = adapter("monday", board(monday))
        try:
            for says, kind, code in (
                ((200, ORPHANED), SourceGone, "ORPHANED"), ((403, {}), SourceGone, "ORPHANED"),
                ((401, {}), SourceFailed, "SOURCE_UNAUTHORIZED"), ((500, {}), SourceFailed, "SOURCE_FAILED"),
                ((429, {}), SourceFailed, "SOURCE_FAILED"), ((200, []), SourceFailed, "SOURCE_FAILED"),
                ((200, {"errors": [{"message": "Parse error"}]}), SourceFailed, "SOURCE_FAILED"),
                ((200, {"errors": ["odd"], "data": None}), SourceFailed, "SOURCE_FAILED"),
                ((200, {}), SourceFailed, "SOURCE_FAILED"),
            ):  # fmt: skip
                monday.says = says
                with pytest.raises(SourceFailed) as failed:
                    await reader.page(None, 10)
                assert (type(failed.value), failed.value.code) == (kind, code), says
                assert "secret" not in failed.value.message
        finally:
            await reader.close()
        stranger = Board(board(monday, token="wrong"))
        with pytest.raises(SourceFailed, match="re-authorization required"):
            await stranger.page(None, 10)
        await stranger.close()

    asyncio.run(body())


def test_values_of_columns() -> None:
    assert value_of('{"date": "2026-06-20", "time": "15:00:00"}') == "2026-06-20T15:00:00Z"
    assert value_of('{"date": "2026-06-20", "time": null}') == "2026-06-20"
    assert value_of('{"personsAndTeams": [{"id": 7, "kind": "person"}, {"id": 8, "kind": "team"}]}') == ["7"]
    assert value_of(None) is None
    assert value_of('"text"') == "text"
    assert value_of("{odd") == "{odd"
    assert value_of('{"index": 1}') == {"index": 1}


@pytest.mark.parametrize(
    "options", [{}, {"token": "x"}, {"token": "", "boardId": 1}, {"token": "x", "boardId": "a"},
                {"token": "x", "boardId": True}, {"token": "x", "boardId": 1, "url": "ftp://x"},
                {"token": "x\n", "boardId": 1}, {"token": "x", "boardId": 1, "no": 1}],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        adapter("monday", options)
    assert refused.value.code == "SOURCE_OPTIONS_INVALID"
