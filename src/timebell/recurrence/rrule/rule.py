"""A recurrence rule in one zone: from DTSTART to its end, with the dates added and removed by hand."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from heapq import merge
from typing import NoReturn

from timebell.errors import InvalidRecurrence
from timebell.recurrence.core import Fold, Gap, Rule, stop_after
from timebell.recurrence.instants import DAY_S, MAX, SECOND, format_instant, from_wall_us, to_us, wall_us
from timebell.recurrence.local_times import DailyWalls, TimesList, TimesOfDay, WallRule, Walls
from timebell.recurrence.rrule.by_day import SetWalls, YearDays, chosen
from timebell.recurrence.rrule.elapsed import SteppedRule
from timebell.recurrence.rrule.parser import DAILY, HORIZON_S, HOURLY, MONTHLY, WEEKLY, YEARLY, Parts, refuse
from timebell.recurrence.zones import Zone


class RRuleRule(Rule):
    """The instants of a rule from its DTSTART to its end, and those added and removed by hand."""

    def __init__(self, base: Rule, first: int, stop: int, local: int, walls: Iterable[int]) -> None:
        self.zone, self.gap, self.fold = base.zone, base.gap, base.fold
        self.fixed = isinstance(base, WallRule)
        """Whether it names local times, rather than following real time."""
        self._base, self._first, self._stop = base, first, stop
        self._local = local
        self._walls = sorted(walls)
        self._added: list[int] = []
        self._removed: list[int] = []
        self._gone: frozenset[int] = frozenset()
        self._gone_walls: frozenset[int] = frozenset()

    def edit(self, added: set[int], removed: set[int], removed_walls: set[int]) -> None:
        """Adds what the rule does not give by itself, and removes what it does."""
        self._added = sorted(at for at in added - removed if 0 <= at < MAX and not self._has(at))
        self._removed = sorted(at for at in removed if self._has(at))
        self._gone = frozenset(self._removed)
        self._gone_walls = frozenset(removed_walls)

    def after(self, instant: int) -> int | None:
        found = self._base.after(instant if instant >= self._first else self._first - 1)
        while found in self._gone:
            found = self._base.after(found)
        if found is not None and found >= self._stop:
            found = None
        if self._added and (i := bisect_right(self._added, instant)) < len(self._added):
            return self._added[i] if found is None else min(found, self._added[i])
        return found

    def before(self, instant: int) -> int | None:
        found = self._base.before(min(instant, self._stop)) if instant > self._first else None
        while found in self._gone:
            found = self._base.before(found)
        if found is not None and found < self._first:
            found = None
        if self._added and (i := bisect_left(self._added, instant)):
            return self._added[i - 1] if found is None else max(found, self._added[i - 1])
        return found

    def count(self, start: int, end: int) -> int:
        low, high = max(start, self._first), min(end, self._stop)
        total = self._base.count(low, high) if low < high else 0
        total -= max(0, bisect_left(self._removed, end) - bisect_left(self._removed, start))
        return total + max(0, bisect_left(self._added, end) - bisect_left(self._added, start))

    def wall(self, low: int, high: int) -> Iterator[int]:
        stop = self._stop - 1
        until = stop + (self.zone.offset(stop // SECOND) + DAY_S) * SECOND
        named = self._base.wall(max(low, self._local), min(high, until))
        given = iter(self._walls[bisect_left(self._walls, low) : bisect_left(self._walls, high)])
        last = None
        for wall in merge(named, given):
            if wall != last and wall not in self._gone_walls:
                yield wall
            last = wall

    def _has(self, instant: int) -> bool:
        return self._first <= instant < self._stop and self._base.count(instant, instant + 1) > 0


def completed(parts: Parts, local: int) -> Parts:
    """The parts with what they leave open taken from DTSTART, in local seconds. RFC 5545, 3.3.10."""
    when = from_wall_us(local * SECOND)
    if not (parts.weeknos or parts.yeardays or parts.monthdays or parts.days):
        if parts.freq == YEARLY:
            parts = parts._replace(months=parts.months or (when.month,), monthdays=(when.day,))
        elif parts.freq == MONTHLY:
            parts = parts._replace(monthdays=(when.day,))
    if not parts.days and (parts.freq == WEEKLY or (parts.weeknos and not parts.yeardays and not parts.monthdays)):
        parts = parts._replace(days=((0, when.weekday()),))
    return parts._replace(
        hours=parts.hours or (when.hour,),
        minutes=parts.minutes or (when.minute,),
        seconds=parts.seconds or (when.second,),
    )


@lru_cache(maxsize=1024)
def walls_of(parts: Parts, local: int) -> Walls:
    """The local times of a rule of DAILY or coarser that begins at `local`, and of its phase before."""
    parts = completed(parts, local)
    times = TimesOfDay(*(sum(1 << n for n in numbers) for numbers in (parts.hours, parts.minutes, parts.seconds)))
    day = local // DAY_S
    if parts.setpos and parts.freq == DAILY:
        kept = chosen(parts.setpos, times.per_day)
        if not kept:
            refuse_never(f"BYSETPOS chooses none of {times.per_day} times a day")
        return DailyWalls(YearDays(parts, day), TimesList(tuple(map(times.at, kept))))
    if parts.setpos and times.per_day > 1:
        return SetWalls(parts, YearDays(parts, day), times)
    return DailyWalls(YearDays(parts, day, setpos=True), times)


@lru_cache(maxsize=256)
def rule_of(
    parts: Parts,
    start: datetime,
    exdates: tuple[datetime, ...],
    rdates: tuple[datetime, ...],
    gap: Gap,
    fold: Fold,
    where: Zone,
) -> RRuleRule:
    """The rule from DTSTART on. Naive datetimes are local times. Raises InvalidRecurrence."""

    def instants(moment: datetime) -> list[int]:
        """What gap and fold make of one moment, in microseconds."""
        if moment.tzinfo is not None:
            return [to_us(moment)]
        return [second * SECOND for second in _resolved(where, wall_us(moment) // SECOND, gap, fold)]

    aware = start.tzinfo is not None
    local = wall_us(where.local(start).replace(tzinfo=None) if aware else start) // SECOND
    # A DTSTART that the clock skips says from when on there are instants even if `gap` leaves it out.
    first = (instants(start) or [(where.gap_end(local) or 0) * SECOND])[0]
    base: Rule
    itself = False
    if parts.freq >= HOURLY:
        base = SteppedRule(parts, first // SECOND, where)
    else:
        walls = walls_of(parts._replace(limit=None, until=None), local)
        base = WallRule(where, walls, gap=gap, fold=fold, missing_days=True)
        # An aware DTSTART in the second pass of a fold is that instant, whichever pass `fold` takes of others.
        itself = aware and walls.next(local) == local and not base.count(first, first + 1)
    begin = first if itself else base.after(first - 1)
    if begin is None or begin - first > HORIZON_S * SECOND:
        _refuse_unfit(parts, local)
    stop = _stop(base, first, parts, where, itself)
    if begin >= stop:
        refuse_never("UNTIL is before the first instant")
    rule = RRuleRule(base, first, stop, local * SECOND, (wall_us(one) for one in rdates if one.tzinfo is None))
    if exdates or rdates or itself:
        added, removed = ({at for one in dates for at in instants(one)} for dates in (rdates, exdates))
        gone = {wall_us(one) for one in exdates if one.tzinfo is None}
        rule.edit(added | ({first} if itself else set()), removed, gone)
    return rule


def _stop(base: Rule, first: int, parts: Parts, where: Zone, itself: bool) -> int:
    """The instant just after the last that COUNT or UNTIL allows."""
    if parts.limit is not None:
        return stop_after(base, first, MAX, parts.limit - itself) if parts.limit > itself else first + 1
    if parts.until is None:
        return MAX
    if parts.until.tzinfo is not None:
        stop = to_us(parts.until)
    else:
        local = wall_us(parts.until) // SECOND
        shown = where.instants(local)  # until it is shown the last time
        stop = (shown[-1] if shown else where.resolve(local)[0]) * SECOND
    if stop < first:
        refuse(f"UNTIL {format_instant(parts.until)} is before DTSTART.", "Give a later UNTIL, or an earlier DTSTART.")
    return min(stop + SECOND, MAX)


def _resolved(where: Zone, local: int, gap: Gap, fold: Fold) -> tuple[int, ...]:
    found = where.instants(local)
    if found:
        return found[:1] if fold == "first" else found[-1:] if fold == "last" else found
    if gap == "skip":
        return ()
    return (where.resolve(local)[0] if gap == "shift" else where.gap_end(local) or 0,)


def _refuse_unfit(parts: Parts, local: int) -> NoReturn:
    """Names a part without which there would be instants, if there is one."""
    what = "nothing fits all of its parts"
    if parts.freq < HOURLY:
        rule = parts._replace(limit=None, until=None)
        less = {
            "BYSETPOS": rule._replace(setpos=()),
            "BYDAY": rule._replace(days=()),
            "BYMONTHDAY": rule._replace(monthdays=()),
            "BYYEARDAY": rule._replace(yeardays=()),
            "BYWEEKNO": rule._replace(weeknos=()),
            "BYMONTH": rule._replace(months=()),
            "INTERVAL": rule._replace(interval=1),
        }
        fits = (name for name, rest in less.items() if rest != rule and walls_of(rest, local).next(local) is not None)
        what = next((f"{name} excludes all that the other parts give" for name in fits), what)
    elif YearDays(parts, local // DAY_S).next(local // DAY_S) is None:
        what = "no date fits all of its parts"
    refuse_never(f"from DTSTART {from_wall_us(local * SECOND).isoformat()} on, {what}")


def refuse_never(why: str) -> NoReturn:
    """Raises InvalidRecurrence with code NEVER_FIRES."""
    raise InvalidRecurrence(
        f"The rule has no instant within 100 years: {why}.", code="NEVER_FIRES", fix="Change the rule or DTSTART."
    )
