"""Campaigns that cannot reach anybody pause by themselves, and continue when the cause is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from timebell import Timebell
from timebell.features.campaigns.engine import chunk_sender
from timebell_fcm_emulator import FakeFcm

from .test_campaigns import HELLO, ended, message_counts, register_devices


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"do": "SENDER_ID_MISMATCH", "details": False}, "blocked: PERMISSION_DENIED"),
        ({"do": "UNREGISTERED", "details": False}, "blocked: NOT_FOUND"),
        ({"do": "SENDER_ID_MISMATCH"}, "errors: "),
    ],
)
def test_a_refused_project_or_sender_pauses_the_campaign_and_loses_nobody(
    run: Callable[..., None], fcm: FakeFcm, rule: dict[str, Any], reason: str
) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 300)
        fcm.rules(rule)
        created = await app.campaigns.create({**HELLO, "chunkSize": 150, "chunkDelayMs": 2000})
        found = await ended(app, created, "paused")
        assert str(found.reason).startswith(reason)
        assert found.opened == 150, "the walk did not continue"
        assert fcm.counts()["requests"] <= 100, "the rest of the chunk was not sent"
        assert await app.devices.count() == 300, "no device is removed"
        fcm.rules()
        await app.campaigns.resume(created.id)
        found = await ended(app, created)
        assert found.accepted + found.refused == 300
        assert found.refused == (100 if reason == "errors: " else 0)
        assert message_counts(fcm) == [1] * found.accepted

    run(body)


def test_refused_credentials_pause_the_campaign_before_its_first_chunk(
    run: Callable[..., None], fcm: FakeFcm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcm.refuse_account()

    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 30)
        created = await app.campaigns.create(HELLO)
        found = await ended(app, created, "paused")
        assert str(found.reason).startswith("blocked: FCM_TOKEN_UNAVAILABLE")
        assert "invalid_grant" in str(found.reason)
        assert (found.opened, found.started_at, fcm.counts()["requests"]) == (0, None, 0)
        await app.campaigns.edit(created.id, {"title": "Still editable"})
        fcm.refuse_account(False)
        await app.campaigns.resume(created.id)
        assert (await ended(app, created)).accepted == 30

    run(body)


def test_an_outage_costs_few_recipients_and_ends_without_a_person(
    run: Callable[..., None], fcm: FakeFcm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_sender, "RETRY_DELAY_SECONDS", 0.1)

    async def answered(code: str, count: int) -> None:
        while fcm.counts()["answered"].get(code, 0) < count:
            await asyncio.sleep(0.05)

    async def body(app: Timebell, service: Any) -> None:
        await register_devices(app, 1000)
        fcm.rules({"do": "UNAVAILABLE", "retry_after": "1"})
        created = await app.campaigns.create({**HELLO, "chunkSize": 500, "chunkDelayMs": "adaptive"})
        await answered("UNAVAILABLE", 3)
        assert (await app.campaigns.get(created.id)).unknown == 0
        fcm.rules({"do": "INTERNAL"})
        await answered("INTERNAL", 5)
        fcm.rules()
        found = await ended(app, created)
        assert (found.state, found.accepted + found.unknown, found.unsent) == ("partly_sent", 1000, 0)
        assert found.unknown <= 100, "the requests in flight when it began, and few others"
        assert set(message_counts(fcm)) == {1}

    run(body)
