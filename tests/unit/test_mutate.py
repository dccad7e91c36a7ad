"""The mutation runner finds the bugs that tests do not detect, leaves the source unchanged, and ends with its tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.mutants import find_mutants
from scripts.mutate import ROOT
from scripts.mutation_results import ModuleResult, read_equivalent, read_results, render

SOURCE = "DELAY = 5\n\n\ndef allow(value: int) -> bool:\n    return value > 1\n"
TEST = "from toy.limits import allow\n\n\ndef test_allow():\n    assert allow(3) and not allow(1)\n"
HANGING_TEST = """import os, pathlib, subprocess, time
def test_allow():
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}\\n")
    time.sleep(600)
"""
EQUIVALENT = '["toy/limits.py"]\n": 5 -> 6" = "nothing reads it"\n": 5 -> 4" = "nothing reads it"\n'
REPORT = """killed src/toy/limits.py:5 allow: value > 1 -> value >= 1
survived src/toy/limits.py:5 allow: 1 -> 2
killed src/toy/limits.py:5 allow: 1 -> 0
2 killed, 1 survived, 0 known survivor, 0 untested
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for path, text in (
        ("src/toy/limits.py", SOURCE), ("src/toy/__init__.py", ""), ("tests/unit/test_limits.py", TEST),
        ("tests/mutation/equivalent.toml", EQUIVALENT),
    ):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def _command(toy: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "scripts.mutate", "--root", str(toy), *options]


def _mutate(toy: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(toy, *options), cwd=ROOT, capture_output=True, text=True)


def test_the_runner_reports_exactly_the_mutants_that_no_test_detects(toy: Path) -> None:
    done = _mutate(toy, "--modules", "toy/limits.py")
    assert (done.returncode, done.stdout) == (1, REPORT), done.stderr
    assert (toy / "src/toy/limits.py").read_text() == SOURCE
    result = read_results(toy)["toy/limits.py"]
    assert (result.killed, result.survived, result.untested) == (2, ["allow: 1 -> 2"], 0)
    page = (toy / "docs/internals/mutation.md").read_text()
    assert "| `toy/limits.py` | 3 | 2 | 1 | 0 | 67% |" in page
    assert ": 5 -> 6 ``, nothing reads it" in page

    # A check accepts the survivors that are known, and no others.
    check = _mutate(toy, "--check", "--seed", "a commit")
    assert (check.returncode, check.stdout.splitlines()[-1]) == (
        0,
        "2 killed, 0 survived, 1 known survivor, 0 untested",
    )
    (toy / "tests/unit/test_limits.py").write_text(TEST.replace("and not allow(1)", ""))
    assert _mutate(toy, "--check").returncode == 1
    assert read_results(toy)["toy/limits.py"] == result


@pytest.mark.parametrize("folder", ["unit", "engine"])
def test_other_tests_run_if_a_mutant_survives_those_named_after_the_module(toy: Path, folder: str) -> None:
    other = toy / "tests" / folder / "test_other.py"
    other.parent.mkdir(exist_ok=True)
    other.write_text(
        "from toy.limits import allow\ndef test_allow():\n    open('runs', 'a').write('x')\n    assert allow(2)\n"
    )
    done = _mutate(toy, "--modules", "toy/limits.py")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (
        0,
        "3 killed, 0 survived, 0 known survivor, 0 untested",
    )
    assert (toy / "runs").read_text() == "xx"  # without a mutant, and for the survivor


def test_a_run_without_mutants_fails(toy: Path) -> None:
    assert _mutate(toy, "--modules", "toy/limits.py", "--budget", "0").returncode == 2
    assert _mutate(toy, "--check").returncode == 2  # no module has results
    assert read_results(toy) == {}


def test_tests_that_fail_without_a_mutant_are_an_error(toy: Path) -> None:
    (toy / "tests/unit/test_limits.py").write_text(TEST.replace("allow(3)", "allow(0)"))
    done = _mutate(toy, "--modules", "toy/limits.py")
    assert (done.returncode, "fail without a mutant" in done.stderr) == (1, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_tests_and_their_processes(toy: Path, number: signal.Signals) -> None:
    (toy / "tests/unit/test_limits.py").write_text(HANGING_TEST)
    runner = subprocess.Popen(_command(toy, "--modules", "toy/limits.py"), cwd=ROOT, stderr=subprocess.DEVNULL)
    pids = toy / "pids"
    _until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    runner.send_signal(number)
    assert runner.wait(60) != 0
    _until(lambda: not any(_is_running(int(pid)) for pid in pids.read_text().split()))


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_removed_conditions_of_a_query_are_mutants() -> None:
    ids = {mutant.id for mutant in find_mutants("query = select(t).where(a, b)\n")}
    assert {": select(t).where(a, b) -> select(t).where(b)", ": select(t).where(a, b) -> select(t).where(a)"} <= ids


def test_the_page_is_written_from_the_stored_results() -> None:
    page = (ROOT / "docs/internals/mutation.md").read_text()
    assert page == render(read_results(ROOT), read_equivalent(ROOT))
    assert "| **all** | 4 | 1 |" in render({"a.py": ModuleResult(1, ["x"], 2)}, {})


def test_every_mutant_marked_as_equivalent_exists_and_has_a_reason() -> None:
    for path, marked in read_equivalent(ROOT).items():
        existing = {mutant.id for mutant in find_mutants((ROOT / "src" / path).read_text())}
        assert set(marked) <= existing, path
        assert all(marked.values()), path
