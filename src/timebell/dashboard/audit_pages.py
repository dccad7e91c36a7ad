"""Nothing missed, nothing doubled; why one occurrence went as it went; and what is to come, by the minute."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fastapi import APIRouter, Response

from timebell.api.schemas import utc
from timebell.dashboard.api_client import part
from timebell.dashboard.rendering import instant
from timebell.dashboard.views import Page, See

DAY = timedelta(days=1)
BARS = 240
SPANS = 24
routes = APIRouter(route_class=Page)


@routes.get("/ui/audit")
async def audit(view: See, from_: str = "", to: str = "", schedule: str = "") -> Response:
    """Compare what should have been with what was; and who changed what, for admins."""
    given = dict(view.request.query_params)
    start = given.get("from") or utc(view.now.replace(microsecond=0) - DAY) or ""
    end = given.get("to") or utc(view.now.replace(microsecond=0)) or ""
    answer = await view.ask("GET", "/audit", from_=start, to=end, schedule=schedule)
    log = await view.get("/audit-log", limit=30, cursor=given.get("cursor", "")) if view.may("admin") else None
    return view.page(
        "audit", 200 if not answer.refused else answer.status, start=start, end=end, schedule=schedule, log=log,
        problem=answer.body if answer.refused else None, found=None if answer.refused else answer.body,
    )  # fmt: skip


@routes.get("/ui/schedules/{id}/why")
async def why(id: str, view: See, at: str = "") -> Response:
    """The story of one occurrence."""
    one = await view.get(f"/schedules/{part(id)}")
    answer = await view.ask("GET", f"/schedules/{part(id)}/why", at=at)
    told = None if answer.refused else answer.body
    return view.page(
        "why", 200 if told else answer.status, one=one, at=at, told=told, problem=None if told else answer.body
    )


@routes.get("/ui/forecast")
async def forecast(view: See, hours: int = 24) -> Response:
    """The load of each minute to come, herds marked."""
    hours = min(168, max(1, hours))
    found = await view.get("/forecast", to=utc(view.now + timedelta(hours=hours)))
    start, quarter = instant(found["from"]), timedelta(hours=hours) / 4
    return view.page(
        "forecast", found=found, hours=hours, bars=bars(found, hours), spans=spans(found, hours),
        marks=[start + n * quarter for n in range(5)],
        herds=[minute for minute in found["minutes"] if minute["herd"]][:20],
    )  # fmt: skip


def bars(found: dict[str, Any], hours: int) -> list[dict[str, Any]]:
    """The minutes, the largest of each span that a bar has room for."""
    span = timedelta(hours=hours) / BARS
    start = instant(found["from"])
    tallest: dict[int, dict[str, Any]] = {}
    for minute in found["minutes"]:
        at, many = int((instant(minute["at"]) - start) / span), minute["schedules"] + minute["jobs"]
        known = tallest.get(at)
        if known is None or many > known["many"]:
            tallest[at] = {"x": max(0, at), "many": many, "herd": minute["herd"], "at": minute["at"]}
    return [tallest[at] for at in sorted(tallest) if at < BARS]


def spans(found: dict[str, Any], hours: int) -> list[dict[str, Any]]:
    """The same as a table: the fires of each of SPANS equal parts that has any, and its largest minute."""
    start, length = instant(found["from"]), timedelta(hours=hours) / SPANS
    parts: dict[int, dict[str, Any]] = {}
    for minute in found["minutes"]:
        n, many = max(0, int((instant(minute["at"]) - start) / length)), minute["schedules"] + minute["jobs"]
        one = parts.setdefault(n, {"from": start + n * length, "many": 0, "most": 0, "at": minute["at"]})
        one["many"] += many
        if many > one["most"]:
            one |= {"most": many, "at": minute["at"]}
    return [parts[n] for n in sorted(parts)]
