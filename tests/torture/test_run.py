"""`timebell torture` from the outside: what it refuses, what it says of ledgers, and whole runs (slow)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.unit.cli.process import ROOT
from timebell.torture import check, grounds, selftest, synthetic
from timebell.torture.plan import FAULTS, Plan, load


def torture(folder: Path, *args: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "timebell.cli.main", "torture", *args], cwd=folder, capture_output=True, text=True,
        timeout=seconds, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


@pytest.fixture
def ledgers(tmp_path: Path) -> Path:
    """The files of a run that never was, and in which nothing is wrong."""
    made = synthetic.clean(Random(1))
    plan = Plan(
        out=str(tmp_path), sockets="", seed=1, minutes=synthetic.LENGTH / 60, rate=1, store="postgres",
        nodes=list(synthetic.NODES), faults=["kill"], began=synthetic.BEGAN, began_wall=synthetic.BEGAN_WALL,
        ended=int(made.plan["ended"]),
    )  # fmt: skip
    plan.save()
    for name in ("intent", "effect", "fault", "record"):
        lines = getattr(made, f"{name}s")
        plan.path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_ledgers_with_nothing_wrong_but_too_little_in_them_are_unknown(ledgers: Path) -> None:
    done = torture(ledgers, "--check", str(ledgers))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "UNKNOWN"), done.stderr
    assert "are needed" in done.stdout
    page = (ledgers / "report.html").read_text()
    assert "<svg" in page
    assert "http://" not in page
    assert "https://" not in page


def test_a_broken_promise_is_invalid(ledgers: Path) -> None:
    effects = ledgers / "effect.jsonl"
    lines = [json.loads(line) for line in effects.read_text().splitlines()]
    next(line for line in lines if line["what"] == "recv")["signed"] = False
    effects.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = torture(ledgers, "--check", str(ledgers))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "INVALID")
    assert "signature: 1" in done.stdout


def test_what_came_before_it_was_due_is_early_also_after_the_end(ledgers: Path) -> None:
    plan = load(str(ledgers))
    lines = [json.loads(line) for line in plan.path("effect.jsonl").read_text().splitlines()]
    one = next(line for line in lines if line["what"] == "recv")
    after = (plan.began_wall + plan.ended - plan.began) // 1000 + 5_000_000
    with plan.path("effect.jsonl").open("a") as file:
        file.write(json.dumps(one | {"seq": 10**6, "due_us": after, "key": "another"}) + "\n")
        file.write(json.dumps(one | {"seq": 10**6 + 1, "due_us": after, "key": "on time", "wall": after * 1000}) + "\n")
    history = check.history_of(plan)
    assert {effect.key for effect in history.effects if effect.due_us == after} == {"another"}
    assert selftest.judge(history).counts["early"] == 1


def test_a_node_that_ended_by_itself_leaves_the_verdict_open(ledgers: Path) -> None:
    plan = load(str(ledgers))
    line = {"kind": "ended", "target": "n2", "start_mono": plan.began, "end_mono": plan.began, "verified_start": True,
            "verified_end": True, "detail": 1}  # fmt: skip
    with plan.path("fault.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert "the node n2 ended by itself, with 1" in check.look(plan.out)["why"]


@pytest.mark.parametrize(
    "args",
    [["--faults", "earthquake"], ["--store", "sqlite", "--faults", "dbstop"], ["--store", "sqlite", "--nodes", "2"],
     ["--store", "mysql"]],
)  # fmt: skip
def test_what_cannot_be_is_refused(args: list[str], tmp_path: Path) -> None:
    done = torture(tmp_path, *args, "--out", "run")
    assert done.returncode == 2
    assert "TORTURE_INVALID" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    done = torture(tmp_path, "--check", "nowhere")
    assert done.returncode == 2
    assert "TORTURE_INVALID" in done.stderr


def test_ledgers_are_never_written_over(ledgers: Path) -> None:
    done = torture(ledgers, "--out", str(ledgers))
    assert done.returncode == 2
    assert "has ledgers already" in done.stderr


def judged(done: subprocess.CompletedProcess[str], folder: Path) -> dict[str, Any]:
    """What the checker said of a run in which no promise was broken; how much was tried is another question."""
    assert done.returncode in (0, 1, 2), done.stderr
    found: dict[str, Any] = json.loads((folder / "run" / "verdict.json").read_text())
    # On a machine that kept everybody waiting most of the time, how late something was says nothing.
    busy = any("waited for a processor" in why for why in found["why"])
    broken = set(found["failed"]) - ({"late", "lost-unkeyed", "not-healed"} if busy else set())
    assert not broken, done.stdout
    assert found["audited"]["differences"] == 0
    return found


def test_two_minutes_of_what_happens_most(tmp_path: Path) -> None:
    args = ["--minutes", "2", "--rate", "12", "--faults", "kill,point,dbstop,cut,freeze", "--out", "run"]
    found = judged(torture(tmp_path, *args, seconds=900), tmp_path)
    assert found["expected"]["must"] > 100
    assert sum(count for kind, count in found["faults"].items() if kind not in ("stall", "starved")) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("store", ["postgres", "pgbouncer", "mariadb", "sqlite"])
def test_three_minutes_of_everything(store: str, tmp_path: Path) -> None:
    judged(torture(tmp_path, "--minutes", "3", "--store", store, "--out", "run", seconds=500), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("store", "minutes", "rate"), [("postgres", 30, 110), ("sqlite", 10, 20)])
def test_everything_for_long(store: str, minutes: int, rate: int, tmp_path: Path) -> None:
    args = ["--minutes", str(minutes), "--store", store, "--rate", str(rate), "--seed", str(time.time_ns() % 10**6)]
    found = judged(torture(tmp_path, *args, "--out", "run", seconds=minutes * 60 + 900), tmp_path)
    assert found["recovery"]["node"]["max"] <= 21


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_bites(fault: str, tmp_path: Path) -> None:
    if why := grounds.lacks(fault, "postgres"):
        pytest.skip(f"{fault}: {why}")
    args = ["--minutes", "1.2", "--rate", "15", "--faults", fault, "--out", "run"]
    assert judged(torture(tmp_path, *args, seconds=900), tmp_path)["faults"].get(fault, 0) >= 1


@pytest.mark.slow
def test_when_it_is_killed_everything_it_started_ends(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "timebell.cli.main", "torture", "--out", "run", "--store", "sqlite"], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "nemesis.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    while _of(tmp_path):
        assert time.monotonic() < deadline, _of(tmp_path)
        time.sleep(0.1)


def _of(folder: Path) -> list[str]:
    """The processes that work in a folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                here = os.readlink(process / "cwd").startswith(str(folder))
            except OSError:
                continue
            if here and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found
