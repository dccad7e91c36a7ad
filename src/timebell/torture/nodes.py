"""The nodes of a run: real `timebell run` processes, each known by its process id and struck by that alone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from timebell.torture import grounds
from timebell.torture.plan import Plan, as_all, come_last, environment

READY = b"Ready in"
PATIENCE = 60.0


class NodeProcess:
    """One node, alive or not."""

    def __init__(self, plan: Plan, name: str, url: str) -> None:
        self.plan, self.name, self.url = plan, name, url
        self.log = plan.path(f"{name}.log")
        self.point = plan.path(f"{name}.point")
        self._clock = plan.path(f"{name}.clock")
        self._told = plan.path(f"{name}.told")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self._from = 0
        self.serves = False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Begin to start it."""
        self.serves = False
        self._from = self.log.stat().st_size if self.log.exists() else 0
        more = {}
        if "clock" in self.plan.faults:
            self.set_clock(0)
            more = grounds.faked(self._clock) | {"TIMEBELL_TEST_TELL": str(self._told)}
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "timebell.cli.main", "run", "timebell.torture.app:app", "--roles",
                 "planner,worker,api", "--port", str(self.port)],
                cwd=self.plan.out, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment(
                    self.plan, TIMEBELL_DATABASE_URL=self.url, TIMEBELL_NODE_NAME=self.name,
                    TIMEBELL_TEST_POINT=str(self.point), **more,
                ),
            )  # fmt: skip
        as_all(self.pid)
        if os.getuid() == 0:  # who else may undo it?
            come_last(self.pid)  # its two seconds of starting would be taken from the nodes that serve

    async def ready(self) -> bool:
        """Wait until it plans and works, and treat it as all from then on; False if it does not come."""
        for _ in range(int(PATIENCE / 0.05)):
            if READY in self._said():
                as_all(self.pid)
                self.serves = True
                return True
            if not self.alive:
                return False
            await asyncio.sleep(0.05)
        return False

    def _said(self) -> bytes:
        with open(self.log, "rb") as log:
            log.seek(self._from)
            return log.read()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def code(self) -> int | None:
        """What it ended with: minus the number of the signal that killed it."""
        return None if self._process is None else self._process.poll()

    @property
    def stopped(self) -> bool:
        """Whether the kernel says that it is frozen."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        except OSError:
            return False

    def set_clock(self, seconds: float) -> None:
        """Have its wall clock be so far off."""
        self._clock.write_text(f"{seconds:+g}\n")

    @property
    def clock_offset(self) -> float:
        """How far off its wall clock is, as it says itself."""
        written = self._told.stat().st_mtime if self._told.exists() else time.time()
        said = self._told.read_text().split() if self._told.exists() else []
        return float(said[0]) - written if said else 0.0

    def send(self, number: signal.Signals) -> None:
        """A signal, to this very process."""
        if self.alive and self._process is not None:
            self._process.send_signal(number)

    async def ended(self, seconds: float) -> bool:
        """Wait until it is gone."""
        for _ in range(int(seconds / 0.02)):
            if not self.alive:
                return True
            await asyncio.sleep(0.02)
        return not self.alive

    def end(self) -> None:
        """Whatever its state, gone."""
        if self._process is not None and self.alive:
            self._process.kill()
            self._process.wait()


def waited(process: int) -> float:
    """For how many seconds a process has waited for a processor, as the kernel counts it."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
