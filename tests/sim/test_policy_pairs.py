"""All pairs of policies: the invariants of every pair, and the documented outcomes of some."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from tests.rotation import rotated
from timebell.model.job import Kind
from timebell.sim.world import World

from .expected_outcomes import EXPECTED, Expected
from .policies import REFUSED, VALUES, covered, declared, explain_exclusion, pairs
from .scene import START, Scene, refused

VALID_PAIRS = [pair for pair in pairs() if explain_exclusion(*pair) is None]
DOCUMENTED_PAIRS = {outcomes.pair for outcomes in EXPECTED}
ALWAYS_TESTED = {
    *(" ".join(pair) for pair in VALID_PAIRS if DOCUMENTED_PAIRS & {" ".join(pair), " ".join(reversed(pair))}),
    *(next(" ".join(pair) for pair in VALID_PAIRS if value in pair) for value in VALUES),
}
"""The documented pairs, and one with each value."""


@cache
def play_pair(pair: str) -> Scene:
    """Return the scene of a pair with documented outcomes."""
    return Scene(*(VALUES[value] for value in pair.split(" "))).play()


def test_every_policy_in_the_source_has_a_value_here() -> None:
    assert declared() - covered() == set(), "give it a Value in tests/sim/policies.py, or list it in NOT_POLICIES"
    assert covered() - declared() - set(VALUES) == set(), "a value is missing in the source"
    assert {frozenset(pair) for pair in combinations(VALUES, 2)} == {frozenset(pair) for pair in pairs()}
    assert set().union(*REFUSED) <= set(VALUES)


@pytest.mark.parametrize("pair", rotated(VALID_PAIRS, ALWAYS_TESTED, " ".join))
def test_two_policies_together_keep_the_invariants(pair: tuple[str, str]) -> None:
    name = " ".join(pair)
    scene = play_pair(name) if name in DOCUMENTED_PAIRS else Scene(*(VALUES[value] for value in pair)).play()
    scene.check()


@pytest.mark.parametrize("outcomes", EXPECTED, ids=lambda outcomes: outcomes.pair)
def test_two_policies_together_have_the_documented_outcomes(outcomes: Expected) -> None:
    assert explain_exclusion(*outcomes.pair.split(" ")) is None
    scene = play_pair(outcomes.pair)
    for kind, expected in (
        (Kind.PLANNED, outcomes.at),
        (Kind.MANUAL, outcomes.manual),
        (Kind.BACKFILL, outcomes.backfill),
    ):
        actual = scene.outcomes(kind)
        assert {clock: actual.get(clock) for clock in expected} == expected, outcomes.words
    starts = {clock: scene.starts(clock) for clock in outcomes.starts}
    assert starts == outcomes.starts, outcomes.words


@pytest.mark.parametrize(("pair", "code"), REFUSED.items(), ids=lambda one: " ".join(sorted(one)))
def test_two_policies_that_exclude_each_other_are_refused(pair: frozenset[str], code: str) -> None:
    with World(start=START) as world:
        scene = Scene(*(VALUES[name] for name in sorted(pair)))
        scene.world, scene.app = world, world.new_app()
        assert world.run(refused(scene)) == code
