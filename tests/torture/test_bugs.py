"""`timebell torture` notices bugs that are planted into its nodes; docs/internals/proof.md has the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.process import ROOT

CAUGHT = {
    "a claim takes what is not due": ("kill", {"early"}),
    "attempts have no numbers": ("kill", {"attempt-order"}),
    "keys are random": ("kill", {"key-unstable"}),
    "completed before it is delivered": ("kill", {"phantom-success", "lost"}),
    "a retry does not wait": ("kill", {"retry"}),
    "the next instant is computed from now": ("kill", {"lost", "accounting"}),
    "overlap sees no live job": ("kill", {"overlap"}),
    "a cancel ends what runs, and says prevented": ("kill", {"after-cancel"}),
    "a resume fires what was paused": ("kill", {"during-pause"}),
    "a pause leaves no rows": ("kill", {"audit"}),
    "a request twice is two jobs": ("cut", {"dup-object"}),
    "a lease of one's own is judged by the wall clock": ("clock", {"dup-unjustified"}),
    "lost attempts are not taken back": ("kill,freeze", {"lost", "incomplete", "not-healed"}),
}
"""Of each bug the faults that bring it out, and the classes of which one at least is not empty then."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", CAUGHT)
def test_torture_notices_a_planted_bug(bug: str, tmp_path: Path) -> None:
    faults, classes = CAUGHT[bug]
    path = os.pathsep.join(map(str, (ROOT / "tests/torture/planted", ROOT / "src", ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "timebell.cli.main", "torture", "--minutes", "1", "--rate", "15", "--faults", faults,
         "--out", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
        env=os.environ | {"PYTHONPATH": path, "PLANTED_BUG": bug},
    )  # fmt: skip
    verdict = tmp_path / "run" / "verdict.json"
    assert verdict.exists(), done.stderr
    assert f"planted: {bug}" in (tmp_path / "run" / "n1.log").read_text()
    failed = json.loads(verdict.read_text())["failed"]
    print(f"\n{bug}: {failed}")
    assert done.returncode == 1
    assert classes & set(failed), failed
