"""Pages of the audit, the explanation of one occurrence, and the forecast."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

from fastapi import APIRouter, Response

from timebell.api.schemas import format_utc
from timebell.dashboard.api_client import quote_segment
from timebell.dashboard.rendering import to_datetime
from timebell.dashboard.time_range import parse_local, read_time_range
from timebell.dashboard.views import CurrentView, PageRoute
from timebell.errors import InvalidInput
from timebell.formatting import to_local

MAX_AUDIT = timedelta(days=30)
MAX_BARS = 240
TABLE_SPANS = 24
routes = APIRouter(route_class=PageRoute)


@routes.get("/ui/audit")
async def audit(view: CurrentView, schedule: str = "") -> Response:
    """Compare expected with recorded occurrences of a period (default: the last day)."""
    time_range = read_time_range(view, "24h")
    end = format_utc(time_range.end or view.now.replace(microsecond=0))
    problem, report = time_range.problem, None
    if problem is None:
        response = await view.call_api(
            "GET", "/audit", from_=format_utc(time_range.start) or format_utc(view.now - MAX_AUDIT), to=end,
            schedule=schedule,
        )  # fmt: skip
        problem, report = (response.body, None) if response.is_error else (None, response.body)
    return view.render(
        "audit", 200 if problem is None else 422, time_range=time_range, schedule=schedule, problem=problem,
        report=report,
    )  # fmt: skip


@routes.get("/ui/schedules/{id}/why")
async def why(id: str, view: CurrentView, at: str = "") -> Response:
    """Explain the outcome of one occurrence. `at` is RFC 3339, or a local time in the zone of the schedule."""
    schedule = await view.get(f"/schedules/{quote_segment(id)}")
    instant, local_at = at, ""
    with suppress(InvalidInput):  # the API explains what is wrong
        parsed = parse_local(at, schedule["timezone"], "at")
        instant, local_at = str(format_utc(parsed)), f"{to_local(parsed, schedule['timezone']):%Y-%m-%dT%H:%M:%S}"
    response = await view.call_api("GET", f"/schedules/{quote_segment(id)}/why", at=instant)
    explanation = None if response.is_error else response.body
    return view.render(
        "why", 200 if explanation else response.status, schedule=schedule, local_at=local_at, explanation=explanation,
        problem=None if explanation else response.body,
    )  # fmt: skip


@routes.get("/ui/forecast")
async def forecast(view: CurrentView, hours: int = 24) -> Response:
    """Show the planned load per minute, with peaks."""
    hours = min(168, max(1, hours))
    report = await view.get("/forecast", to=format_utc(view.now + timedelta(hours=hours)))
    start, quarter = to_datetime(report["from"]), timedelta(hours=hours) / 4
    return view.render(
        "forecast", report=report, hours=hours, bars=chart_bars(report, hours), spans=table_spans(report, hours),
        ticks=[start + n * quarter for n in range(5)],
        peaks=[minute for minute in report["minutes"] if minute["peak"]][:20],
    )  # fmt: skip


def chart_bars(report: dict[str, Any], hours: int) -> list[dict[str, Any]]:
    """Return the bars of the chart: the largest minute of each of MAX_BARS equal spans that has any load."""
    span = timedelta(hours=hours) / MAX_BARS
    start = to_datetime(report["from"])
    bars: dict[int, dict[str, Any]] = {}
    for minute in report["minutes"]:
        n, count = int((to_datetime(minute["at"]) - start) / span), minute["schedules"] + minute["jobs"]
        bar = bars.get(n)
        if bar is None or count > bar["count"]:
            bars[n] = {"x": max(0, n), "count": count, "is_peak": minute["peak"], "at": minute["at"]}
    return [bars[n] for n in sorted(bars) if n < MAX_BARS]


def table_spans(report: dict[str, Any], hours: int) -> list[dict[str, Any]]:
    """Return the rows of the table: the load and largest minute of each of TABLE_SPANS equal spans that has any."""
    start, length = to_datetime(report["from"]), timedelta(hours=hours) / TABLE_SPANS
    spans: dict[int, dict[str, Any]] = {}
    for minute in report["minutes"]:
        n, count = max(0, int((to_datetime(minute["at"]) - start) / length)), minute["schedules"] + minute["jobs"]
        span = spans.setdefault(n, {"from": start + n * length, "count": 0, "max_count": 0, "max_at": minute["at"]})
        span["count"] += count
        if count > span["max_count"]:
            span |= {"max_count": count, "max_at": minute["at"]}
    return [spans[n] for n in sorted(spans)]
