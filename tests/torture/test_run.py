"""`timebell torture` as a command: refused options, verdicts on ledgers, and complete runs (slow)."""

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
from timebell_torture import capabilities, check, selftest, synthetic
from timebell_torture.ledger import read_ledger
from timebell_torture.plan import FAULTS, FAULTS_BY_STORE, Plan, load_plan


def torture(folder: Path, *args: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "timebell.cli.main", "torture", *args], cwd=folder, capture_output=True, text=True,
        timeout=seconds, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


@pytest.fixture
def ledgers(tmp_path: Path) -> Path:
    """The files of a synthetic run without violations."""
    generated = synthetic.clean_ledgers(Random(1))
    plan = Plan(
        out=str(tmp_path), sockets="", seed=1, minutes=synthetic.DURATION_SECONDS / 60, rate=1, store="postgres",
        nodes=list(synthetic.NODES), faults=["kill"], began=synthetic.BEGAN, began_wall=synthetic.BEGAN_WALL,
        ended=int(generated.plan["ended"]),
    )  # fmt: skip
    plan.save()
    for name in ("intent", "effect", "fault", "record"):
        lines = getattr(generated, f"{name}s")
        plan.path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_ledgers_without_violations_but_with_too_few_events_are_unknown(ledgers: Path) -> None:
    done = torture(ledgers, "--check", str(ledgers))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "UNKNOWN"), done.stderr
    assert "required" in done.stdout
    page = (ledgers / "report.html").read_text()
    assert "<svg" in page
    assert "http://" not in page
    assert "https://" not in page


def test_a_violated_guarantee_is_invalid(ledgers: Path) -> None:
    effects = ledgers / "effect.jsonl"
    lines = [json.loads(line) for line in effects.read_text().splitlines()]
    next(line for line in lines if line["what"] == "recv")["signed"] = False
    effects.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = torture(ledgers, "--check", str(ledgers))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "INVALID")
    assert "signature: 1" in done.stdout


def test_an_arrival_before_its_due_time_is_early_also_after_the_end(ledgers: Path) -> None:
    plan = load_plan(str(ledgers))
    lines = [json.loads(line) for line in plan.path("effect.jsonl").read_text().splitlines()]
    template = next(line for line in lines if line["what"] == "recv")
    after = (plan.began_wall + plan.ended - plan.began) // 1000 + 5_000_000
    with plan.path("effect.jsonl").open("a") as file:
        file.write(json.dumps(template | {"seq": 10**6, "due_us": after, "key": "another"}) + "\n")
        file.write(
            json.dumps(template | {"seq": 10**6 + 1, "due_us": after, "key": "on time", "wall": after * 1000}) + "\n"
        )
    history = check.load_history(plan)
    assert {effect.key for effect in history.effects if effect.due_us == after} == {"another"}
    assert selftest.check_history(history).counts["early"] == 1


