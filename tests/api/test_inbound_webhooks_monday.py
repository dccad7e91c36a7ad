"""Webhooks of monday.com: challenged, signed, repeated, late and out of order; on both stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.monday_stand_in import Monday, board, event, signature
from timebell import Arrived
from timebell.ids import new_id

from .web import Web, is_problem, wait_until

Make = Callable[..., Any]
SIGNING = "the signing secret of the app"


@pytest.fixture
def monday() -> Iterator[Monday]:
    with board() as fake:
        yield fake


@asynccontextmanager
async def board_with_trigger(make: Make, monday: Monday, **options: Any) -> AsyncIterator[tuple[Web, str]]:
    """Serve an app with a board and a trigger in a tenant; yield it and the URL of its webhooks."""
    async with make(timezone="UTC", open_here=False) as web:
        key = await web.key("platform", None)
        of = {"key": key, "timebell_tenant": "acme"}
        for name, value in (("monday", "secret"), ("signing", SIGNING)):
            await web.post("/secrets", {"name": name, "value": value}, **of)
        board_options = {
            "token": {"secret": "monday"}, "boardId": "77", "url": monday.url, "everySeconds": 3600, **options,
        }  # fmt: skip
        created = await web.post("/sources", {"name": "board", "kind": "monday", "options": board_options}, **of)
        assert created.status_code == 201, created.text
        due = {"name": "due", "source": "board", "column": "due", "topic": "item.due", "payload": {"do": "notify"}}
        assert (await web.post("/triggers", due, **of)).status_code == 201
        hook = (await web.get("/sources/board", **of)).json()["hook"].removeprefix("/api/v1")
        yield web, hook


async def pending(web: Web) -> list[datetime]:
    return sorted(job.scheduled_at for job in await web.app.list(status="pending", tenant_id="acme"))


def whole_seconds(web: Web, **spans: float) -> datetime:
    """Return a date relative to now, in whole seconds as monday.com stores them."""
    return (web.app.clock.now() + timedelta(**spans)).replace(microsecond=0)  # type: ignore[no-any-return]


async def test_the_webhook_url_answers_challenges_and_requires_its_token(make: Make, monday: Monday) -> None:
    async with board_with_trigger(make, monday) as (web, hook):
        bare = hook.partition("?")[0]
        assert hook != bare
        challenge = await web.post(hook, {"challenge": "3eZbrw1aBm2rZgRN"})
        assert (challenge.status_code, challenge.json()) == (200, {"challenge": "3eZbrw1aBm2rZgRN"})
        for address in (bare, f"{bare}?token=guessed", f"/hooks/nowhere?{hook.partition('?')[2]}"):
            is_problem(await web.post(address, {"challenge": "x"}), 401, "UNAUTHORIZED")
            is_problem(await web.post(address, event(1, None)), 401, "UNAUTHORIZED")
        at, now = whole_seconds(web, days=1), web.app.clock.now()
        assert (await web.post(hook, event(1, at, now))).json()["created"] == 1
        assert await pending(web) == [at]
        # The URL accepts only events of the board; it is not an API key.
        is_problem(await web.post(hook, {"key": "1", "fields": {}}), 401, "UNAUTHORIZED")
        other = {**event(2, at, now)["event"], "boardId": 78}
        assert (await web.post(hook, {"event": other})).json()["changed"] == 0
        endless = {**event(2, at, now)["event"], "pulseId": "9" * 5000}
        assert (await web.post(hook, {"event": endless})).json()["changed"] == 0
        viewer = await web.key("viewer", "acme")
        assert "token" not in (await web.get("/sources/board", key=viewer)).json()["hook"]


async def test_a_signing_secret_requires_signed_webhooks(make: Make, monday: Monday) -> None:
    async with board_with_trigger(make, monday, signingSecret={"secret": "signing"}) as (web, hook):
        bare = hook.partition("?")[0]
        path, at = f"/api/v1{bare}", whole_seconds(web, days=1)
        notice = event(1, at, web.app.clock.now())
        assert (await web.post(hook, {"challenge": "x"})).json() == {"challenge": "x"}
        is_problem(await web.post(hook, notice), 401, "UNAUTHORIZED")  # the right URL without a signature
        for wrong in (
            signature("another secret", path), signature(SIGNING, path, lasts=-3600),
            signature(SIGNING, "/api/v1/hooks/another"), signature(SIGNING, path, algorithm="none"), "a.b.c", "....",
        ):  # fmt: skip
            refused = await web.ask("POST", bare, notice, authorization=wrong)
            is_problem(refused, 401, "UNAUTHORIZED")
        assert await pending(web) == []
        for right in (signature(SIGNING, path), f"Bearer {signature(SIGNING, path)}"):
            assert (await web.ask("POST", bare, notice, authorization=right)).status_code == 200
        assert await pending(web) == [at]
        is_problem(
            await web.ask("POST", bare, {"key": "1", "fields": {}}, authorization=signature(SIGNING, path)), 401,
            "UNAUTHORIZED",
        )  # fmt: skip


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
async def test_webhooks_repeated_and_in_any_order_end_at_the_newest_value(
    make: Make, monday: Monday, times: int
) -> None:
    async with board_with_trigger(make, monday) as (web, hook):
        began = web.app.clock.now() - timedelta(hours=1)
        dates = [whole_seconds(web, days=1, minutes=number) for number in range(50)]
        # A shuffled order, the same in every run; a thousand webhooks in the slow variant.
        order = sorted(
            ((number * 7919 + again * 104_729) % 1009) * 50 + number for number in range(50) for again in range(times)
        )
        for which in (one % 50 for one in order):
            notice = event(1, dates[which], began + timedelta(seconds=which))
            assert (await web.post(hook, notice)).status_code == 200
        assert await pending(web) == [dates[-1]]
        stale = await web.post(hook, event(1, None, began))
        assert (stale.json()["stale"], await pending(web)) == (1, [dates[-1]])
        # An event from a clock ahead of ours does not exclude later events.
        ahead = await web.post(hook, event(1, dates[0], web.app.clock.now() + timedelta(hours=1)))
        assert ahead.json()["cancelled"] == 1
        later = await web.post(hook, event(1, dates[1], web.app.clock.now()))
        assert (later.json()["cancelled"], await pending(web)) == (1, [dates[1]])


async def test_cleared_deleted_and_archived_items_stay_cancelled(make: Make, monday: Monday) -> None:
    async with board_with_trigger(make, monday) as (web, hook):
        at, now = whole_seconds(web, days=1), web.app.clock.now() - timedelta(minutes=1)
        step = timedelta(seconds=1)
        gone = (now + step).isoformat()
        for item, last in (
            (1, event(1, None, now + step)), (2, event(2, whole_seconds(web, days=-1), now + step)),
            (3, {"event": {"type": "delete_pulse", "itemId": 3, "boardId": 77, "triggerTime": gone}}),
            (4, {"event": {"type": "archive_pulse", "pulseId": 4, "triggerTime": gone}}),
        ):  # fmt: skip
            assert (await web.post(hook, event(item, at, now))).json()["created"] == 1
            assert (await web.post(hook, last)).json()["cancelled"] == 1
            assert await pending(web) == []
        for item in (3, 4):  # late or older events, or other columns, restore nothing
            assert (await web.post(hook, event(item, at, now))).json()["created"] == 0
        odd = ({"type": "create_pulse"}, {"pulseId": "x"}, {"pulseId": True}, {"pulseId": 1, "value": 7, "columnId": 3})
        for one in odd:
            assert (await web.post(hook, {"event": one})).json()["created"] == 0
        assert (await web.post(hook, {"event": "x"})).status_code == 422


async def test_an_event_without_a_value_makes_the_item_be_read(make: Make, monday: Monday) -> None:
    async with board_with_trigger(make, monday) as (web, hook):
        received: list[Arrived] = []

        @web.app.on("item.due")
        async def due(event: Arrived) -> None:
            received.append(event)

        monday.put(12345, whole_seconds(web, days=1))
        monday.put(6, whole_seconds(web, days=2), state="archived")
        async with web.app.running(heartbeat=0.1):
            await wait_until(lambda: pending(web))
            assert len(await pending(web)) == 1
            moved = whole_seconds(web, seconds=2)
            monday.put(12345, moved)
            # An event without board, column and time.
            notice = {
                "type": "change_specific_column_value",
                "pulseId": 12345,
                "value": {"date": "2026-06-20", "time": "15:00:00"},
            }
            assert (await web.post(hook, {"event": notice})).json()["created"] == 0
            await wait_until(lambda: received)
            assert received[0].scheduled_at == moved
            # If a webhook and the board differ, the board is right.
            wrong = whole_seconds(web, days=9)
            monday.put(7, whole_seconds(web, days=3))
            await web.post(hook, event(7, wrong, web.app.clock.now()))
            right = [whole_seconds(web, days=3)]

            async def settled() -> bool:
                return [at for at in await pending(web) if abs(at - right[0]) < timedelta(minutes=1)] == await pending(
                    web
                )

            await wait_until(settled)
        (event_,) = received
        assert event_.payload == {
            "triggerId": event_.payload["triggerId"], "itemId": "12345", "boardId": "77", "tenantId": "acme",
            "action": {"do": "notify"}, "scheduledAt": moved.isoformat().replace("+00:00", "Z"), "offset": "0",
        }  # fmt: skip


async def test_events_are_accepted_only_by_boards(make: Make) -> None:
    async with make(timezone="UTC") as web:
        hook = (await web.post("/sources", {"name": "pushed"})).json()["hook"].removeprefix("/api/v1")
        is_problem(await web.post(hook, event(1, None)), 422, "INVALID_ITEM")


async def test_invented_webhooks_are_looked_up_two_at_a_time_for_each_client(make: Make) -> None:
    async with make(open_here=False) as web:
        lookups = web.site.authenticator.capacity.lookups
        hook = f"/hooks/{new_id(web.app.clock.now())}?token=guessed"
        async with lookups.hold("127.0.0.1"), lookups.hold("127.0.0.1"):
            request = asyncio.create_task(web.post(hook, {"challenge": "x"}))
            done, _ = await asyncio.wait([request], timeout=0.3)
            assert not done
        is_problem(await request, 401, "UNAUTHORIZED")
