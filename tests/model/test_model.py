"""The engine against the model; see docs/internals/proof.md."""

from __future__ import annotations

import os

import pytest
from hypothesis import seed

from tests.model.bugs import detect
from tests.model.extended_machine import ExtendedMachine
from tests.model.machine import Machine, run_histories
from tests.model.mutants import MUTANTS, Mutant
from tests.rotation import rotated

EXAMPLES = 12


@pytest.mark.parametrize("part", rotated(range(8), "0"))
def test_no_history_loses_duplicates_or_blocks_a_job_or_starts_one_early(part: int) -> None:
    run_histories(EXAMPLES, seed(part)(type("Machine", (Machine,), {})) if part else Machine)


@pytest.mark.soak
@pytest.mark.parametrize("machine", [Machine, ExtendedMachine])
def test_thousands_of_random_histories_keep_all_invariants(machine: type[Machine]) -> None:
    run_histories(int(os.environ.get("TIMEBELL_TEST_EXAMPLES", "5000")), machine, random=True)


@pytest.mark.soak  # some take many minutes
@pytest.mark.parametrize("mutant", [pytest.param(one, id=one.name) for one in MUTANTS])
def test_the_model_detects_each_seeded_bug(mutant: Mutant) -> None:
    rule, histories = detect(mutant)
    assert rule, f"{histories} histories pass"
