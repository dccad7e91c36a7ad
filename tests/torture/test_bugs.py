"""`timebell torture` detects bugs that are seeded into its nodes; see docs/internals/proof.md."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from tests.torture.bugs import BUGS, SHORT_SETTLE, format_result, run_bug
from tests.torture.mutants import FAILOVER_MUTANTS, MUTANTS


def test_targeted_bugs_are_known_mutants() -> None:
    assert BUGS.keys() <= {mutant.name for mutant in MUTANTS}
    assert len(BUGS) >= 12


def test_each_fault_of_a_failover_has_a_bug_that_it_reveals() -> None:
    assert {mutant.name for mutant in FAILOVER_MUTANTS} <= BUGS.keys()
    for mutant in FAILOVER_MUTANTS:
        with mutant.seeded():  # its text is still in the code
            pass


def test_overrides_name_existing_attributes() -> None:
    targets = {
        target for run, _ in BUGS.values() for values in run.overrides.values() for target in values if ":" in target
    }
    for target in targets | set(SHORT_SETTLE):
        module_name, _, name = target.partition(":")
        assert hasattr(importlib.import_module(module_name), name), target


@pytest.mark.soak
@pytest.mark.skipif(
    "TIMEBELL_TEST_BUGS" not in os.environ, reason="python -m tests.torture.bugs runs them: ten minutes"
)
@pytest.mark.parametrize("bug", BUGS)
def test_torture_detects_a_seeded_bug(bug: str, tmp_path: Path) -> None:
    result = run_bug(bug, *BUGS[bug], tmp_path, seed=1)
    assert format_result(bug, result).startswith("caught"), result
