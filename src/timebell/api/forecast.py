"""`/forecast`: number of due jobs per future minute, with peaks, and the next runs of each schedule."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from itertools import islice, pairwise
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.route import ApiRoute, Context, RequestContext, read_route
from timebell.api.schemas import Instant, Limit, ResponseBody, format_utc, json_response, parse_timestamp
from timebell.errors import InvalidInput
from timebell.model.decide import upcoming
from timebell.model.schedule import Schedule
from timebell.store.audit import overview
from timebell.store.schedules import forecast as rows

MAX_RANGE = timedelta(days=7)
DEFAULT_RANGE = timedelta(hours=24)
MAX_OCCURRENCES = 200_000
MAX_SCANNED_JOBS = 1_000_000
JOBS_SPAN = timedelta(hours=4)
CONCURRENT_SPANS = 2
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
    (names, has_all_runs), (jobs, counted_until) = await asyncio.gather(
        _list_runs(ctx, start, end), _count_jobs(ctx, start, end)
    )
    total = sum(map(len, names.values())) + jobs.total()
    peak_size = max(MIN_PEAK_SIZE, PEAK_FACTOR * total / max(1.0, (end - start) / MINUTE))
    return json_response({
        "from": format_utc(start), "to": format_utc(end), "total": total,
        "complete": has_all_runs and counted_until >= end, "jobsCountedUntil": format_utc(counted_until),
        "minutes": _render_minutes(names, jobs, peak_size),
    })  # fmt: skip


async def _list_runs(ctx: RequestContext, start: datetime, end: datetime) -> tuple[dict[datetime, list[str]], bool]:
    """Return the names of the schedules that run in each minute, one for each run, and whether these are all."""
    names: dict[datetime, list[str]] = {}
    remaining, after = MAX_OCCURRENCES, None
    while start < end:
        schedules, after = await ctx.run(rows.list_firing_before, ctx.tenant_id, end, after)
        # Evaluating recurrences is CPU-bound, so do it off the event loop, one page at a time.
        remaining -= await asyncio.to_thread(_add_runs, names, schedules, start, end, remaining + 1)
        if after is None or remaining < 0:
            break
    return names, remaining >= 0


def _add_runs(
    names: dict[datetime, list[str]], schedules: Iterable[Schedule], start: datetime, end: datetime, limit: int
) -> int:
    """Add up to `limit` runs to the names of their minutes; return how many."""
    runs = ((at, schedule.name) for schedule in schedules for at in upcoming(schedule, start, end))
    count = 0
    for at, name in islice(runs, limit):
        names.setdefault(at.replace(second=0, microsecond=0), []).append(name)
        count += 1
    return count


async def _count_jobs(ctx: RequestContext, start: datetime, end: datetime) -> tuple[Counter[datetime], datetime]:
    """Count the pending jobs of each minute, and return until when they were counted.

    Each span is an operation of its own: a server counts several at the same time, and on SQLite, whose operations
    run one after another, claims do not wait for all of them.
    """
    counts: Counter[datetime] = Counter()
    scanned = 0
    while start < end and scanned < MAX_SCANNED_JOBS:
        edges = [min(start + n * JOBS_SPAN, end) for n in range(CONCURRENT_SPANS + 1)]
        spans = await asyncio.gather(*(
            ctx.run(rows.count_pending_by_minute, ctx.tenant_id, since, until, MAX_SCANNED_JOBS - scanned)
            for since, until in pairwise(edges) if since < until
        ))  # fmt: skip
        for span in spans:
            counts.update(span.counts)
            scanned += span.scanned
        start = edges[-1]
    return counts, start


def _render_minutes(
    names: Mapping[datetime, list[str]], jobs: Mapping[datetime, int], peak_size: float
) -> list[dict[str, Any]]:
    rendered = []
    for at in sorted(names.keys() | jobs.keys()):
        runs, due = names.get(at, []), jobs.get(at, 0)
        is_peak = len(runs) + due >= peak_size
        rendered.append({
            "at": format_utc(at), "schedules": len(runs), "jobs": due, "peak": is_peak,
            "names": [name for name, _ in Counter(runs).most_common(MAX_PEAK_NAMES)] if is_peak else [],
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
