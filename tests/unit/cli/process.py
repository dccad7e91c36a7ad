"""A `timebell` process: started, watched line by line, ended."""

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
PATIENCE = 120.0
_numbers = count()


class Process:
    """One process; its output goes to files, so that nothing is lost and nobody blocks."""

    def __init__(self, folder: Path, args: list[str], environment: dict[str, str]) -> None:
        number = next(_numbers)
        self.out, self.err = folder / f"process-{number}.out", folder / f"process-{number}.err"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIMEBELL_")}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "timebell.cli.main", *args], cwd=folder, stdout=out, stderr=err,
                stdin=subprocess.DEVNULL, env={**kept, "PYTHONPATH": str(ROOT / "src"), **environment},
            )  # fmt: skip

    def wait_for(self, pattern: str, *, err: bool = False, times: int = 1) -> list[str]:
        """The lines that match, once there are so many."""

        def found() -> list[str] | None:
            text = (self.err if err else self.out).read_text()
            lines = [line for line in text.splitlines() if re.search(pattern, line)]
            return lines if len(lines) >= times else None

        return until(found, lambda: f"{pattern!r} in:\n{self.out.read_text()}\n{self.err.read_text()}")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; its exit code."""
        self.popen.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Until it ends by itself; its exit code."""
        return self.popen.wait(PATIENCE)

    def kill(self) -> None:
        """End it, whatever it does."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(PATIENCE)


T = TypeVar("T")


def until(look: Callable[[], T | None], wanted: Callable[[], str]) -> T:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {PATIENCE:g} s: {wanted()}")
