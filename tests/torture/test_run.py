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

import pytest

from tests.unit.cli.process import ROOT
from timebell.torture import synthetic
from timebell.torture.plan import Plan


def torture(folder: Path, *args: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
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


def test_ledgers_are_never_written_over(ledgers: Path) -> None:
    done = torture(ledgers, "--out", str(ledgers))
    assert done.returncode == 2
    assert "has ledgers already" in done.stderr


@pytest.mark.slow
def test_three_minutes_on_postgres(tmp_path: Path) -> None:
    done = torture(tmp_path, "--minutes", "3", "--rate", "20", "--out", "run", seconds=400)
    assert done.stdout.splitlines()[-1] in ("VALID", "UNKNOWN"), done.stdout + done.stderr


@pytest.mark.slow
def test_three_minutes_on_sqlite(tmp_path: Path) -> None:
    done = torture(tmp_path, "--minutes", "3", "--store", "sqlite", "--faults", "kill,point", "--out", "run",
                   seconds=400)  # fmt: skip
    assert done.stdout.splitlines()[-1] in ("VALID", "UNKNOWN"), done.stdout + done.stderr


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
