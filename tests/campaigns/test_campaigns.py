"""Campaigns end to end, against an FCM emulator that records every message."""

from __future__ import annotations

import asyncio
import zoneinfo
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from timebell import Cron, Timebell
from timebell.errors import StoreUnreachable
from timebell.features.campaigns.engine import chunk_sender
from timebell.features.campaigns.model.campaign_plan import Campaign
from timebell.features.campaigns.store import chunk_results, chunks
from timebell_fcm_emulator import FakeFcm

HELLO = {"title": "Hello", "body": "You", "chunkSize": 20, "chunkDelayMs": 0}
HOURLY = {"chunkDelayMs": 3_600_000}  # the second chunk starts only if the campaign is resumed


async def register_devices(app: Timebell, count: int, **about: Any) -> list[str]:
    tokens = [f"phone-of-{about.get('user_id', 'user')}-{n:04}" for n in range(count)]
    await app.devices.register_many([{"token": token, **about} for token in tokens])
    return tokens


def message_counts(fcm: FakeFcm) -> list[int]:
    """Return the number of messages of each device, sorted."""
    return sorted(map(len, fcm.received().values()))


async def ended(app: Timebell, created: Campaign, *states: str) -> Campaign:
    """Wait until the campaign has ended, or is in one of the states, and has no open chunk."""
    while True:
        found = await app.campaigns.get(created.id)
        if (found.state in states if states else found.ended_at is not None) and not found.open_chunks:
            return found
        await asyncio.sleep(0.02)


def test_each_device_receives_one_message_and_the_counts_match(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        tokens = await register_devices(app, 70)
        fcm.rules({"do": "UNREGISTERED", "match": "0007$"})
        found = await ended(app, await app.campaigns.create(HELLO))
        assert (found.accepted, found.refused, found.unknown, found.opened) == (69, 1, 0, 70)
        assert sorted(fcm.received()) == sorted(set(tokens) - {"phone-of-user-0007"})
        assert set(message_counts(fcm)) == {1}
        assert found.started_at is not None and found.ended_at is not None
        assert found.send_at <= found.started_at < found.ended_at
        assert await app.devices.count() == 69  # the dead token is gone

    run(body)


def test_a_stopped_campaign_lists_remaining_recipients_and_a_retry_reaches_them(
    run: Callable[..., None], fcm: FakeFcm
) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 40)
        created = await app.campaigns.create({**HELLO, **HOURLY})
        while (await app.campaigns.get(created.id)).accepted < 20:
            await asyncio.sleep(0.01)
        await app.campaigns.stop(created.id, "wrong text")
        found = await ended(app, created, "stopped")
        got = {row["recipient"] for row in (await app.campaigns.deliveries(created.id, limit=500)).items}
        left = {device.id for device in (await app.campaigns.remaining(created.id, limit=500)).items}
        assert (len(got), len(left), found.opened) == (20, 20, 20)
        assert not got & left
        await app.campaigns.retry(created.id)
        found = await ended(app, created)
        assert found.accepted == 40
        assert message_counts(fcm) == [1] * 40

    run(body)


def test_a_paused_campaign_keeps_its_cursor(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 60)
        created = await app.campaigns.create({**HELLO, **HOURLY})
        while (await app.campaigns.get(created.id)).accepted < 20:
            await asyncio.sleep(0.01)
        await app.campaigns.pause(created.id, "lunch")
        await ended(app, created, "paused")
        await service.wait_until_idle()
        assert (await app.campaigns.get(created.id)).opened == 20
        for _ in range(3):  # repeated requests resume it once
            await app.campaigns.resume(created.id)
        while (await app.campaigns.get(created.id)).accepted < 40:
            await asyncio.sleep(0.01)
        await app.campaigns.pause(created.id)
        await app.campaigns.resume(created.id)
        found = await ended(app, created)
        assert (found.accepted, message_counts(fcm)) == (60, [1] * 60)

    run(body)


def test_only_unavailable_recipients_are_sent_again(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 20)
        fcm.rules({"do": "UNAVAILABLE", "match": "000[0-4]$", "times": 5, "retry_after": "0"})
        found = await ended(app, await app.campaigns.create(HELLO))
        assert (found.accepted, found.unsent) == (20, 0)
        assert message_counts(fcm) == [1] * 20

    run(body)


