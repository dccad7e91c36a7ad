"""The alarms on which the loops of a node sleep.

A loop wakes at the time that its last step returned, or when its alarm is woken: by a commit that changed something it
waits for, of this node or of another one, or by another loop. docs/internals/one-job.md lists all wake-ups.
"""

from __future__ import annotations

from timebell.alarm import Alarm
from timebell.clock import Clock
from timebell.store.transaction import JOBS, OPERATIONS, SCHEDULES, SOURCES, STOPS

LOOP_BY_SUBJECT = {
    JOBS: "worker",
    SCHEDULES: "planner",
    STOPS: "heartbeat",
    OPERATIONS: "operations",
    SOURCES: "sources",
}
"""The loop that waits for a subject of `Transaction.notify`."""


class Wakeups:
    """One alarm for each loop. `heartbeat` replaces the alarm of the heartbeat in simulations."""

    def __init__(self, clock: Clock, heartbeat: Alarm | None = None) -> None:
        self.planner = Alarm(clock)
        self.worker = Alarm(clock)
        self.scanner = Alarm(clock)
        self.heartbeat = heartbeat or Alarm(clock)
        self.leader = Alarm(clock)
        self.operations = Alarm(clock)
        self.sources = Alarm(clock)
        self.reconciler = Alarm(clock)

    def on_commit(self, subjects: frozenset[str]) -> None:
        """Wake the loops that wait for these subjects. Thread-safe."""
        for subject in subjects:
            if subject in LOOP_BY_SUBJECT:
                self.alarm_of(LOOP_BY_SUBJECT[subject]).wake_threadsafe()

    def alarm_of(self, loop: str) -> Alarm:
        """Return the alarm of a loop."""
        alarm: Alarm = getattr(self, loop)
        return alarm

    def close(self) -> None:
        """Close all alarms."""
        for alarm in vars(self).values():
            alarm.close()
