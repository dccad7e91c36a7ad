"""A recurrence rule compiled for one zone: from DTSTART to its end, with RDATE and EXDATE applied."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from heapq import merge
from typing import NoReturn

from timebell.errors import InvalidRecurrence
from timebell.recurrence.instants import DAY_S, MAX_US, SECOND_US, format_instant, local_from_us, local_to_us, to_us
from timebell.recurrence.rrule.by_day import SetposLocalTimes, YearDays, setpos_indexes
from timebell.recurrence.rrule.elapsed import SteppedRule
from timebell.recurrence.rrule.parser import DAILY, HORIZON_S, HOURLY, MONTHLY, WEEKLY, YEARLY, Parts, refuse
from timebell.recurrence.rules.local_times import (
    DailyLocalTimes,
    ListedTimesOfDay,
    LocalTimeRule,
    LocalTimes,
    TimesOfDay,
)
from timebell.recurrence.rules.rule import Fold, Gap, Rule, stop_after_runs
from timebell.recurrence.zones import Zone


class RRuleRule(Rule):
    """The instants of a base rule from DTSTART to its end, with RDATEs added and EXDATEs removed."""

    def __init__(self, base: Rule, first: int, stop: int, local: int, added_local_times: Iterable[int]) -> None:
        self.zone, self.gap, self.fold = base.zone, base.gap, base.fold
        self.fixed = isinstance(base, LocalTimeRule)
        self._base, self._first, self._stop = base, first, stop
        self._local_start = local
        self._added_local_times = sorted(added_local_times)
        self._added: list[int] = []
        self._removed: list[int] = []
        self._removed_set: frozenset[int] = frozenset()
        self._removed_local_times: frozenset[int] = frozenset()

    def apply_dates(self, added: set[int], removed: set[int], removed_local_times: set[int]) -> None:
        """Add instants that the base rule does not have, and remove instants and local times."""
        self._added = sorted(at for at in added - removed if 0 <= at < MAX_US and not self._base_has(at))
        self._removed = sorted(at for at in removed if self._base_has(at))
        self._removed_set = frozenset(self._removed)
        self._removed_local_times = frozenset(removed_local_times)

    def after(self, instant: int) -> int | None:
        match = self._base.after(instant if instant >= self._first else self._first - 1)
        while match in self._removed_set:
            match = self._base.after(match)
        if match is not None and match >= self._stop:
            match = None
        if self._added and (i := bisect_right(self._added, instant)) < len(self._added):
            return self._added[i] if match is None else min(match, self._added[i])
        return match

    def before(self, instant: int) -> int | None:
        match = self._base.before(min(instant, self._stop)) if instant > self._first else None
        while match in self._removed_set:
            match = self._base.before(match)
        if match is not None and match < self._first:
            match = None
        if self._added and (i := bisect_left(self._added, instant)):
            return self._added[i - 1] if match is None else max(match, self._added[i - 1])
        return match

    def count(self, start: int, end: int) -> int:
        low, high = max(start, self._first), min(end, self._stop)
        total = self._base.count(low, high) if low < high else 0
        total -= max(0, bisect_left(self._removed, end) - bisect_left(self._removed, start))
        return total + max(0, bisect_left(self._added, end) - bisect_left(self._added, start))

    def iter_local_times(self, low: int, high: int) -> Iterator[int]:
        stop = self._stop - 1
        until = stop + (self.zone.offset(stop // SECOND_US) + DAY_S) * SECOND_US
        base_times = self._base.iter_local_times(max(low, self._local_start), min(high, until))
        added_times = iter(
            self._added_local_times[
                bisect_left(self._added_local_times, low) : bisect_left(self._added_local_times, high)
            ]
        )
        previous = None
        for local in merge(base_times, added_times):
            if local != previous and local not in self._removed_local_times:
                yield local
            previous = local

    def _base_has(self, instant: int) -> bool:
        return self._first <= instant < self._stop and self._base.count(instant, instant + 1) > 0


def fill_from_dtstart(parts: Parts, local: int) -> Parts:
    """Fill missing parts from DTSTART, a local time in seconds (RFC 5545, 3.3.10)."""
    dtstart = local_from_us(local * SECOND_US)
    if not (parts.weeknos or parts.yeardays or parts.monthdays or parts.days):
        if parts.freq == YEARLY:
            parts = parts._replace(months=parts.months or (dtstart.month,), monthdays=(dtstart.day,))
        elif parts.freq == MONTHLY:
            parts = parts._replace(monthdays=(dtstart.day,))
    if not parts.days and (parts.freq == WEEKLY or (parts.weeknos and not parts.yeardays and not parts.monthdays)):
        parts = parts._replace(days=((0, dtstart.weekday()),))
    return parts._replace(
        hours=parts.hours or (dtstart.hour,),
        minutes=parts.minutes or (dtstart.minute,),
        seconds=parts.seconds or (dtstart.second,),
    )


@lru_cache(maxsize=1024)
def build_local_times(parts: Parts, local: int) -> LocalTimes:
    """Build the local times of a DAILY or coarser rule whose DTSTART is `local` (seconds).

    They include earlier local times in the same phase; the caller limits them to DTSTART and later.
    """
    parts = fill_from_dtstart(parts, local)
    times = TimesOfDay(*(sum(1 << n for n in numbers) for numbers in (parts.hours, parts.minutes, parts.seconds)))
    day = local // DAY_S
    if parts.setpos and parts.freq == DAILY:
        indexes = setpos_indexes(parts.setpos, times.per_day)
        if not indexes:
            refuse_never_fires(f"BYSETPOS selects none of {times.per_day} times a day")
        return DailyLocalTimes(YearDays(parts, day), ListedTimesOfDay(tuple(map(times.at, indexes))))
    if parts.setpos and times.per_day > 1:
        return SetposLocalTimes(parts, YearDays(parts, day), times)
    return DailyLocalTimes(YearDays(parts, day, setpos=True), times)


@lru_cache(maxsize=256)
def build_rule(
    parts: Parts,
    start: datetime,
    exdates: tuple[datetime, ...],
    rdates: tuple[datetime, ...],
    gap: Gap,
    fold: Fold,
    zone: Zone,
) -> RRuleRule:
    """Build the rule of `parts` from DTSTART (`start`) on. Naive datetimes are local times.

    Raises InvalidRecurrence (INVALID_RRULE; NEVER_FIRES without an instant in the 100 years after `start`).
    """

    def instants(moment: datetime) -> list[int]:
        """Resolve one datetime to its instants in microseconds, according to `gap` and `fold`."""
        if moment.tzinfo is not None:
            return [to_us(moment)]
        return [second * SECOND_US for second in _resolve_local(zone, local_to_us(moment) // SECOND_US, gap, fold)]

    aware = start.tzinfo is not None
    local = local_to_us(zone.local(start).replace(tzinfo=None) if aware else start) // SECOND_US
    # With gap="skip", a DTSTART in a gap has no instant; the rule then starts at the end of the gap.
    first = (instants(start) or [(zone.gap_end(local) or 0) * SECOND_US])[0]
    base: Rule
    dtstart_added = False
    if parts.freq >= HOURLY:
        base = SteppedRule(parts, first // SECOND_US, zone)
    else:
        local_times = build_local_times(parts._replace(max_count=None, until=None), local)
        base = LocalTimeRule(zone, local_times, gap=gap, fold=fold, fire_on_missing_days=True)
        # An aware DTSTART in the second pass of a fold is that instant, even if `fold` selects the first pass.
        dtstart_added = aware and local_times.next(local) == local and not base.count(first, first + 1)
    begin = first if dtstart_added else base.after(first - 1)
    if begin is None or begin - first > HORIZON_S * SECOND_US:
        _refuse_contradiction(parts, local)
    stop = _stop_instant(base, first, parts, zone, dtstart_added)
    if begin >= stop:
        refuse_never_fires("UNTIL is before the first instant")
    rule = RRuleRule(
        base, first, stop, local * SECOND_US, (local_to_us(value) for value in rdates if value.tzinfo is None)
    )
    if exdates or rdates or dtstart_added:
        added, removed = ({at for value in dates for at in instants(value)} for dates in (rdates, exdates))
        removed_local_times = {local_to_us(value) for value in exdates if value.tzinfo is None}
        rule.apply_dates(added | ({first} if dtstart_added else set()), removed, removed_local_times)
    return rule


def _stop_instant(base: Rule, first: int, parts: Parts, zone: Zone, dtstart_added: bool) -> int:
    """Return the instant just after the last instant that COUNT or UNTIL allows."""
    if parts.max_count is not None:
        return (
            stop_after_runs(base, first, MAX_US, parts.max_count - dtstart_added)
            if parts.max_count > dtstart_added
            else first + 1
        )
    if parts.until is None:
        return MAX_US
    if parts.until.tzinfo is not None:
        stop = to_us(parts.until)
    else:
        local = local_to_us(parts.until) // SECOND_US
        seconds = zone.instants(local)  # in a fold, the later one
        stop = (seconds[-1] if seconds else zone.resolve(local)[0]) * SECOND_US
    if stop < first:
        refuse(f"UNTIL {format_instant(parts.until)} is before DTSTART.", "Use a later UNTIL or an earlier DTSTART.")
    return min(stop + SECOND_US, MAX_US)


def _resolve_local(zone: Zone, local: int, gap: Gap, fold: Fold) -> tuple[int, ...]:
    seconds = zone.instants(local)
    if seconds:
        return seconds[:1] if fold == "first" else seconds[-1:] if fold == "last" else seconds
    if gap == "skip":
        return ()
    return (zone.resolve(local)[0] if gap == "shift" else zone.gap_end(local) or 0,)


def _refuse_contradiction(parts: Parts, local: int) -> NoReturn:
    """Raise InvalidRecurrence (NEVER_FIRES) that mentions a part without which the rule would have instants, if any."""
    reason = "nothing matches all of its parts"
    if parts.freq < HOURLY:
        rule = parts._replace(max_count=None, until=None)
        reduced_rules = {
            "BYSETPOS": rule._replace(setpos=()),
            "BYDAY": rule._replace(days=()),
            "BYMONTHDAY": rule._replace(monthdays=()),
            "BYYEARDAY": rule._replace(yeardays=()),
            "BYWEEKNO": rule._replace(weeknos=()),
            "BYMONTH": rule._replace(months=()),
            "INTERVAL": rule._replace(interval=1),
        }
        culprits = (
            name
            for name, reduced in reduced_rules.items()
            if reduced != rule and build_local_times(reduced, local).next(local) is not None
        )
        reason = next((f"{name} excludes everything that the other parts allow" for name in culprits), reason)
    elif YearDays(parts, local // DAY_S).next(local // DAY_S) is None:
        reason = "no date matches all of its parts"
    refuse_never_fires(f"from DTSTART {local_from_us(local * SECOND_US).isoformat()} on, {reason}")


def refuse_never_fires(reason: str) -> NoReturn:
    """Raise InvalidRecurrence with code NEVER_FIRES."""
    raise InvalidRecurrence(
        f"The rule has no instant within 100 years: {reason}.", code="NEVER_FIRES", fix="Change the rule or DTSTART."
    )
