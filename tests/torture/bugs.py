"""Seed bugs into the nodes and the driver of torture runs, and check that the runs detect them.

Run `python -m tests.torture.bugs`. Each bug has a run of its own, as short as possible: it injects only the faults that
reveal the bug, and ends at the first violation that does not depend on the end of the run. `overrides` make rare events
frequent: long handlers, a high failure rate, large clock steps. Then runs without a bug follow, which must find none.
The results are stored in a file, from which the next call continues, and in tests/proof.json, for the last column of
the table in docs/internals/proof.md. On two cores the bugs take about ten minutes, and the runs without a bug seven
more (omit them with `--no-sound`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts import proof
from timebell_torture import capabilities
from timebell_torture import run as runs
from timebell_torture.history import NODE_FAULTS, STORE_FAULTS, History
from timebell_torture.ledger import read_ledger
from timebell_torture.plan import Plan, load_plan, reset_priority
from timebell_torture.rules import HistoryChecker

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".cache" / "torture-bugs.json"
POLL_INTERVAL_SECONDS = 2.0  # between readings of the ledgers of a run
RUN_TIMEOUT_SECONDS = 240.0  # includes start and end
NO_BUG = "nothing"
EXPECTED_RESULTS = ("caught", "sound")
# Violations that are certain as soon as they occur; the others depend on the records at the end of the run.
IMMEDIATE_CLASSES = {
    "early", "attempt-order", "key-unstable", "after-cancel", "during-pause", "overlap", "retry", "dup-unjustified",
}  # fmt: skip


@dataclass(frozen=True)
class TargetedRun:
    """A run that reveals a bug.

    `seconds` are the lengths of its phases: clean, faulted, recovery; no fault is injected in a faulted phase of less
    than 6 s. `overrides` maps each process of the run to module attributes and their values, or a node to settings.
    """

    name: str
    store: str = "sqlite"
    nodes: int = 1
    rate: float = 24.0
    faults: tuple[str, ...] = ()
    seconds: tuple[float, float, float] = (22, 5, 4)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def may_stop_early(self) -> bool:
        """True if it may end at the first violation: no fault that is not recorded yet could excuse it."""
        return not {*NODE_FAULTS, *STORE_FAULTS} & {*self.faults} or self.faults == ("cut",)


SHORT_SETTLE = {"timebell_torture.driver:SETTLE_SECONDS": 3.0}
LONG_HANDLERS = {"timebell_torture.receiver:MAX_HANDLER_SECONDS": 14.0}
NO_FAULTS = TargetedRun("no faults")
# Long runs, half of which fail: retries, overlaps, and cancels of running jobs are frequent.
LONG_AND_FAILING = TargetedRun(
    "long and failing", rate=20, seconds=(60, 5, 4),
    overrides={"receiver": LONG_HANDLERS | {"timebell_torture.receiver:FAILURE_RATE": 0.5}},
)  # fmt: skip
PAUSES = TargetedRun(
    "pauses", rate=30, seconds=(30, 5, 4),
    overrides={
        "driver": {
            "timebell.engine.leader.continuous_audit:DECISION_GRACE": 3.0,
            "timebell_torture.driver:OPERATION_INTERVAL_SECONDS": [1.0, 6.0],
        }
    },
)  # fmt: skip
KILLS = TargetedRun("kills", faults=("kill",), seconds=(6, 22, 8))
# Too short for a cut of a node. Only the connected driver is cut off, and loses the replies to its commits.
LOST_REPLIES = TargetedRun("lost replies", "postgres", faults=("cut",), seconds=(12, 20, 6))
# A node sees an unchanged heartbeat counter only if it observes more often than the owner renews: n1 does.
FREQUENT_OBSERVER = {"receiver": LONG_HANDLERS, "n1": {"TIMEBELL_SCHEDULER_HEARTBEAT": "1s"}}
CLOCKS = TargetedRun(
    "the clock of a node", "postgres", 2, faults=("clock",), seconds=(8, 62, 8),
    overrides={"nemesis": {"timebell_torture.injectors:NODE_CLOCK_STEPS_SECONDS": [600.0]}, **FREQUENT_OBSERVER},
)  # fmt: skip
# The first clock step makes jobs run early, so that fewer are running at the second step: it must come under load.
STORE_CLOCK = TargetedRun(
    "the clock of the database", "postgres", 2, 40.0, faults=("dbclock",), seconds=(16, 40, 5),
    overrides={"nemesis": {"timebell_torture.injectors:DATABASE_CLOCK_STEPS_SECONDS": [16.0]}, **FREQUENT_OBSERVER},
)  # fmt: skip
# A single node, so that no other one starts what it misses.
SILENT_HOST = TargetedRun("a silent host", "postgres", faults=("strand",), seconds=(12, 12, 30))
# The recovery is longer than a lease, after which another node repeats what was dropped.
READ_ONLY = TargetedRun(
    "a read-only database", "postgres", 2, faults=("read-only",), seconds=(16, 16, 28),
    overrides={"receiver": LONG_HANDLERS},  # so that some end while it is read-only
)  # fmt: skip
PROMOTION = TargetedRun("a promoted standby", "postgres", rate=60, faults=("promote",), seconds=(6, 40, 8))
REWIND = TargetedRun("a standby that lags behind", "postgres", faults=("rewind",), seconds=(6, 40, 8))

BUGS: dict[str, tuple[TargetedRun, set[str]]] = {
    "leases are judged by the wall clock": (CLOCKS, {"dup-unjustified"}),
    "leases are judged by the database's clock": (STORE_CLOCK, {"dup-unjustified"}),
    "a claim takes what is not due": (NO_FAULTS, {"early"}),
    "attempts have no numbers": (LONG_AND_FAILING, {"attempt-order"}),
    "keys are random": (LONG_AND_FAILING, {"key-unstable"}),
    "a retry does not wait": (LONG_AND_FAILING, {"retry"}),
    "overlap sees no live job": (LONG_AND_FAILING, {"overlap"}),
    "a cancelled job is retried": (LONG_AND_FAILING, {"after-cancel"}),
    "a resume fires paused occurrences": (PAUSES, {"during-pause"}),
    "a repeated request creates two jobs": (LOST_REPLIES, {"dup-object", "key-unstable"}),
    "a node judges its own lease by the wall clock": (CLOCKS, {"dup-unjustified"}),
    "completed before it is delivered": (NO_FAULTS, {"phantom-success", "lost"}),
    "the next instant is computed from now": (NO_FAULTS, {"lost", "accounting"}),
    "a pause leaves no rows": (PAUSES, {"audit"}),
    "lost attempts are not recovered": (KILLS, {"lost", "incomplete", "not-healed"}),
    "a silent database is not noticed": (SILENT_HOST, {"late", "lost"}),
    "results are dropped on a read-only database": (READ_ONLY, {"dup-unjustified"}),
    "commits do not wait for standbys": (PROMOTION, {"lost-write", "loss-report"}),
    "lost writes are not noticed": (REWIND, {"loss-report"}),
}
"""The run that reveals each bug, and the classes of which at least one must then be found."""


class ShortPlan(Plan):
    """A plan with phases of the given lengths."""

    seconds: tuple[float, float, float]

    def start_phases(self) -> None:
        clean, faulted, recovery = self.seconds
        quiet = clean + faulted
        self.phases = {"clean": (0.0, clean), "faulted": (clean, quiet), "recovery": (quiet, quiet + recovery)}
        self.began, self.began_wall = time.monotonic_ns(), time.time_ns()
        self.ended = self.began + int((quiet + recovery) * 1e9)


def execute_run(target: TargetedRun, folder: Path, seed: int) -> None:
    """Execute a run in this process; SIGTERM ends it cleanly."""
    plan = ShortPlan(
        out=str(folder), sockets="", seed=seed, minutes=sum(target.seconds) / 60, rate=target.rate, store=target.store,
        nodes=[f"n{number + 1}" for number in range(target.nodes)], faults=list(target.faults),
    )  # fmt: skip
    plan.seconds = target.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    runs.run(plan, lambda _: None)


def run_bug(bug: str, target: TargetedRun, classes: set[str], folder: Path, seed: int) -> dict[str, Any]:
    """Run a bug; return the violation classes among `classes` that were found, and the duration in seconds."""
    missing = [
        reason
        for fault in target.faults
        if (reason := capabilities.missing_requirement(fault, target.store)) is not None
    ]
    if missing:
        return {"lacks": missing[0]}
    started_at = time.monotonic()
    overrides = {**target.overrides, "driver": {**SHORT_SETTLE, **target.overrides.get("driver", {})}}
    folders = ("tests/torture/seeded", "src", "packages/timebell-torture/src", ".")
    path = os.pathsep.join(str(ROOT / folder) for folder in folders)
    seeded = {} if bug == NO_BUG else {"SEEDED_BUG": bug}
    with (folder / "run.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "import sys; from tests.torture import bugs; bugs.run_in_process(sys.argv[1:])",
             json.dumps(asdict(target)), str(folder), str(seed)],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=os.environ | {"PYTHONPATH": path, "SEEDED_OVERRIDES": json.dumps(overrides)} | seeded,
        )  # fmt: skip
    found: set[str] = set()
    try:
        while process.poll() is None and time.monotonic() - started_at < RUN_TIMEOUT_SECONDS:
            try:
                process.wait(POLL_INTERVAL_SECONDS)
            except subprocess.TimeoutExpired:
                if target.may_stop_early and (found := classes & IMMEDIATE_CLASSES & _classes_so_far(folder)):
                    break
    finally:
        process.terminate()
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    verdict = folder / "verdict.json"
    if not found and verdict.exists():
        found = classes & set(json.loads(verdict.read_text())["failed"])
    node_log = (folder / "n1.log").read_text() if (folder / "n1.log").exists() else ""
    if not found and not verdict.exists():
        return {"broken": (folder / "run.log").read_text()[-600:]}
    if bug != NO_BUG and f"seeded: {bug}" not in node_log:
        return {"broken": f"the bug was not seeded: {node_log[-300:]}"}
    return {"found": sorted(found), "seconds": round(time.monotonic() - started_at)}


def run_in_process(arguments: list[str]) -> None:
    """Execute the run that the arguments describe: the entry point of its process."""
    reset_priority(os.getpid())  # the receiver and the proxies must not inherit a low priority
    target = json.loads(arguments[0])
    for name in ("faults", "seconds"):
        target[name] = tuple(target[name])
    execute_run(TargetedRun(**target), Path(arguments[1]), int(arguments[2]))


def _classes_so_far(folder: Path) -> set[str]:
    """Return the violation classes in the ledgers so far."""
    try:
        plan = load_plan(str(folder))
        if not plan.began:
            return set()
        # Intents are read last, so that no effect lacks its request.
        effects, faults, intents = (read_ledger(plan.path(f"{name}.jsonl")) for name in ("effect", "fault", "intent"))
    except (OSError, ValueError):  # not written yet, or only in part
        return set()
    return set(HistoryChecker(History(asdict(plan), intents, effects, faults, [])).verdict().counts)


def format_result(bug: str, result: Mapping[str, Any]) -> str:
    """Return the line to print for a bug."""
    if "lacks" in result or "broken" in result:
        return f"NOT RUN    {bug}: {result.get('lacks') or result['broken']}"
    as_expected = bool(result["found"]) is not bug.startswith(NO_BUG)
    word = (
        ("caught" if result["found"] else "sound")
        if as_expected
        else "NOT CAUGHT"
        if not result["found"]
        else "FALSE ALARM"
    )
    return f"{word:11}{bug}: {', '.join(result['found']) or 'no violation'}, {result['seconds']} s"


def main(
    results: Path, only: str, seed: int, again: bool, sound: bool, keep: Path | None
) -> None:  # fmt: skip
    """Run the bugs without a stored result, or all with `--again`; only those whose names contain `--only`.

    Exits with 1 if a bug was not detected, or a run without a bug has violations. `--keep` is a folder for ledgers.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # child processes are ended by their `finally` blocks
    results.parent.mkdir(parents=True, exist_ok=True)
    results_by_bug: dict[str, Any] = {} if again or not results.exists() else json.loads(results.read_text())
    runs_to_do = [(bug, target, classes) for bug, (target, classes) in BUGS.items()]
    for name in dict.fromkeys(target.name for target, _ in BUGS.values()) if sound else ():
        entries = [(target, classes) for target, classes in BUGS.values() if target.name == name]
        runs_to_do.append(
            (
                f"{NO_BUG}, as for {name}",
                entries[0][0],
                {violation_class for _, classes in entries for violation_class in classes},
            )
        )
    for bug, target, classes in runs_to_do:
        if only not in bug or (
            bug in results_by_bug and format_result(bug, results_by_bug[bug]).startswith(EXPECTED_RESULTS)
        ):
            continue
        with tempfile.TemporaryDirectory(prefix="torture-bug-") as temporary:
            folder = Path(temporary) if keep is None else keep.resolve() / bug.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            results_by_bug[bug] = run_bug(NO_BUG if bug.startswith(NO_BUG) else bug, target, classes, folder, seed)
        print(format_result(bug, results_by_bug[bug]), flush=True)
        results.write_text(json.dumps(results_by_bug, indent=1) + "\n")
        if bug in BUGS and "found" in results_by_bug[bug]:
            proof.record("torture", bug, results_by_bug[bug])
    selected = [bug for bug, _, _ in runs_to_do if only in bug]
    passed = [bug for bug in selected if format_result(bug, results_by_bug[bug]).startswith(EXPECTED_RESULTS)]
    print(f"{len(passed)} of {len(selected)} as expected; results in {results}")
    raise SystemExit(len(passed) != len(selected))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.torture.bugs", description=main.__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--no-sound", action="store_false", dest="sound")
    parser.add_argument("--keep", type=Path)
    main(**vars(parser.parse_args()))
