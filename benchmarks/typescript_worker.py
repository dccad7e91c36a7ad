"""Lost and repeated jobs of a TypeScript worker while it and its node are killed.

`python -m benchmarks.typescript_worker [--jobs 100000] [--kills 5]` requires Node.js and the environment of the tests.

All jobs are due from the start, and a schedule adds one each second. A node on PostgreSQL serves a worker of
`clients/typescript`, which runs 50 jobs at a time, each for up to 200 ms. Node and worker are killed in turn (kill -9)
after equal shares of the jobs, and started again. The worker writes a line when an attempt starts, and another when the
server has confirmed its result; the kills are written between them, so that their order explains each repetition.
The counts are stored in tests/proof.json and shown in docs/internals/proof.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from scripts import proof
from tests.clients.server import TIMEOUT_SECONDS, Server, running, wait_until
from tests.clients.typescript import CLIENT, build
from tests.servers import Postgres
from timebell.features import FEATURES
from timebell.store.open import upgrade

JOBS_OF_A_PAGE = 200
MIN_JOBS_PER_SECOND = 50  # slower counts as stuck


@dataclass
class Result:
    """Counts of a run. `repeated` attempts are those that followed another of the same job, by their cause."""

    jobs: int = 0
    scheduled: int = 0
    kills_of_worker: int = 0
    kills_of_node: int = 0
    lost: int = 0
    repeated_after_kill_of_worker: int = 0
    repeated_after_kill_of_node: int = 0
    repeated_without_cause: list[str] = field(default_factory=list)
    audit: str = ""
    audit_exit_code: int = 0
    seconds: float = 0.0


@dataclass
class _Started:
    attempt: int
    worker: str
    kills_of_node: int
    """Kills of the node before this attempt."""


class History:
    """The lines of workers and kills, in the order in which they were written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._position = 0
        self._last: dict[str, _Started] = {}
        self._acknowledged: set[tuple[str, int]] = set()
        self._killed_workers: set[str] = set()
        self._kills_of_node = 0

    @property
    def started(self) -> set[str]:
        """Ids of the jobs of which an attempt has started."""
        return set(self._last)

    def write_kill(self, name: str) -> None:
        """Write that a process has ended by a kill."""
        with self.path.open("a") as file:
            file.write(f"killed {name}\n")

    def read(self, result: Result) -> int:
        """Count what was written since the last call; return the number of jobs that have started."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            *lines, rest = file.read().split(b"\n")
            self._position = file.tell() - len(rest)
        for line in lines:
            event, *words = line.decode().split()
            if event == "started":
                self._count_start(words[0], int(words[1]), words[2], result)
            elif event == "acknowledged":
                self._acknowledged.add((words[0], int(words[1])))
            elif words == ["node"]:
                self._kills_of_node += 1
            else:
                self._killed_workers.add(words[0])
        return len(self._last)

    def _count_start(self, job: str, attempt: int, worker: str, result: Result) -> None:
        before = self._last.get(job)
        self._last[job] = _Started(attempt, worker, self._kills_of_node)
        if before is None:
            return
        is_known = (job, before.attempt) in self._acknowledged
        if is_known or attempt <= before.attempt:
            result.repeated_without_cause.append(job)
        elif before.worker in self._killed_workers:
            result.repeated_after_kill_of_worker += 1
        elif before.kills_of_node < self._kills_of_node:
            result.repeated_after_kill_of_node += 1
        else:
            result.repeated_without_cause.append(job)


def run(server: Server, folder: Path, jobs: int, kills: int) -> Result:
    """Run `jobs` jobs on a started node during `kills` kills each of worker and node; return the counts."""
    result, history, began = Result(jobs=jobs), History(folder / "history.txt"), time.monotonic()
    _create_jobs(server, jobs)
    schedule = server.request("POST", "/schedules", {
        "name": "each-second", "topic": "count.scheduled", "interval": {"everyMs": 1000}, "timezone": "UTC",
        "catchUp": {"policy": "all"}, "overlapPolicy": "allow",
    })  # fmt: skip

    def wait_for_jobs(count: int) -> None:
        wait_until(lambda: history.read(result) >= count, seconds=TIMEOUT_SECONDS + jobs / MIN_JOBS_PER_SECOND)

    for number in range(kills):
        with _worker(server, folder, history, f"worker{number}") as worker:
            wait_for_jobs(jobs * (2 * number + 1) // (2 * kills + 1))
            server.kill()
            history.write_kill("node")
            result.kills_of_node += 1
            server.start()
            wait_for_jobs(jobs * (2 * number + 2) // (2 * kills + 1))
            worker.kill()
            worker.wait(TIMEOUT_SECONDS)
            history.write_kill(f"worker{number}")
            result.kills_of_worker += 1
    with _worker(server, folder, history, f"worker{kills}") as worker:
        wait_for_jobs(jobs)
        end = (datetime.now(UTC) + timedelta(seconds=2)).isoformat()
        server.request("PATCH", f"/schedules/{schedule['id']}", {"endAt": end}, **{"If-Match": "*"})
        wait_until(lambda: server.request("GET", f"/schedules/{schedule['id']}")["nextFireAt"] is None)
        # One request for both, because a job of a killed worker becomes pending again.
        wait_until(lambda: not server.request("GET", "/jobs?status=pending&status=active&limit=1")["items"])
        worker.send_signal(signal.SIGTERM)
        if worker.wait(TIMEOUT_SECONDS):
            raise RuntimeError("The worker did not stop gracefully.")
    history.read(result)
    result.seconds = round(time.monotonic() - began, 1)
    _count_lost(server, history, result)
    return result


def audit(server: Server, result: Result) -> None:
    """Compare the runs of the schedule with its occurrences, as soon as all are old enough for that."""

    def is_complete() -> bool:
        result.audit_exit_code, result.audit = server.audit()
        return " due" not in result.audit

    wait_until(is_complete, lambda: result.audit)


def _create_jobs(server: Server, count: int) -> None:
    lines = b"".join(b'{"topic": "count.one", "timezone": "UTC", "key": "%d"}\n' % each for each in range(count))
    created = server.request("POST", "/jobs/bulk", lines, "application/x-ndjson")["progress"]["done"]
    if created != count:
        raise RuntimeError(f"{created} of {count} jobs were created.")


def _worker(
    server: Server, folder: Path, history: History, name: str
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    command = ["node", str(CLIENT / "test" / "worker.mjs"), str(history.path), name]
    return running(command, folder / "worker.log", TIMEBELL_URL=server.url, TIMEBELL_API_KEY=server.key)


def _list_jobs(server: Server, status: str) -> Iterator[dict[str, Any]]:
    cursor = ""
    while True:
        page = server.request("GET", f"/jobs?status={status}&limit={JOBS_OF_A_PAGE}{cursor}")
        yield from page["items"]
        if not page["nextCursor"]:
            return
        cursor = f"&cursor={page['nextCursor']}"


def _count_lost(server: Server, history: History, result: Result) -> None:
    """Count as lost the jobs that the server does not report as completed, or that no worker started."""
    completed, failed = list(_list_jobs(server, "completed")), list(_list_jobs(server, "failed"))
    result.scheduled = sum(job["scheduleId"] is not None for job in completed + failed)
    result.lost = result.jobs + result.scheduled - len({job["id"] for job in completed} & history.started)


def _migrate(url: str) -> None:
    asyncio.run(upgrade(url, FEATURES))


def main(argv: Sequence[str]) -> int:
    """Print the counts; return the exit status: 0 if nothing was lost and each repetition has a cause."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.typescript_worker", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=5, help="kills each of worker and node")
    args = parser.parse_args(argv)
    build()
    postgres = Postgres(durable=True)
    try:
        with tempfile.TemporaryDirectory(prefix="timebell-bench-") as folder:
            server = Server(Path(folder), postgres.create_database(_migrate))
            server.start()
            try:
                result = run(server, Path(folder), args.jobs, args.kills)
                audit(server, result)
            finally:
                server.stop()
    finally:
        postgres.close()
    print(json.dumps(asdict(result), indent=1))
    proof.record("worker", "TypeScript", asdict(result))
    return 1 if result.lost or result.repeated_without_cause or result.audit_exit_code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
