"""The message of a campaign, checked when it is made and shown as the JSON a phone gets. Pure."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any

import orjson

from timebell.model.campaign_plan import Campaign, Sending
from timebell.targets.push import message
from timebell.targets.push.message import LONGEST_TAG, Content, Encoded, Message

ANYONE = "the-token-of-a-device"
_LONGEST_ID = "0" * 36


def content_of(sending: Sending, notification: str) -> Content:
    """The message under a notification's id. Raises InvalidPayload (BODY_UNFIT)."""
    data = sending.texts()
    if sending.notification_id is not None:
        data.setdefault("notificationId", notification)
    tag = sending.collapse_key or notification
    if len(tag.encode()) > LONGEST_TAG:
        tag = hashlib.sha256(tag.encode()).hexdigest()
    return Content(sending.title, sending.body, data, sending.ttl, sending.collapse_key, tag)


def check(sending: Sending) -> None:
    """Raises InvalidInput (PUSH_MESSAGE_INVALID, PUSH_MESSAGE_TOO_LARGE, BODY_UNFIT) for what FCM would refuse."""
    notification = sending.notification_of(_LONGEST_ID, _LONGEST_ID, _LONGEST_ID, _LONGEST_ID)
    message.check(content_of(sending, notification), "token")


def preview(found: Campaign, now: datetime) -> dict[str, Any]:
    """The very request that is made for a device, as JSON."""
    notification = found.sending.notification_of(found.id, found.schedule_id, "the-id-of-a-device", "the-id-of-a-user")
    encoded = Encoded(content_of(found.sending, notification), now)
    request: dict[str, Any] = orjson.loads(Message("token", ANYONE, encoded).request())
    return request
