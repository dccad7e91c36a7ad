"""A run from start to verdict: starts its processes in order, and ends each by its id in any case."""

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
from timebell_torture import capabilities
from timebell_torture.ledger import Ledger
from timebell_torture.plan import FAULTS, FAULTS_BY_STORE, STORES, Plan, environment

LEDGER_FILES = ("intent.jsonl", "effect.jsonl", "fault.jsonl", "record.jsonl")
POLL_INTERVAL_SECONDS, STALL_SECONDS = 0.05, 0.25


def create_plan(
    minutes: float, seed: int, nodes: int, store: str, rate: float, faults: str, out: str | None,
    report_progress: Callable[[str], None] = lambda _: None,
) -> Plan:  # fmt: skip
    """Validate the options and return the plan.

    With `all` faults, those that are impossible on this machine are left out and reported. Raises InvalidInput
    (INVALID_TORTURE).
    """
    supported = FAULTS_BY_STORE.get(store, FAULTS)
    chosen = list(supported) if faults == "all" else [each.strip() for each in faults.split(",") if each.strip()]
    problems = [each for each in chosen if each not in supported]
    missing = {
        each: reason
        for each in {*chosen} - {*problems}
        if (reason := capabilities.missing_requirement(each, store)) is not None
    }
    if faults == "all":
        chosen = [each for each in chosen if each not in missing]
        for each, reason in missing.items():
            report_progress(f"LEFT OUT: {each}: {reason}")
    else:
        problems += [f"{each} ({reason})" for each, reason in missing.items()]
    if store == "pgbouncer" and (reason := capabilities.missing_requirement("pool", store)) is not None:
        problems.append(f"--store pgbouncer ({reason})")
    if store not in STORES:
        problems.append(f"--store {store}")
    if store == "sqlite" and nodes != 1:
        problems.append(f"--nodes {nodes} on sqlite, which allows one engine per file")
    folder = Path(out or tempfile.mkdtemp(prefix="timebell-torture-")).resolve()
    if folder.exists() and any((folder / name).exists() for name in LEDGER_FILES):
        problems.append(f"--out {out}, which has ledgers already")
    if problems:
        raise InvalidInput(
            f"torture does not support these options: {'; '.join(problems)}.", code="INVALID_TORTURE",
            fix=f"Use all or some of the faults of {store}: {', '.join(supported)}; stores are {', '.join(STORES)}.",
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"n{number + 1}" for number in range(nodes)]
    return Plan(
        out=str(folder), sockets="", seed=seed, minutes=minutes, rate=rate, store=store, nodes=names, faults=chosen,
        commit=_git_commit(),
    )  # fmt: skip


def run(plan: Plan, report_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the plan and return the summary with the verdict.

    Raises TimebellError (TORTURE_ERROR) if the test itself fails.
    """
    if "drop" in plan.faults:
        capabilities.enter_own_network()
    sockets = Path(tempfile.mkdtemp(prefix="tb-torture-"))
    sockets.chmod(0o711)
    plan.sockets = str(sockets)
    plan.save()
    started: list[RoleProcess] = []
    finished = threading.Event()
    try:
        receiver = _start_role(started, plan, "receiver")
        receiver.wait_for_file("receiver.json", 30)
        nemesis = _start_role(started, plan, "nemesis")
        nemesis.wait_for_file("nemesis.json", 300)
        workers = _start_role(started, plan, "remote_workers")
        workers.wait_for_file("remote_workers.json", 60)
        plan.start_phases()
        plan.save()
        threading.Thread(target=_record_stalls, args=(plan, finished), daemon=True).start()
        driver = _start_role(started, plan, "driver")
        for phase, (start, _) in plan.phases.items():
            _wait_until(plan, start, started)
            report_progress(f"{plan.elapsed:5.0f} s  {phase}")
        _wait_until(plan, plan.minutes * 60, started)
        driver.wait_for_success(180 + 20 * plan.minutes)  # includes reading back every job
        nemesis.wait_for_file("healed.json", 60)
        finished.set()
        nemesis.stop(90)
        receiver.stop(20)
        checker = _start_role(started, plan, "check")
        checker.wait_for_success(600 + 60 * plan.minutes)
    finally:
        finished.set()
        for role in reversed(started):
            role.stop(60)
        shutil.rmtree(sockets, ignore_errors=True)
    summary: dict[str, Any] = json.loads(plan.path("verdict.json").read_text())
    return summary


class RoleProcess:
    """One process of the run."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name = plan, name
        self.log = plan.path(f"{name}.log")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "timebell_torture", name, plan.out], cwd=plan.out,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(plan), start_new_session=True,
            )  # fmt: skip

    def wait_for_file(self, file: str, seconds: float) -> None:
        """Wait until the process has written a file."""
        deadline = time.monotonic() + seconds
        while not self.plan.path(file).exists():
            self.raise_if_failed()
            if time.monotonic() > deadline:
                raise self._failure(f"did not write {file} within {seconds:g} s")
            time.sleep(POLL_INTERVAL_SECONDS)

    def raise_if_failed(self) -> None:
        """Raise TimebellError if the process has failed."""
        if self.process.poll():
            raise self._failure(f"ended with {self.process.returncode}")

    def wait_for_success(self, seconds: float) -> None:
        """Wait until the process has ended with 0."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self._failure(f"did not end within {seconds:g} s") from None
        self.raise_if_failed()

    def stop(self, seconds: float) -> None:
        """Send SIGTERM and wait up to `seconds`, then kill the process."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _failure(self, reason: str) -> TimebellError:
        last_lines = self.log.read_text(errors="replace").strip().splitlines()[-3:]
        return TimebellError(
            f"The process {self.name} of the test {reason}.",
            code="TORTURE_ERROR",
            fix=" ".join([f"See {self.log}.", *last_lines])[:600],
        )


def _start_role(started: list[RoleProcess], plan: Plan, name: str) -> RoleProcess:
    started.append(RoleProcess(plan, name))
    return started[-1]


def _wait_until(plan: Plan, until: float, roles: list[RoleProcess]) -> None:
    while plan.elapsed < until:
        for role in roles:
            role.raise_if_failed()
        time.sleep(min(1.0, max(0.0, until - plan.elapsed)))


def _record_stalls(plan: Plan, finished: threading.Event) -> None:
    """Record intervals in which this machine stood still: lateness in them is excused."""
    ledger, count, previous = Ledger(plan.path("fault.jsonl")), 0, time.monotonic_ns()
    while not finished.wait(POLL_INTERVAL_SECONDS):
        now = time.monotonic_ns()
        if now - previous > STALL_SECONDS * 1e9:
            count += 1
            ledger.append_blocking(
                id=f"stall-{count}", kind="stall", target="machine", start_mono=previous, end_mono=now,
                verified_start=True, verified_end=True,
            )  # fmt: skip
        previous = now


def _git_commit() -> str:
    """Return the commit of this source tree, or an empty string without git."""
    git = shutil.which("git")
    if git is None:
        return ""
    completed = subprocess.run(
        [git, "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return completed.stdout.strip()
