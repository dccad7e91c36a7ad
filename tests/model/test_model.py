"""The engine against the model; see docs/internals/proof.md."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.harder import Harder
from tests.model.machine import Machine
from tests.model.mutants import MUTANTS, Mutant
from timebell.errors import TimebellError

EXAMPLES, STEPS, FOR_A_MUTANT = 40, 30, 600
UNSEEN = {"leases are judged by the database's clock"}
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


def test_nothing_is_lost_early_doubled_or_stuck_whatever_happens() -> None:
    run(EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Machine, Harder])
def test_nothing_is_lost_early_doubled_or_stuck_in_thousands_of_new_histories(machine: type[Machine]) -> None:
    run(int(os.environ.get("TIMEBELL_TEST_EXAMPLES", "5000")), machine, random=True)


def _marks(mutant: Mutant) -> list[pytest.MarkDecorator]:
    unseen = pytest.mark.xfail(reason="the model does not see it, torture does: docs/internals/proof.md")
    return [pytest.mark.slow, *([unseen] if mutant.name in UNSEEN else [])]


@pytest.mark.parametrize("mutant", [pytest.param(one, id=one.name, marks=_marks(one)) for one in MUTANTS])
def test_the_model_notices_each_planted_bug(mutant: Mutant) -> None:
    before = Machine.made
    with mutant.planted(), pytest.raises(BaseException) as caught:
        run(FOR_A_MUTANT, phases=(Phase.generate,))
    said = str(caught.value).partition("\n")[0]
    assert isinstance(caught.value, AssertionError | TimebellError), said
    print(f"\n{mutant.name}: after {Machine.made - before} histories by {said.partition(':')[0]}")


def test_every_planted_bug_is_in_the_table_of_the_documentation() -> None:
    bugs = PROOF.read_text().partition("## The bugs")[2]
    table = re.findall(r"^\| ([^|]+?) \| [^|]+ \| [^|]+ \| [^|]+ \|$", bugs, re.MULTILINE)
    assert set(table) >= {one.name for one in MUTANTS}
