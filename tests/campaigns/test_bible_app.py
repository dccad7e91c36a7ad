"""The campaign that this was made for: a Bible app's reading of the day, at 16:15 in Seoul, for those who want it.

Its schedule is kept in snake_case with nulls and zeros; its phones read camelCase strings, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from timebell import Timebell
from timebell.testing.fcm import FakeFcm

ROW = {
    "title": "Today's reading", "content": "Psalm 22 is waiting for you.", "push_onoff": "Y", "marketing_onoff": None,
    "topic": None, "division": "bible", "version": 0, "bible_code": 19, "chapter": 22, "section": None,
    "landing_url": None,
}  # fmt: skip
"""As it is in `push_notification_schedule`."""
DEEP_LINK = ("division", "version", "bible_code", "chapter", "section", "landing_url")
READ_BY_PHONES = {"division": "bible", "version": "0", "bibleCode": "19", "chapter": "22"}


def message() -> dict[str, Any]:
    return {
        "title": ROW["title"], "body": ROW["content"], "data": {name: ROW[name] for name in DEEP_LINK},
        "fields": {"rename": {"bible_code": "bibleCode", "landing_url": "landingUrl"}},
        "filters": {"pushOnOff": ROW["push_onoff"], "marketingOnOff": ROW["marketing_onoff"], "topic": ROW["topic"]},
        "chunkSize": 20, "chunkDelayMs": 50,
    }  # fmt: skip


def test_the_reading_of_the_day(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        readers = [f"phone-of-reader-{n:03}" for n in range(50)]
        await app.devices.register_many([{"token": token, "push_on": True} for token in readers])
        await app.devices.register("phone-of-somebody-muted", push_on=False)
        made = await app.campaigns.create(message(), send_at="2035-03-01T16:15:00", timezone="Asia/Seoul")
        assert made.send_at == datetime(2035, 3, 1, 7, 15, tzinfo=UTC)
        assert (made.sending.size, made.started_at, made.accepted) == (20, None, 0)
        shown = (await app.campaigns.preview(made.id))["message"]
        assert shown["data"] == READ_BY_PHONES
        await app.campaigns.start(made.id)  # not to wait until then
        while (found := await app.campaigns.get(made.id)).state != "completed":
            await asyncio.sleep(0.02)
        assert (found.accepted, found.left_out) == (50, {"pushOff": 1})
        assert sorted(fcm.received()) == readers
        for (sent,) in fcm.bodies().values():
            assert sent["message"] == {**shown, "token": sent["message"]["token"]}
            assert "undefined" not in str(sent) and "None" not in str(sent) and "null" not in str(sent)

    run(body)
