"""The plan of a run: its settings, its phases, and the location of its files."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FAULTS = (
    "kill", "freeze", "dbstop", "cut", "drop", "churn", "point", "clock", "dbclock", "diskfull", "pool", "migrate",
    "strand", "read-only", "promote", "rewind",
)  # fmt: skip
FAULTS_BY_STORE = {
    "sqlite": ("kill", "freeze", "churn", "point", "diskfull", "migrate"),  # the node's clock is also the database's
    "mariadb": (
        "kill",
        "freeze",
        "dbstop",
        "cut",
        "churn",
        "point",
        "clock",
        "migrate",
        "strand",
        "read-only",
        "promote",
        "rewind",
    ),
}
STORES = ("postgres", "pgbouncer", "mariadb", "sqlite")
SECRET_KEY = "torture-torture-torture-torture-torture"  # noqa: S105 - of the installation under test
RAISED_PRIORITY = -10  # nice value
MAX_CONCURRENT_FAULTS = 2
# These affect every node, so only one of them is injected at a time; the last three are injected alone.
STORE_WIDE_FAULTS = ("dbstop", "dbclock", "diskfull", "migrate", "read-only", "strand", "promote", "rewind")
EXCLUSIVE_FAULTS = ("strand", "promote", "rewind")
MAX_FAULT_SECONDS = {
    "freeze": 20.0, "cut": 21.0, "drop": 21.0, "point": 13.0, "churn": 8.0, "clock": 22.0, "dbclock": 16.0,
    "diskfull": 14.0, "read-only": 12.0, "strand": 8.0, "promote": 15.0, "rewind": 24.0,
}  # fmt: skip
"""The longest duration of each kind of fault, if it is not 7 seconds."""
MAX_FAULT_PAUSE_SECONDS = 2.5
REQUIRED_FAULTS = 5  # of each kind, that took effect in 10 minutes
SIGNING_SECRET = "whsec_dG9ydHVyZS10b3J0dXJlLXRvcnR1cmUtdG9ydHVyZQ=="  # noqa: S105 - of the test's own receiver


@dataclass(slots=True, kw_only=True)
class Plan:
    """The settings of a run.

    `began` and `began_wall` are the start of the clean phase in nanoseconds, on both clocks.
    """

    out: str
    sockets: str
    seed: int
    minutes: float
    rate: float
    store: str
    nodes: list[str]
    faults: list[str]
    commit: str = ""
    began: int = 0
    began_wall: int = 0
    ended: int = 0
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of 10 minutes that the run has: it needs this share of the minimums for a verdict."""
        return min(1.0, self.minutes / 10)

    @property
    def required_faults(self) -> int:
        """How many faults of each kind must take effect."""
        return max(1, math.ceil(REQUIRED_FAULTS * self.share))

    def phase_times(self) -> dict[str, tuple[float, float]]:
        """Return the start and the end of each phase in seconds."""
        total = self.minutes * 60
        clean, drain = min(60.0, max(12.0, total * 0.15)), min(60.0, max(28.0, total * 0.18))
        faulted_end = total - drain
        return {"clean": (0.0, clean), "faulted": (clean, faulted_end), "recovery": (faulted_end, total)}

    def missing_fault_seconds(self) -> float:
        """Return by how many seconds the faulted phase is too short for the required faults, or 0."""
        start, end = self.phase_times()["faulted"]
        concurrent = MAX_CONCURRENT_FAULTS if len(self.nodes) > 1 else 1
        needed = 0.0
        for kind in self.faults:
            seconds = MAX_FAULT_SECONDS.get(kind, 7.0) + MAX_FAULT_PAUSE_SECONDS
            needed += seconds / (1 if kind in EXCLUSIVE_FAULTS else concurrent)
        return max(0.0, needed * self.required_faults - (end - start))

    def start_phases(self) -> None:
        """Start the clean phase now."""
        self.phases, total = self.phase_times(), self.minutes * 60
        self.began, self.began_wall = time.monotonic_ns(), time.time_ns()
        self.ended = self.began + int(total * 1e9)

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the clean phase."""
        return (time.monotonic_ns() - self.began) / 1e9

    def path(self, name: str) -> Path:
        """Return the path of a file of this run."""
        return Path(self.out) / name

    @property
    def receiver_socket(self) -> str:
        """The Unix socket of the receiver. Its folder has a short path, because socket paths are limited."""
        return f"{self.sockets}/receiver"

    def save(self) -> None:
        """Write plan.json, which the other processes read."""
        write_json(self.path("plan.json"), asdict(self))


def load_plan(out: str) -> Plan:
    """Return the plan of the run in a folder."""
    fields = json.loads((Path(out) / "plan.json").read_text())
    fields["phases"] = {name: tuple(window) for name, window in fields["phases"].items()}
    return Plan(**fields)


def write_json(path: Path, value: Any) -> None:
    """Replace a file atomically."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value, indent=1))
    draft.rename(path)


def terminate_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def lower_priority() -> None:
    """Run this process only on CPU time that others leave, and preempt it when another one wakes up.

    This includes the autogroup, because Linux may share the CPUs by session.
    """
    os.nice(10)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("10")
    set_idle_priority(os.getpid())


def set_idle_priority(process: int) -> None:
    """Run a process only when no other process wants a CPU, until `reset_priority`."""
    if sys.platform == "linux":
        os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def raise_priority() -> None:
    """Give this process a high priority, if permitted: processes that only forward data must not cause delays."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, RAISED_PRIORITY)


def reset_priority(process: int) -> None:
    """Give a process normal priority, after `set_idle_priority` or if its parent has a high priority."""
    with suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{process}/task")):
            os.setpriority(os.PRIO_PROCESS, thread, 0)
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def environment(plan: Plan, **extra: str) -> dict[str, str]:
    """Return the environment of a process of the run, without this machine's own settings for Timebell."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBELL_")}
    settings = {
        "TIMEBELL_WEBHOOK_SIGNING_SECRET": SIGNING_SECRET, "TIMEBELL_SECRET_KEY": SECRET_KEY,
        "TIMEBELL_WEBHOOK_ALLOW": "127.0.0.0/8",
        "TIMEBELL_WEBHOOK_TIMEOUT": "5s", "TIMEBELL_LOG_FORMAT": "text", "TIMEBELL_TEST_RECEIVER": plan.receiver_socket,
    }  # fmt: skip
    return inherited | settings | extra
