"""What a figure must be read beside: the machine, the versions, and who used the processors meanwhile."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TICK = os.sysconf("SC_CLK_TCK")
PACKAGES = ("asyncpg", "sqlalchemy", "orjson", "uvloop", "pgqueuer", "croniter", "cronsim", "tzdata")


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in task.read_text().split():
                found += tree(int(child))
        except OSError:
            pass  # it ended meanwhile
    return found


def cpu(pid: int | None) -> float:
    """CPU seconds of a process tree so far, ended children included."""
    return sum(map(_cpu, tree(pid))) if pid is not None else 0.0


def _cpu(pid: int) -> float:
    try:
        own = [int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0.0
    ended = int(stat[13]) + int(stat[14])  # children that were waited for, in ticks
    return sum(own) / 1e9 + ended / TICK


def rss_mb(pid: int) -> float:
    """Resident memory of a process, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def _busy() -> float:
    spent = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(spent) - spent[3] - spent[4]) / TICK


class Meter:
    """CPU of the server, of ours, and of everybody else, over a with-block."""

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
        server, ours, everybody = cpu(self.server), cpu(os.getpid()), tree(os.getpid())
        if self.server in everybody:  # a Redis is a child of ours
            ours -= server
        return time.monotonic(), _busy(), server, ours


def facts() -> dict[str, Any]:
    """The machine and the versions of what is measured."""
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = Path("/proc/meminfo").read_text().split()[1]
    return {
        "cores": os.cpu_count(),
        "processor": model[0].split(":", 1)[1].strip() if model else platform.machine(),
        "memory_gb": round(int(memory) / 2**20, 1),
        "kernel": platform.release(),
        "fdatasync_us": _fdatasync(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _fdatasync(times: int = 100) -> int:
    """Microseconds that a durable write of 8 KiB takes where temporary files are."""
    import tempfile

    with tempfile.TemporaryFile() as file:
        start = time.monotonic()
        for _ in range(times):
            os.pwrite(file.fileno(), b"x" * 8192, 0)
            os.fdatasync(file.fileno())
        return round((time.monotonic() - start) / times * 1e6)


def line() -> str:
    """What a figure depends on, in one line."""
    found = facts()
    load = os.getloadavg()[0]
    return f"{found['processor']}, {found['cores']} cores, load {load:.1f}, fdatasync {found['fdatasync_us']} us"
