"""Making a campaign, with a preview of who gets it when, and of what a phone is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from timebell.campaigns import content
from timebell.client import datetimes
from timebell.dashboard.api_client import part
from timebell.dashboard.fields import default_zone, from_json, number, problem, sent, texts
from timebell.dashboard.overview_data import Now
from timebell.dashboard.views import Page, See, View
from timebell.errors import InvalidInput, TimebellError
from timebell.ids import new_id
from timebell.model.campaign import CampaignState, Throttle, timetable
from timebell.model.campaign_plan import OPTIONS, Campaign, Sending, zone_of
from timebell.recurrence.zone_names import names as zone_names

FIRES = 6
WHENS = {"at": "sendAt", "local": "localTime", "cron": "cronExpression"}
FRESH = {"when": "at", "at": "", "data": "", "filters": "", "chunkSize": "500", "chunkDelayMs": "2000"}
TEXTS = ("name", "title", "body", "timezone", "collapseKey", "expiresAt")
NUMBERS = ("ttl", "chunkSize", "maxRecipients", "approveAbove")
routes = APIRouter(route_class=Page)


@routes.get("/ui/new/campaign")
async def new(request: Request, view: See) -> Response:
    """An empty form, or what its preview button sent."""
    return await _shown(view, {"timezone": default_zone(request, view), **dict(request.query_params)}, None)


@routes.post("/ui/new/campaign")
async def create(view: See) -> Response:
    """Make it."""
    made = await sent(view, "/campaigns", body_of, _shown)
    if isinstance(made, Response):
        return made
    where = "schedules" if made["scheduleId"] == made["id"] else "campaigns"
    return view.back(f"/ui/{where}/{part(made['id'])}", "created")


@routes.get("/ui/new/campaign/preview")
async def preview(request: Request, view: See) -> Response:
    """What the campaign in the form would be."""
    return view.page("_campaign_preview", p=await previewed(view, dict(request.query_params)))


async def _shown(view: View, form: Mapping[str, str], wrong: Any, status: int = 200) -> Response:
    filled = {**FRESH, "timezone": "", **form}
    return view.page(
        "campaign_form", status, form=filled, problem=wrong, p=await previewed(view, filled),
        zones=sorted(zone_names()),
    )  # fmt: skip


def body_of(form: Mapping[str, str]) -> dict[str, Any]:
    """A form as the API takes it. Raises InvalidInput."""
    body: dict[str, Any] = texts(form, *TEXTS)
    body |= {name: found for name in NUMBERS if (found := number(name, form.get(name, ""))) is not None}
    when, at = form.get("when", "at"), form.get("at", "").strip()
    if when != "now":
        if when not in WHENS or not at:
            raise InvalidInput(
                "Nothing says when it is sent.", code="CAMPAIGN_INVALID", fix="Write it, e.g. 2027-01-01T09:00."
            )
        body[WHENS[when]] = at
    for name in ("data", "filters"):
        if (found := from_json(name, form.get(name, ""))) is not None:
            body[name] = found
    if form.get("marketing"):
        body["marketing"] = True
    delay = form.get("chunkDelayMs", "").strip()
    if delay:
        body["chunkDelayMs"] = delay if delay == "adaptive" else number("chunkDelayMs", delay)
    if quiet := texts(form, "quietStart", "quietEnd"):
        body["quietHours"] = {
            "start": quiet.get("quietStart", ""), "end": quiet.get("quietEnd", ""),
            "then": form.get("quietThen") or "wait",
        }  # fmt: skip
    if (size := number("canarySize", form.get("canarySize", ""))) is not None:
        rate = number("canaryRate", form.get("canaryRate", ""))
        body["canary"] = {"size": size, "maxErrorRate": 0.05 if rate is None else rate / 100}
    return body


async def previewed(view: View, form: Mapping[str, str]) -> dict[str, Any]:
    """Who gets it when, and the request; or a `problem`."""
    try:
        body = body_of(form)
        message = Sending.read({name: body[name] for name in OPTIONS if name in body})
        content.check(message)
        at, place = _when(view, body, message)
        draft = Campaign(
            id=new_id(view.now), tenant_id=view.caller.tenant_id, sending=message, state=CampaignState.PENDING,
            send_at=at, timezone=place, created_at=view.now, updated_at=view.now,
        )  # fmt: skip
        told: dict[str, Any] = {
            "problem": None, "timezone": place, "request": content.preview(draft, view.now), "fires": None,
            "now": form.get("when") == "now", "at": None if message.local else at, "zones": [], "left": [],
        }  # fmt: skip
    except TimebellError as unfit:
        return {"problem": problem(unfit)}
    if "cronExpression" in body:
        asked = {"name": "preview", "topic": "preview", "timezone": place, "cronExpression": body["cronExpression"]}
        fires = await view.ask("POST", "/schedules/preview", asked, count=FIRES)
        if fires.refused:
            return {"problem": fires.body}
        told["fires"] = fires.body["next"]
    count = await _audience(view, message)
    if "problem" in count:
        return count
    told["count"] = count["count"]
    if told["fires"] is None:
        told["zones"], told["left"] = _plan(draft, count["zones"], view.now)
    return told


def _when(view: View, body: Mapping[str, Any], message: Sending) -> tuple[datetime, str]:
    """The instant and its zone, as for the API. Raises InvalidInput, InThePast."""
    default = view.app.settings.default_timezone or "UTC"
    given = message.local if message.local is not None else body.get("sendAt")
    found = datetimes.read(given, body.get("timezone"), default if message.local or not given else None, view.now)
    return found.at, found.timezone


async def _audience(view: View, message: Sending) -> dict[str, Any]:
    """How many are meant, by zone, at most some seconds old; or a `problem`."""
    asked = {"filters": message.filters.json()}

    async def count() -> dict[str, Any]:
        answer = await view.ask("POST", "/audiences/count", asked)
        return {"problem": answer.body} if answer.refused else answer.body

    now: Now = view.request.app.state.now
    return await now.audience(view.caller.tenant_id, json.dumps(asked, sort_keys=True), count)


def _plan(draft: Campaign, counts: Mapping[str, int], now: datetime) -> tuple[list[Any], list[Any]]:
    """When each zone gets it, and who is left out."""
    message, audience = draft.sending, dict[Any, int]()
    for name, many in counts.items():
        place = zone_of((name or None) if message.by_zone else None, draft.timezone)
        audience[place] = audience.get(place, 0) + many
    throttle = Throttle(message.size) if message.delay is None else Throttle(message.size, message.delay)
    plan = timetable(
        audience, message.local or draft.send_at, now=now, quiet=message.quiet, throttle=throttle,
        until=message.expires_at,
    )  # fmt: skip
    left = [(zone, why.value, many) for (zone, why), many in plan.left_out.items()]
    return list(plan.per_zone()), left
