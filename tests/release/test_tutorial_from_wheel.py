"""The tutorial runs from the built wheel in a clean environment, without the source tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks
from tests.docs.test_snippets import Session, durable_postgres

__all__ = ["durable_postgres"]


@pytest.mark.slow
def test_the_tutorial_runs_from_the_wheel(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist"], cwd=ROOT,
                   check=True, capture_output=True)  # fmt: skip
    (wheel,) = (tmp_path / "dist").iterdir()
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{wheel}[server,secrets,push]",
         ROOT / "packages" / "timebell-fcm-emulator", "psycopg[binary]", "standardwebhooks", "httpx", "pytest"],
        check=True,
    )  # fmt: skip
    where = subprocess.check_output([python, "-c", "import timebell; print(timebell.__file__)"], text=True)
    assert str(tmp_path / "fresh") in where
    folder = tmp_path / "work"
    folder.mkdir()
    session = Session(folder, request, python=python, source="")
    sessions = [block for block in blocks(DOCS / "start" / "tutorial.md") if block.language == "console"]
    assert len(sessions) >= 7
    for block in sessions:
        session.run(block)
