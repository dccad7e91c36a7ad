"""Programs of the examples, started as a person would, and what they say."""

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
PATIENCE = 180.0  # real seconds, for a machine that is busy


def environment(**more: str) -> dict[str, str]:
    """This one, with the source tree and whatever is named."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1", **more}


def until(holds: Callable[[], bool], within: float = PATIENCE) -> None:
    """Wait until something holds."""
    end = time.monotonic() + within
    while not holds():
        assert time.monotonic() < end, f"not within {within:g} s"
        time.sleep(0.05)


def done(*command: str, folder: Path, **more: str) -> str:
    """What a program says that ends by itself, and well."""
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment(**more), capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@contextmanager
def going(log: Path, *command: str, folder: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that goes on while the block runs, and then drains on SIGTERM; its words are in `log`."""
    with log.open("w") as says:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment(**more), stdout=says, stderr=says
        )
        try:
            yield process
        except BaseException:
            print(log.read_text()[-6000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            finally:
                process.kill()
    assert process.returncode in (0, -15), log.read_text()[-6000:]
