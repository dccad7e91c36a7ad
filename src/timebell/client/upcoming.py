"""Upcoming occurrences of many schedules, merged by time and paginated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from heapq import merge
from itertools import islice

from timebell.client.validation import parse_uuid
from timebell.errors import InvalidInput
from timebell.model.decide import upcoming
from timebell.model.page import Page
from timebell.model.schedule import Schedule, Upcoming
from timebell.recurrence.instants import MAX_US, from_us, to_us

Position = tuple[datetime, str]


def merge_page(
    schedules: Sequence[Schedule], start: datetime, end: datetime, limit: int, after: Position | None
) -> Page[Upcoming]:
    """Return up to `limit` occurrences of these schedules in [start, end), soonest first, after position `after`."""
    if after is not None:
        start = max(start, after[0])
    following = merge(*(_occurrences(schedule, start, end) for schedule in schedules))
    remaining = (item for item in following if after is None or (item.at, item.schedule_id) > after)
    items = list(islice(remaining, limit + 1))
    last = items[limit - 1] if len(items) > limit else None
    return Page(items[:limit], None if last is None else f"{to_us(last.at)}.{last.schedule_id}")


def _occurrences(schedule: Schedule, start: datetime, end: datetime) -> Iterator[Upcoming]:
    for at in upcoming(schedule, start, end):
        yield Upcoming(at, schedule.id, schedule.name, schedule.topic, schedule.timezone)


def parse_cursor(cursor: str | None) -> Position | None:
    """Return the position in a cursor. Raises InvalidInput (INVALID_CURSOR)."""
    if cursor is None:
        return None
    instant, _, id_ = cursor.partition(".") if isinstance(cursor, str) else ("", "", "")
    schedule_id = parse_uuid(id_)
    if schedule_id is None or not (
        instant.isascii() and instant.isdigit() and len(instant) < 20 and int(instant) < MAX_US
    ):
        raise InvalidInput(
            f"cursor {cursor!r:.60} is not valid.",
            code="INVALID_CURSOR",
            fix="Use the next_cursor of the previous page unchanged.",
        )
    return from_us(int(instant)), schedule_id
