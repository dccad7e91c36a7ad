"""A node that writes down each start of a job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from timebell import Arrived, Timebell

SECRET_KEY = "a secret key of the benchmark"
STARTS = "TIMEBELL_TEST_STARTS"

app = Timebell(timezone="UTC")


@app.on("benchmark.failover")
async def record_start(event: Arrived) -> None:
    """Append the number of the job and the time to the node's file."""
    with open(os.environ[STARTS], "a") as file:
        file.write(f"{event.payload['number']} {time.time():.3f}\n")


def start_node(folder: Path, number: int, url: str, port: int) -> subprocess.Popen[bytes]:
    """Start a node whose starts and log are files in a folder."""
    with open(folder / f"node{number}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "timebell.cli.main", "run", "benchmarks.failover.node:app", "--port", str(port)],
            stderr=log,
            env={
                **os.environ, "TIMEBELL_DATABASE_URL": url, "TIMEBELL_SECRET_KEY": SECRET_KEY,
                "TIMEBELL_NODE_NAME": f"n{number}", STARTS: str(folder / f"starts{number}"),
            },
        )  # fmt: skip


def read_starts(folder: Path) -> list[tuple[int, float]]:
    """Return the number of the job and the time of each start on any node."""
    lines = [line.split() for file in folder.glob("starts*") for line in file.read_text().splitlines()]
    return [(int(line[0]), float(line[1])) for line in lines if len(line) == 2]
