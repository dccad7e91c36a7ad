"""What another release of the zone data does to instants that an earlier one gave: where the same local time lies
now, and what moves.

An instant is stored with the offset from UTC it was computed with, so its local time is known without the old
data. An occurrence that names a local time keeps it and moves; one that follows real time stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from itertools import islice, pairwise
from typing import NamedTuple

from timebell.recurrence.core import Recurrence, Rule
from timebell.recurrence.instants import DAY, MAX_S, MIN_S, SECOND, from_us, to_us, wall_us
from timebell.recurrence.zones import Note, Release, Zone

_LONGEST_GAP = 3 * 3600 * SECOND  # of those that jumps of the clock make in a day that exists
_COMPARED = 50_000  # occurrences of a rule that follows real time, after which none is expected to differ


def under(recurrence: Recurrence, release: Release) -> Recurrence:
    """The same recurrence by another release's zone data. Raises InvalidTimezone if that has no such zone."""
    return replace(recurrence, release=release)


def offset_at(recurrence: Recurrence, at: datetime | None) -> int | None:
    """The offset from UTC, in seconds, that clocks show in its zone at an instant."""
    return None if at is None else recurrence.rule.zone.offset(to_us(at) // SECOND)


def moved_to(recurrence: Recurrence, at: datetime, offset: int | None) -> datetime | None:
    """Where the occurrence that was stored as `at` lies by the recurrence's own zone data; None if it is over.

    `offset` (seconds) is the one it was stored with. Without it (it was not always kept) an instant that is none
    of the recurrence's own is taken for the nearest that is.
    """
    instant = to_us(at)
    if recurrence.spec.delay is not None:
        return at
    if _stays(recurrence, instant, offset):
        return at
    if offset is None:
        return _nearest(recurrence, at)
    found = recurrence.next_us(_same_time(recurrence.rule, recurrence, instant, offset) - 1)
    return None if found is None else from_us(found)


def carried(recurrence: Recurrence, at: datetime | None, offset: int | None) -> Recurrence:
    """The recurrence as it goes on from an instant that other zone data gave: that instant as it was stored, for it
    may be due, and after it every occurrence of its own but the one that is meant by it."""
    if at is None or recurrence.spec.delay is not None or _stays(recurrence, to_us(at), offset):
        return recurrence
    instant = to_us(at)
    found = moved_to(recurrence, at, offset)
    own = instant if found is None else to_us(found)
    if offset is not None:
        start = _same_time(recurrence.rule, recurrence, instant, offset)
        zone = recurrence.rule.zone
        if own != start and _wall(zone, own) != instant + offset * SECOND:
            own = start  # the clock skips that time now, and so does the recurrence
    return recurrence.ruled(_Carried(recurrence.rule, instant, max(instant, own) + 1))


def overrides_again(recurrence: Recurrence, since: datetime) -> Recurrence:
    """The recurrence, whose overrides after `since` name instants that other zone data gave: each now names the
    occurrence that is nearest."""
    plain = replace(recurrence, overrides=())
    named = [
        one if one.at <= since or plain.has(one.at) else replace(one, at=_nearest(plain, one.at) or one.at)
        for one in recurrence.overrides
    ]
    return replace(recurrence, overrides=tuple(named))


def resolve_again(local_time: str, at: datetime, zone: Zone) -> datetime:
    """Where a local time that was resolved to `at` lies in this zone: there, if clocks still show it then."""
    second, fraction = divmod(wall_us(datetime.fromisoformat(local_time)), SECOND)
    found = [from_us(one * SECOND + fraction) for one in zone.instants(second)]
    return at if at in found else from_us(zone.resolve(second)[0] * SECOND + fraction)


class Difference(NamedTuple):
    """Occurrences whose zone has one offset by the old data and another by the new: how many, from when on."""

    offset_before: int
    offset_after: int
    occurrences: int
    since: datetime


def differences(old: Recurrence, new: Recurrence, start: datetime, end: datetime) -> list[Difference]:
    """What moves within [start, end) when a recurrence by old zone data becomes one by new data."""
    found: dict[tuple[int, int], Difference] = {}
    for one in _differences(old, new, start, end) if old.spec.delay is None else ():
        key = one.offset_before, one.offset_after
        was = found.get(key)
        found[key] = one if was is None else was._replace(occurrences=was.occurrences + one.occurrences)
    return list(found.values())


def _differences(old: Recurrence, new: Recurrence, start: datetime, end: datetime) -> Iterator[Difference]:
    for low, high, before, after in _apart(old.rule.zone, new.rule.zone, start, end):
        if next(old.rule.wall(low + before * SECOND, high + before * SECOND), None) is not None:
            first = old.next_us(low - 1)
            count = old.count(from_us(low), from_us(high))
        else:
            own = islice(old.between(from_us(low), from_us(high)), _COMPARED)
            other = [at for at in map(to_us, own) if new.next_us(at - 1) != at]
            first, count = (other[0] if other else None), len(other)
        if first is not None and count:
            yield Difference(before, after, count, from_us(first))


def _apart(old: Zone, new: Zone, start: datetime, end: datetime) -> Iterator[tuple[int, int, int, int]]:
    """The stretches within [start, end), in microseconds, in which two zones have different offsets; and these."""
    low, high = (min(max(to_us(edge) // SECOND, MIN_S), MAX_S) for edge in (start, end))
    edges = {low, high} | {one.start for zone in (old, new) for one in zone.segments if low < one.start < high}
    for one, following in pairwise(sorted(edges)):
        before, after = old.offset(one), new.offset(one)
        if before != after:
            yield one * SECOND, following * SECOND, before, after


def _stays(recurrence: Recurrence, instant: int, offset: int | None) -> bool:
    same = offset is None or offset == recurrence.rule.zone.offset(instant // SECOND)
    return same and recurrence.next_us(instant - 1) == instant


def _wall(zone: Zone, instant: int) -> int:
    return instant + zone.offset(instant // SECOND) * SECOND


def _nearest(recurrence: Recurrence, at: datetime) -> datetime | None:
    later, earlier = recurrence.next(at), recurrence.previous(at)
    if earlier is not None and to_us(at) - to_us(earlier) <= DAY and (later is None or at - earlier < later - at):
        return earlier
    return later


def _same_time(rule: Rule, recurrence: Recurrence, instant: int, offset: int) -> int:
    """The instant from which the occurrence is to be found: where its local time begins to be shown; its own
    instant, if it follows real time."""
    wall = instant + offset * SECOND
    if next(rule.wall(wall, wall + 1), None) is None:
        if recurrence.next_us(instant - 1) == instant:
            return instant
        named = [*rule.wall(wall - _LONGEST_GAP, wall)]  # perhaps a gap had moved it, which is no more
        if not named:
            return instant
        wall = named[-1]
    second, fraction = divmod(wall, SECOND)
    end = rule.zone.gap_end(second)
    if end is not None and rule.gap == "end":
        return end * SECOND
    return rule.zone.resolve(second)[0] * SECOND + fraction


class _Carried(Rule):
    """One instant, and those of a rule from a later one on."""

    def __init__(self, rule: Rule, first: int, since: int) -> None:
        self.rule, self.first, self.since = rule, first, since
        self.zone, self.gap, self.fold = rule.zone, rule.gap, rule.fold

    def after(self, instant: int) -> int | None:
        return self.first if instant < self.first else self.rule.after(max(instant, self.since - 1))

    def before(self, instant: int) -> int | None:
        found = self.rule.before(instant)
        if found is not None and found >= self.since:
            return found
        return self.first if self.first < instant else None

    def count(self, start: int, end: int) -> int:
        own = max(start, self.since)
        return (start <= self.first < end) + (self.rule.count(own, end) if own < end else 0)

    def wall(self, low: int, high: int) -> Iterator[int]:
        return self.rule.wall(low, high)

    def note(self, instant: int) -> Note | None:
        return None if instant == self.first else self.rule.note(instant)
