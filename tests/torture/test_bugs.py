"""`timebell torture` notices bugs that are planted into its nodes; see docs/internals/proof.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.model.mutants import MUTANTS
from tests.torture.bugs import BUGS, DOCUMENT, caught, fill, line


def test_what_is_aimed_at_are_bugs_that_can_be_planted() -> None:
    assert BUGS.keys() <= {mutant.name for mutant in MUTANTS}
    assert len(BUGS) >= 12


def test_the_table_takes_what_was_found(tmp_path: Path) -> None:
    bug, other = list(BUGS)[:2]
    document = tmp_path / "proof.md"
    document.write_text(DOCUMENT.read_text())
    fill(document, {bug: {"found": ["lost", "early"], "seconds": 7}, other: {"lacks": "no such program"}})
    lines = document.read_text().splitlines()
    (row,) = [row for row in lines if row.startswith(f"| {bug} |")]
    assert row.endswith("| `lost`, `early`, 7 s |")
    assert len(set(lines) - set(DOCUMENT.read_text().splitlines())) <= 1


@pytest.mark.slow
@pytest.mark.skipif(
    "TIMEBELL_TEST_BUGS" not in os.environ, reason="python -m tests.torture.bugs runs them: ten minutes"
)
@pytest.mark.parametrize("bug", BUGS)
def test_torture_notices_a_planted_bug(bug: str, tmp_path: Path) -> None:
    found = caught(bug, *BUGS[bug], tmp_path, seed=1)
    assert line(bug, found).startswith("caught"), found
