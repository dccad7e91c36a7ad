"""`python -m timebell` without the extra `server`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WITHOUT_CLICK = """
import sys, runpy
sys.modules["click"] = None
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "click" else find_spec(name, package)
sys.argv = ["timebell", *sys.argv[1:]]
runpy.run_module("timebell", run_name="__main__")
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TIMEBELL_DATABASE_URL": f"sqlite:///{folder}/bell.db"}
    command = [sys.executable, "-c", WITHOUT_CLICK, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_the_library_alone_upgrades_tables(tmp_path: Path) -> None:
    upgraded = run(tmp_path, "db", "upgrade")
    assert (upgraded.returncode, upgraded.stderr) == (0, "The tables have version 0001.\n")
    assert (tmp_path / "bell.db").exists()


def test_other_commands_name_the_extra(tmp_path: Path) -> None:
    refused = run(tmp_path, "schedule", "list")
    assert refused.returncode == 1
    assert 'pip install "timebell[server]"' in refused.stderr
