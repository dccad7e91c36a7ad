"""Message content of a campaign: validation, and the JSON sent to FCM. No I/O."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any

import orjson

from timebell.features.campaigns.model.campaign_plan import Campaign, CampaignPlan
from timebell.features.campaigns.model.device import Device
from timebell.features.campaigns.push import message
from timebell.features.campaigns.push.message import MAX_TAG_BYTES, Content, EncodedContent, Message
from timebell.features.campaigns.store.walk import placeholder_values, variant_of

EXAMPLE_TOKEN = "the-token-of-a-device"  # noqa: S105
_LONGEST_ID = "0" * 36


def build_content(plan: CampaignPlan, notification_id: str, campaign_id: str) -> Content:
    """Return the message content for a notification id. Raises InvalidPayload (INVALID_BODY)."""
    data = plan.data_strings()
    if plan.track_opens:
        data["campaignId"] = campaign_id
    if plan.notification_id is not None:
        data.setdefault("notificationId", notification_id)
    tag = plan.collapse_key or notification_id
    if len(tag.encode()) > MAX_TAG_BYTES:
        tag = hashlib.sha256(tag.encode()).hexdigest()
    return Content(plan.title, plan.body, data, plan.ttl, plan.collapse_key, tag, plan.appearance)


def check_message(plan: CampaignPlan) -> None:
    """Check that FCM would accept the message in each variant and language, with the fallbacks of its placeholders.

    Raises InvalidInput (INVALID_PUSH_MESSAGE, PUSH_MESSAGE_TOO_LARGE, INVALID_BODY).
    """
    notification_id = plan.notification_id_for(_LONGEST_ID, _LONGEST_ID, _LONGEST_ID, _LONGEST_ID)
    for variant in (None, *(each.name for each in plan.experiment.variants)):
        chosen = plan.for_variant(variant)
        for language in (None, *chosen.translations):
            personal = chosen.personalize({"language": language}) if plan.is_personal else chosen
            message.check_content(build_content(personal, notification_id, _LONGEST_ID), "token")


def preview_request(
    campaign: Campaign, now: datetime, device: Device | None = None, variant: str | None = None
) -> dict[str, Any]:
    """Return the exact request that is sent to FCM for a device, as JSON; without a device, with the fallbacks.

    The message is in the specified variant, otherwise in that of the device.
    """
    device_id, user_id = ("the-id-of-a-device", "the-id-of-a-user") if device is None else (device.id, device.user_id)
    notification_id = campaign.plan.notification_id_for(campaign.id, campaign.schedule_id, device_id, user_id)
    plan = campaign.plan.for_variant(variant or variant_of(campaign, device_id, user_id))
    if campaign.plan.is_personal:
        values = {} if device is None else placeholder_values(campaign.id, device)
        plan = plan.personalize({"campaignId": campaign.id, "deviceId": device_id, **values})
    encoded = EncodedContent(build_content(plan, notification_id, campaign.id), now)
    token = EXAMPLE_TOKEN if device is None else device.token
    request: dict[str, Any] = orjson.loads(Message("token", token, encoded).request())
    return request
