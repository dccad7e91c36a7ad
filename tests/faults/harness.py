"""Start, strike and watch node processes; read what they did and what the store says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from timebell import Timebell
from timebell.model.job import Job, JobState
from timebell.model.schedule import Schedule

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


def wait_until(condition: Callable[[], T], what: str, seconds: float = 30) -> T:
    """Look again and again until it is so."""
    limit = time.monotonic() + seconds
    while True:
        late = time.monotonic() > limit
        if found := condition():
            return found
        if late:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


class Nursery:
    """The process that forks nodes; see `tests.faults.nursery`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"], cwd=ROOT, env=_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, **request: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TIMEBELL_")}


class NodeProcess:
    """One node in a process of its own. With `exec` it is not forked but a fresh interpreter, so that what the
    loader reads from the environment (a faked clock) holds for it."""

    def __init__(
        self, nursery: Nursery, url: str, effects: Path, *, ready: bool = True, exec: bool = False, **environment: str
    ) -> None:
        self._nursery = nursery
        self._effects = effects
        self.log = effects.with_suffix(f".{time.monotonic_ns()}.log")
        self._fresh: subprocess.Popen[bytes] | None = None
        if exec:
            with open(self.log, "wb") as log:
                self._fresh = subprocess.Popen(
                    [sys.executable, "-m", "tests.faults.node", url, str(effects)],
                    cwd=ROOT, env=_environment() | environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
            self.pid: int = self._fresh.pid
        else:
            self.pid = nursery.ask(url=url, effects=str(effects), log=str(self.log), environment=environment)
        if ready:
            wait_until(lambda: self.lines("ready") or self.code() is not None, "the node is up")
            assert self.code() is None, self.said

    def lines(self, what: str) -> list[dict[str, Any]]:
        """What this node wrote."""
        return [line for line in lines(self._effects, what) if line["pid"] == self.pid]

    @property
    def said(self) -> str:
        """Its log."""
        return self.log.read_text()

    def code(self, seconds: float = 0) -> int | None:
        """Its exit code, or None while it lives."""
        if self._fresh is None:
            code: int | None = self._nursery.ask(pid=self.pid, seconds=seconds)
            return code
        try:
            return self._fresh.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    @property
    def state(self) -> str:
        """The kernel's letter for its state."""
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it lives."""
        assert self.code() is None, f"it is gone: {self.said}"
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self.signal(signal.SIGKILL)
        assert self.code(10) == -signal.SIGKILL

    def freeze(self) -> None:
        """SIGSTOP; it stands still when this returns."""
        self.signal(signal.SIGSTOP)
        self.frozen()

    def frozen(self) -> None:
        """Wait until it stands still, by whose hand ever."""
        wait_until(lambda: self.state == "T", "it is frozen")

    def thaw(self) -> None:
        """SIGCONT; it runs when this returns."""
        self.signal(signal.SIGCONT)
        wait_until(lambda: self.state != "T", "it is awake")

    def struck(self) -> None:
        """Wait until the fault it carries has killed it."""
        assert self.code(30) == -signal.SIGKILL, f"the fault did not bite: {self.said}"
        assert self.lines("fault")

    def terminate(self) -> dict[str, Any]:
        """SIGTERM; what it counted in its life. It must end well."""
        self.signal(signal.SIGTERM)
        assert self.code(30) == 0, self.said
        return self.lines("left")[0]

    def end(self) -> None:
        """Whatever its state, gone."""
        if self.code() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code(10)


def lines(effects: Path, what: str | None = None) -> list[dict[str, Any]]:
    """What the nodes wrote."""
    if not effects.exists():
        return []
    read = [json.loads(line) for line in effects.read_text().splitlines() if line.endswith("}")]
    return [line for line in read if what is None or line["what"] == what]


def starts(effects: Path) -> dict[str, list[int]]:
    """The attempts that started, by occurrence key."""
    found = defaultdict(list)
    for line in lines(effects, "start"):
        found[line["key"]].append(line["attempt"])
    return dict(found)


def only_once(effects: Path) -> None:
    """Every occurrence that started did so in one attempt."""
    twice = {key: attempts for key, attempts in starts(effects).items() if len(attempts) != 1}
    assert not twice, f"started more than once: {twice}"


def repeats_are_due_to(pids: Iterable[int], effects: Path) -> None:
    """An occurrence starts again only after its attempt before was on a node of these (or failed by design), and
    always with a higher attempt."""
    blamed = set(pids)
    last: dict[str, dict[str, Any]] = {}
    for line in lines(effects, "start"):
        before = last.get(line["key"])
        if before is not None:
            assert line["attempt"] > before["attempt"], f"{line['key']} ran twice under one attempt: {line}"
            failed = line["topic"] == "flaky" and before["attempt"] == 1
            assert before["pid"] in blamed or failed, f"repeated without a reason: {before}, {line}"
        last[line["key"]] = line


def ask(url: str, question: Callable[[Timebell], Coroutine[Any, Any, T]]) -> T:
    """Use the store as a client, from this process."""

    async def call() -> T:
        app = Timebell(url, timezone="UTC")
        try:
            return await question(app)
        finally:
            await app.close()

    return asyncio.run(call())


def jobs(url: str, **filters: Any) -> list[Job]:
    """Every job of the store."""

    async def read(app: Timebell) -> list[Job]:
        found: list[Job] = []
        cursor = None
        while True:
            page = await app.list(limit=500, cursor=cursor, **filters)
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                return found

    return ask(url, read)


def completed(url: str, ids: Iterable[str], seconds: float = 30) -> None:
    """Wait until all these jobs are completed."""
    wanted = set(ids)

    def missing() -> set[str]:
        return wanted - {job.id for job in jobs(url, status=["completed"])}

    wait_until(lambda: not missing(), f"{len(wanted)} jobs completed", seconds)


def accounted(url: str, made: Schedule, step: float = 1.0) -> list[Job]:
    """The accounting identity: each instant from a schedule's first to its cursor has exactly one row, or lies in
    exactly one range row. Gives the rows."""
    (now,) = (one for one in ask(url, lambda app: app.schedules.list(None, 100, None)).items if one.id == made.id)
    assert made.next_fire_at is not None and now.next_fire_at is not None
    span = timedelta(seconds=step)
    count = round((now.next_fire_at - made.next_fire_at) / span)
    expected = [made.next_fire_at + index * span for index in range(count)]
    rows = jobs(url, schedule_id=made.id)
    found = []
    for row in rows:
        found += [row.scheduled_at + index * span for index in range(row.skipped_count)]
        if row.skipped_count > 1:
            assert row.skipped_to == found[-1]
        if row.state is JobState.SKIPPED:
            assert row.reason
    assert sorted(found) == expected, "instants without a row, or with two"
    return rows
