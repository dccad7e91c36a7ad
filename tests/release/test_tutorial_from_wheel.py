"""The tutorial runs from the built wheel in a clean environment, without the source tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks
from tests.docs.test_snippets import Session, durable_postgres

__all__ = ["durable_postgres"]


STEP_TIMEOUT_SECONDS = 600  # to build or install; an unreachable package index takes pip longer than that


def run(*command: str | Path) -> str:
    """Run a step and return its output. A step that fails or takes too long fails the test with its output."""
    line = " ".join(map(str, command))
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=STEP_TIMEOUT_SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired as timeout:
        output = (timeout.stdout or b"").decode(errors="replace")
        pytest.fail(f"more than {STEP_TIMEOUT_SECONDS} s: {line}\n{output}")
    assert done.returncode == 0, f"exit code {done.returncode}: {line}\n{done.stdout}"
    return done.stdout


@pytest.mark.soak  # installs packages from the network
def test_the_tutorial_runs_from_the_wheel(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").iterdir()
    run(sys.executable, "-m", "venv", tmp_path / "fresh")
    python = tmp_path / "fresh" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{wheel}[server,secrets,push]",
        ROOT / "packages" / "timebell-fcm-emulator", "psycopg[binary]", "standardwebhooks", "httpx2",
        "pytest")  # fmt: skip
    where = run(python, "-c", "import timebell; print(timebell.__file__)")
    assert str(tmp_path / "fresh") in where
    folder = tmp_path / "work"
    folder.mkdir()
    session = Session(folder, request, python=python, source="")
    sessions = [block for block in blocks(DOCS / "start" / "tutorial.md") if block.language == "console"]
    assert len(sessions) >= 7
    for block in sessions:
        session.run(block)
