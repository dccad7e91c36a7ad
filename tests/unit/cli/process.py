"""Start a `timebell` process, wait for lines of its output, and end it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[3]
TIMEOUT_SECONDS = 120.0
_numbers = count()


class Process:
    """One process. Its output goes to files, so that nothing is lost and no pipe fills up."""

    def __init__(self, folder: Path, args: list[str], environment: dict[str, str]) -> None:
        number = next(_numbers)
        self.out, self.err = folder / f"process-{number}.out", folder / f"process-{number}.err"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBELL_")}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "timebell.cli.main", *args], cwd=folder, stdout=out, stderr=err,
                stdin=subprocess.DEVNULL, env={**inherited, "PYTHONPATH": str(ROOT / "src"), **environment},
            )  # fmt: skip

    def wait_for(self, pattern: str, *, err: bool = False, times: int = 1) -> list[str]:
        """Return the matching lines as soon as there are at least `times` of them."""

        def found() -> list[str] | None:
            text = (self.err if err else self.out).read_text()
            lines = [line for line in text.splitlines() if re.search(pattern, line)]
            return lines if len(lines) >= times else None

        return until(found, lambda: f"{pattern!r} in:\n{self.out.read_text()}\n{self.err.read_text()}")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until the process ends by itself, and return its exit code."""
        return self.popen.wait(TIMEOUT_SECONDS)

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(TIMEOUT_SECONDS)


T = TypeVar("T")


def until(probe: Callable[[], T | None], describe: Callable[[], str]) -> T:
    """Return the first result of `probe` that is not None, or fail after TIMEOUT_SECONDS."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        found = probe()
        if found is not None:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {TIMEOUT_SECONDS:g} s: {describe()}")
