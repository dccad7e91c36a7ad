"""Bugs planted into the nodes and the driver of torture runs, to see which `timebell torture` catches:
`python -m tests.torture.bugs`.

Each bug has a run of its own, as short as it can be: only the faults that bring the bug out, aimed, and it ends at the
first violation that needs no end of the run to be one. Where it would take long for the rare to happen, `sets` makes it
frequent: how long handlers take, how often they fail, by how much a clock jumps. Then runs follow in which nothing is
planted: what they break catches nothing. What was found is kept in a file, by which the next call goes on; then it
fills the column of the table in docs/internals/proof.md. On two cores the bugs take about ten minutes, the runs without
one seven more (not with `--no-sound`).
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

from timebell.torture import grounds
from timebell.torture import run as runs
from timebell.torture.history import NODE_FAULTS, STORE_FAULTS, History
from timebell.torture.ledgers import read
from timebell.torture.plan import Plan, as_all, load
from timebell.torture.verdicts import Check

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".cache" / "torture-bugs.json"
DOCUMENT = ROOT / "docs" / "internals" / "proof.md"
LOOK = 2.0  # seconds between looks at the ledgers of a run
LONGEST = 240.0  # seconds for one run, with its start and its end
NOTHING = "nothing"
GOOD = ("caught", "sound")
# Violations as soon as they are seen; the others are judged when the run is over and its records are read.
AT_ONCE = {
    "early", "attempt-order", "key-unstable", "after-cancel", "during-pause", "overlap", "retry", "dup-unjustified",
}  # fmt: skip


@dataclass(frozen=True)
class Aim:
    """A run that brings a bug out. `seconds` are those of its phases: clean, faulted, recovery; in less than six
    no fault strikes. `sets` are names of modules and their values, by the process of the run, and settings of
    nodes."""

    name: str
    store: str = "sqlite"
    nodes: int = 1
    rate: float = 24.0
    faults: tuple[str, ...] = ()
    seconds: tuple[float, float, float] = (22, 5, 4)
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def early(self) -> bool:
        """Whether it may end at the first violation: no fault that is not written down yet could excuse it."""
        return not {*NODE_FAULTS, *STORE_FAULTS} & {*self.faults} or self.faults == ("cut",)


SHORTLY = {"timebell.torture.driver:SETTLE": 3.0}  # until the records are read
LONG = {"timebell.torture.sink:LONGEST": 14.0}
QUIET = Aim("no faults")
# Much runs for long, and half of it fails: often something is tried again, overlaps, or is cancelled while it runs.
HARD = Aim("long and failing", rate=20, seconds=(60, 5, 4), sets={"sink": LONG | {"timebell.torture.sink:FAILS": 0.5}})
PAUSES = Aim(
    "pauses", rate=30, seconds=(30, 5, 4),
    sets={
        "driver": {"timebell.engine.leader.continuous_audit:GRACE": 3.0, "timebell.torture.driver:BETWEEN": [1.0, 6.0]}
    },
)  # fmt: skip
KILLS = Aim("kills", faults=("kill",), seconds=(6, 22, 8))
# Too short for a node to be cut off: the driver is, when it has connected, and loses the answers to its commits.
REPLIES = Aim("lost replies", "postgres", faults=("cut",), seconds=(12, 20, 6))
# A counter stands still between two looks only if who looks does so between two heartbeats of its owner: n1 does.
LOOKS = {"sink": LONG, "n1": {"TIMEBELL_SCHEDULER_HEARTBEAT": "1s"}}
CLOCKS = Aim(
    "the clock of a node", "postgres", 2, faults=("clock",), seconds=(8, 62, 8),
    sets={"nemesis": {"timebell.torture.injectors:STEPS": [600.0]}, **LOOKS},
)  # fmt: skip
# It jumps when much runs: what is due by then is early, so that at the second jump there is less.
STORE_CLOCK = Aim(
    "the clock of the database", "postgres", 2, 40.0, faults=("dbclock",), seconds=(16, 40, 5),
    sets={"nemesis": {"timebell.torture.injectors:STORE_STEPS": [16.0]}, **LOOKS},
)  # fmt: skip

BUGS: dict[str, tuple[Aim, set[str]]] = {
    "leases are judged by the wall clock": (CLOCKS, {"dup-unjustified"}),
    "leases are judged by the database's clock": (STORE_CLOCK, {"dup-unjustified"}),
    "a claim takes what is not due": (QUIET, {"early"}),
    "attempts have no numbers": (HARD, {"attempt-order"}),
    "keys are random": (HARD, {"key-unstable"}),
    "a retry does not wait": (HARD, {"retry"}),
    "overlap sees no live job": (HARD, {"overlap"}),
    "a cancelled job is tried again": (HARD, {"after-cancel"}),
    "a resume fires what was paused": (PAUSES, {"during-pause"}),
    "a request twice is two jobs": (REPLIES, {"dup-object", "key-unstable"}),
    "a lease of one's own is judged by the wall clock": (CLOCKS, {"dup-unjustified"}),
    "completed before it is delivered": (QUIET, {"phantom-success", "lost"}),
    "the next instant is computed from now": (QUIET, {"lost", "accounting"}),
    "a pause leaves no rows": (PAUSES, {"audit"}),
    "lost attempts are not taken back": (KILLS, {"lost", "incomplete", "not-healed"}),
}
"""Of each bug the run that brings it out, and the classes of which one at least is not empty."""


class Short(Plan):
    """A plan with these phases."""

    seconds: tuple[float, float, float]

    def begin(self) -> None:
        """As in Plan."""
        clean, faulted, recovery = self.seconds
        quiet = clean + faulted
        self.phases = {"clean": (0.0, clean), "faulted": (clean, quiet), "recovery": (quiet, quiet + recovery)}
        self.began, self.began_wall = time.monotonic_ns(), time.time_ns()
        self.ended = self.began + int((quiet + recovery) * 1e9)


def one(aim: Aim, folder: Path, seed: int) -> None:
    """A whole run, in the process that is for it alone; SIGTERM ends it in good order."""
    plan = Short(
        out=str(folder), sockets="", seed=seed, minutes=sum(aim.seconds) / 60, rate=aim.rate, store=aim.store,
        nodes=[f"n{number + 1}" for number in range(aim.nodes)], faults=list(aim.faults),
    )  # fmt: skip
    plan.seconds = aim.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    runs.run(plan, lambda _: None)


def caught(bug: str, aim: Aim, classes: set[str], folder: Path, seed: int) -> dict[str, Any]:
    """Run it; the violations among `classes` that were found, and after how many seconds."""
    lacking = [why for fault in aim.faults if (why := grounds.lacks(fault, aim.store)) is not None]
    if lacking:
        return {"lacks": lacking[0]}
    began = time.monotonic()
    sets = {**aim.sets, "driver": {**SHORTLY, **aim.sets.get("driver", {})}}
    path = os.pathsep.join(map(str, (ROOT / "tests/torture/planted", ROOT / "src", ROOT)))
    planted = {} if bug == NOTHING else {"PLANTED_BUG": bug}
    with (folder / "run.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; from tests.torture import bugs; bugs.begun(sys.argv[1:])",
             json.dumps(asdict(aim)), str(folder), str(seed)],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=os.environ | {"PYTHONPATH": path, "PLANTED_AIMS": json.dumps(sets)} | planted,
        )  # fmt: skip
    found: set[str] = set()
    try:
        while child.poll() is None and time.monotonic() - began < LONGEST:
            try:
                child.wait(LOOK)
            except subprocess.TimeoutExpired:
                if aim.early and (found := classes & AT_ONCE & _so_far(folder)):
                    break
    finally:
        child.terminate()
        try:
            child.wait(90)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    verdict = folder / "verdict.json"
    if not found and verdict.exists():
        found = classes & set(json.loads(verdict.read_text())["failed"])
    node = (folder / "n1.log").read_text() if (folder / "n1.log").exists() else ""
    if not found and not verdict.exists():
        return {"broken": (folder / "run.log").read_text()[-600:]}
    if bug != NOTHING and f"planted: {bug}" not in node:
        return {"broken": f"the bug was not planted: {node[-300:]}"}
    return {"found": sorted(found), "seconds": round(time.monotonic() - began)}


def begun(given: list[str]) -> None:
    """The process of one run."""
    as_all(os.getpid())  # the sink and the proxies are not to come last, whoever calls this with which priority
    aim = json.loads(given[0])
    for name in ("faults", "seconds"):
        aim[name] = tuple(aim[name])
    one(Aim(**aim), Path(given[1]), int(given[2]))


def _so_far(folder: Path) -> set[str]:
    """The classes of violations in the ledgers as they are: what was asked is read last, so that nothing is strange."""
    try:
        plan = load(str(folder))
        if not plan.began:
            return set()
        effects, faults, intents = (read(plan.path(f"{name}.jsonl")) for name in ("effect", "fault", "intent"))
    except (OSError, ValueError):  # not there yet, or the end of a line is not
        return set()
    return set(Check(History(asdict(plan), intents, effects, faults, [])).verdict().counts)


def line(bug: str, said: Mapping[str, Any]) -> str:
    """What is told of a bug."""
    if "lacks" in said or "broken" in said:
        return f"NOT RUN    {bug}: {said.get('lacks') or said['broken']}"
    good = bool(said["found"]) is not bug.startswith(NOTHING)
    word = ("caught" if said["found"] else "sound") if good else "NOT CAUGHT" if not said["found"] else "FALSE ALARM"
    return f"{word:11}{bug}: {', '.join(said['found']) or 'no violation'}, {said['seconds']} s"


def fill(document: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the last column of the table of bugs."""
    lines = document.read_text().splitlines()
    for number, text in enumerate(lines):
        cells = text.split(" | ")
        name = cells[0].removeprefix("| ")
        if len(cells) == 4 and name in results and results[name].get("found"):
            found = results[name]
            lines[number] = " | ".join([*cells[:3], f"`{'`, `'.join(found['found'])}`, {found['seconds']} s |"])
    document.write_text("\n".join(lines) + "\n")


