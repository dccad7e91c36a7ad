"""`/forecast`: how much fires in each minute to come, and where it comes all at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.route import Guarded, Let, reads
from timebell.api.schemas import Instant, Shown, answer, aware, utc
from timebell.errors import InvalidInput
from timebell.model.decide import upcoming
from timebell.model.schedule import Schedule
from timebell.store.schedules import forecast as rows

LONGEST = timedelta(days=7)
AHEAD = timedelta(hours=24)
MOST_FIRES = 200_000
MINUTE = timedelta(minutes=1)
HERD, ABOVE = 10, 5  # a herd has so many in its minute, and so many times what an average minute has
NAMED = 5
routes = APIRouter(route_class=Guarded, tags=["forecast"])
At = Annotated[str | None, Query(max_length=64)]


class Minute(Shown):
    """What is due in a minute."""

    at: Instant
    schedules: Annotated[int, Field(description="Occurrences to come.")]
    jobs: Annotated[int, Field(description="Jobs that are there already.")]
    herd: Annotated[
        bool, Field(description=f"At least {HERD}, and {ABOVE} times what an average minute of the range has.")
    ]
    names: Annotated[list[str], Field(description=f"Of a herd, up to {NAMED} schedules with the most.")]


class Forecast(Shown):
    """Minutes in which anything is due. `complete` is false when there was too much to count: then it ends early."""

    from_: Annotated[Instant, Field(alias="from")]
    to: Instant
    total: int
    complete: bool
    minutes: list[Minute]


@routes.get("/forecast", response_model=Forecast, **reads())
async def get_forecast(let: Let, from_: Annotated[At, Query(alias="from")] = None, to: At = None) -> Response:
    """The load of each minute: from now for a day, or as given; 7 days at most. Pauses and overrides count, fixed
    delays by their next run alone."""
    start = let.now if from_ is None else aware(from_, "from")
    end = start + AHEAD if to is None else aware(to, "to")
    if not start < end <= start + LONGEST:
        raise InvalidInput(
            "The forecast goes from one instant to a later one, 7 days at most.", code="INVALID_RANGE",
            fix="Give from and to closer together.",
        )  # fmt: skip
    start = max(start, let.now)
    fires: Counter[datetime] = Counter()
    who: dict[datetime, Counter[str]] = {}
    complete, after, more = True, None, start < end
    while complete and more:
        found, after = await let.run(rows.firing, let.tenant_id, end, after)
        more = after is not None
        # Off the event loop, a page at a time: rules are worked out in Python.
        left = MOST_FIRES - fires.total()
        complete = await asyncio.to_thread(_count, found, start, end, left, fires, who)
    jobs: dict[datetime, int] = await let.run(rows.pending, let.tenant_id, start, end) if start < end else {}
    return answer({
        "from": utc(start), "to": utc(end), "total": fires.total() + sum(jobs.values()), "complete": complete,
        "minutes": _minutes(fires, jobs, who, (end - start) / MINUTE),
    })  # fmt: skip


def _count(
    found: Iterable[Schedule], start: datetime, end: datetime, left: int,
    fires: Counter[datetime], who: dict[datetime, Counter[str]],
) -> bool:  # fmt: skip
    """Count the occurrences of these schedules by minute; whether there were at most `left`."""
    for schedule in found:
        for at in upcoming(schedule, start, end):
            minute = at.replace(second=0, microsecond=0)
            fires[minute] += 1
            who.setdefault(minute, Counter())[schedule.name] += 1
            left -= 1
            if left < 0:
                return False
    return True


def _minutes(
    fires: Counter[datetime], jobs: dict[datetime, int], who: dict[datetime, Counter[str]], minutes: float
) -> list[dict[str, Any]]:
    total = fires.total() + sum(jobs.values())
    least = max(HERD, ABOVE * total / max(1.0, minutes))
    shown = []
    for at in sorted({*fires, *jobs}):
        herd = fires[at] + jobs.get(at, 0) >= least
        names = [name for name, _ in who.get(at, Counter()).most_common(NAMED)] if herd else []
        shown.append({
            "at": utc(at), "schedules": fires[at], "jobs": jobs.get(at, 0), "herd": herd, "names": names,
        })  # fmt: skip
    return shown
