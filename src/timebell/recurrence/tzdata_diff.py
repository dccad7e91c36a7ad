"""Effects of a new release of the zone data on instants that were computed with an earlier one.

An instant is stored with the UTC offset used to compute it, so its local time is known without the old data. An
occurrence with a specified local time keeps that local time and moves to another instant; an occurrence that follows
real time keeps its instant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from itertools import islice, pairwise
from typing import NamedTuple

from timebell.recurrence.instants import DAY_US, MAX_S, MIN_S, SECOND_US, from_us, local_to_us, to_us
from timebell.recurrence.recurrence import Recurrence
from timebell.recurrence.rules.rule import Rule
from timebell.recurrence.zones import Note, Release, Zone

_MAX_GAP_US = 3 * 3600 * SECOND_US  # upper bound for gaps other than skipped dates
_MAX_COMPARED = 50_000  # occurrences compared for a rule that follows real time; later ones are assumed to be equal


def with_release(recurrence: Recurrence, release: Release) -> Recurrence:
    """Return the recurrence with another release of the zone data. Raises InvalidTimezone if that lacks the zone."""
    return replace(recurrence, release=release)


def offset_at(recurrence: Recurrence, at: datetime | None) -> int | None:
    """Return the UTC offset of the recurrence's zone at an instant, in seconds; None for no instant."""
    return None if at is None else recurrence.rule.zone.offset(to_us(at) // SECOND_US)


def relocate(recurrence: Recurrence, at: datetime, offset: int | None) -> datetime | None:
    """Return the instant, by the recurrence's zone data, of the occurrence stored as `at`; None if there is none.

    `offset` (seconds) is the UTC offset stored with it. Without an offset, an instant that the recurrence does not have
    is mapped to the nearest instant that it has.
    """
    instant = to_us(at)
    if recurrence.spec.delay is not None:
        return at
    if _is_unchanged(recurrence, instant, offset):
        return at
    if offset is None:
        return _nearest_occurrence(recurrence, at)
    match = recurrence.next_us(_search_start(recurrence.rule, recurrence, instant, offset) - 1)
    return None if match is None else from_us(match)


def resume_from(recurrence: Recurrence, at: datetime | None, offset: int | None) -> Recurrence:
    """Return the recurrence that continues from `at`, an instant computed with other zone data.

    It contains `at` itself, which may be due already, and the later occurrences by the recurrence's own zone data,
    without the one that corresponds to `at`. `offset` (seconds) is the UTC offset stored with `at`.
    """
    if at is None or recurrence.spec.delay is not None or _is_unchanged(recurrence, to_us(at), offset):
        return recurrence
    instant = to_us(at)
    relocated = relocate(recurrence, at, offset)
    replacement = instant if relocated is None else to_us(relocated)
    if offset is not None:
        start = _search_start(recurrence.rule, recurrence, instant, offset)
        zone = recurrence.rule.zone
        if replacement != start and _local_us(zone, replacement) != instant + offset * SECOND_US:
            replacement = start  # the local time lies in a gap now, and the recurrence omits it
    return recurrence.with_rule(_ResumedRule(recurrence.rule, instant, max(instant, replacement) + 1))


def relocate_overrides(recurrence: Recurrence, since: datetime) -> Recurrence:
    """Return the recurrence with each override after `since` mapped to the nearest occurrence.

    Their instants were computed with other zone data, so the recurrence may not have them.
    """
    original = replace(recurrence, overrides=())
    overrides = [
        override
        if override.at <= since or original.has(override.at)
        else replace(override, at=_nearest_occurrence(original, override.at) or override.at)
        for override in recurrence.overrides
    ]
    return replace(recurrence, overrides=tuple(overrides))


def re_resolve_local(local_time: str, at: datetime, zone: Zone) -> datetime:
    """Return the instant in this zone of a local time that was resolved to `at`: `at` if clocks still show it then."""
    second, fraction = divmod(local_to_us(datetime.fromisoformat(local_time)), SECOND_US)
    instants = [from_us(instant * SECOND_US + fraction) for instant in zone.instants(second)]
    return at if at in instants else from_us(zone.resolve(second)[0] * SECOND_US + fraction)


class Difference(NamedTuple):
    """A change of the zone's UTC offset (seconds) and the affected occurrences: their number and the first instant."""

    offset_before: int
    offset_after: int
    occurrences: int
    since: datetime


def find_differences(old: Recurrence, new: Recurrence, start: datetime, end: datetime) -> list[Difference]:
    """Return what changes within [start, end) between a recurrence with old zone data and the same with new data."""
    differences: dict[tuple[int, int], Difference] = {}
    for difference in _iter_differences(old, new, start, end) if old.spec.delay is None else ():
        key = difference.offset_before, difference.offset_after
        known = differences.get(key)
        differences[key] = (
            difference if known is None else known._replace(occurrences=known.occurrences + difference.occurrences)
        )
    return list(differences.values())


def _iter_differences(old: Recurrence, new: Recurrence, start: datetime, end: datetime) -> Iterator[Difference]:
    for low, high, before, after in _differing_ranges(old.rule.zone, new.rule.zone, start, end):
        if next(old.rule.iter_local_times(low + before * SECOND_US, high + before * SECOND_US), None) is not None:
            first = old.next_us(low - 1)
            count = old.count(from_us(low), from_us(high))
        else:
            candidates = islice(old.between(from_us(low), from_us(high)), _MAX_COMPARED)
            changed = [at for at in map(to_us, candidates) if new.next_us(at - 1) != at]
            first, count = (changed[0] if changed else None), len(changed)
        if first is not None and count:
            yield Difference(before, after, count, from_us(first))


def _differing_ranges(old: Zone, new: Zone, start: datetime, end: datetime) -> Iterator[tuple[int, int, int, int]]:
    """Yield the ranges within [start, end) in which two zones have different offsets.

    Each is (start, end, old offset, new offset); start and end in microseconds, offsets in seconds.
    """
    low, high = (min(max(to_us(edge) // SECOND_US, MIN_S), MAX_S) for edge in (start, end))
    edges = {low, high} | {
        segment.start for zone in (old, new) for segment in zone.segments if low < segment.start < high
    }
    for edge, next_edge in pairwise(sorted(edges)):
        before, after = old.offset(edge), new.offset(edge)
        if before != after:
            yield edge * SECOND_US, next_edge * SECOND_US, before, after


def _is_unchanged(recurrence: Recurrence, instant: int, offset: int | None) -> bool:
    same = offset is None or offset == recurrence.rule.zone.offset(instant // SECOND_US)
    return same and recurrence.next_us(instant - 1) == instant


def _local_us(zone: Zone, instant: int) -> int:
    return instant + zone.offset(instant // SECOND_US) * SECOND_US


def _nearest_occurrence(recurrence: Recurrence, at: datetime) -> datetime | None:
    later, earlier = recurrence.next(at), recurrence.previous(at)
    if earlier is not None and to_us(at) - to_us(earlier) <= DAY_US and (later is None or at - earlier < later - at):
        return earlier
    return later


def _search_start(rule: Rule, recurrence: Recurrence, instant: int, offset: int) -> int:
    """Return the instant from which to search for an occurrence that was stored as `instant` with `offset` (seconds).

    It is the first instant of its local time by the rule's zone data, or `instant` for a rule that follows real time.
    """
    local = instant + offset * SECOND_US
    if next(rule.iter_local_times(local, local + 1), None) is None:
        if recurrence.next_us(instant - 1) == instant:
            return instant
        skipped_times = [*rule.iter_local_times(local - _MAX_GAP_US, local)]  # a gap of the old data may have moved it
        if not skipped_times:
            return instant
        local = skipped_times[-1]
    second, fraction = divmod(local, SECOND_US)
    end = rule.zone.gap_end(second)
    if end is not None and rule.gap == "end":
        return end * SECOND_US
    return rule.zone.resolve(second)[0] * SECOND_US + fraction


class _ResumedRule(Rule):
    """A single instant, followed by the instants of a rule from `since` on."""

    def __init__(self, rule: Rule, first: int, since: int) -> None:
        self.rule, self.first, self.since = rule, first, since
        self.zone, self.gap, self.fold = rule.zone, rule.gap, rule.fold

    def after(self, instant: int) -> int | None:
        return self.first if instant < self.first else self.rule.after(max(instant, self.since - 1))

    def before(self, instant: int) -> int | None:
        match = self.rule.before(instant)
        if match is not None and match >= self.since:
            return match
        return self.first if self.first < instant else None

    def count(self, start: int, end: int) -> int:
        low = max(start, self.since)
        return (start <= self.first < end) + (self.rule.count(low, end) if low < end else 0)

    def iter_local_times(self, low: int, high: int) -> Iterator[int]:
        return self.rule.iter_local_times(low, high)

    def note(self, instant: int) -> Note | None:
        return None if instant == self.first else self.rule.note(instant)
