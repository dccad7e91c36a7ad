"""Context of every figure: the machine, the versions, and the CPU use of other processes."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
PACKAGES = ("asyncpg", "sqlalchemy", "orjson", "uvloop", "pgqueuer", "croniter", "cronsim", "tzdata")


def process_tree(pid: int) -> list[int]:
    """Return a process id and those of all its descendants."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in task.read_text().split():
                pids += process_tree(int(child))
        except OSError:
            pass  # the process ended meanwhile
    return pids


def cpu_seconds(pid: int | None) -> float:
    """Return the CPU seconds of a process tree so far, including ended children; 0 without a process."""
    return sum(map(_cpu, process_tree(pid))) if pid is not None else 0.0


def _cpu(pid: int) -> float:
    try:
        own = [int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    ended = int(stat[13]) + int(stat[14])  # children that were reaped, in ticks
    return sum(own) / 1e9 + ended / TICK


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def _busy_seconds() -> float:
    """Return the CPU seconds of all processors since boot, without idle and I/O wait."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / TICK


class Meter:
    """Measure the CPU use of the server, of the benchmark and of all other processes during a with-block."""

    def __init__(self, server: int | None) -> None:
        self.server = server
        self.figures: dict[str, float] = {}

    def __enter__(self) -> Meter:
        self._before = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        wall, busy, server, ours = (b - a for a, b in zip(self._before, self._read(), strict=True))
        foreign = max(0.0, busy - server - ours) / wall
        self.figures = {"wall_s": wall, "server_cpu_s": server, "our_cpu_s": ours, "foreign_cores": foreign}

    def _read(self) -> tuple[float, float, float, float]:
        server, ours = cpu_seconds(self.server), cpu_seconds(os.getpid())
        if self.server in process_tree(os.getpid()):  # Redis is a child of the benchmark
            ours -= server
        return time.monotonic(), _busy_seconds(), server, ours


def describe() -> dict[str, Any]:
    """Return the facts about the machine, and the versions of packages."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = Path("/proc/meminfo").read_text().split()[1]
    return {
        "cores": os.cpu_count(),
        "processor": model[0].split(":", 1)[1].strip() if model else platform.machine(),
        "memory_gb": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "fdatasync_us": _fdatasync_us(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _fdatasync_us(times: int = 100) -> int:
    """Return the microseconds of a durable write of 8 KiB in the folder of temporary files."""
    import tempfile

    with tempfile.TemporaryFile() as file:
        start = time.monotonic()
        for _ in range(times):
            os.pwrite(file.fileno(), b"x" * 8192, 0)
            os.fdatasync(file.fileno())
        return round((time.monotonic() - start) / times * 1e6)


def summary_line() -> str:
    """Return the machine, its load and the time of a durable write in one line."""
    facts = describe()
    load = os.getloadavg()[0]
    return f"{facts['processor']}, {facts['cores']} cores, load {load:.1f}, fdatasync {facts['fdatasync_us']} us"
