"""The sending pace: it stays within the quota, slows down on quota errors, and recovers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from timebell.features.campaigns.push.pace import BURST_SECONDS, QUOTA_SHARE, Pace

STEPS = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 2_000), st.none() | st.integers(0, 90)), min_size=1, max_size=40
)


@settings(max_examples=50)
@given(st.integers(60, 60_000), STEPS)
def test_the_pace_stays_within_the_quota_and_sends_nothing_while_paused(per_minute: int, steps: Any) -> None:
    pace, now, total = Pace(per_minute, 0.0), 0.0, 0
    for passed, wanted, exceeded in steps:
        now += passed
        granted = pace.take(wanted, now)
        assert 0 <= granted <= wanted
        assert not granted or now >= pace.paused_until
        total += granted
        assert total <= per_minute / 60 * QUOTA_SHARE * (now + BURST_SECONDS) + 1
        if exceeded is not None:
            pace.slow_down(now, exceeded)
            assert pace.take(10, now) == 0 or exceeded == 0
        assert pace.take(0, now) == 0


def test_nodes_share_the_quota() -> None:
    paces = [at_full_rate() for _ in range(3)]
    for pace in paces:
        pace.divide_quota(3)
    total = sum(pace.take(100_000, 101.0 + second) for pace in paces for second in range(60))
    assert 0.99 * 600_000 * QUOTA_SHARE < total <= 600_000 * QUOTA_SHARE + 10_000
    paces[0].divide_quota(1)  # the others have left
    assert paces[0].take(100_000, 161.0) < paces[0].take(100_000, 200.0)


def test_slowing_down_removes_the_burst() -> None:
    pace = Pace(60_000, 0.0)
    pace.slow_down(0.0, 0.0)
    assert pace.take(1_000, 0.0) <= 1


def at_full_rate() -> Pace:
    """Return a pace that has sent messages for the last minutes, until second 100."""
    pace = Pace(600_000, 0.0)
    for second in range(101):
        pace.take(1, float(second))
    assert pace.rate == pace.full_rate
    return pace


def test_the_rate_halves_and_recovers_within_a_minute() -> None:
    pace = at_full_rate()
    for _ in range(50):  # simultaneous quota errors
        pace.slow_down(100.0, 5.0)
    assert pace.rate == pace.full_rate / 2
    assert pace.take(10, 104.9) == 0
    assert pace.seconds_until_next(104.0) == 1.0
    pace.take(10, 105.0)
    pace.take(10, 136.0)
    assert pace.rate == pace.full_rate


def test_the_full_rate_takes_a_minute_from_a_standstill() -> None:
    pace = at_full_rate()
    for started_at in (1000.0, 2000.0):  # each after a pause
        sent = [pace.take(10_000, started_at + second) for second in range(70)]
        assert sent[0] <= 500
        assert sum(sent[:10]) < 1.5 * pace.full_rate
        assert all(0.9 * pace.full_rate <= each <= pace.full_rate + 1 for each in sent[62:])


def test_an_outage_is_probed_less_and_less_often() -> None:
    pace, now, probes = at_full_rate(), 100.0, list[float]()
    while now < 400:
        if pace.take(1, now):
            probes.append(now)
            pace.back_off(now)
        now = max(now + 0.01, pace.paused_until)
    assert len(probes) < 25
    gaps = [later - sooner for sooner, later in pairwise(probes)][-3:]
    assert all(45 <= gap <= 76 for gap in gaps)
    pace.reset_back_off()
    pace.back_off(now)
    assert pace.take(1, now + 1) == 1, "a single unknown result is no outage"
