"""Compare the expected occurrences of a schedule with the recorded jobs, in both directions. Pure: no clock, no store.

Each schedule has one `ScheduleAudit`, which requests rows one window at a time, so that memory use does not grow with
the number of occurrences. A revision applies to the instants after it took effect, up to and including the instant at
which the next one took effect: an edit first decides every occurrence up to itself (see `schedules.edit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby, islice

from timebell.errors import InvalidRecurrence
from timebell.model.audit_findings import (
    STARTED,
    AuditCounts,
    Difference,
    Finding,
    RecordedJob,
    RevisionStart,
    ScheduleHistory,
    ZoneShift,
)
from timebell.model.job import JobState, Kind
from timebell.recurrence import Recurrence
from timebell.recurrence.instants import SECOND_US, from_us, to_us

MICROSECOND = timedelta(microseconds=1)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
HALF_HOUR_US = 1800 * SECOND_US  # local clocks change at multiples of this
WINDOW_SIZE = 1_000  # expected instants per window
RESCHEDULED = "rescheduled"  # reason of a cancelled job whose occurrence was taken over by a later job
MAX_DEFERRED_DIFFERENCES = 100_000  # differences around a tzdata change that are buffered until all are known
NO_SUCH_OCCURRENCE = "The revision in effect then has no such occurrence."


@dataclass(frozen=True, slots=True)
class _Segment:
    """The interval [low, high) in which a revision applies."""

    number: int
    low: datetime
    high: datetime


@dataclass(frozen=True, slots=True)
class _RangeCoverage:
    """The range row that covers the current position, and the instants in it that have their own rows."""

    range_end: datetime
    overridden: frozenset[datetime]


@dataclass(frozen=True, slots=True)
class _ShiftWindow:
    """An interval [low, high) in which rows may lie a multiple of `shift` from where the installed tzdata puts them."""

    low: datetime
    high: datetime
    shift: timedelta


class ScheduleAudit:
    """The audit of one schedule within [start, end).

    Alternate `next_window`, which returns the interval of rows to read, and `compare_rows`, which compares them.
    `grace` is the minimum age of an occurrence that must have been decided. `zone_shifts` are the shifts of all tzdata
    changes, in all zones; `firing_stopped` is true while all firing is stopped. Totals are added to `counts`; each
    difference is passed to `report`.
    """

    def __init__(
        self, history: ScheduleHistory, start: datetime, end: datetime, now: datetime, grace: timedelta,
        counts: AuditCounts, report: Callable[[Difference], None], zone_shifts: Sequence[ZoneShift] = (), *,
        firing_stopped: bool = False,
    ) -> None:  # fmt: skip
        self.history = history
        self.counts = counts
        self._report = report
        self._zone_shifts = zone_shifts
        self._recurrence_cache: dict[int, Recurrence | None] = {}
        self._shifts_by_zone: dict[str, list[_ShiftWindow]] = {}
        self._now = now
        self._start = start
        self._end = max(start, self._audit_end(min(end, now - grace), firing_stopped))
        self._segments = _segments(history.revisions, start, max(end, self._end))
        self._position = start
        self._expected: list[datetime] = []
        self._window_end = start
        self._coverage: _RangeCoverage | None = None
        self._missing_span: tuple[datetime, datetime, int] | None = None
        self._deferred_missing: list[datetime] = []
        self._deferred_unexpected: list[RecordedJob] = []
        counts.schedules += 1
        for segment in self._segments:  # occurrences that need not be decided yet
            counts.due += self._count_expected(segment.number, max(segment.low, self._end), min(segment.high, end))

    def _audit_end(self, end: datetime, firing_stopped: bool) -> datetime:
        """Return `end`, or the cursor of a paused schedule: its later occurrences are decided when it resumes."""
        history = self.history
        paused = history.exists and (firing_stopped or not history.enabled) and history.next_fire_at is not None
        return min(end, history.next_fire_at) if paused and history.next_fire_at is not None else end

    @property
    def is_first_window(self) -> bool:
        """True before the first window was compared: a range row from before `start` may reach into it."""
        return self._position == self._start

    def count_occurrences(self) -> int:
        """Return the number of occurrences that will be compared."""
        return sum(
            self._count_expected(segment.number, segment.low, min(segment.high, self._end))
            for segment in self._segments
        )

    def next_window(self) -> tuple[datetime, datetime] | None:
        """Return the interval [low, high) of scheduled instants to read next; None at the end."""
        if self._position >= self._end:
            return None
        self._expected, self._window_end = [], self._end
        covered = self._coverage
        if covered is not None and covered.range_end >= self._position:
            self._window_end = min(self._end, covered.range_end + MICROSECOND)
            self._expected = sorted(at for at in covered.overridden if self._position <= at < self._window_end)
            return self._position, self._window_end
        for segment in self._segments:
            low, high = max(segment.low, self._position), min(segment.high, self._end)
            if low >= high:
                continue
            recurrence = self._recurrence(segment.number)
            if recurrence is None:
                continue
            if recurrence.spec.delay is not None:
                max_span = timedelta(microseconds=max(recurrence.spec.delay.length_us, SECOND_US // 100) * WINDOW_SIZE)
                if high - low > max_span:
                    self._window_end = low + max_span
                    break
                continue
            remaining = WINDOW_SIZE - len(self._expected)
            instants = list(_occurrences(recurrence, low, high, remaining + 1))
            self._expected += instants[:remaining]
            if len(instants) > remaining:
                self._window_end = instants[remaining]
                break
        return self._position, self._window_end

    @property
    def estimated_rows(self) -> int:
        """The approximate number of rows in the window."""
        return 1 + len(self._expected)

    def compare_rows(self, rows: Sequence[RecordedJob], preceding_range: RecordedJob | None = None) -> None:
        """Compare the rows of the window, ordered by scheduled instant.

        `preceding_range` is the range row from before the first window that reaches into it.
        """
        if preceding_range is not None:
            self._compare_range(preceding_range, is_expected=True)
        expected, n = self._expected, 0
        for at, group in groupby(rows, key=lambda row: row.scheduled_at):
            while n < len(expected) and expected[n] < at:
                self._add_missing(expected[n])
                n += 1
            is_expected = n < len(expected) and expected[n] == at
            n += is_expected
            self._compare_instant(at, list(group), is_expected)
        for at in expected[n:]:
            self._add_missing(at)
        self._position = self._window_end
        if self._position >= self._end:
            self._resolve_deferred()

    def _add_missing(self, at: datetime) -> None:
        if self._is_covered(at):
            return
        self.counts.expected += 1
        if self._shifts_at(at) and len(self._deferred_missing) < MAX_DEFERRED_DIFFERENCES:
            self._deferred_missing.append(at)
        elif self._missing_span is None:
            self._missing_span = at, at, 1
        else:
            self._missing_span = self._missing_span[0], at, self._missing_span[2] + 1

    def _compare_instant(self, at: datetime, rows: list[RecordedJob], is_expected: bool) -> None:
        self.counts.manual += sum(row.kind == Kind.MANUAL for row in rows)
        own_rows = [row for row in rows if row.kind in (Kind.PLANNED, Kind.BACKFILL)]
        for row in own_rows:
            if row.started_early:
                self._add_difference(Finding.EARLY, at, at, 1, "The job started before it was due.", row)
        planned = [row for row in own_rows if row.kind == Kind.PLANNED and row.reason != RESCHEDULED]
        backfills = [row for row in own_rows if row.kind == Kind.BACKFILL and row.created_at <= self._now]
        covered = self._is_covered(at)
        self._count_backfills(at, backfills)
        if is_expected and not covered:
            if planned:
                self._report_missing_span()
            else:
                self._add_missing(at)
        self._report_duplicates(at, planned, backfills, covered)
        if planned and not covered:
            self._count_decision(at, planned[0], is_expected)

    def _count_backfills(self, at: datetime, backfills: list[RecordedJob]) -> None:
        self.counts.backfilled += len(backfills)
        for row in backfills:
            if not self._has_occurrence(row.revision, at):
                self._add_unexpected(row)

    def _report_duplicates(
        self, at: datetime, planned: list[RecordedJob], backfills: list[RecordedJob], covered: bool
    ) -> None:
        ran = [row for row in (*planned, *backfills) if row.has_run_or_will]
        if len(planned) > 1 or (covered and planned):
            self._add_difference(Finding.DUPLICATED, at, at, 1, "The occurrence was decided more than once.", *planned)
        elif len(ran) > 1:
            self._add_difference(Finding.DUPLICATED, at, at, 1, "The occurrence ran more than once.", *ran)

    def _count_decision(self, at: datetime, row: RecordedJob, is_expected: bool) -> None:
        if row.is_range:
            self._compare_range(row, is_expected)
            return
        if not is_expected and self._is_delay(row.revision):  # each run determines the next, so any instant is valid
            is_expected = True
        if not is_expected:
            self._add_unexpected(row)
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

    def _compare_range(self, row: RecordedJob, is_expected: bool) -> None:
        """Check the count of a range row; later planned rows within the range are reported as duplicates."""
        recurrence = self._recurrence(row.revision)
        if not is_expected or recurrence is None or recurrence.spec.delay is not None:
            self._add_unexpected(row)
        if recurrence is None or recurrence.spec.delay is not None:
            return
        low, high = row.scheduled_at, row.last_instant + MICROSECOND
        actual = _count_between(recurrence.effective(), low, high)
        if actual != row.count and not self._is_count_explained_by_shift(recurrence, row):
            detail = f"A range row counts {row.count:,} skipped occurrences; there are {actual:,}."
            self._add_difference(Finding.MISCOUNTED, low, row.last_instant, abs(actual - row.count), detail, row)
        in_period = _count_between(recurrence.effective(), max(low, self._start), min(high, self._end))
        self.counts.expected += in_period
        self.counts.skipped[row.reason or "?"] += in_period
        self._coverage = _RangeCoverage(row.last_instant, frozenset(recurrence.overridden_instants(low, high)))

    def _is_covered(self, at: datetime) -> bool:
        """Return whether the current range row covers this instant."""
        return self._coverage is not None and at <= self._coverage.range_end and at not in self._coverage.overridden

    def _add_unexpected(self, row: RecordedJob) -> None:
        if (
            self._shifts_at(row.scheduled_at)
            and not row.is_range
            and len(self._deferred_unexpected) < MAX_DEFERRED_DIFFERENCES
        ):
            self._deferred_unexpected.append(row)
            return
        self._add_difference(Finding.UNEXPECTED, row.scheduled_at, row.last_instant, row.count, NO_SUCH_OCCURRENCE, row)

    def _report_missing_span(self) -> None:
        if self._missing_span is None:
            return
        at, to, count = self._missing_span
        self._missing_span = None
        detail = "No row records its outcome." if count == 1 else "No row records their outcomes."
        cursor = self.history.next_fire_at
        if cursor is not None and at >= cursor and self.history.exists:
            cause = (
                f"the schedule is errored: {self.history.error}"
                if self.history.error
                else "no planner has processed it"
            )
            detail = f"Not decided yet: {cause}."
        self._add_difference(Finding.MISSING, at, to, count, detail)

    def _resolve_deferred(self) -> None:
        """Match missing occurrences with unexpected rows that other tzdata explains; report the rest."""
        surplus = list(self._deferred_unexpected)
        for at in self._deferred_missing:
            match = next((row for row in surplus if self._is_explained_by_shift(at, row.scheduled_at)), None)
            if match is None:
                self._report_missing_span()
                self._missing_span = at, at, 1
                self._report_missing_span()
            else:
                surplus.remove(match)
                self.counts.moved += 1
        for row in surplus:
            self._add_difference(
                Finding.UNEXPECTED, row.scheduled_at, row.last_instant, row.count, NO_SUCH_OCCURRENCE, row
            )
        self._report_missing_span()

    def _add_difference(
        self, finding: Finding, at: datetime, to: datetime, count: int, detail: str, *rows: RecordedJob
    ) -> None:
        self.counts.found[finding.value] += 1
        self._report(Difference(
            finding=finding, schedule_id=self.history.id, schedule=self.history.name, at=at, to=to, count=count,
            detail=detail, jobs=tuple(row.id for row in rows),
        ))  # fmt: skip

    def _recurrence(self, number: int | None) -> Recurrence | None:
        """Return the recurrence of a revision; None if it does not exist or cannot be read (reported once)."""
        if number is None:
            return None
        if number not in self._recurrence_cache:
            recurrence = None
            revision = next((one for one in self.history.revisions if one.number == number), None)
            if revision is not None:
                try:
                    recurrence = self.history.load_recurrence(number)
                except Exception as error:
                    detail = f"Revision {number} cannot be read, so its occurrences are unknown: {error!s:.200}"
                    self._recurrence_cache[number] = None
                    self._add_difference(Finding.UNREADABLE, revision.effective_at, revision.effective_at, 1, detail)
            self._recurrence_cache[number] = recurrence
        return self._recurrence_cache[number]

    def _has_occurrence(self, number: int | None, at: datetime) -> bool:
        """Return whether a revision has this instant, even outside its interval: a backfill may reach before it."""
        recurrence = self._recurrence(number)
        return recurrence is not None and recurrence.has(at)

    def _is_delay(self, number: int | None) -> bool:
        recurrence = self._recurrence(number)
        return recurrence is not None and recurrence.spec.delay is not None

    def _count_expected(self, number: int, low: datetime, high: datetime) -> int:
        recurrence = self._recurrence(number) if low < high else None
        return 0 if recurrence is None or recurrence.spec.delay is not None else _count_between(recurrence, low, high)

    # tzdata: rows were planned with the release installed then, and are compared with the release installed now.

    def _shifts_at(self, at: datetime) -> list[_ShiftWindow]:
        if not self._zone_shifts:
            return []
        segment = next((one for one in self._segments if one.low <= at < one.high), None)
        recurrence = None if segment is None else self._recurrence(segment.number)
        if recurrence is None:
            return []
        if recurrence.timezone not in self._shifts_by_zone:
            self._shifts_by_zone[recurrence.timezone] = list(_shift_windows(self._zone_shifts, recurrence))
        return [window for window in self._shifts_by_zone[recurrence.timezone] if window.low <= at < window.high]

    def _is_explained_by_shift(self, at: datetime, other: datetime) -> bool:
        """Return whether other tzdata may have put at `other` the occurrence expected `at`.

        Either they are a multiple of the offset change apart; or the local time lies in a gap under one of the two
        releases, so that the occurrence was moved to the end of the gap.
        """
        distance = abs(other - at)
        return any(
            MICROSECOND <= distance <= DAY
            and (not distance % window.shift or (distance < window.shift and not to_us(other) % HALF_HOUR_US))
            for window in self._shifts_at(at)
        )

    def _is_count_explained_by_shift(self, recurrence: Recurrence, row: RecordedJob) -> bool:
        """Return whether other tzdata may explain the count of a range row."""
        for window in self._shifts_at(row.scheduled_at) or self._shifts_at(row.last_instant):
            effective, low, high = recurrence.effective(), row.scheduled_at, row.last_instant + MICROSECOND
            shift = window.shift
            minimum = _count_between(effective, low + shift, high - shift) if high - low > 2 * shift else 0
            if minimum <= row.count <= _count_between(effective, low - shift, high + shift):
                return True
        return False


def _segments(revisions: Sequence[RevisionStart], start: datetime, end: datetime) -> list[_Segment]:
    segments: list[_Segment] = []
    ordered = sorted(revisions, key=lambda one: one.number)
    since = None
    for n, revision in enumerate(ordered):
        following = ordered[n + 1] if n + 1 < len(ordered) else None
        since = revision.effective_at if since is None else max(since, revision.effective_at)
        low = max(start, since + MICROSECOND)
        high = end if following is None else min(end, max(since, following.effective_at) + MICROSECOND)
        if low < high:
            segments.append(_Segment(revision.number, low, high))
    return segments


def _occurrences(recurrence: Recurrence, low: datetime, high: datetime, limit: int) -> Iterator[datetime]:
    """Yield the first `limit` instants in [low, high); stop where the search gives up, as the planner does."""
    with suppress(InvalidRecurrence):
        yield from islice(recurrence.between(low, high), limit)


def _count_between(recurrence: Recurrence, low: datetime, high: datetime) -> int:
    try:
        return recurrence.count(low, high)
    except InvalidRecurrence:
        return sum(1 for _ in _occurrences(recurrence, low, high, 1_000_000))


def _shift_windows(zone_shifts: Sequence[ZoneShift], recurrence: Recurrence) -> Iterator[_ShiftWindow]:
    zone = recurrence.rule.zone
    for zone_shift in zone_shifts:
        if zone_shift.timezone != recurrence.timezone:
            continue
        # A release installed late differs from the last clock change on, not only for instants after its installation.
        segment = zone.segments[zone.index(to_us(zone_shift.since) // SECOND_US)]
        since = min(zone_shift.since, from_us(max(segment.start, 0) * SECOND_US))
        yield _ShiftWindow(since - zone_shift.shift, zone_shift.until + zone_shift.shift + HOUR, zone_shift.shift)
