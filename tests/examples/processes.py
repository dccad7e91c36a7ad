"""Run the example programs as a user would, and read their output."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = EXAMPLES.parent / "src"
TIMEOUT_SECONDS = 180.0  # real time, long enough for a busy machine


def environment(**more: str) -> dict[str, str]:
    """Return the environment of this process with the source tree and `more` added."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1", **more}


def wait_until(condition: Callable[[], bool], within: float = TIMEOUT_SECONDS) -> None:
    """Wait for a condition to become true, at most `within` seconds."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, f"not within {within:g} s"
        time.sleep(0.05)


def run_program(*command: str, folder: Path, **more: str) -> str:
    """Return the output of a program that ends by itself with exit code 0."""
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment(**more), capture_output=True, text=True,
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@contextmanager
def running_program(log: Path, *command: str, folder: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program for the length of the block, then drain it with SIGTERM; its output goes to `log`."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment(**more), stdout=output, stderr=output
        )
        try:
            yield process
        except BaseException:
            print(log.read_text()[-6000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(TIMEOUT_SECONDS)
            finally:
                process.kill()
    assert process.returncode in (0, -15), log.read_text()[-6000:]
