"""The rule of a list of dates and times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from datetime import datetime

from timebell.recurrence.instants import SECOND_US, local_to_us, to_us
from timebell.recurrence.rules.rule import Rule
from timebell.recurrence.zones import Zone


class DatesRule(Rule):
    """The instants of a list of datetimes in one zone."""

    def __init__(self, dates: tuple[datetime, ...], zone: Zone) -> None:
        self.zone = zone
        self._local_times = [local_to_us(value) for value in dates if value.tzinfo is None]
        instants = {to_us(value) for value in dates if value.tzinfo is not None}
        for local in self._local_times:
            second, fraction = divmod(local, SECOND_US)
            instants.add(zone.resolve(second)[0] * SECOND_US + fraction)
        self._instants = sorted(instants)

    def after(self, instant: int) -> int | None:
        i = bisect_right(self._instants, instant)
        return self._instants[i] if i < len(self._instants) else None

    def before(self, instant: int) -> int | None:
        i = bisect_left(self._instants, instant)
        return self._instants[i - 1] if i else None

    def count(self, start: int, end: int) -> int:
        return max(0, bisect_left(self._instants, end) - bisect_left(self._instants, start))

    def iter_local_times(self, low: int, high: int) -> Iterator[int]:
        return iter(self._local_times[bisect_left(self._local_times, low) : bisect_left(self._local_times, high)])
