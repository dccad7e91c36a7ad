"""`/forecast`: number of due jobs per future minute, with peaks, and the next runs of each schedule."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.route import ApiRoute, Context, read_route
from timebell.api.schemas import Instant, Limit, ResponseBody, format_utc, json_response, parse_timestamp
from timebell.errors import InvalidInput
from timebell.model.decide import upcoming
from timebell.model.schedule import Schedule
from timebell.store.audit import overview
from timebell.store.schedules import forecast as rows

MAX_RANGE = timedelta(days=7)
DEFAULT_RANGE = timedelta(hours=24)
MAX_OCCURRENCES = 200_000
MINUTE = timedelta(minutes=1)
MIN_PEAK_SIZE, PEAK_FACTOR = 10, 5  # minimum size, and minimum multiple of the average minute
MAX_PEAK_NAMES = 5
MAX_RUNS_PER_SCHEDULE = 1_500
routes = APIRouter(route_class=ApiRoute, tags=["forecast"])


class Minute(ResponseBody):
    """Load of one minute."""

    at: Instant
    schedules: Annotated[int, Field(description="Future occurrences of schedules.")]
    jobs: Annotated[int, Field(description="Jobs that already exist, except held ones and those of paused queues.")]
    peak: Annotated[
        bool,
        Field(description=f"Peak: at least {MIN_PEAK_SIZE}, and {PEAK_FACTOR} times the average minute of the range."),
    ]
    names: Annotated[
        list[str], Field(description=f"For peaks, names of up to {MAX_PEAK_NAMES} schedules with the most occurrences.")
    ]


class Forecast(ResponseBody):
    """Minutes with load. `complete` is false if there were too many occurrences or jobs to count all of them."""

    from_: Annotated[Instant, Field(alias="from")]
    to: Instant
    total: int
    complete: bool
    jobs_counted_until: Annotated[
        Instant,
        Field(description="Existing jobs are counted until this time: about a million, or the end of the range."),
    ]
    minutes: list[Minute]


@routes.get("/forecast", response_model=Forecast, **read_route(report=True))
async def get_forecast(
    ctx: Context,
    from_: Annotated[Instant | None, Query(alias="from")] = None,
    to: Annotated[Instant | None, Query()] = None,
) -> Response:
    """Forecast the load per minute, by default for the next 24 hours, and for at most 7 days.

    Pauses and overrides are respected. A schedule with a fixed delay contributes only its next run.
    """
    start = ctx.now if from_ is None else parse_timestamp(from_, "from")
    end = start + DEFAULT_RANGE if to is None else parse_timestamp(to, "to")
    if not start < end <= start + MAX_RANGE:
        raise InvalidInput(
            "The forecast range must be positive and at most 7 days.", code="INVALID_RANGE",
            fix="Specify from before to, at most 7 days apart.",
        )  # fmt: skip
    start = max(start, ctx.now)
    occurrences: Counter[datetime] = Counter()
    names_by_minute: dict[datetime, Counter[str]] = {}
    complete, after, has_more = True, None, start < end
    while complete and has_more:
        schedules, after = await ctx.run(rows.list_firing_before, ctx.tenant_id, end, after)
        has_more = after is not None
        # Evaluating recurrences is CPU-bound, so do it off the event loop, one page at a time.
        remaining = MAX_OCCURRENCES - occurrences.total()
        complete = await asyncio.to_thread(
            _count_occurrences, schedules, start, end, remaining, occurrences, names_by_minute
        )
    pending: rows.PendingByMinute = await ctx.run(rows.count_pending_by_minute, ctx.tenant_id, start, end)
    jobs = pending.counts
    return json_response({
        "from": format_utc(start), "to": format_utc(end), "total": occurrences.total() + sum(jobs.values()),
        "complete": complete and pending.counted_until >= end, "jobsCountedUntil": format_utc(pending.counted_until),
        "minutes": _render_minutes(occurrences, jobs, names_by_minute, (end - start) / MINUTE),
    })  # fmt: skip


def _count_occurrences(
    schedules: Iterable[Schedule], start: datetime, end: datetime, remaining: int,
    occurrences: Counter[datetime], names_by_minute: dict[datetime, Counter[str]],
) -> bool:  # fmt: skip
    """Count occurrences by minute; return False if there are more than `remaining`."""
    for schedule in schedules:
        for at in upcoming(schedule, start, end):
            minute = at.replace(second=0, microsecond=0)
            occurrences[minute] += 1
            names_by_minute.setdefault(minute, Counter())[schedule.name] += 1
            remaining -= 1
            if remaining < 0:
                return False
    return True


def _render_minutes(
    occurrences: Counter[datetime],
    jobs: Mapping[datetime, int],
    names_by_minute: dict[datetime, Counter[str]],
    minutes: float,
) -> list[dict[str, Any]]:
    total = occurrences.total() + sum(jobs.values())
    peak_size = max(MIN_PEAK_SIZE, PEAK_FACTOR * total / max(1.0, minutes))
    rendered = []
    for at in sorted({*occurrences, *jobs}):
        is_peak = occurrences[at] + jobs.get(at, 0) >= peak_size
        names = [name for name, _ in names_by_minute.get(at, Counter()).most_common(MAX_PEAK_NAMES)] if is_peak else []
        rendered.append({
            "at": format_utc(at), "schedules": occurrences[at], "jobs": jobs.get(at, 0), "peak": is_peak,
            "names": names,
        })  # fmt: skip
    return rendered


class UpcomingSchedule(ResponseBody):
    """Next runs of one schedule within a range: the first and last time, and their number."""

    schedule_id: str
    name: str
    topic: str
    timezone: str
    next_at: Instant
    last_at: Instant
    runs: Annotated[int, Field(description=f"Counted up to {MAX_RUNS_PER_SCHEDULE:,}.")]


class Upcoming(ResponseBody):
    """Schedules that run within a range, soonest first. `complete` is false if there are more than `limit`."""

    from_: Annotated[Instant, Field(alias="from")]
    to: Instant
    items: list[UpcomingSchedule]
    complete: bool


@routes.get("/forecast/upcoming", response_model=Upcoming, **read_route())
async def list_upcoming(ctx: Context, to: Annotated[Instant | None, Query()] = None, limit: Limit = 50) -> Response:
    """List the schedules that run from now until `to`, by default for 24 hours, and for at most 7 days.

    Pauses and overrides are respected. A schedule with a fixed delay contributes only its next run.
    """
    end = ctx.now + DEFAULT_RANGE if to is None else parse_timestamp(to, "to")
    if not ctx.now < end <= ctx.now + MAX_RANGE:
        raise InvalidInput(
            "to must be in the future, at most 7 days from now.", code="INVALID_RANGE", fix="Specify a later time."
        )
    schedules: list[Schedule] = await ctx.run(overview.list_next_to_fire, ctx.tenant_id, end, limit + 1)
    items = await asyncio.to_thread(_summarize_runs, schedules[:limit], ctx.now, end)
    return json_response({
        "from": format_utc(ctx.now), "to": format_utc(end), "items": items, "complete": len(schedules) <= limit,
    })  # fmt: skip


def _summarize_runs(schedules: Iterable[Schedule], start: datetime, end: datetime) -> list[dict[str, Any]]:
    summaries = []
    for schedule in schedules:
        times = list(islice(upcoming(schedule, start, end), MAX_RUNS_PER_SCHEDULE))
        if times:
            summaries.append({
                "scheduleId": schedule.id, "name": schedule.name, "topic": schedule.topic,
                "timezone": schedule.timezone, "nextAt": format_utc(times[0]), "lastAt": format_utc(times[-1]),
                "runs": len(times),
            })  # fmt: skip
    return sorted(summaries, key=lambda summary: (str(summary["nextAt"]), str(summary["name"])))
