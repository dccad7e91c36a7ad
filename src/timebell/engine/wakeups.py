"""The alarms on which the loops of a node sleep.

A loop wakes at the time that its last step returned, or when its alarm is woken: by a commit that changed something it
waits for, of this node or of another one, or by another loop. docs/internals/one-job.md lists all wake-ups.
"""

from __future__ import annotations

from timebell.alarm import Alarm
from timebell.clock import Clock
from timebell.store.transaction import JOBS, OPERATIONS, SCHEDULES, STOPS

LOOP_BY_SUBJECT = {JOBS: "worker", SCHEDULES: "planner", STOPS: "heartbeat", OPERATIONS: "operations"}
"""The loop of the core that waits for a subject of `Transaction.notify`."""


class Wakeups:
    """One alarm for each loop. `heartbeat` replaces the alarm of the heartbeat in simulations."""

    def __init__(self, clock: Clock, heartbeat: Alarm | None = None) -> None:
        self._clock = clock
        self.planner = Alarm(clock)
        self.worker = Alarm(clock)
        self.scanner = Alarm(clock)
        self.heartbeat = heartbeat or Alarm(clock)
        self.leader = Alarm(clock)
        self.operations = Alarm(clock)
        self.reconciler = Alarm(clock)
        self.audit_export = Alarm(clock)
        self.definitions = Alarm(clock)
        self.progress = Alarm(clock)
        self.alarms = [
            self.planner, self.worker, self.scanner, self.heartbeat, self.leader, self.operations, self.reconciler,
            self.audit_export, self.definitions, self.progress,
        ]  # fmt: skip
        self._alarms_by_subject: dict[str, list[Alarm]] = {
            subject: [getattr(self, loop)] for subject, loop in LOOP_BY_SUBJECT.items()
        }

    def add_alarm(self, subject: str) -> Alarm:
        """Create the alarm of another loop, such as a service of a feature, that waits for `subject`."""
        alarm = Alarm(self._clock)
        self.alarms.append(alarm)
        self._alarms_by_subject.setdefault(subject, []).append(alarm)
        return alarm

    def on_commit(self, subjects: frozenset[str]) -> None:
        """Wake the loops that wait for these subjects. Thread-safe."""
        for subject in subjects:
            for alarm in self._alarms_by_subject.get(subject, ()):
                alarm.wake_threadsafe()

    def close(self) -> None:
        """Close all alarms."""
        for alarm in self.alarms:
            alarm.close()
