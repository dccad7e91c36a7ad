"""What should have happened and did not: pure comparisons, for the leader's counts and for `timebell watch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from timebell.errors import InvalidRecurrence
from timebell.recurrence import Recurrence
from timebell.store.cluster.gauges import Overdue
from timebell.store.schedules.recurrence_column import recurrence_of

GRACE = 10.0
"""Seconds after its instant from which an occurrence without any row is overdue."""
WAITING = 60.0
"""Seconds from which a job that is due and has not started is worth an alarm: from then on it counts as missed."""
SILENCE = 10.0
"""Seconds for which the database may fail to answer before that is worth an alarm."""
NAMED = 3
COUNTED = 100
"""Occurrences of a schedule that one look counts: a heart must not stand still over a long outage."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs a person. The code stays the same for as long as it lasts."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at the database: the beat of every node by id, what is overdue, how long the oldest due job waits
    (seconds)."""

    beats: Mapping[str, int]
    overdue: Sequence[Overdue]
    oldest: float


def unrecorded(recurrence: Recurrence, cursor: datetime, counted: datetime | None, until: datetime) -> int:
    """How many occurrences from the cursor up to `until` have no row and were not counted before: those after
    `counted`, the last instant that was. Counting stops at `COUNTED`."""
    start = cursor if counted is None else max(cursor, counted + timedelta(microseconds=1))
    if start > until:
        return 0
    if recurrence.spec.delay is not None:
        return int(counted is None)
    count = 0
    try:
        at = recurrence.fired().next(start - timedelta(microseconds=1))
        while at is not None and at <= until and count < COUNTED:
            count += 1
            at = recurrence.fired().next(at)
    except InvalidRecurrence:  # a search for more that was given up
        pass
    return count


class Unrecorded:
    """Counts each occurrence that is overdue without a row once, however often one looks."""

    def __init__(self) -> None:
        self._counted: dict[str, datetime] = {}

    def count(self, overdue: Sequence[Overdue], now: datetime) -> int:
        """How many more there are."""
        until, found = now - timedelta(seconds=GRACE), 0
        for one in overdue:
            try:
                found += unrecorded(recurrence_of(one.recurrence), one.since, self._counted.get(one.id), until)
            except Exception:  # not readable: its instant is overdue all the same
                found += one.id not in self._counted
        self._counted = {one.id: until for one in overdue}
        return found


@dataclass(slots=True)
class Watch:
    """Judges looks at the database. Times are the watcher's own monotonic seconds; `lease` is how long a node may
    be silent."""

    lease: float
    began: float
    _answered: float = field(init=False)
    _alive: float = field(init=False)
    _beats: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._answered = self._alive = self.began

    def judge(self, seen: Seen | None, why: str, now: float) -> list[Problem]:
        """The problems there are, from a look, or from none and the reason."""
        if seen is None:
            # How the nodes are is not known meanwhile; they get the time of a lease to show it.
            self._alive, self._beats = now, {}
            if now - self._answered < SILENCE:
                return []
            return [Problem("DATABASE_UNREACHABLE", f"The database has not answered for {SILENCE:g} s: {why}")]
        self._answered = now
        if any(self._beats.get(id_) != beat for id_, beat in seen.beats.items()) and self._beats:
            self._alive = now
        self._beats = seen.beats or self._beats
        return [*self._nodes(now), *_overdue(seen.overdue), *_waiting(seen.oldest)]

    def _nodes(self, now: float) -> list[Problem]:
        silent = now - self._alive
        if silent < self.lease:
            return []
        return [Problem("NO_LIVE_NODE", f"No node has given a sign of life for {silent:.0f} s: nothing fires.")]


def _overdue(overdue: Sequence[Overdue]) -> list[Problem]:
    if not overdue:
        return []
    named = ", ".join(f"{one.label} (since {one.since:%Y-%m-%d %H:%M:%S} UTC)" for one in overdue[:NAMED])
    more = ", ..." if len(overdue) > NAMED else ""
    many = "A schedule has" if len(overdue) == 1 else f"{len(overdue)} schedules have"
    return [Problem("SCHEDULE_NOT_FIRED", f"{many} not fired more than {GRACE:g} s after the time: {named}{more}.")]


def _waiting(oldest: float) -> list[Problem]:
    if oldest < WAITING:
        return []
    return [Problem("JOBS_NOT_STARTED", f"Jobs have been due for up to {oldest:.0f} s and have not started.")]
