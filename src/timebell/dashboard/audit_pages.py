"""Pages of the audit, the explanation of one occurrence, and the forecast."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

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
    start, length = to_datetime(report["from"]), timedelta(hours=hours)
    minutes = [Minute(to_datetime(one["at"]), one["schedules"] + one["jobs"], one["peak"]) for one in report["minutes"]]
    return view.render(
        "forecast", report=report, hours=hours, bars=sum_spans(minutes, start, length / MAX_BARS),
        spans=sum_spans(minutes, start, length / TABLE_SPANS), ticks=[start + n * length / 4 for n in range(5)],
        peaks=[minute for minute in report["minutes"] if minute["peak"]][:20],
    )  # fmt: skip


class Minute(NamedTuple):
    """Load of one minute."""

    at: datetime
    runs: int
    is_peak: bool


@dataclass(slots=True)
class LoadSpan:
    """Load of the n-th of equal spans."""

    n: int
    start: datetime
    runs: int
    largest: Minute


def sum_spans(minutes: Iterable[Minute], start: datetime, length: timedelta) -> list[LoadSpan]:
    """Divide minutes, which are in order, into spans from `start`; return those with any load."""
    spans: list[LoadSpan] = []
    for minute in minutes:
        n = max(0, (minute.at - start) // length)  # the first minute may have begun before `start`
        if not spans or spans[-1].n != n:
            spans.append(LoadSpan(n, start + n * length, minute.runs, minute))
            continue
        span = spans[-1]
        span.runs += minute.runs
        if minute.runs > span.largest.runs:
            span.largest = minute
    return spans
