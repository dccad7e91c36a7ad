"""A sample of the differential run; `python -m tests.differential` is all of it."""

from __future__ import annotations

import random

import pytest

from tests.rotation import rotated
from timebell.recurrence.zone_names import accepted_names

from .__main__ import at_changes, on_days

EVERY = sorted(accepted_names())


@pytest.mark.parametrize("part", rotated(range(6), "01"))
def test_the_oracle_agrees_around_dst_transitions(part: int) -> None:
    for name in random.Random(part).sample(EVERY, 3):
        counted, wrong = at_changes(name, part, 1)
        assert wrong == []
        assert counted or "Etc/" in name or counted.total() == 0


@pytest.mark.parametrize("name", ["Pacific/Apia", "Australia/Lord_Howe", "America/St_Johns", "Africa/Casablanca"])
def test_the_oracle_agrees_in_unusual_zones(name: str) -> None:
    counted, wrong = at_changes(name, 7, 1)
    assert wrong == []
    assert counted.total() > 80


@pytest.mark.parametrize("part", rotated(range(3), "1"))
def test_the_oracle_agrees_about_days(part: int) -> None:
    counted, wrong = on_days(part, 2, 60)
    assert wrong == []
    assert counted.total() == 60