def test_a_node_that_ended_without_a_fault_makes_the_verdict_unknown(ledgers: Path) -> None:
    plan = load_plan(str(ledgers))
    line = {"kind": "ended", "target": "n2", "start_mono": plan.began, "end_mono": plan.began, "verified_start": True,
            "verified_end": True, "detail": 1}  # fmt: skip
    with plan.path("fault.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert "the node n2 ended without a fault, with exit code 1" in check.check_run(plan.out)["why"]


@pytest.mark.parametrize(
    "args",
    [["--faults", "earthquake"], ["--store", "sqlite", "--faults", "dbstop"], ["--store", "sqlite", "--nodes", "2"],
     ["--store", "mysql"]],
)  # fmt: skip
def test_unsupported_options_are_refused(args: list[str], tmp_path: Path) -> None:
    done = torture(tmp_path, *args, "--out", "run")
    assert done.returncode == 2
    assert "INVALID_TORTURE" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_folder_without_ledgers_is_refused(tmp_path: Path) -> None:
    done = torture(tmp_path, "--check", "nowhere")
    assert done.returncode == 2
    assert "INVALID_TORTURE" in done.stderr


def test_ledgers_are_never_overwritten(ledgers: Path) -> None:
    done = torture(ledgers, "--out", str(ledgers))
    assert done.returncode == 2
    assert "has ledgers already" in done.stderr


# Without a CPU everything is late, and these classes follow from lateness. No other violation is ever excused.
LATENESS = frozenset({"late", "lost-unkeyed", "not-healed"})


def run_torture(folder: Path, *args: str, seconds: float = 900) -> dict[str, Any]:
    """Return the summary of a run without a violation; a verdict UNKNOWN is accepted.

    A run that had no CPU and was late is repeated once; if this is late for the same reason, the test is skipped.
    """
    for out in ("run", "repeated"):
        done = torture(folder, *args, "--out", out, seconds=seconds)
        assert done.returncode in (0, 1, 2), done.stderr
        assert (folder / out / "verdict.json").exists(), done.stderr
        summary: dict[str, Any] = json.loads((folder / out / "verdict.json").read_text())
        assert set(summary["failed"]) <= LATENESS, done.stdout
        assert summary["audited"]["differences"] == 0
        if not summary["failed"]:
            return summary
        assert any("waited for a CPU" in reason for reason in summary["why"]), done.stdout
    pytest.skip("the machine had no CPU for the nodes in two runs")


def test_a_minute_of_the_most_frequent_faults(tmp_path: Path) -> None:
    summary = run_torture(tmp_path, "--minutes", "1", "--rate", "12", "--faults", "kill,point,dbstop")
    assert summary["expected"]["must"] > 100
    attempts = [line for line in read_ledger(tmp_path / "run" / "effect.jsonl") if line["what"] == "recv"]
    assert {each["by"] for each in attempts} == {"async", "thread", "exact", "http", "remote"}
    assert sum(count for kind, count in summary["faults"].items() if kind not in ("stall", "starved")) >= 3


@pytest.mark.parametrize(("minutes", "too_short"), [(2, True), (10, True), (30, False)])
def test_a_run_that_is_too_short_for_its_faults_is_known_beforehand(minutes: float, too_short: bool) -> None:
    plan = Plan(
        out="", sockets="", seed=1, minutes=minutes, rate=1, store="postgres", nodes=["n1", "n2", "n3"],
        faults=list(FAULTS),
    )  # fmt: skip
    assert bool(plan.missing_fault_seconds()) is too_short


@pytest.mark.soak
@pytest.mark.parametrize("store", ["postgres", "pgbouncer", "mariadb", "sqlite"])
def test_three_minutes_of_all_faults(store: str, tmp_path: Path) -> None:
    run_torture(tmp_path, "--minutes", "3", "--store", store)


@pytest.mark.soak
@pytest.mark.parametrize(("store", "minutes", "rate"), [("postgres", 30, 110), ("sqlite", 10, 20)])
def test_long_runs_of_all_faults(store: str, minutes: int, rate: int, tmp_path: Path) -> None:
    args = ["--minutes", str(minutes), "--store", store, "--rate", str(rate), "--seed", str(time.time_ns() % 10**6)]
    summary = run_torture(tmp_path, *args, seconds=minutes * 60 + 900)
    assert summary["recovery"]["node"]["max"] <= 21


@pytest.mark.soak  # more than a minute each
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("store", ["postgres", "mariadb"])
def test_each_fault_takes_effect(store: str, fault: str, tmp_path: Path) -> None:
    if fault not in FAULTS_BY_STORE.get(store, FAULTS):
        pytest.skip(f"{fault} is not supported on {store}")
    if reason := capabilities.missing_requirement(fault, store):
        pytest.skip(f"{fault}: {reason}")
    summary = run_torture(tmp_path, "--minutes", "1.2", "--rate", "15", "--faults", fault, "--store", store)
    assert summary["faults"].get(fault, 0) >= 1


@pytest.mark.soak  # the run must start within a minute
def test_its_processes_end_when_it_is_killed(tmp_path: Path) -> None:
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
    while _processes_in(tmp_path):
        assert time.monotonic() < deadline, _processes_in(tmp_path)
        time.sleep(0.1)


def _processes_in(folder: Path) -> list[str]:
    """Return the command lines of the processes that run in a folder."""
    commands = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                inside = os.readlink(process / "cwd").startswith(str(folder))
            except OSError:
                continue
            if inside and int(process.name) != os.getpid():
                commands.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return commands
