"""The engine against the model; see docs/internals/proof.md."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.extended_machine import ExtendedMachine
from tests.model.machine import Machine
from tests.model.mutants import MUTANTS, Mutant
from tests.rotation import rotated
from timebell.errors import TimebellError

EXAMPLES, STEPS, EXAMPLES_PER_MUTANT = 12, 30, 600
PROOF = Path(__file__).parents[2] / "docs/internals/proof.md"


def run(
    examples: int, machine: type[Machine] = Machine, *, random: bool = False,
    phases: tuple[Phase, ...] = (Phase.generate, Phase.shrink),
) -> None:  # fmt: skip
    chosen = settings(
        max_examples=examples, stateful_step_count=STEPS, phases=phases, deadline=None,
        database=None, derandomize=not random, suppress_health_check=list(HealthCheck),
        print_blob=True, report_multiple_bugs=False,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("part", rotated(range(8), "0"))
def test_no_history_loses_duplicates_or_blocks_a_job_or_starts_one_early(part: int) -> None:
    run(EXAMPLES, seed(part)(type("Machine", (Machine,), {})) if part else Machine)


@pytest.mark.soak
@pytest.mark.parametrize("machine", [Machine, ExtendedMachine])
def test_thousands_of_random_histories_keep_all_invariants(machine: type[Machine]) -> None:
    run(int(os.environ.get("TIMEBELL_TEST_EXAMPLES", "5000")), machine, random=True)


@pytest.mark.soak  # some take many minutes
@pytest.mark.parametrize("mutant", [pytest.param(one, id=one.name) for one in MUTANTS])
def test_the_model_detects_each_seeded_bug(mutant: Mutant) -> None:
    before = Machine.made
    with mutant.seeded(), pytest.raises(BaseException) as caught:
        run(EXAMPLES_PER_MUTANT, phases=(Phase.generate,))
    said = str(caught.value).partition("\n")[0]
    assert isinstance(caught.value, AssertionError | TimebellError), said
    print(f"\n{mutant.name}: after {Machine.made - before} histories by {said.partition(':')[0]}")


def test_every_seeded_bug_is_documented() -> None:
    bugs = PROOF.read_text().partition("## The bugs")[2]
    table = re.findall(r"^\| ([^|]+?) \| [^|]+ \| [^|]+ \| [^|]+ \|$", bugs, re.MULTILINE)
    assert set(table) >= {one.name for one in MUTANTS}
