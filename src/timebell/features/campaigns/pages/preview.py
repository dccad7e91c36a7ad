"""The preview of a campaign form: recipients, send times, and the message as some recipients will see it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from timebell.client import datetimes
from timebell.dashboard.fields import to_problem
from timebell.dashboard.overview_data import UPCOMING_TTL_SECONDS
from timebell.dashboard.views import View
from timebell.errors import InThePast, NotFound, RevisionStale, TimebellError
from timebell.features.campaigns.engine import content
from timebell.features.campaigns.model import personalization
from timebell.features.campaigns.model.campaign import CampaignState, Throttle, build_timetable
from timebell.features.campaigns.model.campaign_plan import OPTION_NAMES, Campaign, CampaignPlan, zone_or_default
from timebell.features.campaigns.model.device import Device
from timebell.features.campaigns.pages.form_body import has_send_time, to_request_body
from timebell.features.campaigns.store import devices
from timebell.ids import new_id

PREVIEW_FIRES = 6
WORDS_OF_FORM = {
    InThePast.code: ("The send time is in the past.", "Choose a later time."),
    "RUN_AT_WITHOUT_TIMEZONE": ("The send time has no time zone.", "Enter one, e.g. Europe/Paris."),
    RevisionStale.code: (
        "Another user saved this campaign meanwhile.", "Open “Edit” again to see the changes, and repeat yours."
    ),
}  # fmt: skip
"""Text and fix of problems by their code, where those of the API are not for users of a form."""
SAMPLE_SIZE = 3
"""Recipients whose personal message is shown."""


def describe_problem(problem: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a problem in the words of the form, not in those of the API."""
    detail, fix = WORDS_OF_FORM.get(problem["code"], (problem["detail"], problem.get("fix")))
    return {**problem, "detail": detail, "fix": fix}


async def build_preview(view: View, form: Mapping[str, str]) -> dict[str, Any]:
    """Return the preview of the campaign in the form, or `{"problem": ...}`.

    `count` recipients; `runs` of a cron campaign, else `zones` (zone, first, last, count) and `excluded` recipients;
    `samples`: the message to some recipients; `request`: the push request to the first of them; `unknown_attributes` of
    its placeholders, each with a similar name or None. Without a message there are no samples, and without a send time
    no `zones`.
    """
    is_scheduled = has_send_time(form)
    try:
        body = to_request_body(form if is_scheduled else {**form, "when": "now"})
        message = CampaignPlan.from_json({name: body[name] for name in OPTION_NAMES if name in body})
        has_message = any(body.get(name) for name in ("title", "body", "data", "variants"))
        if has_message:
            content.check_message(message)
        send_at, timezone = _resolve_send_time(view, body, message)
        draft = Campaign(
            id=new_id(view.now), tenant_id=view.caller.tenant_id, plan=message, state=CampaignState.PENDING,
            send_at=send_at, timezone=timezone, created_at=view.now, updated_at=view.now,
        )  # fmt: skip
        user_id = form.get("previewUser", "").strip()
        samples = await _preview_samples(view, draft, user_id) if has_message else []
    except TimebellError as error:
        return {"problem": describe_problem(to_problem(error))}
    preview: dict[str, Any] = {
        "problem": None, "timezone": timezone, "samples": samples,
        "request": samples[0]["request"] if samples else None, "runs": None,
        "starts_now": form.get("when") == "now", "is_scheduled": is_scheduled,
        "at": None if message.local_time else send_at, "zones": [], "excluded": [],
        "unknown_attributes": await _find_unknown_attributes(view, message),
        "sample_size": devices.ATTRIBUTE_SAMPLE_SIZE,
    }  # fmt: skip
    if "cronExpression" in body:
        schedule = {
            "name": "preview", "topic": "preview", "timezone": timezone, "cronExpression": body["cronExpression"],
        }  # fmt: skip
        response = await view.call_api("POST", "/schedules/preview", schedule, count=PREVIEW_FIRES)
        if response.is_error:
            return {"problem": response.body}
        preview["runs"] = response.body["next"]
    count = await _count_audience(view, message)
    if "problem" in count:
        return count
    preview["count"] = count["count"]
    if preview["runs"] is None and is_scheduled:
        preview["zones"], preview["excluded"] = _plan_timetable(draft, count["zones"], view.now)
    return preview


