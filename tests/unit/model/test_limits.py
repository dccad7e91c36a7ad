"""Queue limits as pure functions: rates, groups and round robin."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.errors import InvalidInput
from timebell.model.limits import (
    RATE_BUCKETS,
    Limits,
    admit_by_group,
    available_starts,
    next_start,
    record_starts,
    round_robin,
)

S = 1_000_000  # microseconds in a second


@pytest.mark.parametrize(
    ("starts", "now", "allowed", "at"),
    [
        ([], 0, 3, 0),
        ([(0, 2)], 0, 1, 0),
        ([(0, 3)], 0, 0, 10 * S),
        ([(0, 3)], 10 * S - 1, 0, 10 * S),
        ([(0, 3)], 10 * S, 3, 10 * S),
        ([(0, 1), (4 * S, 2)], 5 * S, 0, 10 * S),
        ([(0, 1), (4 * S, 2)], 10 * S, 1, 10 * S),
        ([(0, 2), (4 * S, 1)], 10 * S, 2, 10 * S),
        # The rate was reduced: five have started, three are allowed.
        ([(0, 1), (1 * S, 1), (2 * S, 1), (3 * S, 2)], 5 * S, 0, 12 * S),
        # Starts recorded by a clock that was an hour ahead count from now, not for an hour.
        ([(3600 * S, 3)], 5 * S, 0, 15 * S),
    ],
)
def test_rate_limits_the_starts_in_every_window(starts: list[tuple[int, int]], now: int, allowed: int, at: int) -> None:
    assert available_starts(starts, 3, 10 * S, now) == allowed
    assert next_start(starts, 3, 10 * S, now) == at


def test_starts_are_recorded_individually_for_small_rates_and_in_buckets_for_large_ones() -> None:
    few = record_starts(record_starts([], 5, 10 * S, 0, 1), 5, 10 * S, 1, 2)
    assert few == [(0, 1), (1, 2)]
    assert record_starts(few, 5, 10 * S, 1, 1) == [(0, 1), (1, 3)]
    assert record_starts([(0, 1)], 1000, 10 * S, 1, 2) == [(1, 3)]
    assert record_starts([(0, 1)], 1000, 10 * S, 10 * S // RATE_BUCKETS, 2) == [(0, 1), (10 * S // RATE_BUCKETS, 2)]
    assert record_starts([(0, 1)], 5, 10 * S, 10 * S, 1) == [(10 * S, 1)]
    assert record_starts([(0, 1), (S, 2)], 1000, 10 * S, S + 1, 3) == [(0, 1), (S + 1, 5)]


@pytest.mark.parametrize(
    ("rate", "at", "merged"), [(51, 199_999, True), (51, 200_000, False), (50, 1, False), (50, 0, True)]
)
def test_starts_at_a_rate_above_50_are_merged_in_50_parts_of_the_period(rate: int, at: int, merged: bool) -> None:
    assert record_starts([(0, 1)], rate, 10 * S, at, 1) == ([(at, 2)] if merged else [(0, 1), (at, 1)])


@given(
    rate=st.integers(1, 200),
    per=st.integers(1_000, 60 * S),
    requests=st.lists(st.tuples(st.integers(0, 2 * S), st.integers(1, 50)), min_size=1, max_size=80),
)
def test_no_window_exceeds_the_rate_and_no_wait_exceeds_the_period(
    rate: int, per: int, requests: list[tuple[int, int]]
) -> None:
    recorded: list[tuple[int, int]] = []
    started: list[tuple[int, int]] = []
    for now, (_, wanted) in zip(accumulate(pause for pause, _ in requests), requests, strict=True):
        next_at = next_start(recorded, rate, per, now)
        assert now <= next_at <= now + per
        assert available_starts(recorded, rate, per, next_at) >= 1
        assert next_at == now or available_starts(recorded, rate, per, next_at - 1) == 0
        allowed = min(wanted, available_starts(recorded, rate, per, now))
        if allowed:
            recorded = record_starts(recorded, rate, per, now, allowed)
            started.append((now, allowed))
        assert len(recorded) <= max(rate, RATE_BUCKETS + 2)
        assert sum(count for at, count in started if at > now - per) <= rate


@given(rate=st.integers(1, 500), per=st.integers(1_000, 60 * S))
def test_backlog_uses_the_whole_rate(rate: int, per: int) -> None:
    recorded: list[tuple[int, int]] = []
    now = total = 0
    for _ in range(20):
        now = next_start(recorded, rate, per, now)
        allowed = available_starts(recorded, rate, per, now)
        total += allowed
        recorded = record_starts(recorded, rate, per, now, allowed)
    assert total == rate * 20
    assert now == per * 19


A, B = ("t", "a"), ("t", "b")


@pytest.mark.parametrize(
    ("groups", "running", "per_group", "max_jobs", "start", "wait"),
    [
        ([None, None, None], {}, 1, 2, [0, 1], []),
        ([A, A, B, None, A], {}, 1, 9, [0, 2, 3], [1, 4]),
        ([A, A, B, A], {}, 2, 9, [0, 1, 2], [3]),
        ([A, B], {A: 1}, 1, 9, [1], [0]),
        ([A, B], {A: 5}, 2, 9, [1], [0]),
        ([A, A, B, A], {}, 1, 1, [0], []),
        ([("u", "a"), A], {A: 1}, 1, 9, [0], [1]),
        ([], {}, 1, 9, [], []),
    ],
)
def test_group_concurrency_is_limited_and_excess_jobs_wait(
    groups: list[tuple[str, str] | None], running: dict[tuple[str, str], int], per_group: int, max_jobs: int,
    start: list[int], wait: list[int],
) -> None:  # fmt: skip
    assert admit_by_group(groups, Counter(running), per_group, max_jobs) == (start, wait)


@given(
    groups=st.lists(st.sampled_from([None, A, B, ("u", "a")]), max_size=40),
    running=st.dictionaries(st.sampled_from([A, B]), st.integers(0, 4)),
    per_group=st.integers(1, 4),
    max_jobs=st.integers(1, 40),
)
def test_jobs_wait_only_for_a_full_group(
    groups: list[tuple[str, str] | None], running: dict[tuple[str, str], int], per_group: int, max_jobs: int
) -> None:
    before, counts = Counter(running), Counter(running)
    start, wait = admit_by_group(groups, counts, per_group, max_jobs)
    assert not set(start) & set(wait)
    assert len(start) <= max_jobs
    assert counts == before + Counter(groups[at] for at in start if groups[at] is not None)
    assert all(counts[groups[at]] >= per_group for at in wait)  # type: ignore[index]
    assert all(counts[group] <= max(per_group, before[group]) for group in counts)
    if len(start) < max_jobs:
        assert sorted(start + wait) == list(range(len(groups)))


def test_round_robin_gives_each_tenant_one_before_any_has_two() -> None:
    order = round_robin(["a", "a", "a", "b", "b", "c"])
    assert order == [0, 3, 5, 1, 4, 2]
    assert round_robin([]) == []


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"concurrency": 0}, "INVALID_CONCURRENCY"),
        ({"concurrency": True}, "INVALID_CONCURRENCY"),
        ({"concurrency_per_group": 1.5}, "INVALID_CONCURRENCY_PER_GROUP"),
        ({"rate": 0}, "INVALID_RATE"),
        ({"rate": 0.1}, "INVALID_RATE"),
        ({"rate": "9"}, "INVALID_RATE"),
        ({"rate": 1_000_001}, "INVALID_RATE"),
        ({"concurrency": 1_000_001}, "INVALID_CONCURRENCY"),
        ({"rate": 1, "per": 0}, "INVALID_DURATION"),
        ({"rate": 1, "per": timedelta(0)}, "INVALID_DURATION"),
    ],
)
def test_invalid_limits_are_refused(given: dict[str, object], code: str) -> None:
    limits = {"concurrency": None, "rate": None, "per": 1.0, "concurrency_per_group": None, **given}
    with pytest.raises(InvalidInput) as refused:
        Limits.parse(**limits)  # type: ignore[arg-type]
    assert refused.value.code == code


def test_limits_are_parsed() -> None:
    assert Limits.parse(None, 5, timedelta(minutes=1), None) == Limits(rate=5, per=60.0)
    assert Limits.parse(None, None, 1.0, None) == Limits()
    assert Limits.parse(1, 1_000_000, 0.001, 1_000_000) == Limits(
        concurrency=1, rate=1_000_000, per=0.001, concurrency_per_group=1_000_000
    )
