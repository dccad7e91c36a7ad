"""Every two policies that can meet, met: what must hold of any, and what the contract says of some."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from timebell.model.job import Kind
from timebell.sim.world import World

from .policies import REFUSED, VALUES, covered, declared, never_meet, pairs
from .scene import START, Scene, refused
from .settled import SETTLED, Settled

MEET = [pair for pair in pairs() if never_meet(*pair) is None]
AGAIN = {one.pair for one in SETTLED}


@cache
def played(pair: str) -> Scene:
    """The scene of two policies of which the contract settles something, too."""
    return Scene(*(VALUES[name] for name in pair.split(" "))).play()


def test_every_policy_of_the_source_has_a_value_here() -> None:
    assert declared() - covered() == set(), "give it a Value in tests/sim/policies.py, or say in PLAIN that it is none"
    assert covered() - declared() - set(VALUES) == set(), "it is gone"
    assert {frozenset(pair) for pair in combinations(VALUES, 2)} == {frozenset(pair) for pair in pairs()}
    assert set().union(*REFUSED) <= set(VALUES)


@pytest.mark.parametrize("pair", MEET, ids=" ".join)
def test_two_policies_together(pair: tuple[str, str]) -> None:
    named = " ".join(pair)
    scene = played(named) if named in AGAIN else Scene(*(VALUES[name] for name in pair)).play()
    scene.check()


@pytest.mark.parametrize("settled", SETTLED, ids=lambda one: one.pair)
def test_what_the_contract_settles_of_two_policies(settled: Settled) -> None:
    assert never_meet(*settled.pair.split(" ")) is None
    scene = played(settled.pair)
    for kind, expected in (
        (Kind.PLANNED, settled.at),
        (Kind.MANUAL, settled.manual),
        (Kind.BACKFILL, settled.backfill),
    ):
        found = scene.outcomes(kind)
        assert {clock: found.get(clock) for clock in expected} == expected, settled.words
    starts = {clock: scene.starts(clock) for clock in settled.starts}
    assert starts == settled.starts, settled.words


@pytest.mark.parametrize(("pair", "code"), REFUSED.items(), ids=lambda one: " ".join(sorted(one)))
def test_two_policies_that_exclude_each_other_are_refused(pair: frozenset[str], code: str) -> None:
    with World(start=START) as world:
        scene = Scene(*(VALUES[name] for name in sorted(pair)))
        scene.world, scene.app = world, world.new_app()
        assert world.run(refused(scene)) == code
