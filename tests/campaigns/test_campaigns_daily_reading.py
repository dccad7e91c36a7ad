"""A daily reading at 16:15 in Seoul, sent to the subscribed devices of a Bible app.

The stored row has snake_case names, nulls and zeros; the app reads only camelCase strings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from timebell import Timebell
from timebell_fcm_emulator import FakeFcm

ROW = {
    "title": "Today's reading", "content": "Psalm 22 is waiting for you.", "push_onoff": "Y", "marketing_onoff": None,
    "topic": None, "division": "bible", "version": 0, "bible_code": 19, "chapter": 22, "section": None,
    "landing_url": None,
}  # fmt: skip
"""A row of the table `push_notification_schedule`."""
DEEP_LINK = ("division", "version", "bible_code", "chapter", "section", "landing_url")
EXPECTED_DATA = {"division": "bible", "version": "0", "bibleCode": "19", "chapter": "22"}


def message() -> dict[str, Any]:
    return {
        "title": ROW["title"], "body": ROW["content"], "data": {name: ROW[name] for name in DEEP_LINK},
        "fields": {"rename": {"bible_code": "bibleCode", "landing_url": "landingUrl"}},
        "filters": {"pushOnOff": ROW["push_onoff"], "marketingOnOff": ROW["marketing_onoff"], "topic": ROW["topic"]},
        "chunkSize": 20, "chunkDelayMs": 50,
    }  # fmt: skip


def test_a_scheduled_campaign_sends_renamed_string_data(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        readers = [f"phone-of-reader-{n:03}" for n in range(50)]
        await app.devices.register_many([{"token": token, "push_on": True} for token in readers])
        await app.devices.register("phone-of-tester-muted", push_on=False)
        created = await app.campaigns.create(message(), send_at="2035-03-01T16:15:00", timezone="Asia/Seoul")
        assert created.send_at == datetime(2035, 3, 1, 7, 15, tzinfo=UTC)
        assert (created.plan.chunk_size, created.started_at, created.accepted) == (20, None, 0)
        preview = (await app.campaigns.preview(created.id))["message"]
        assert preview["data"] == EXPECTED_DATA
        await app.campaigns.start(created.id)  # before its send time
        while (found := await app.campaigns.get(created.id)).state != "completed":
            await asyncio.sleep(0.02)
        assert (found.accepted, found.excluded) == (50, {"pushOff": 1})
        assert sorted(fcm.received()) == readers
        for (sent,) in fcm.bodies().values():
            assert sent["message"] == {**preview, "token": sent["message"]["token"]}
            assert "undefined" not in str(sent) and "None" not in str(sent) and "null" not in str(sent)

    run(body)
