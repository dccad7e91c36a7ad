"""Campaigns from end to end, over the wire of a fake FCM that keeps a ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from timebell import Cron, Timebell
from timebell.campaigns import target
from timebell.errors import StoreUnreachable
from timebell.model.campaign_plan import Campaign
from timebell.store.campaigns import chunks
from timebell.testing.fcm import FakeFcm

HELLO = {"title": "Hello", "body": "You", "chunkSize": 20, "chunkDelayMs": 0}
HOURLY = {"chunkDelayMs": 3_600_000}  # the next chunk is not within the test, unless somebody resumes


async def devices(app: Timebell, count: int, **about: Any) -> list[str]:
    tokens = [f"phone-of-{about.get('user_id', 'somebody')}-{n:04}" for n in range(count)]
    await app.devices.register_many([{"token": token, **about} for token in tokens])
    return tokens


def times(fcm: FakeFcm) -> list[int]:
    """How often each device got a message."""
    return sorted(map(len, fcm.received().values()))


async def ended(app: Timebell, made: Campaign, *states: str) -> Campaign:
    """It, in one of these states, with no chunk under way."""
    while True:
        found = await app.campaigns.get(made.id)
        if found.state in (states or ("completed",)) and not found.open_chunks:
            return found
        await asyncio.sleep(0.02)


def test_everybody_gets_it_once_and_the_counts_say_so(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        tokens = await devices(app, 70)
        fcm.rules({"do": "UNREGISTERED", "match": "0007$"})
        found = await ended(app, await app.campaigns.create(HELLO))
        assert (found.accepted, found.refused, found.unknown, found.opened) == (69, 1, 0, 70)
        assert sorted(fcm.received()) == sorted(set(tokens) - {"phone-of-somebody-0007"})
        assert set(times(fcm)) == {1}
        assert found.started_at is not None and found.ended_at is not None
        assert found.send_at <= found.started_at < found.ended_at
        assert await app.devices.count() == 69  # the dead token is gone

    run(body)


def test_a_stopped_one_says_who_got_it_and_who_did_not_and_a_retry_reaches_the_rest(
    run: Callable[..., None], fcm: FakeFcm
) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 40)
        made = await app.campaigns.create({**HELLO, **HOURLY})
        while (await app.campaigns.get(made.id)).accepted < 20:
            await asyncio.sleep(0.01)
        await app.campaigns.stop(made.id, "wrong text")
        found = await ended(app, made, "stopped")
        got = {row["recipient"] for row in (await app.campaigns.deliveries(made.id, limit=500)).items}
        left = {device.id for device in (await app.campaigns.left(made.id, limit=500)).items}
        assert (len(got), len(left), found.opened) == (20, 20, 20)
        assert not got & left
        await app.campaigns.retry(made.id)
        found = await ended(app, made)
        assert found.accepted == 40
        assert times(fcm) == [1] * 40

    run(body)


def test_a_paused_one_keeps_its_cursor(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 60)
        made = await app.campaigns.create({**HELLO, **HOURLY})
        while (await app.campaigns.get(made.id)).accepted < 20:
            await asyncio.sleep(0.01)
        await app.campaigns.pause(made.id, "lunch")
        await ended(app, made, "paused")
        await service.idle()
        assert (await app.campaigns.get(made.id)).opened == 20
        for _ in range(3):  # asked again, and again: one goes on
            await app.campaigns.resume(made.id)
        while (await app.campaigns.get(made.id)).accepted < 40:
            await asyncio.sleep(0.01)
        await app.campaigns.pause(made.id)
        await app.campaigns.resume(made.id)
        found = await ended(app, made)
        assert (found.accepted, times(fcm)) == (60, [1] * 60)

    run(body)


def test_what_fcm_does_not_take_now_is_tried_again_and_the_rest_is_not(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 20)
        fcm.rules({"do": "UNAVAILABLE", "match": "000[0-4]$", "times": 5, "retry_after": "0"})
        found = await ended(app, await app.campaigns.create(HELLO))
        assert (found.accepted, found.unsent) == (20, 0)
        assert times(fcm) == [1] * 20

    run(body)


def test_unknown_is_counted_and_left_unless_somebody_asks(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 20)
        fcm.rules({"do": "INTERNAL", "match": "000[0-4]$", "times": 5, "accepted": True})
        made = await app.campaigns.create(HELLO)
        found = await ended(app, made)
        assert (found.accepted, found.unknown) == (15, 5)
        await app.campaigns.retry(made.id)
        found = await ended(app, made)
        assert (found.accepted, found.unknown, sum(times(fcm))) == (15, 5, 20)
        await app.campaigns.retry(made.id, unknown=True)
        found = await ended(app, made)
        assert (found.accepted, found.unknown) == (20, 0)

    run(body)


def test_the_canary_stops_it_until_somebody_has_looked(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 100)
        fcm.rules({"do": "THIRD_PARTY_AUTH_ERROR", "match": "00[0-2]5$"})
        made = await app.campaigns.create({**HELLO, "canary": {"size": 30, "maxErrorRate": 0.05}})
        found = await ended(app, made, "paused")
        assert (found.reason, found.opened, found.refused) == ("canary", 30, 3)
        fcm.rules()
        await app.campaigns.resume(made.id, by="ann")
        found = await ended(app, made)
        assert (found.accepted, found.refused) == (97, 3)
        await app.campaigns.retry(made.id)
        assert (await ended(app, made)).accepted == 100

    run(body)


def test_gates_of_size_are_before_the_first_message(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 30)
        first = await ended(app, await app.campaigns.create(HELLO, name="daily"))
        assert first.accepted == 30
        for gate, why in (({"maxRecipients": 29}, "ceiling"), ({"approveAbove": 29}, "approval")):
            made = await app.campaigns.create({**HELLO, **gate})
            found = await ended(app, made, "paused")
            assert found.reason is not None and found.reason.startswith(why)
            assert found.opened == 0
        await app.devices.register_many([{"token": f"another-phone-{n:04}"} for n in range(30)])
        found = await ended(app, await app.campaigns.create({**HELLO, "maxChange": 0.5}, name="daily"), "paused")
        assert found.reason == "change: 60 recipients, 30 the last time"
        await app.campaigns.resume(found.id, by="ann")
        found = await ended(app, found)
        assert (found.accepted, found.approved_by) == (60, "ann")

    run(body)


def test_an_occurrence_of_a_recurring_one_is_a_campaign_made_once(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 5)
        schedule = await app.campaigns.repeat(
            {**HELLO, "notificationId": "n-{{scheduleId}}-{{userId}}"}, Cron("0 9 1 1 *"), name="yearly", timezone="UTC"
        )
        for count in (1, 2):
            job = await app.schedules.trigger(schedule.id)
            while (found := await app.get(job.id)).state != "completed":
                await asyncio.sleep(0.02)
            assert found.result == {"campaignId": job.id, "made": True}
            sent = await ended(app, await app.campaigns.get(job.id))
            assert (sent.schedule_id, sent.name, sent.accepted) == (schedule.id, "yearly", 5)
            assert times(fcm) == [count] * 5
        (device, *_) = (await app.devices.list()).items
        data = fcm.bodies()[device.token][0]["message"]["data"]
        assert data == {"notificationId": f"n-{schedule.id}-{device.id}"}

    run(body)


def test_a_test_goes_to_test_devices_alone_and_counts_nowhere(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 3)
        await app.devices.register("phone-of-the-tester", user_id="ann")
        made = await app.campaigns.create(HELLO, send_at="2035-01-01T00:00:00Z")
        job = await app.campaigns.test(made.id, user_ids=["ann"])
        while (await app.get(job.id)).state != "completed":
            await asyncio.sleep(0.02)
        assert list(fcm.received()) == ["phone-of-the-tester"]
        assert (await app.campaigns.get(made.id)).opened == 0
        await app.campaigns.start(made.id)  # and now to all
        assert (await ended(app, made)).accepted == 4

    run(body)


def test_what_fcm_said_is_kept_until_the_store_answers_again(
    run: Callable[..., None], fcm: FakeFcm, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = chunks.close_chunk, []

    def close_chunk(*given: Any, **more: Any) -> Any:
        if len(failed) < 2:
            failed.append(given)
            raise StoreUnreachable("The database does not answer.")
        return real(*given, **more)

    monkeypatch.setattr(chunks, "close_chunk", close_chunk)
    monkeypatch.setattr(target, "PAUSE", 0.05)

    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 10)
        found = await ended(app, await app.campaigns.create(HELLO))
        assert (found.accepted, found.unknown, times(fcm)) == (10, 0, [1] * 10)
        assert len(failed) == 2

    run(body)


def test_adaptive_chunks_follow_one_another_and_keep_to_the_quota(
    run: Callable[..., None], fcm: FakeFcm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_FCM_MESSAGES_PER_MINUTE", "1200")
    monkeypatch.setattr(target, "PAUSE", 0.05)
    fcm.quota(1200)
    begin, close, begun = chunks.open_chunk, chunks.close_chunk, set[int]()

    def open_chunk(*given: Any) -> Any:
        opened = begin(*given)
        if opened.recipients:
            begun.add(opened.number)
        return opened

    def close_chunk(*given: Any, **more: Any) -> Any:
        if len(begun) < 3:  # none ends before all of them have begun
            raise StoreUnreachable("The database does not answer.")
        return close(*given, **more)

    monkeypatch.setattr(chunks, "open_chunk", open_chunk)
    monkeypatch.setattr(chunks, "close_chunk", close_chunk)

    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 60)
        found = await ended(app, await app.campaigns.create({**HELLO, "chunkDelayMs": "adaptive"}))
        counts = fcm.counts()
        assert (found.accepted, counts["answered"]) == (60, {"OK": 60})
        # A second's worth goes at once, 19; then 19.2 a second.
        assert found.ended_at - found.started_at > timedelta(seconds=40 / 19.2)
        assert begun == {1, 2, 3}

    run(body)


def test_each_chunk_is_a_line_of_the_log_and_each_message_is_counted(
    run: Callable[..., None], fcm: FakeFcm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="timebell.campaigns")

    async def body(app: Timebell, service: Any) -> None:
        await devices(app, 21, user_id="ann")
        fcm.rules(
            {"do": "UNREGISTERED", "match": "0007$"},
            {"do": "UNAVAILABLE", "match": "0003$", "times": 1, "retry_after": "0"},
            {"do": "INTERNAL", "match": "0020$"},
        )
        found = await ended(app, await app.campaigns.create({**HELLO, "notificationId": "n-{{userId}}"}))
        ids = sorted(row["recipient"] for row in (await app.campaigns.deliveries(found.id)).items)
        await service.idle()  # each chunk has said what it has written
        lines = [each for each in caplog.records if getattr(each, "event", "") == "push.chunk"]
        first, last = (next(each for each in lines if each.cursor_from == id_) for id_ in (ids[0], ids[20]))
        assert (first.notification_id, first.cursor_to, first.tokens) == ("n-{{userId}}", ids[19], 20)
        assert first.status == "18 accepted, 1 refused, 1 to be tried again"
        assert (last.user_id, last.tokens, last.status) == ("ann", 1, "1 unknown")
        assert len(lines) == 3
        while (expected := (await app.campaigns.get(found.id)).expected) is None:
            await asyncio.sleep(0.02)
        assert expected in (20, 21)  # counted before or after the dead token went
        assert service.node.counters.messages.values == {
            ("accepted",): 19, ("refused",): 1, ("unknown",): 1, ("again",): 1,
        }  # fmt: skip

    run(body)
