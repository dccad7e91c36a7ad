"""Detection of overdue schedules, late jobs and silent nodes.

Pure functions and state without I/O, used by the leader's watchdog and by `timebell watch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from timebell.errors import InvalidRecurrence
from timebell.recurrence import Recurrence
from timebell.store.cluster.gauges import OverdueSchedule
from timebell.store.schedules.recurrence_column import recurrence_from_json

OVERDUE_GRACE_SECONDS = 10.0
"""Seconds after its due time at which an occurrence without a row counts as overdue."""
START_ALARM_SECONDS = 60.0
"""Seconds after which a due job that has not started raises an alarm and counts as missed."""
DATABASE_SILENCE_SECONDS = 10.0
"""Seconds without a database response that raise an alarm."""
MAX_NAMED_SCHEDULES = 3
MAX_COUNTED = 100
"""Maximum occurrences of a schedule counted in one check, so a long outage cannot block the heartbeat."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem that requires an operator. Its code is stable for as long as it lasts; `events` may increase."""

    code: str
    text: str
    events: int = 1


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """State of the cluster as read from the database.

    `heartbeats` maps node ids to heartbeat counters; `oldest_due_age_seconds` is the wait of the oldest due job.
    """

    heartbeats: Mapping[str, int]
    overdue: Sequence[OverdueSchedule]
    oldest_due_age_seconds: float


def count_unrecorded(recurrence: Recurrence, cursor: datetime, counted_until: datetime | None, until: datetime) -> int:
    """Count occurrences from the cursor through `until` that have no row and were not counted before.

    Occurrences up to and including `counted_until` were counted earlier. Counting stops at MAX_COUNTED.
    """
    start = cursor if counted_until is None else max(cursor, counted_until + timedelta(microseconds=1))
    if start > until:
        return 0
    if recurrence.spec.delay is not None:
        return int(counted_until is None)
    count = 0
    try:
        at = recurrence.effective().next(start - timedelta(microseconds=1))
        while at is not None and at <= until and count < MAX_COUNTED:
            count += 1
            at = recurrence.effective().next(at)
    except InvalidRecurrence:  # the search for the next occurrence reached its limit
        pass
    return count


class UnrecordedCounter:
    """Count each overdue occurrence without a row once, regardless of the number of checks."""

    def __init__(self) -> None:
        self._counted_until: dict[str, datetime] = {}

    def count(self, overdue: Sequence[OverdueSchedule], now: datetime) -> int:
        """Return the number of overdue occurrences not counted before."""
        until, total = now - timedelta(seconds=OVERDUE_GRACE_SECONDS), 0
        for schedule in overdue:
            try:
                total += count_unrecorded(
                    recurrence_from_json(schedule.recurrence),
                    schedule.since,
                    self._counted_until.get(schedule.id),
                    until,
                )
            except Exception:  # the recurrence is unreadable, but its next occurrence is overdue regardless
                total += schedule.id not in self._counted_until
        self._counted_until = {schedule.id: until for schedule in overdue}
        return total


@dataclass(slots=True)
class Watch:
    """Derive problems from successive snapshots of the database.

    Times are monotonic seconds of this process. `lease_seconds` is the time without a heartbeat after which nodes count
    as dead.
    """

    lease_seconds: float
    started: float
    _last_response: float = field(init=False)
    _last_heartbeat: float = field(init=False)
    _heartbeats: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._last_response = self._last_heartbeat = self.started

    def find_problems(self, snapshot: ClusterSnapshot | None, reason: str, now: float) -> list[Problem]:
        """Return the current problems. A `snapshot` of None means the database did not respond, for `reason`."""
        if snapshot is None:
            # The state of the nodes is unknown meanwhile, so give them a full lease to send a heartbeat.
            self._last_heartbeat, self._heartbeats = now, {}
            if now - self._last_response < DATABASE_SILENCE_SECONDS:
                return []
            return [
                Problem(
                    "DATABASE_UNREACHABLE",
                    f"The database has not responded for {DATABASE_SILENCE_SECONDS:g} s: {reason}",
                )
            ]
        self._last_response = now
        if (
            any(self._heartbeats.get(id_) != heartbeat for id_, heartbeat in snapshot.heartbeats.items())
            and self._heartbeats
        ):
            self._last_heartbeat = now
        self._heartbeats = snapshot.heartbeats or self._heartbeats
        return [
            *self._node_problems(now),
            *_overdue_problems(snapshot.overdue),
            *_waiting_problems(snapshot.oldest_due_age_seconds),
        ]

    def _node_problems(self, now: float) -> list[Problem]:
        silent = now - self._last_heartbeat
        if silent < self.lease_seconds:
            return []
        return [Problem("NO_LIVE_NODE", f"No node has sent a heartbeat for {silent:.0f} s: nothing fires.")]


def _overdue_problems(overdue: Sequence[OverdueSchedule]) -> list[Problem]:
    if not overdue:
        return []
    examples = ", ".join(
        f"{schedule.label} (since {schedule.since:%Y-%m-%d %H:%M:%S} UTC)" for schedule in overdue[:MAX_NAMED_SCHEDULES]
    )
    more = ", ..." if len(overdue) > MAX_NAMED_SCHEDULES else ""
    subject = "A schedule has" if len(overdue) == 1 else f"{len(overdue)} schedules have"
    return [
        Problem(
            "SCHEDULE_NOT_FIRED",
            f"{subject} not fired more than {OVERDUE_GRACE_SECONDS:g} s after the due time: {examples}{more}.",
        )
    ]


def _waiting_problems(oldest_due_age_seconds: float) -> list[Problem]:
    if oldest_due_age_seconds < START_ALARM_SECONDS:
        return []
    return [
        Problem(
            "JOBS_NOT_STARTED", f"Jobs have been due for up to {oldest_due_age_seconds:.0f} s and have not started."
        )
    ]
