"""The audit: what should have happened, compared with what is recorded, both ways. Pure: it knows no clock, no store.

One schedule is one `Comparison`, which asks for rows a window at a time, so that millions of occurrences take no more
memory than a few hundred. A revision holds for the instants after it was made, up to and with the instant at which the
next one was: an edit decides all up to itself first (see `schedules.edit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby, islice

from timebell.errors import InvalidRecurrence
from timebell.model.audit_findings import STARTED, Counts, Difference, Finding, History, Recorded, Revised, ZoneMove
from timebell.model.job import JobState, Kind
from timebell.recurrence import Recurrence
from timebell.recurrence.instants import SECOND, from_us, to_us

TINY = timedelta(microseconds=1)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
HALF_HOUR = 1800 * SECOND  # clocks jump at multiples of it
WINDOW = 1_000  # expected instants that are compared at a time
RESCHEDULED = "rescheduled"  # why a job is cancelled in whose place a later one runs: the occurrence is that one's
KEPT = 100_000  # differences around a change of zone data that are kept until all of them are known
UNKNOWN = "No revision that held then has this occurrence."


@dataclass(frozen=True, slots=True)
class _Segment:
    """The stretch [low, high) in which a revision holds."""

    number: int
    low: datetime
    high: datetime


@dataclass(frozen=True, slots=True)
class _Covered:
    """A range row that the comparison is within, and the instants in it that have rows of their own."""

    to: datetime
    overridden: frozenset[datetime]


@dataclass(frozen=True, slots=True)
class _Move:
    """In [low, high) rows may lie a multiple of `by` from where this zone data has them."""

    low: datetime
    high: datetime
    by: timedelta


class Comparison:
    """The audit of one schedule within [start, end): `window` says which rows to read, `take` judges them.

    `moves` are those of new zone data, in all zones; `halted` says that all firing is stopped. Counts are added to
    `counts`, and every difference is handed to `tell`.
    """

    def __init__(
        self, history: History, start: datetime, end: datetime, now: datetime, grace: timedelta, counts: Counts,
        tell: Callable[[Difference], None], moves: Sequence[ZoneMove] = (), *, halted: bool = False,
    ) -> None:  # fmt: skip
        self.history = history
        self.counts = counts
        self._tell = tell
        self._zone_moves = moves
        self._read: dict[int, Recurrence | None] = {}
        self._moves: dict[str, list[_Move]] = {}
        self._now = now
        self._start = start
        self._end = max(start, self._judged_until(min(end, now - grace), halted))
        self._segments = _segments(history.revisions, start, max(end, self._end))
        self._at = start
        self._expected: list[datetime] = []
        self._high = start
        self._covered: _Covered | None = None
        self._gap: tuple[datetime, datetime, int] | None = None
        self._lacking: list[datetime] = []
        self._surplus: list[Recorded] = []
        counts.schedules += 1
        for segment in self._segments:  # what need not be decided yet
            counts.due += self._count(segment.number, max(segment.low, self._end), min(segment.high, end))

    def _judged_until(self, end: datetime, halted: bool) -> datetime:
        """What a paused schedule has before it is decided when it is resumed."""
        one = self.history
        waits = one.exists and (halted or not one.enabled) and one.next_fire_at is not None
        return min(end, one.next_fire_at) if waits and one.next_fire_at is not None else end

    @property
    def first(self) -> bool:
        """Whether nothing was read yet: then a range row may reach in from before."""
        return self._at == self._start

    def size(self) -> int:
        """How many occurrences are to be compared."""
        return sum(self._count(one.number, one.low, min(one.high, self._end)) for one in self._segments)

    def window(self) -> tuple[datetime, datetime] | None:
        """The rows to read next: those scheduled in [low, high); None at the end."""
        if self._at >= self._end:
            return None
        self._expected, self._high = [], self._end
        covered = self._covered
        if covered is not None and covered.to >= self._at:
            self._high = min(self._end, covered.to + TINY)
            self._expected = sorted(at for at in covered.overridden if self._at <= at < self._high)
            return self._at, self._high
        for segment in self._segments:
            low, high = max(segment.low, self._at), min(segment.high, self._end)
            if low >= high:
                continue
            recurrence = self._recurrence(segment.number)
            if recurrence is None:
                continue
            if recurrence.spec.delay is not None:
                most = timedelta(microseconds=max(recurrence.spec.delay.length, SECOND // 100) * WINDOW)
                if high - low > most:
                    self._high = low + most
                    break
                continue
            room = WINDOW - len(self._expected)
            found = list(_instants(recurrence, low, high, room + 1))
            self._expected += found[:room]
            if len(found) > room:
                self._high = found[room]
                break
        return self._at, self._high

    @property
    def weight(self) -> int:
        """About how many rows the window has."""
        return 1 + len(self._expected)

    def take(self, rows: Sequence[Recorded], before: Recorded | None = None) -> None:
        """Judge the rows of the window, in order; `before` is the range row that reaches into the first one."""
        if before is not None:
            self._range(before, known=True)
        expected, n = self._expected, 0
        for at, group in groupby(rows, key=lambda row: row.scheduled_at):
            while n < len(expected) and expected[n] < at:
                self._without_row(expected[n])
                n += 1
            known = n < len(expected) and expected[n] == at
            n += known
            self._judge(at, list(group), known)
        for at in expected[n:]:
            self._without_row(at)
        self._at = self._high
        if self._at >= self._end:
            self._finish()

    def _without_row(self, at: datetime) -> None:
        if self._is_covered(at):
            return
        self.counts.expected += 1
        if self._moves_at(at) and len(self._lacking) < KEPT:
            self._lacking.append(at)
        elif self._gap is None:
            self._gap = at, at, 1
        else:
            self._gap = self._gap[0], at, self._gap[2] + 1

    def _judge(self, at: datetime, rows: list[Recorded], known: bool) -> None:
        self.counts.manual += sum(row.kind == Kind.MANUAL for row in rows)
        ours = [row for row in rows if row.kind in (Kind.PLANNED, Kind.BACKFILL)]
        for row in ours:
            if row.early:
                self._say(Finding.EARLY, at, at, 1, "It began before its time.", row)
        planned = [row for row in ours if row.kind == Kind.PLANNED and row.reason != RESCHEDULED]
        backfills = [row for row in ours if row.kind == Kind.BACKFILL and row.created_at <= self._now]
        self.counts.backfilled += len(backfills)
        for row in backfills:
            if not self._knows(row.revision, at):
                self._unexpected(row)
        covered = self._is_covered(at)
        if known and not covered:
            if not planned:
                self._without_row(at)
            else:
                self._close_gap()
        if not planned and not backfills:
            return
        ran = [row for row in (*planned, *backfills) if row.ran]
        if len(planned) > 1 or (covered and planned):
            self._say(Finding.DOUBLED, at, at, 1, "It was decided more than once.", *planned)
        elif len(ran) > 1:
            self._say(Finding.DOUBLED, at, at, 1, "It ran more than once.", *ran)
        if planned and not covered:
            self._decided(at, planned[0], known)

    def _decided(self, at: datetime, row: Recorded, known: bool) -> None:
        if row.ranges:
            self._range(row, known)
            return
        if not known and self._is_delay(row.revision):  # each run of it sets the next, so it has no grid
            known = True
        if not known:
            self._unexpected(row)
            return
        self.counts.expected += 1
        if row.state == JobState.SKIPPED:
            self.counts.skipped[row.reason or "?"] += 1
        elif row.state in STARTED or row.attempt:
            self.counts.fired += 1
        elif row.state == JobState.CANCELLED:
            self.counts.cancelled += 1
        else:
            self.counts.pending += 1

    def _range(self, row: Recorded, known: bool) -> None:
        """A row for many: as many as there are in it, and no row of its own for any of them."""
        recurrence = self._recurrence(row.revision)
        if not known or recurrence is None or recurrence.spec.delay is not None:
            self._unexpected(row)
        if recurrence is None or recurrence.spec.delay is not None:
            return
        low, high = row.scheduled_at, row.last + TINY
        there = _count(recurrence.fired(), low, high)
        if there != row.count and not self._may_count(recurrence, row):
            detail = f"A row for {row.count:,} skipped occurrences stands where there are {there:,}."
            self._say(Finding.MISCOUNTED, low, row.last, abs(there - row.count), detail, row)
        within = _count(recurrence.fired(), max(low, self._start), min(high, self._end))
        self.counts.expected += within
        self.counts.skipped[row.reason or "?"] += within
        self._covered = _Covered(row.last, frozenset(recurrence.overridden(low, high)))

    def _is_covered(self, at: datetime) -> bool:
        """Whether a range row stands for this instant."""
        return self._covered is not None and at <= self._covered.to and at not in self._covered.overridden

    def _unexpected(self, row: Recorded) -> None:
        if self._moves_at(row.scheduled_at) and not row.ranges and len(self._surplus) < KEPT:
            self._surplus.append(row)
            return
        self._say(Finding.UNEXPECTED, row.scheduled_at, row.last, row.count, UNKNOWN, row)

    def _close_gap(self) -> None:
        if self._gap is None:
            return
        at, to, count = self._gap
        self._gap = None
        detail = "No row says what became of it." if count == 1 else "No row says what became of them."
        cursor = self.history.next_fire_at
        if cursor is not None and at >= cursor and self.history.exists:
            fault = (
                f"the schedule was set aside: {self.history.fault}" if self.history.fault else "no planner came to it"
            )
            detail = f"Not decided yet: {fault}."
        self._say(Finding.MISSING, at, to, count, detail)

    def _finish(self) -> None:
        """What lies where other zone data had it is neither missing nor unexpected."""
        surplus = list(self._surplus)
        for at in self._lacking:
            theirs = next((row for row in surplus if self._is_move(at, row.scheduled_at)), None)
            if theirs is None:
                self._close_gap()
                self._gap = at, at, 1
                self._close_gap()
            else:
                surplus.remove(theirs)
                self.counts.moved += 1
        for row in surplus:
            self._say(Finding.UNEXPECTED, row.scheduled_at, row.last, row.count, UNKNOWN, row)
        self._close_gap()

    def _say(self, finding: Finding, at: datetime, to: datetime, count: int, detail: str, *rows: Recorded) -> None:
        self.counts.found[finding.value] += 1
        self._tell(Difference(
            finding=finding, schedule_id=self.history.id, schedule=self.history.name, at=at, to=to, count=count,
            detail=detail, jobs=tuple(row.id for row in rows),
        ))  # fmt: skip

    def _recurrence(self, number: int | None) -> Recurrence | None:
        """That of a revision; None if there is no such revision, or it cannot be read, which is said once."""
        if number is None:
            return None
        if number not in self._read:
            found = None
            revision = next((one for one in self.history.revisions if one.number == number), None)
            if revision is not None:
                try:
                    found = self.history.recurrence(number)
                except Exception as broken:
                    detail = f"Revision {number} cannot be read, so nothing is known of it: {broken!s:.200}"
                    self._read[number] = None
                    self._say(Finding.UNREADABLE, revision.effective_at, revision.effective_at, 1, detail)
            self._read[number] = found
        return self._read[number]

    def _knows(self, number: int | None, at: datetime) -> bool:
        """Whether a revision has an instant, whenever it held: a backfill reaches before it."""
        recurrence = self._recurrence(number)
        return recurrence is not None and recurrence.has(at)

    def _is_delay(self, number: int | None) -> bool:
        recurrence = self._recurrence(number)
        return recurrence is not None and recurrence.spec.delay is not None

    def _count(self, number: int, low: datetime, high: datetime) -> int:
        recurrence = self._recurrence(number) if low < high else None
        return 0 if recurrence is None or recurrence.spec.delay is not None else _count(recurrence, low, high)

    # Zone data: rows were written by what was installed then, and it is judged by what is installed now.

    def _moves_at(self, at: datetime) -> list[_Move]:
        if not self._zone_moves:
            return []
        segment = next((one for one in self._segments if one.low <= at < one.high), None)
        recurrence = None if segment is None else self._recurrence(segment.number)
        if recurrence is None:
            return []
        if recurrence.timezone not in self._moves:
            self._moves[recurrence.timezone] = list(_moves(self._zone_moves, recurrence))
        return [move for move in self._moves[recurrence.timezone] if move.low <= at < move.high]

    def _is_move(self, at: datetime, other: datetime) -> bool:
        """Whether other zone data may have had at `other` what is expected `at`: a change or several of the offset
        apart; or where clocks stopped jumping over its local time, at which an occurrence is put that they skip."""
        apart = abs(other - at)
        return any(
            TINY <= apart <= DAY and (not apart % move.by or (apart < move.by and not to_us(other) % HALF_HOUR))
            for move in self._moves_at(at)
        )

    def _may_count(self, recurrence: Recurrence, row: Recorded) -> bool:
        """Whether other zone data may have counted so many."""
        for move in self._moves_at(row.scheduled_at) or self._moves_at(row.last):
            fired, low, high = recurrence.fired(), row.scheduled_at, row.last + TINY
            fewest = _count(fired, low + move.by, high - move.by) if high - low > 2 * move.by else 0
            if fewest <= row.count <= _count(fired, low - move.by, high + move.by):
                return True
        return False


def _segments(revisions: Sequence[Revised], start: datetime, end: datetime) -> list[_Segment]:
    found: list[_Segment] = []
    ordered = sorted(revisions, key=lambda one: one.number)
    since = None
    for n, revision in enumerate(ordered):
        following = ordered[n + 1] if n + 1 < len(ordered) else None
        since = revision.effective_at if since is None else max(since, revision.effective_at)
        low = max(start, since + TINY)
        high = end if following is None else min(end, max(since, following.effective_at) + TINY)
        if low < high:
            found.append(_Segment(revision.number, low, high))
    return found


def _instants(recurrence: Recurrence, low: datetime, high: datetime, most: int) -> Iterator[datetime]:
    """Those in [low, high); none beyond where a search is given up, as the planner sets the schedule aside there."""
    with suppress(InvalidRecurrence):
        yield from islice(recurrence.between(low, high), most)


def _count(recurrence: Recurrence, low: datetime, high: datetime) -> int:
    try:
        return recurrence.count(low, high)
    except InvalidRecurrence:
        return sum(1 for _ in _instants(recurrence, low, high, 1_000_000))


def _moves(moves: Sequence[ZoneMove], recurrence: Recurrence) -> Iterator[_Move]:
    zone = recurrence.rule.zone
    for one in moves:
        if one.timezone != recurrence.timezone:
            continue
        # Data that came late differs from the last change of the clock on, not only from what was to come then.
        segment = zone.segments[zone.index(to_us(one.since) // SECOND)]
        since = min(one.since, from_us(max(segment.start, 0) * SECOND))
        yield _Move(since - one.by, one.until + one.by + HOUR, one.by)