async def _preview_samples(view: View, draft: Campaign, user_id: str) -> list[dict[str, Any]]:
    """Return the messages to a user, or to the first recipients if the message is personal; otherwise an example.

    An example of each variant, if there are any. Each has `device` (None: an example), `variant`, `request`, and its
    `title`, `body` and `image`. Raises NotFound.
    """
    found: list[Device | None] = []
    tenant_id = view.caller.tenant_id
    if user_id:
        found += await view.app.store.run(devices.list_user_devices, tenant_id, user_id, 1)
        if not found:
            raise NotFound(
                f"The user {user_id!r:.60} has no device that accepts push messages.", code="DEVICE_NOT_FOUND",
                fix="Enter the userId of a registered device, or leave the field empty.",
            )  # fmt: skip
    elif draft.plan.is_personal:
        page = await view.app.store.run(
            devices.list_devices, tenant_id, SAMPLE_SIZE, None, draft.plan.filters, None, view.now
        )
        found += page.items
    variants: list[str | None] = [variant.name for variant in draft.plan.experiment.variants]
    if user_id or not variants:
        variants = [None]
    samples = []
    for variant in variants:
        for device in found or [None]:
            request = content.preview_request(draft, view.now, device, variant)
            notification = request["message"].get("notification", {})
            samples.append({"device": device, "variant": variant, "request": request, **{
                name: notification.get(name) for name in ("title", "body", "image")
            }})  # fmt: skip
    return samples


async def _find_unknown_attributes(view: View, message: CampaignPlan) -> list[tuple[str, str | None]]:
    """Return the attributes in the message that none of the newest devices has, each with a similar name.

    Their fallback hides a typing error in the message.
    """
    used = personalization.attribute_names([*message.texts, *message.variant_texts])
    known = await view.app.store.run(devices.sample_attributes, view.caller.tenant_id) if used else {}
    unknown = sorted(used - known.keys()) if known else []
    return [(name, next(iter(get_close_matches(name, known, 1)), None)) for name in unknown]


def _resolve_send_time(view: View, body: Mapping[str, Any], message: CampaignPlan) -> tuple[datetime, str]:
    """Return the send time and its zone, resolved as by the API. Raises InvalidInput, InThePast."""
    default = view.app.settings.default_timezone or "UTC"
    send_time = message.local_time if message.local_time is not None else body.get("sendAt")
    resolved = datetimes.resolve_run_at(
        send_time, body.get("timezone"), default if message.local_time or not send_time else None, view.now
    )
    return resolved.at, resolved.timezone


async def _count_audience(view: View, message: CampaignPlan) -> dict[str, Any]:
    """Return the number of recipients by zone, at most 15 s old; or `{"problem": ...}`."""
    body = {"filters": message.filters.to_json()}

    async def count() -> dict[str, Any]:
        response = await view.call_api("POST", "/audiences/count", body)
        return {"problem": response.body} if response.is_error else response.body

    key = f"{view.caller.tenant_id} {json.dumps(body, sort_keys=True)}"
    counts: dict[str, Any] = await view.overview_cache.cached("audience", key, UPCOMING_TTL_SECONDS, count)
    return counts


def _plan_timetable(draft: Campaign, counts: Mapping[str, int], now: datetime) -> tuple[list[Any], list[Any]]:
    """Return (zone, first, last, count) of each zone, and the excluded recipients as (zone, reason, count)."""
    message, audience = draft.plan, dict[Any, int]()
    for name, count in counts.items():
        zone = zone_or_default((name or None) if message.is_zone_dependent else None, draft.timezone)
        audience[zone] = audience.get(zone, 0) + count
    throttle = (
        Throttle(message.chunk_size)
        if message.chunk_delay is None
        else Throttle(message.chunk_size, message.chunk_delay)
    )
    plan = build_timetable(
        audience, message.local_time or draft.send_at, now=now, quiet_hours=message.quiet_hours, throttle=throttle,
        until=message.expires_at,
    )  # fmt: skip
    excluded = [(zone_name, reason.value, count) for (zone_name, reason), count in plan.excluded.items()]
    return list(plan.zone_summaries()), excluded
