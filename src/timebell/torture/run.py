"""A run from start to verdict: the processes one after another, each ended by its id whatever happens."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timebell.errors import InvalidInput, TimebellError
from timebell.torture import grounds
from timebell.torture.ledgers import Ledger
from timebell.torture.plan import FAULTS, ON, STORES, Plan, environment

LEDGERS = ("intent.jsonl", "effect.jsonl", "fault.jsonl", "record.jsonl")
TICK, STALL = 0.05, 0.25  # seconds


def plan_of(
    minutes: float, seed: int, nodes: int, store: str, rate: float, faults: str, out: str | None,
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:  # fmt: skip
    """What was asked for, checked; of `all` faults it tells which are not possible here. Raises InvalidInput
    (TORTURE_INVALID)."""
    known = ON.get(store, FAULTS)
    chosen = list(known) if faults == "all" else [each.strip() for each in faults.split(",") if each.strip()]
    wrong = [each for each in chosen if each not in known]
    lacking = {each: why for each in {*chosen} - {*wrong} if (why := grounds.lacks(each, store)) is not None}
    if faults == "all":
        chosen = [each for each in chosen if each not in lacking]
        for each, why in lacking.items():
            tell(f"LEFT OUT: {each}, as {why}")
    else:
        wrong += [f"{each}, as {why}" for each, why in lacking.items()]
    if store == "pgbouncer" and (why := grounds.lacks("pool", store)) is not None:
        wrong.append(f"--store pgbouncer, as {why}")
    if store not in STORES:
        wrong.append(f"--store {store}")
    if store == "sqlite" and nodes != 1:
        wrong.append(f"--nodes {nodes} on sqlite, which has one engine to a file")
    folder = Path(out or tempfile.mkdtemp(prefix="timebell-torture-")).resolve()
    if folder.exists() and any((folder / name).exists() for name in LEDGERS):
        wrong.append(f"--out {out}, which has ledgers already")
    if wrong:
        raise InvalidInput(
            f"torture cannot do this: {'; '.join(wrong)}.", code="TORTURE_INVALID",
            fix=f"Faults on {store} are all, or some of {', '.join(known)}; stores are {', '.join(STORES)}.",
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"n{number + 1}" for number in range(nodes)]
    return Plan(
        out=str(folder), sockets="", seed=seed, minutes=minutes, rate=rate, store=store, nodes=names, faults=chosen,
        commit=_commit(),
    )  # fmt: skip


def run(plan: Plan, tell: Callable[[str], None]) -> dict[str, Any]:
    """Break things for so many minutes; the verdict. Raises TimebellError (TORTURE_BROKE) if the test itself fails."""
    if "drop" in plan.faults:
        grounds.own_network()
    sockets = Path(tempfile.mkdtemp(prefix="tb-torture-"))
    sockets.chmod(0o711)
    plan.sockets = str(sockets)
    plan.save()
    started: list[Role] = []
    over = threading.Event()
    try:
        sink = _begin(started, plan, "sink")
        sink.has("sink.json", 30)
        nemesis = _begin(started, plan, "nemesis")
        nemesis.has("nemesis.json", 180)
        plan.begin()
        plan.save()
        threading.Thread(target=_metronome, args=(plan, over), daemon=True).start()
        driver = _begin(started, plan, "driver")
        for phase, (start, _) in plan.phases.items():
            _wait(plan, start, started)
            tell(f"{plan.now:5.0f} s  {phase}")
        _wait(plan, plan.minutes * 60, started)
        driver.done(180 + 20 * plan.minutes)  # it reads back every job
        nemesis.has("healed.json", 60)
        over.set()
        nemesis.end(90)
        sink.end(20)
        checker = _begin(started, plan, "check")
        checker.done(600 + 60 * plan.minutes)
    finally:
        over.set()
        for role in reversed(started):
            role.end(60)
        shutil.rmtree(sockets, ignore_errors=True)
    found: dict[str, Any] = json.loads(plan.path("verdict.json").read_text())
    return found


class Role:
    """One of the processes."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name = plan, name
        self.log = plan.path(f"{name}.log")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "timebell.torture", name, plan.out], cwd=plan.out,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(plan), start_new_session=True,
            )  # fmt: skip

    def has(self, file: str, seconds: float) -> None:
        """Wait for a file that it writes."""
        until = time.monotonic() + seconds
        while not self.plan.path(file).exists():
            self.alive()
            if time.monotonic() > until:
                raise self._broke(f"did not come so far within {seconds:g} s ({file})")
            time.sleep(TICK)

    def alive(self) -> None:
        """Raises TimebellError when it has failed."""
        if self.process.poll():
            raise self._broke(f"ended with {self.process.returncode}")

    def done(self, seconds: float) -> None:
        """Wait until it has ended well."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self._broke(f"did not end within {seconds:g} s") from None
        self.alive()

    def end(self, seconds: float) -> None:
        """Ask it to end, and see to it that it does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _broke(self, why: str) -> TimebellError:
        last = self.log.read_text(errors="replace").strip().splitlines()[-3:]
        return TimebellError(
            f"The {self.name} of the test {why}.", code="TORTURE_BROKE", fix=" ".join([f"See {self.log}.", *last])[:600]
        )


def _begin(started: list[Role], plan: Plan, name: str) -> Role:
    started.append(Role(plan, name))
    return started[-1]


def _wait(plan: Plan, until: float, roles: list[Role]) -> None:
    while plan.now < until:
        for role in roles:
            role.alive()
        time.sleep(min(1.0, max(0.0, until - plan.now)))


def _metronome(plan: Plan, over: threading.Event) -> None:
    """Write down when this machine stood still: lateness of that time is nobody's."""
    ledger, count, before = Ledger(plan.path("fault.jsonl")), 0, time.monotonic_ns()
    while not over.wait(TICK):
        now = time.monotonic_ns()
        if now - before > STALL * 1e9:
            count += 1
            ledger.note(
                id=f"stall-{count}", kind="stall", target="machine", start_mono=before, end_mono=now,
                verified_start=True, verified_end=True,
            )  # fmt: skip
        before = now


def _commit() -> str:
    """Which code this is, where there is a git to say it."""
    git = shutil.which("git")
    if git is None:
        return ""
    found = subprocess.run(
        [git, "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()
