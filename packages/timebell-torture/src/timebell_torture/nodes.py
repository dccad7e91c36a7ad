"""The nodes of a run: real `timebell run` processes, each signalled only by its process id."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from timebell_torture import capabilities
from timebell_torture.plan import Plan, environment, reset_priority, set_idle_priority

READY_MESSAGE = b"Ready in"
START_TIMEOUT_SECONDS = 150.0  # on a busy machine


class NodeProcess:
    """One node, running or not."""

    def __init__(self, plan: Plan, name: str, url: str) -> None:
        self.plan, self.name, self.url = plan, name, url
        self.log = plan.path(f"{name}.log")
        self.fail_point = plan.path(f"{name}.point")
        self._clock = plan.path(f"{name}.clock")
        self._reported_clock = plan.path(f"{name}.reported-clock")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self._log_offset = 0
        self.is_serving = False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start the process, without waiting until it is ready."""
        self.is_serving = False
        self._log_offset = self.log.stat().st_size if self.log.exists() else 0
        clock_environment = {}
        if "clock" in self.plan.faults:
            self.set_clock(0)
            clock_environment = capabilities.faketime_environment(self._clock) | {
                "TIMEBELL_TEST_CLOCK_REPORT": str(self._reported_clock)
            }
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "timebell.cli.main", "run", "timebell_torture.app:app", "--roles",
                 "planner,worker,api", "--port", str(self.port)],
                cwd=self.plan.out, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment(
                    self.plan, TIMEBELL_DATABASE_URL=self.url, TIMEBELL_NODE_NAME=self.name,
                    TIMEBELL_TEST_FAIL_POINT=str(self.fail_point), **clock_environment,
                ),
            )  # fmt: skip
        reset_priority(self.pid)
        if os.getuid() == 0:  # only root may raise the priority again
            set_idle_priority(self.pid)  # its two seconds of start-up CPU time would be taken from the serving nodes

    async def ready(self) -> bool:
        """Wait until it plans and works, then give it normal priority; return False if it does not start."""
        for _ in range(int(START_TIMEOUT_SECONDS / 0.05)):
            if READY_MESSAGE in self._log_since_launch():
                reset_priority(self.pid)
                self.is_serving = True
                return True
            if not self.is_alive:
                return False
            await asyncio.sleep(0.05)
        return False

    def _log_since_launch(self) -> bytes:
        with open(self.log, "rb") as log:
            log.seek(self._log_offset)
            return log.read()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code: minus the signal number if a signal killed the process, None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def is_frozen(self) -> bool:
        """True if the kernel reports that the process is stopped."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        except OSError:
            return False

    def set_clock(self, seconds: float) -> None:
        """Shift the node's wall clock by this many seconds."""
        self._clock.write_text(f"{seconds:+g}\n")

    @property
    def clock_offset(self) -> float:
        """The offset of the node's wall clock in seconds, as the node reports it."""
        written_at = self._reported_clock.stat().st_mtime if self._reported_clock.exists() else time.time()
        reported = self._reported_clock.read_text().split() if self._reported_clock.exists() else []
        return float(reported[0]) - written_at if reported else 0.0

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it is running."""
        if self.is_alive and self._process is not None:
            self._process.send_signal(number)

    async def wait_for_exit(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether the process has ended."""
        for _ in range(int(seconds / 0.02)):
            if not self.is_alive:
                return True
            await asyncio.sleep(0.02)
        return not self.is_alive

    def kill(self) -> None:
        """Kill the process (SIGKILL) in any state, and wait for its end."""
        if self._process is not None and self.is_alive:
            self._process.kill()
            self._process.wait()


def cpu_wait_seconds(process: int) -> float:
    """Return the total seconds for which a process was runnable but had no CPU, as counted by the kernel."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
