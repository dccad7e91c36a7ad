"""The sending process is killed on its way, again and again."""

from __future__ import annotations

import pytest

from benchmarks import campaigns


@pytest.mark.slow
def test_killed_five_times_on_its_way_nobody_gets_it_twice() -> None:
    assert campaigns.main(["--devices", "200000", "--kills", "5", "--stores", "sqlite"]) == 0
