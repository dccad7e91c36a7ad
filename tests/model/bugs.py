"""Count the random histories until the model detects each seeded bug: `python -m tests.model.bugs`.

The counts are stored in tests/proof.json and shown in docs/internals/proof.md. Bugs with a targeted history are left
out. `--only TEXT` selects the bugs whose names contain a text.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor, as_completed

from hypothesis import Phase
from hypothesis.errors import FlakyFailure

from scripts import proof
from tests.model.machine import Machine, run_histories
from tests.model.mutants import MUTANTS, Mutant
from tests.model.test_targeted_histories import AIMED
from timebell.errors import TimebellError

MAX_HISTORIES = 600


def detect(mutant: Mutant) -> tuple[str, int]:
    """Run histories until one fails; return the violated rule and the number of histories.

    The rule is empty if all histories pass. Other failures than a violated rule or an error of Timebell are raised.
    """
    before, rule = Machine.made, ""
    with mutant.seeded():
        try:
            run_histories(MAX_HISTORIES, phases=(Phase.generate,))
        except FlakyFailure as failure:  # passes if repeated: a seeded bug may read the real clock
            rule = _violated_rule(failure.exceptions[0])
        except (AssertionError, TimebellError) as error:
            rule = _violated_rule(error)
    return rule, Machine.made - before


def _violated_rule(error: BaseException) -> str:
    if isinstance(error, TimebellError):
        return f"error `{error.code}`"
    if isinstance(error, AssertionError):
        return str(error).partition(":")[0] or "an assertion in the code"
    raise error


def main(only: str) -> int:
    """Run the selected bugs in one process per core; return 1 if one was not detected."""
    undetected = 0
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        selected = [one for one in MUTANTS if only in one.name and one.name not in AIMED]
        runs = {executor.submit(detect, mutant): mutant.name for mutant in selected}
        for run in as_completed(runs):
            rule, histories = run.result()
            print(f"{runs[run]}: after {histories} histories by {rule or 'nothing'}", flush=True)
            proof.record("model", runs[run], {"rule": rule, "histories": histories})
            undetected += not rule
    return 1 if undetected else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.model.bugs", description=__doc__)
    parser.add_argument("--only", default="")
    raise SystemExit(main(parser.parse_args().only))