def test_unknown_results_are_sent_again_only_on_request(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 20)
        fcm.rules({"do": "INTERNAL", "match": "000[0-4]$", "times": 5, "accepted": True})
        created = await app.campaigns.create(HELLO)
        found = await ended(app, created)
        assert (found.accepted, found.unknown) == (15, 5)
        await app.campaigns.retry(created.id)
        found = await ended(app, created)
        assert (found.accepted, found.unknown, sum(message_counts(fcm))) == (15, 5, 20)
        await app.campaigns.retry(created.id, unknown=True)
        found = await ended(app, created)
        assert (found.accepted, found.unknown) == (20, 0)

    run(body)


def test_the_canary_pauses_the_campaign_until_it_is_resumed(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 100)
        fcm.rules({"do": "THIRD_PARTY_AUTH_ERROR", "match": "00[0-2]5$"})
        created = await app.campaigns.create({**HELLO, "canary": {"size": 30, "maxErrorRate": 0.05}})
        found = await ended(app, created, "paused")
        assert (found.reason, found.opened, found.refused) == ("canary", 30, 3)
        fcm.rules()
        await app.campaigns.resume(created.id, by="ann")
        found = await ended(app, created)
        assert (found.accepted, found.refused) == (97, 3)
        await app.campaigns.retry(created.id)
        assert (await ended(app, created)).accepted == 100

    run(body)


def test_size_limits_pause_the_campaign_before_the_first_message(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 30)
        first = await ended(app, await app.campaigns.create(HELLO, name="daily"))
        assert first.accepted == 30
        for gate, why in (({"maxRecipients": 29}, "ceiling"), ({"approveAbove": 29}, "approval")):
            created = await app.campaigns.create({**HELLO, **gate})
            found = await ended(app, created, "paused")
            assert found.reason is not None and found.reason.startswith(why)
            assert found.opened == 0
        await app.devices.register_many([{"token": f"another-phone-{n:04}"} for n in range(30)])
        found = await ended(app, await app.campaigns.create({**HELLO, "maxChange": 0.5}, name="daily"), "paused")
        assert found.reason == "change: 60 recipients, 30 in the previous campaign"
        await app.campaigns.resume(found.id, by="ann")
        found = await ended(app, found)
        assert (found.accepted, found.approved_by) == (60, "ann")

    run(body)


def test_each_occurrence_of_a_recurring_campaign_creates_one_campaign(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 5)
        schedule = await app.campaigns.repeat(
            {**HELLO, "notificationId": "n-{{scheduleId}}-{{userId}}"}, Cron("0 9 1 1 *"), name="yearly", timezone="UTC"
        )
        for count in (1, 2):
            job = await app.schedules.trigger(schedule.id)
            while (found := await app.get(job.id)).state != "completed":
                await asyncio.sleep(0.02)
            assert found.result == {"campaignId": job.id, "created": True}
            sent = await ended(app, await app.campaigns.get(job.id))
            assert (sent.schedule_id, sent.name, sent.accepted) == (schedule.id, "yearly", 5)
            assert message_counts(fcm) == [count] * 5
        (device, *_) = (await app.devices.list()).items
        data = fcm.bodies()[device.token][0]["message"]["data"]
        assert data == {"notificationId": f"n-{schedule.id}-{device.id}"}

    run(body)


