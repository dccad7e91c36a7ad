"""`timebell torture` notices bugs that are planted into its nodes; see docs/internals/proof.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.process import ROOT

CAUGHT = {
    "a claim takes what is not due": ("sqlite", "kill", {"early"}),
    "attempts have no numbers": ("sqlite", "kill", {"attempt-order"}),
    "keys are random": ("sqlite", "kill", {"key-unstable"}),
    "completed before it is delivered": ("sqlite", "kill", {"phantom-success", "lost"}),
    "a retry does not wait": ("sqlite", "kill", {"retry"}),
    "the next instant is computed from now": ("sqlite", "kill", {"lost", "accounting"}),
    "overlap sees no live job": ("sqlite", "kill", {"overlap"}),
    "a cancel ends what runs, and says prevented": ("sqlite", "kill", {"after-cancel"}),
    "a resume fires what was paused": ("sqlite", "kill", {"during-pause"}),
    "a pause leaves no rows": ("sqlite", "kill", {"audit"}),
    "lost attempts are not taken back": ("sqlite", "kill", {"lost", "incomplete", "not-healed"}),
    "a request twice is two jobs": ("postgres", "cut", {"dup-object"}),
    "a lease of one's own is judged by the wall clock": ("postgres", "clock", {"dup-unjustified"}),
}
"""Of each bug where it is planted, the faults that bring it out, and the classes of which one at least is not empty."""


@pytest.mark.slow
@pytest.mark.skipif("TIMEBELL_TEST_BUGS" not in os.environ, reason="TIMEBELL_TEST_BUGS=1 runs them: not counted yet")
@pytest.mark.parametrize("bug", CAUGHT)
def test_torture_notices_a_planted_bug(bug: str, tmp_path: Path) -> None:
    store, faults, classes = CAUGHT[bug]
    path = os.pathsep.join(map(str, (ROOT / "tests/torture/planted", ROOT / "src", ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "timebell.cli.main", "torture", "--minutes", "1", "--rate", "12", "--store", store,
         "--faults", faults, "--out", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": path, "PLANTED_BUG": bug},
    )  # fmt: skip
    verdict = tmp_path / "run" / "verdict.json"
    assert verdict.exists(), done.stderr
    assert f"planted: {bug}" in (tmp_path / "run" / "n1.log").read_text()
    failed = json.loads(verdict.read_text())["failed"]
    print(f"\n{bug}: {failed}")
    assert done.returncode == 1
    assert classes & set(failed), failed
