"""Processes of Celery: a Redis broker, two prefork children with a prefetch of four each, no results.

It cannot publish in bulk. Schedules are defined in code and fired by an embedded beat. Handlers run in forked children,
so each child appends its records to its own file.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from glob import glob
from typing import Any

from celery import Celery, signals
from celery.schedules import crontab

from benchmarks import child
from benchmarks.machine import cpu_seconds

DAY_SECONDS = 86_400
STOP_TIMEOUT_SECONDS = 20.0  # for requeuing its unacknowledged jobs one by one; all records are in files by then

app = Celery("bench")
app.conf.update(
    broker_connection_retry_on_startup=True, broker_transport_options={"visibility_timeout": 3 * DAY_SECONDS},
    enable_utc=True, task_ignore_result=True, timezone="UTC", worker_hijack_root_logger=False,
    worker_prefetch_multiplier=4, worker_redirect_stdouts=False,
)  # fmt: skip
_out = ""
_wait_seconds = 0.0
_file: int | None = None


@app.task(name="bench")
def bench(i: int, due: int, pad: str) -> None:
    """Record the start of a job; `due` is 0 for jobs of schedules."""
    global _file
    if _file is None:
        _file = os.open(f"{_out}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_file, struct.pack("ddd", i, due / 1000, time.time()))
    if _wait_seconds:
        time.sleep(_wait_seconds)


async def setup(_url: str, _: dict[str, Any]) -> None:
    """Do nothing; Redis needs no setup."""
    child.print_json(ready=True)


async def create(url: str, spec: dict[str, Any]) -> None:
    """Create one-shots."""
    app.conf.broker_url = url
    with app.producer_pool.acquire(block=True) as producer:

        async def write(batch: list[dict[str, Any]]) -> None:
            for each in batch:
                at = {"eta": datetime.fromtimestamp(each["due"] / 1000, UTC)} if spec["lead"] > 0 else {}
                bench.apply_async(kwargs=each, producer=producer, **at)

        await child.create(spec, write)


def work(url: str, spec: dict[str, Any]) -> None:
    """Run one worker."""
    global _out, _wait_seconds
    _out, _wait_seconds = spec["out"], spec.get("wait_ms", 0) / 1000
    app.conf.broker_url = url
    arguments = ["worker", "-P", "prefork", "-c", "2", "--loglevel=ERROR"]
    arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    if count := spec.get("schedules", 0):
        app.conf.beat_schedule = {
            f"s{number}": {"task": "bench", "schedule": crontab(), "kwargs": child.payload(number, 0)}
            for number in range(count)
        }
        arguments += ["-B"]

    @signals.worker_ready.connect(weak=False)
    def ready(**_: Any) -> None:
        child.print_json(ready=True, startup_cpu=cpu_seconds(os.getpid()))
        threading.Thread(target=_watch, daemon=True).start()

    with tempfile.TemporaryDirectory(prefix="timebell-bench-beat-") as folder:
        app.worker_main([*arguments, "-s", f"{folder}/beat"])
    sys.exit()


def _watch() -> None:
    """Print the number of starts until standard input closes; then stop."""
    closed = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), closed.set()), daemon=True).start()
    reported = 0
    while not closed.wait(child.REPORT_INTERVAL_SECONDS if reported else 0.2):
        count = sum(os.path.getsize(path) for path in glob(f"{_out}-*")) // 24
        if count != reported:
            reported = count
            child.print_json(count=count)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_TIMEOUT_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "work":  # in the main thread, because it installs signal handlers
        work(sys.argv[2], json.loads(sys.argv[3]))
    child.main({"setup": setup, "create": create})
