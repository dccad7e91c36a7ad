"""Boards of monday.com, against a stand-in server for the GraphQL requests of the adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.monday_stand_in import Monday
from tests.monday_stand_in import board as served
from timebell import Arrived, Timebell
from timebell.errors import InvalidInput, SourceFailed, SourceGone
from timebell.features.triggers.engine.webhook_subscriptions import EVENTS
from timebell.features.triggers.model.trigger import WebhookNotice
from timebell.features.triggers.sources import create_adapter
from timebell.features.triggers.sources.call_plan import CallPlan, account_id
from timebell.features.triggers.sources.monday import Board, parse_column_value
from timebell.features.triggers.store import call_budgets, webhook_changes

from .test_sql_sources import soon, until

ORPHANED = {"errors": [{"message": "gone", "extensions": {"code": "ResourceNotFoundException", "status_code": 404}}]}
FORBIDDEN = {"error_code": "UserUnauthorizedException", "error_message": "no", "status_code": 403}


@pytest.fixture
def monday() -> Iterator[Monday]:
    with served() as fake:
        yield fake


def board(monday: Monday, **options: Any) -> dict[str, Any]:
    return {"token": "secret", "boardId": 77, "url": monday.url, "everySeconds": 0.2, "dailyCalls": 10**9, **options}


async def follow(app: Timebell, monday: Monday, **options: Any) -> list[Arrived]:
    events: list[Arrived] = []

    @app.on("item.due")
    async def due(event: Arrived) -> None:
        events.append(event)

    await app.triggers.put_source("board", "monday", board(monday, **options))
    await app.triggers.put("due", "board", "due", "item.due", payload={"do": "notify"})
    return events


async def count(app: Timebell, many: int, status: str = "pending") -> bool:
    return len(await app.list(status=status, limit=500)) == many


def test_a_board_is_read_in_pages_followed_and_fires(monday: Monday, tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        for number in range(1, 1202):
            monday.put(number, soon(days=1))
        events = await follow(app, monday)
        try:
            async with app.running(heartbeat=0.1):
                await until(lambda: count_all(app, 1201))
                del monday.items[2]
                monday.put(1, soon(seconds=2))
                await until(lambda: bool(events))
                await until(lambda: count_all(app, 1199))
        finally:
            await app.close()
        (event,) = events
        assert event.payload["boardId"] == "77"
        assert (event.payload["itemId"], event.payload["action"]) == ("1", {"do": "notify"})

    asyncio.run(body())


async def orphaned(app: Timebell, why: str | None) -> bool:
    return (await app.triggers.get("due")).orphaned_reason == why


async def count_all(app: Timebell, many: int) -> bool:
    found, cursor = 0, None
    while True:
        page = await app.list(status="pending", limit=500, cursor=cursor)
        found += len(page)
        if (cursor := page.next_cursor) is None:
            return found == many


@pytest.mark.parametrize("says", [(200, ORPHANED), (200, FORBIDDEN), (200, {"data": {"boards": []}}), (404, {})])
def test_a_missing_board_skips_its_jobs_without_charge_and_recovers(monday: Monday, tmp_path: Path, says: Any) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        monday.put(1, soon(seconds=1))
        monday.put(2, soon(hours=1))
        events = await follow(app, monday)
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
                assert events == []
                monday.says = None
                monday.put(2, soon(seconds=1))
                # An edit of the source triggers an immediate scan.
                await app.triggers.put_source("board", "monday", board(monday, everySeconds=0.3))
                await until(lambda: bool(events))
                await until(lambda: orphaned(app, None))
        finally:
            await app.close()

    asyncio.run(body())


def test_a_board_that_disappears_during_a_read_removes_nothing(monday: Monday, tmp_path: Path) -> None:
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
                    return (await app.triggers.get_source("board")).orphaned_at is not None

                await until(orphaned)
                assert await count_all(app, 1201)
        finally:
            await app.close()

    asyncio.run(body())


def test_failures_are_classified(monday: Monday) -> None:
    async def body() -> None:
        reader = create_adapter("monday", board(monday))
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
                    await reader.read_page(None, 10)
                assert (type(failed.value), failed.value.code) == (kind, code), says
                assert "secret" not in failed.value.message
        finally:
            await reader.close()
        stranger = Board(board(monday, token="wrong"))
        with pytest.raises(SourceFailed, match="re-authorization required"):
            await stranger.read_page(None, 10)
        await stranger.close()

    asyncio.run(body())


def test_an_exhausted_budget_reports_its_retry_delay(monday: Monday) -> None:
    budget = {"message": "Complexity budget exhausted", "extensions": {"code": "COMPLEXITY_BUDGET_EXHAUSTED"}}
    field = {
        "error_code": "FIELD_LIMIT_EXCEEDED",
        "error_message": "Concurrency",
        "error_data": {"retry_in_seconds": 15},
    }

    async def body() -> None:
        reader = create_adapter("monday", board(monday))
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
                    await reader.read_page(None, 10)
                assert (failed.value.code, failed.value.retry_after) == ("SOURCE_FAILED", pause), says
        finally:
            await reader.close()

    asyncio.run(body())


def test_no_request_is_sent_before_the_retry_delay_has_passed(monday: Monday, tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        monday.put(1, soon(days=1))
        monday.says = 429, {}, {"Retry-After": "600"}
        await follow(app, monday)
        try:
            async with app.running(heartbeat=0.05):

                async def failing() -> bool:
                    return (await app.triggers.get_source("board")).state == "errored"

                await until(failing)
                # A webhook reports an item and the leader runs its steps: no request is sent.
                source, service = await app.triggers.get_source("board"), app.service
                assert service is not None
                await app.store.run(
                    webhook_changes.apply_webhook_changes, source, [WebhookNotice(key="1")], app.clock.now()
                )
                for _ in range(3):
                    before = service.last_step_at["sources"]
                    service.leader.feature_services["sources"].alarm.wake()
                    await until(lambda before=before: service.last_step_at["sources"] > before)  # type: ignore[misc]
                # A second source of the same account is not read either, nor is the first one after an edit.
                await app.triggers.put_source("other", "monday", board(monday, boardId=78))
                await app.triggers.put_source("board", "monday", board(monday, everySeconds=0.3))

                async def both_failing() -> bool:
                    found = [await app.triggers.get_source(name) for name in ("board", "other")]
                    return all("budget is used up" in (each.error or "") for each in found)

                await until(both_failing)
                assert len(monday.asked) == 1
                # Another account is.
                monday.says = None
                monday.tokens.add("another")
                await app.triggers.put_source("board", "monday", board(monday, token="another"))
                await until(lambda: count(app, 1))
        finally:
            await app.close()

    asyncio.run(body())


def test_a_scan_with_an_expired_cursor_restarts_and_drops_nothing(monday: Monday, tmp_path: Path) -> None:
    lost = {"errors": [{"message": "Cursor expired", "extensions": {"code": "CursorExpiredError"}}]}

    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        for number in range(1, 1202):
            monday.put(number, soon(days=1))
        answer, lose = monday.answer, [True]

        def once(request: dict[str, Any]) -> tuple[Any, ...]:
            if "cursor" in request["variables"] and lose:
                lose.pop()
                return 200, lost
            return answer(request)

        monday.answer = once  # type: ignore[method-assign]
        await follow(app, monday, everySeconds=3600)
        try:
            async with app.running(heartbeat=0.1):
                await until(lambda: count_all(app, 1201))
                source = await app.triggers.get_source("board")
                assert (lose, source.error) == ([], None)
        finally:
            await app.close()

    asyncio.run(body())


def test_archived_items_are_not_read(monday: Monday) -> None:
    async def body() -> None:
        reader = create_adapter("monday", board(monday))
        try:
            monday.put(1, soon(days=1))
            monday.put(2, soon(days=1), state="archived")
            monday.put(3, soon(days=1), state="deleted")
            assert list((await reader.read_page(None, 10)).rows) == ["1"]
            assert list((await reader.read_rows(["1", "2", "3"])).rows) == ["1"]
        finally:
            await reader.close()

    asyncio.run(body())


def test_column_values_are_parsed() -> None:
    assert parse_column_value('{"date": "2026-06-20", "time": "15:00:00"}') == "2026-06-20T15:00:00Z"
    assert parse_column_value('{"date": "2026-06-20", "time": null}') == "2026-06-20"
    assert parse_column_value('{"personsAndTeams": [{"id": 7, "kind": "person"}, {"id": 8, "kind": "team"}]}') == ["7"]
    assert parse_column_value(None) is None
    assert parse_column_value('"text"') == "text"
    assert parse_column_value("{odd") == "{odd"
    assert parse_column_value('{"index": 1}') == {"index": 1}


@pytest.mark.parametrize(
    "options", [{}, {"token": "x"}, {"token": "", "boardId": 1}, {"token": "x", "boardId": "a"},
                {"token": "x", "boardId": True}, {"token": "x", "boardId": 1, "url": "ftp://x"},
                {"token": "x\n", "boardId": 1}, {"token": "x", "boardId": 1, "no": 1},
                {"token": "x", "boardId": 1, "url": "http://["}, {"token": "x", "boardId": 1, "url": "http://x:99999"}],
)  # fmt: skip
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        create_adapter("monday", options)
    assert refused.value.code == "INVALID_SOURCE_OPTIONS"


def test_calls_stop_at_the_daily_limit_of_the_account(monday: Monday, tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        monday.put(1, soon(days=1))
        monday.daily_limit = 3
        await follow(app, monday)
        try:
            async with app.running(heartbeat=0.05):

                async def spent() -> bool:
                    return "budget is used up" in ((await app.triggers.get_source("board")).error or "")

                await until(spent)
                assert len(monday.asked) == 4  # the refused call counts, too
                midnight = call_budgets.next_midnight(app.clock.now())
                account = account_id("default", board(monday))
                next_call = await app.store.run(
                    call_budgets.take_call, account, "default", 10, midnight - timedelta(seconds=1)
                )
                assert next_call == midnight
                assert await app.store.run(call_budgets.take_call, account, "default", 10, midnight) is None
        finally:
            await app.close()

    asyncio.run(body())


def test_our_own_count_keeps_the_daily_limit(monday: Monday, tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        for number in range(1, 1202):
            monday.put(number, soon(days=1))
        await follow(app, monday, dailyCalls=2, everySeconds=86_400)
        try:
            async with app.running(heartbeat=0.05):

                async def spent() -> bool:
                    return "budget is used up" in ((await app.triggers.get_source("board")).error or "")

                await until(spent)
                assert len(monday.asked) == 2  # of three pages
        finally:
            await app.close()

    asyncio.run(body())


def test_only_the_columns_of_the_options_are_requested(monday: Monday) -> None:
    async def body() -> None:
        reader = create_adapter("monday", board(monday, columns=["due"]))
        await reader.read_page(None, 10)
        assert "column_values(ids: $columns)" in monday.asked[0]["query"]
        assert monday.asked[0]["variables"]["columns"] == ["due"]
        await reader.close()

    asyncio.run(body())


def test_webhooks_are_subscribed_and_unsubscribed(monday: Monday, tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        app.settings = replace(app.settings, secret_key="a secret key of an installation")
        options = board(monday, webhooks="https://bell.example/", everySeconds=3600)
        await app.triggers.put_source("board", "monday", options)
        source = await app.triggers.get_source("board")
        try:
            async with app.running(heartbeat=0.05):
                await until(lambda: len(monday.webhooks) == len(EVENTS))
                assert {hook["event"] for hook in monday.webhooks.values()} == set(EVENTS)
                hook = next(iter(monday.webhooks.values()))
                assert hook["board"] == "77"
                assert hook["url"].startswith(f"https://bell.example/api/v1/hooks/{source.id}?token=")
                former = set(monday.webhooks)
                await app.triggers.put_source("board", "monday", {**options, "webhooks": "https://new.example"})
                await until(lambda: len(monday.webhooks) == len(EVENTS) and not former & set(monday.webhooks))
                await app.triggers.delete_source("board")
                await until(lambda: not monday.webhooks)
        finally:
            await app.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("options", "interval"),
    [({}, 864.0), ({"dailyCalls": 1000}, 172.8), ({"dailyCalls": 25_000}, 60.0), ({"everySeconds": 3600}, 3600.0)],
)
def test_full_reads_use_half_of_the_daily_calls(options: dict[str, Any], interval: float) -> None:
    assert CallPlan.parse(options).interval == interval


@pytest.mark.parametrize("options", [{"everySeconds": 60}, {"dailyCalls": 0}, {"dailyCalls": "many"}])
def test_plans_above_the_daily_calls_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        CallPlan.parse(options)
    assert refused.value.code == "INVALID_SOURCE_OPTIONS"


def test_a_second_board_must_leave_the_graces_longer_than_the_full_reads(monday: Monday, tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        options = {key: value for key, value in board(monday).items() if key != "everySeconds"} | {"dailyCalls": 1000}
        second = {**options, "boardId": 78}
        try:
            await app.triggers.put_source("board", "monday", options)
            await app.triggers.put("due", "board", "due", "item.due", grace=400)
            await app.triggers.put("later", "board", "due", "item.due", grace=300)
            with pytest.raises(InvalidInput, match=r"'later' is 300 s.*every 345\.6 s") as refused:
                await app.triggers.put_source("second", "monday", second)
            assert refused.value.code == "GRACE_TOO_SHORT"
            assert [each.name for each in await app.triggers.list_sources()] == ["board"]
            await app.triggers.put_source("second", "monday", {**second, "token": "of another account"})
            await app.triggers.delete("later")
            await app.triggers.put_source("third", "monday", second)
            with pytest.raises(InvalidInput) as refused:
                await app.triggers.put("due", "third", "due", "item.due", grace=300, replace=False)
            assert refused.value.code == "GRACE_TOO_SHORT"
        finally:
            await app.close()

    asyncio.run(body())


def test_a_board_that_outgrows_its_daily_calls_says_which_grace_is_too_short(monday: Monday, tmp_path: Path) -> None:
    async def body() -> None:
        app = Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        for number in range(1, 1202):
            monday.put(number, soon(days=1))
        await follow(app, monday, dailyCalls=1000, everySeconds=173)
        try:
            async with app.running(heartbeat=0.05):

                async def described() -> bool:
                    return "'due' is 346 s" in ((await app.triggers.get_source("board")).error or "")

                await until(described)
                assert await count_all(app, 1201)
        finally:
            await app.close()

    asyncio.run(body())
