"""Failovers of real clusters under load, judged from outside; see `python -m benchmarks patroni`."""

from __future__ import annotations

import pytest

from benchmarks.clusters import patroni
from benchmarks.clusters.judge import Result, judge
from benchmarks.clusters.member import Missing

MAX_FIRST_START_SECONDS = 5.0  # after the database accepts writes again
MAX_LAST_START_SECONDS = 21.0  # the reply to a claim may be lost: another node then takes the job over


def assert_nothing_was_lost(result: Result) -> None:
    result.print()
    assert result.acknowledged > 1000
    assert result.lost == [], result.log
    assert result.early == []
    assert result.unexplained == 0, result.log
    for outcome in result.outcomes:
        assert outcome.first_start is not None
        assert outcome.first_start < MAX_FIRST_START_SECONDS, outcome
        assert (outcome.last_due_started or 0) < MAX_LAST_START_SECONDS, outcome


@pytest.mark.slow
def test_ten_failovers_of_patroni_lose_and_repeat_nothing() -> None:
    try:
        result = judge(patroni.PatroniCluster, [(name, patroni.EVENTS[name]) for name in patroni.TEN_EVENTS])
    except Missing as missing:
        pytest.skip(str(missing))
    assert_nothing_was_lost(result)
