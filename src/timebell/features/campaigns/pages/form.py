"""Form that creates a campaign, with a preview of recipients, send times and the push request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from timebell.client import datetimes
from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.fields import default_timezone, parse_json, parse_number, submit, text_fields, to_problem
from timebell.dashboard.overview_data import UPCOMING_TTL_SECONDS
from timebell.dashboard.views import CurrentView, PageRoute, View
from timebell.errors import InvalidInput, TimebellError
from timebell.features.campaigns.engine import content
from timebell.features.campaigns.model.campaign import CampaignState, Throttle, build_timetable
from timebell.features.campaigns.model.campaign_plan import OPTION_NAMES, Campaign, CampaignPlan, zone_or_default
from timebell.ids import new_id
from timebell.recurrence.zone_names import accepted_names as zone_names

PREVIEW_FIRES = 6
SEND_TIME_FIELDS = {"at": "sendAt", "local": "localTime", "cron": "cronExpression"}
EMPTY_FORM = {"when": "at", "at": "", "data": "", "filters": "", "chunkSize": "500", "chunkDelayMs": "2000"}
TEXT_FIELDS = ("name", "title", "body", "timezone", "collapseKey", "expiresAt")
NUMBER_FIELDS = ("ttl", "chunkSize", "maxRecipients", "approveAbove")
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/new/campaign")
async def new(request: Request, view: CurrentView) -> Response:
    """Render an empty form, or the fields that its Preview button sent."""
    return await _render_form(view, {"timezone": default_timezone(request, view), **dict(request.query_params)}, None)


@routes.post("/ui/new/campaign")
async def create(view: CurrentView) -> Response:
    """Create a campaign; with a cron expression, a schedule that creates campaigns."""
    created = await submit(view, "/campaigns", to_request_body, _render_form)
    if isinstance(created, Response):
        return created
    collection = "schedules" if created["scheduleId"] == created["id"] else "campaigns"
    return view.redirect(f"/ui/{collection}/{quote_segment(created['id'])}", "created")


@routes.get("/ui/new/campaign/preview")
async def preview(request: Request, view: CurrentView) -> Response:
    """Render the preview of the campaign in the form, as a fragment."""
    fields = dict(request.query_params)
    return view.render("partials/campaign_preview", preview=await build_preview(view, fields))


async def _render_form(view: View, form: Mapping[str, str], problem: Any, status: int = 200) -> Response:
    fields = {**EMPTY_FORM, "timezone": "", **form}
    return view.render(
        "campaign_form", status, form=fields, problem=problem, preview=await build_preview(view, fields),
        zones=sorted(zone_names()),
    )  # fmt: skip


def to_request_body(form: Mapping[str, str]) -> dict[str, Any]:
    """Convert form fields to a request body of the API. Raises InvalidInput."""
    body: dict[str, Any] = text_fields(form, *TEXT_FIELDS)
    body |= {name: number for name in NUMBER_FIELDS if (number := parse_number(name, form.get(name, ""))) is not None}
    when, at = form.get("when", "at"), form.get("at", "").strip()
    if when != "now":
        if when not in SEND_TIME_FIELDS or not at:
            raise InvalidInput(
                "The campaign has no send time.", code="INVALID_CAMPAIGN", fix="Enter one, e.g. 2027-01-01T09:00."
            )
        body[SEND_TIME_FIELDS[when]] = at
    for name in ("data", "filters"):
        if (value := parse_json(name, form.get(name, ""))) is not None:
            body[name] = value
    if form.get("marketing"):
        body["marketing"] = True
    delay = form.get("chunkDelayMs", "").strip()
    if delay:
        body["chunkDelayMs"] = delay if delay == "adaptive" else parse_number("chunkDelayMs", delay)
    if quiet := text_fields(form, "quietStart", "quietEnd"):
        body["quietHours"] = {
            "start": quiet.get("quietStart", ""), "end": quiet.get("quietEnd", ""),
            "then": form.get("quietThen") or "wait",
        }  # fmt: skip
    if (size := parse_number("canarySize", form.get("canarySize", ""))) is not None:
        rate = parse_number("canaryRate", form.get("canaryRate", ""))
        body["canary"] = {"size": size, "maxErrorRate": 0.05 if rate is None else rate / 100}
    return body


async def build_preview(view: View, form: Mapping[str, str]) -> dict[str, Any]:
    """Return the preview of the campaign in the form, or `{"problem": ...}`.

    `count` recipients; `runs` of a cron campaign, else `zones` (zone, first, last, count) and `excluded` recipients;
    `request`: the push request with a placeholder for the token.
    """
    try:
        body = to_request_body(form)
        message = CampaignPlan.from_json({name: body[name] for name in OPTION_NAMES if name in body})
        content.check_message(message)
        send_at, timezone = _resolve_send_time(view, body, message)
        draft = Campaign(
            id=new_id(view.now), tenant_id=view.caller.tenant_id, plan=message, state=CampaignState.PENDING,
            send_at=send_at, timezone=timezone, created_at=view.now, updated_at=view.now,
        )  # fmt: skip
        preview: dict[str, Any] = {
            "problem": None, "timezone": timezone, "request": content.preview_request(draft, view.now), "runs": None,
            "starts_now": form.get("when") == "now", "at": None if message.local_time else send_at,
            "zones": [], "excluded": [],
        }  # fmt: skip
    except TimebellError as error:
        return {"problem": to_problem(error)}
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
    if preview["runs"] is None:
        preview["zones"], preview["excluded"] = _plan_timetable(draft, count["zones"], view.now)
    return preview


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