def test_an_occurrence_reaches_each_zone_at_its_local_time(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        east, west = zoneinfo.ZoneInfo("Pacific/Kiritimati"), zoneinfo.ZoneInfo("Pacific/Honolulu")
        await app.devices.register("phone-in-the-east", timezone=east.key)
        await app.devices.register("phone-in-the-west", timezone=west.key)
        schedule = await app.campaigns.repeat(
            HELLO, Cron("* * * * * *"), name="often", timezone="America/New_York", in_recipient_zones=True
        )
        while fcm.counts()["accepted"] < 1:
            await asyncio.sleep(0.02)
        await app.schedules.pause(schedule.id)
        *_, campaign = (await app.campaigns.list()).items
        job = await app.get(campaign.id)
        local = job.scheduled_at.astimezone(east).replace(tzinfo=None)
        assert (campaign.plan.local_time, campaign.timezone) == (local, "America/New_York")
        assert campaign.send_at == local.replace(tzinfo=zoneinfo.ZoneInfo("America/New_York"))
        assert set(fcm.received()) == {"phone-in-the-east"}
        while (forecast := await app.campaigns.forecast(job.id)).waiting_for is None:  # not all zones are planned yet
            await asyncio.sleep(0.02)
        assert (forecast.waiting_for, forecast.waiting_until) == (west.key, local.replace(tzinfo=west))
        now = await app.schedules.trigger(schedule.id)
        while (await app.get(now.id)).state != "completed":
            await asyncio.sleep(0.02)
        assert (await ended(app, await app.campaigns.get(now.id))).accepted == 2

    run(body)


def test_a_test_send_goes_only_to_test_devices_and_is_not_counted(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 3)
        await app.devices.register("phone-of-the-tester", user_id="ann")
        created = await app.campaigns.create(HELLO, send_at="2035-01-01T00:00:00Z")
        job = await app.campaigns.test(created.id, user_ids=["ann"])
        while (await app.get(job.id)).state != "completed":
            await asyncio.sleep(0.02)
        assert list(fcm.received()) == ["phone-of-the-tester"]
        assert (await app.campaigns.get(created.id)).opened == 0
        await app.campaigns.start(created.id)  # now to all devices
        assert (await ended(app, created)).accepted == 4

    run(body)


def test_results_are_retained_until_the_store_is_reachable(
    run: Callable[..., None], fcm: FakeFcm, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = chunk_results.close_chunk, []

    def close_chunk(*fields: Any, **more: Any) -> Any:
        if len(failed) < 2:
            failed.append(fields)
            raise StoreUnreachable("The database does not answer.")
        return real(*fields, **more)

    monkeypatch.setattr(chunk_results, "close_chunk", close_chunk)
    monkeypatch.setattr(chunk_sender, "RETRY_DELAY_SECONDS", 0.05)

    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 10)
        found = await ended(app, await app.campaigns.create(HELLO))
        assert (found.accepted, found.unknown, message_counts(fcm)) == (10, 0, [1] * 10)
        assert len(failed) == 2

    run(body)


def test_adaptive_chunks_run_back_to_back_within_the_quota(
    run: Callable[..., None], fcm: FakeFcm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEBELL_FCM_MESSAGES_PER_MINUTE", "1200")
    monkeypatch.setattr(chunk_sender, "RETRY_DELAY_SECONDS", 0.05)
    fcm.quota(1200)
    original_open, close, opened_numbers = chunks.open_chunk, chunk_results.close_chunk, set[int]()

    def open_chunk(*fields: Any) -> Any:
        opened = original_open(*fields)
        if opened.recipients:
            opened_numbers.add(opened.number)
        return opened

    def close_chunk(*fields: Any, **more: Any) -> Any:
        if len(opened_numbers) < 3:  # no chunk closes before all three are open
            raise StoreUnreachable("The database does not answer.")
        return close(*fields, **more)

    monkeypatch.setattr(chunks, "open_chunk", open_chunk)
    monkeypatch.setattr(chunk_results, "close_chunk", close_chunk)

    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 60)
        found = await ended(app, await app.campaigns.create({**HELLO, "chunkDelayMs": "adaptive"}))
        counts = fcm.counts()
        assert (found.accepted, counts["answered"]) == (60, {"OK": 60})
        # A burst of 19 messages (one second's quota), then 19.2 per second.
        assert found.ended_at - found.started_at > timedelta(seconds=40 / 19.2)
        assert opened_numbers == {1, 2, 3}

    run(body)


def test_each_chunk_is_logged_and_each_message_counted(
    run: Callable[..., None], fcm: FakeFcm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="timebell.campaigns")

    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 21, user_id="ann")
        fcm.rules(
            {"do": "UNREGISTERED", "match": "0007$"},
            {"do": "UNAVAILABLE", "match": "0003$", "times": 1, "retry_after": "0"},
            {"do": "INTERNAL", "match": "0020$"},
        )
        found = await ended(app, await app.campaigns.create({**HELLO, "notificationId": "n-{{userId}}"}))
        ids = sorted(row["recipient"] for row in (await app.campaigns.deliveries(found.id)).items)
        await service.wait_until_idle()  # every chunk has logged its result
        lines = [each for each in caplog.records if getattr(each, "event", "") == "push.chunk"]
        first, last = (next(each for each in lines if each.cursor_from == id_) for id_ in (ids[0], ids[20]))
        assert (first.notification_id, first.cursor_to, first.tokens) == ("n-{{userId}}", ids[19], 20)
        assert first.status == "18 accepted, 1 refused, 1 to be tried again"
        assert (last.user_id, last.tokens, last.status) == ("ann", 1, "1 unknown")
        assert len(lines) == 3
        while (expected := (await app.campaigns.get(found.id)).expected) is None:
            await asyncio.sleep(0.02)
        assert expected in (20, 21)  # counted before or after the dead token was removed
        assert service.node.counters.of_features["timebell_campaign_messages_total"].values == {
            ("accepted",): 19, ("refused",): 1, ("unknown",): 1, ("retry",): 1,
        }  # fmt: skip

    run(body)
