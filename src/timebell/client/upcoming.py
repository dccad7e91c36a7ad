"""What is to come of many schedules, merged by time and page by page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from heapq import merge
from itertools import islice

from timebell.client.validation import uuid_of
from timebell.errors import InvalidInput
from timebell.model.decide import upcoming
from timebell.model.page import Page
from timebell.model.schedule import Schedule, Upcoming
from timebell.recurrence.instants import MAX, from_us, to_us

Place = tuple[datetime, str]


def page_of(
    schedules: Sequence[Schedule], start: datetime, end: datetime, limit: int, after: Place | None
) -> Page[Upcoming]:
    """Up to `limit` occurrences of these schedules in [start, end), soonest first, and those after a place only."""
    if after is not None:
        start = max(start, after[0])
    following = merge(*(_of(schedule, start, end) for schedule in schedules))
    left = (one for one in following if after is None or (one.at, one.schedule_id) > after)
    found = list(islice(left, limit + 1))
    last = found[limit - 1] if len(found) > limit else None
    return Page(found[:limit], None if last is None else f"{to_us(last.at)}.{last.schedule_id}")


def _of(schedule: Schedule, start: datetime, end: datetime) -> Iterator[Upcoming]:
    for at in upcoming(schedule, start, end):
        yield Upcoming(at, schedule.id, schedule.name, schedule.topic, schedule.timezone)


def read_cursor(cursor: str | None) -> Place | None:
    """The place after which a listing goes on. Raises InvalidInput (INVALID_CURSOR)."""
    if cursor is None:
        return None
    instant, _, id_ = cursor.partition(".") if isinstance(cursor, str) else ("", "", "")
    known = uuid_of(id_)
    if known is None or not (instant.isascii() and instant.isdigit() and len(instant) < 20 and int(instant) < MAX):
        raise InvalidInput(
            f"cursor {cursor!r:.60} is not one of ours.", code="INVALID_CURSOR", fix="Use next_cursor as it came."
        )
    return from_us(int(instant)), known
