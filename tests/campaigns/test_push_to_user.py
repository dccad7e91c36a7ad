"""A push to a user goes to all devices of the user, and to each device once per notification."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from timebell import Timebell
from timebell.errors import InvalidInput
from timebell_fcm_emulator import FakeFcm

TARGET = {
    "kind": "push", "userId": "{{payload.userId}}", "title": "Your shift begins", "data": {"room": "{{payload.room}}"},
    "notificationId": "shift-7-{{payload.userId}}-start",
}  # fmt: skip


async def push(app: Timebell, service: Any, user: str, **more: Any) -> Any:
    job = await app.schedule_at(
        "shift.start", payload={"userId": user, "room": "3"}, target=TARGET, retry={"attempts": 3, "delay": 0.1}, **more
    )
    await service.wait_until_idle()
    while (found := await app.get(job.id)).state in ("pending", "running"):
        await service.wait_until_idle()
    return found


def test_all_devices_of_a_user_get_the_notification_once(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await app.devices.register_many([{"token": f"phone-of-ann-{n}", "user_id": "ann"} for n in range(3)])
        await app.devices.register("phone-of-ann-muted", user_id="ann", push_on=False)
        await app.devices.register("phone-of-bob-0", user_id="bob")
        fcm.rules(
            {"do": "UNREGISTERED", "match": "ann-0"},
            {"do": "UNAVAILABLE", "match": "ann-1", "times": 1, "retry_after": "0"}
        )  # fmt: skip
        found = await push(app, service, "ann")
        assert found.state == "completed"
        assert [each["outcome"] for each in found.result["targets"]] == ["refused", "accepted", "accepted"]
        assert {token: len(ids) for token, ids in fcm.received().items()} == {"phone-of-ann-1": 1, "phone-of-ann-2": 1}
        assert fcm.bodies()["phone-of-ann-1"][0]["message"]["data"] == {
            "room": "3", "notificationId": "shift-7-ann-start",
        }  # fmt: skip
        devices = (await app.devices.list(user_id="ann")).items
        assert [device.token for device in devices] == ["phone-of-ann-1", "phone-of-ann-2", "phone-of-ann-muted"]
        await app.devices.register("phone-of-ann-new", user_id="ann")
        again = await push(app, service, "ann")  # another job, the same notification
        assert [each.get("code") for each in again.result["targets"]] == ["ALREADY_ACCEPTED", "ALREADY_ACCEPTED", None]
        assert {token: len(ids) for token, ids in fcm.received().items()} == {
            "phone-of-ann-1": 1, "phone-of-ann-2": 1, "phone-of-ann-new": 1,
        }  # fmt: skip

    run(body)


def test_a_device_deleted_between_attempts_is_not_retried(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        await app.devices.register_many([{"token": f"phone-of-ann-{n}", "user_id": "ann"} for n in range(2)])
        fcm.rules({"do": "UNAVAILABLE", "match": "ann-1", "retry_after": "1"})
        job = await app.schedule_at("shift.start", payload={"userId": "ann", "room": "3"}, target=TARGET)
        while not (await app.get(job.id)).attempts:
            await service.wait_until_idle()
        await app.devices.delete_tokens(["phone-of-ann-1"])
        while (found := await app.get(job.id)).state in ("pending", "running"):
            await service.wait_until_idle()
        assert [each.get("code") for each in found.result["targets"]] == [None, "DEVICE_REMOVED"]

    run(body)


def test_a_user_without_devices_fails_the_job(run: Callable[..., None], fcm: FakeFcm) -> None:
    async def body(app: Timebell, service: Any) -> None:
        found = await push(app, service, "without-devices")
        assert (found.state, found.error_code, found.attempt) == ("failed", "USER_WITHOUT_DEVICES", 1)

    run(body)


def test_a_payload_without_the_user_is_refused_at_creation(sqlite_url: str, fcm: FakeFcm) -> None:
    async def body() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        with pytest.raises(InvalidInput) as refused:
            await app.schedule_at("shift.start", payload={"room": "3"}, target=TARGET)
        assert refused.value.code == "INVALID_BODY"
        await app.close()

    asyncio.run(body())