def main(
    results: Path, only: str, seed: int, again: bool, sound: bool, keep: Path | None
) -> None:  # fmt: skip
    """Run those that are not in the file of results yet, or `--again`; those with `--only` in their names. Ends with 1
    if one was not caught, or nothing was planted and yet a run says so. `--keep` is where ledgers and logs stay."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    results.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = {} if again or not results.exists() else json.loads(results.read_text())
    todo = [(bug, aim, classes) for bug, (aim, classes) in BUGS.items()]
    for name in dict.fromkeys(aim.name for aim, _ in BUGS.values()) if sound else ():
        same = [(aim, classes) for aim, classes in BUGS.values() if aim.name == name]
        todo.append((f"{NOTHING}, as for {name}", same[0][0], {one for _, classes in same for one in classes}))
    for bug, aim, classes in todo:
        if only not in bug or (bug in known and line(bug, known[bug]).startswith(GOOD)):
            continue
        with tempfile.TemporaryDirectory(prefix="torture-bug-") as passing:
            folder = Path(passing) if keep is None else keep.resolve() / bug.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            known[bug] = caught(NOTHING if bug.startswith(NOTHING) else bug, aim, classes, folder, seed)
        print(line(bug, known[bug]), flush=True)
        results.write_text(json.dumps(known, indent=1) + "\n")
    fill(DOCUMENT, known)
    wanted = [bug for bug, _, _ in todo if only in bug]
    right = [bug for bug in wanted if line(bug, known[bug]).startswith(GOOD)]
    print(f"{len(right)} of {len(wanted)} as they should be; results in {results}")
    raise SystemExit(len(right) != len(wanted))


if __name__ == "__main__":
    asked = argparse.ArgumentParser(prog="python -m tests.torture.bugs", description=main.__doc__)
    asked.add_argument("--results", type=Path, default=RESULTS)
    asked.add_argument("--only", default="")
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--again", action="store_true")
    asked.add_argument("--no-sound", action="store_false", dest="sound")
    asked.add_argument("--keep", type=Path)
    main(**vars(asked.parse_args()))
