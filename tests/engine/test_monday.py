"""Boards of monday.com, against a server that speaks as much GraphQL as the adapter asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.monday_stand_in import Monday
from tests.monday_stand_in import board as served
from timebell import Arrived, Timebell
from timebell.errors import InvalidInput, SourceFailed, SourceGone
from timebell.model.trigger import Said
from timebell.store.triggers import webhook_changes
from timebell.triggers import adapter
from timebell.triggers.monday import Board, value_of

from .test_sql_sources import soon, until

ORPHANED = {"errors": [{"message": "gone", "extensions": {"code": "ResourceNotFoundException", "status_code": 404}}]}
FORBIDDEN = {"error_code": "UserUnauthorizedException", "error_message": "no", "status_code": 403}


@pytest.fixture
def monday() -> Iterator[Monday]:
    with served() as fake:
        yield fake


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


async def orphaned(app: Timebell, why: str | None) -> bool:
    return (await app.triggers.get("due")).orphaned == why


async def count_all(app: Timebell, many: int) -> bool:
    found, cursor = 0, None
    while True:
        page = await app.list(status="pending", limit=500, cursor=cursor)
        found += len(page)
        if (cursor := page.next_cursor) is None:
            return found == many


@pytest.mark.parametrize("says", [(200, ORPHANED), (200, FORBIDDEN), (200, {"data": {"boards": []}}), (404, {})])
def test_s3_f6_a_board_that_is_gone_skips_for_free_and_comes_back(monday: Monday, tmp_path: Path, says: Any) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        monday.put(1, soon(seconds=1))
        monday.put(2, soon(hours=1))
        heard = await follow(app, monday)
        await app.pause_queue("default")  # the first is not due before the board is gone
        try:
            async with app.running(heartbeat=0.1):
                await until(lambda: count(app, 2))
                monday.says = says
                await app.resume_queue("default")
                await until(lambda: count(app, 1, "skipped"))
                (skipped,) = await app.list(status="skipped")
                code = 403 if says[1] == FORBIDDEN else 404
                assert (skipped.reason, skipped.error) == ("orphaned", f"Board orphaned ({code})")
                await until(lambda: orphaned(app, f"Board orphaned ({code})"))
                assert heard == []
                monday.says = None
                monday.put(2, soon(seconds=1))
                # Somebody edits the source, which is looked at at once then.
                await app.triggers.put_source("board", "monday", board(monday, everySeconds=0.3))
                await until(lambda: bool(heard))
                await until(lambda: orphaned(app, None))
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


def test_a_budget_that_is_spent_says_for_how_long(monday: Monday) -> None:
    budget = {"message": "Complexity budget exhausted", "extensions": {"code": "COMPLEXITY_BUDGET_EXHAUSTED"}}
    field = {
        "error_code": "FIELD_LIMIT_EXCEEDED",
        "error_message": "Concurrency",
        "error_data": {"retry_in_seconds": 15},
    }

    async def body() -> None:
        reader = adapter("monday", board(monday))
        try:
            for says, pause in (
                ((200, {"errors": [{**budget, "extensions": {**budget["extensions"], "retry_in_seconds": 7}}]}), 7),  # type: ignore[dict-item]
                ((200, {"errors": [budget]}, {"Retry-After": "11"}), 11), ((429, {}, {"Retry-After": "30"}), 30),
                ((200, field), 15), ((429, {}, {"Retry-After": "1000000"}), 3600), ((429, {}), None),
                ((200, {"errors": [budget]}, {"Retry-After": "soon"}), None),
                ((503, "no object", {"Retry-After": "5"}), 5),
            ):  # fmt: skip
                monday.says = says
                with pytest.raises(SourceFailed) as failed:
                    await reader.page(None, 10)
                assert (failed.value.code, failed.value.retry_after) == ("SOURCE_FAILED", pause), says
        finally:
            await reader.close()

    asyncio.run(body())


def test_nobody_asks_before_the_time_that_was_named(monday: Monday, tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        monday.put(1, soon(days=1))
        monday.says = 429, {}, {"Retry-After": "600"}
        await follow(app, monday)
        try:
            async with app.running(heartbeat=0.05):

                async def failing() -> bool:
                    return (await app.triggers.source("board")).state == "failing"

                await until(failing)
                # A webhook tells of an item, and the leader steps: nobody asks.
                source, service = await app.triggers.source("board"), app.service
                assert service is not None
                await app.store.run(webhook_changes.hear, source, [Said(key="1")], app.clock.now())
                for _ in range(3):
                    before = service.turned["sources"]
                    service.operate()
                    await until(lambda before=before: service.turned["sources"] > before)  # type: ignore[misc]
                assert len(monday.asked) == 1
                # Who edits it does not wait for ten minutes.
                monday.says = None
                await app.triggers.put_source("board", "monday", board(monday, everySeconds=0.3))
                await until(lambda: count(app, 1))
        finally:
            await app.close()

    asyncio.run(body())


def test_a_look_whose_cursor_was_forgotten_begins_anew_and_drops_nothing(monday: Monday, tmp_path: Path) -> None:
    lost = {"errors": [{"message": "Cursor expired", "extensions": {"code": "CursorExpiredError"}}]}

    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        for number in range(1, 1202):
            monday.put(number, soon(days=1))
        answer, lose = monday.answer, [True]

        def once(asked: dict[str, Any]) -> tuple[Any, ...]:
            if "cursor" in asked["variables"] and lose:
                lose.pop()
                return 200, lost
            return answer(asked)

        monday.answer = once  # type: ignore[method-assign]
        await follow(app, monday, everySeconds=3600)
        try:
            async with app.running(heartbeat=0.1):
                await until(lambda: count_all(app, 1201))
                source = await app.triggers.source("board")
                assert (lose, source.fault) == ([], None)
        finally:
            await app.close()

    asyncio.run(body())


def test_what_is_archived_is_there_no_more(monday: Monday) -> None:
    async def body() -> None:
        reader = adapter("monday", board(monday))
        try:
            monday.put(1, soon(days=1))
            monday.put(2, soon(days=1), state="archived")
            monday.put(3, soon(days=1), state="deleted")
            assert list((await reader.page(None, 10)).rows) == ["1"]
            assert list(await reader.read(["1", "2", "3"])) == ["1"]
        finally:
            await reader.close()

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
                {"token": "x\n", "boardId": 1}, {"token": "x", "boardId": 1, "no": 1},
                {"token": "x", "boardId": 1, "url": "http://["}, {"token": "x", "boardId": 1, "url": "http://x:99999"}],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        adapter("monday", options)
    assert refused.value.code == "SOURCE_OPTIONS_INVALID"
