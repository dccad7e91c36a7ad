"""What a run is: its settings, its phases, and where its files are."""

from __future__ import annotations

import ctypes
import json
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
)  # fmt: skip
ON = {
    "sqlite": ("kill", "freeze", "churn", "point", "diskfull", "migrate"),  # whose clock is that of its node
    "mariadb": ("kill", "freeze", "dbstop", "cut", "churn", "point", "clock", "migrate"),
}
STORES = ("postgres", "pgbouncer", "mariadb", "sqlite")
KEY = "torture-torture-torture-torture-torture"  # of the test's own installation
FIRST = -10  # a priority
SECRET = "whsec_dG9ydHVyZS10b3J0dXJlLXRvcnR1cmUtdG9ydHVyZQ=="  # noqa: S105 - of the test's own receiver


@dataclass(slots=True, kw_only=True)
class Plan:
    """The settings of a run. `began` and `began_wall` are nanoseconds of both clocks when the clean phase began."""

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

    def begin(self) -> None:
        """The clean phase begins now."""
        whole = self.minutes * 60
        clean, drain = min(60.0, max(12.0, whole * 0.15)), min(60.0, max(28.0, whole * 0.18))
        heal = whole - drain
        self.phases = {"clean": (0.0, clean), "faulted": (clean, heal), "recovery": (heal, whole)}
        self.began, self.began_wall = time.monotonic_ns(), time.time_ns()
        self.ended = self.began + int(whole * 1e9)

    @property
    def now(self) -> float:
        """Seconds since it began."""
        return (time.monotonic_ns() - self.began) / 1e9

    def path(self, name: str) -> Path:
        """A file of this run."""
        return Path(self.out) / name

    @property
    def socket(self) -> str:
        """Where handlers reach the sink: short, as the names of sockets have to be."""
        return f"{self.sockets}/sink"

    def save(self) -> None:
        """For the other processes."""
        write(self.path("plan.json"), asdict(self))


def load(out: str) -> Plan:
    """The plan of the run in this folder."""
    found = json.loads((Path(out) / "plan.json").read_text())
    found["phases"] = {name: tuple(window) for name, window in found["phases"].items()}
    return Plan(**found)


def write(path: Path, value: Any) -> None:
    """Whole, or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value, indent=1))
    draft.rename(path)


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the process that started this one is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def give_way() -> None:
    """Let others have a processor first, also where Linux shares them out by session: this process gets what they
    leave, and is put aside at once when one of them wakes up."""
    os.nice(10)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("10")
    come_last(os.getpid())


def come_last(process: int) -> None:
    """Have a process run only while no other wants to, until `as_all`."""
    if sys.platform == "linux":
        os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def take_precedence() -> None:
    """Have a processor before others, where this user may: what only passes things on is not to be waited for."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)


def as_all(process: int) -> None:
    """Have a process that one with precedence has started, or that came last, wait like any other."""
    with suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{process}/task")):
            os.setpriority(os.PRIO_PROCESS, thread, 0)
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def environment(plan: Plan, **more: str) -> dict[str, str]:
    """Of the processes of a run: nothing that this machine has set for Timebell."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBELL_")}
    ours = {
        "TIMEBELL_WEBHOOK_SIGNING_SECRET": SECRET, "TIMEBELL_SECRET_KEY": KEY, "TIMEBELL_WEBHOOK_ALLOW": "127.0.0.0/8",
        "TIMEBELL_WEBHOOK_TIMEOUT": "5s", "TIMEBELL_LOG_FORMAT": "text", "TIMEBELL_TEST_SINK": plan.socket,
    }  # fmt: skip
    return kept | ours | more
