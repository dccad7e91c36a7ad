"""What a queue allows: rates, groups and turns, decided by pure functions."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.errors import InvalidInput
from timebell.model.limits import GRAINS, Limits, admitted, allowed, in_turns, next_start, started

S = 1_000_000  # microseconds in a second


@pytest.mark.parametrize(
    ("starts", "now", "may", "at"),
    [
        ([], 0, 3, 0),
        ([(0, 2)], 0, 1, 0),
        ([(0, 3)], 0, 0, 10 * S),
        ([(0, 3)], 10 * S - 1, 0, 10 * S),
        ([(0, 3)], 10 * S, 3, 10 * S),
        ([(0, 1), (4 * S, 2)], 5 * S, 0, 10 * S),
        ([(0, 1), (4 * S, 2)], 10 * S, 1, 10 * S),
        ([(0, 2), (4 * S, 1)], 10 * S, 2, 10 * S),
        # The rate was larger before: five started, three is what may.
        ([(0, 1), (1 * S, 1), (2 * S, 1), (3 * S, 2)], 5 * S, 0, 12 * S),
        # A clock that was an hour ahead: they count as of now, not for an hour.
        ([(3600 * S, 3)], 5 * S, 0, 15 * S),
    ],
)
def test_at_most_the_rate_may_start_in_any_stretch_of_its_time(
    starts: list[tuple[int, int]], now: int, may: int, at: int
) -> None:
    assert allowed(starts, 3, 10 * S, now) == may
    assert next_start(starts, 3, 10 * S, now) == at


def test_starts_of_a_small_rate_are_remembered_each_and_of_a_large_one_by_the_grain() -> None:
    few = started(started([], 5, 10 * S, 0, 1), 5, 10 * S, 1, 2)
    assert few == [(0, 1), (1, 2)]
    assert started(few, 5, 10 * S, 1, 1) == [(0, 1), (1, 3)]
    assert started([(0, 1)], 1000, 10 * S, 1, 2) == [(1, 3)]
    assert started([(0, 1)], 1000, 10 * S, 10 * S // GRAINS, 2) == [(0, 1), (10 * S // GRAINS, 2)]
    assert started([(0, 1)], 5, 10 * S, 10 * S, 1) == [(10 * S, 1)]


@given(
    rate=st.integers(1, 200),
    per=st.integers(1_000, 60 * S),
    asks=st.lists(st.tuples(st.integers(0, 2 * S), st.integers(1, 50)), min_size=1, max_size=80),
)
def test_whatever_is_asked_no_stretch_has_more_than_the_rate_and_the_wait_is_no_longer_than_the_time(
    rate: int, per: int, asks: list[tuple[int, int]]
) -> None:
    kept: list[tuple[int, int]] = []
    real: list[tuple[int, int]] = []
    for now, (_, wanted) in zip(accumulate(pause for pause, _ in asks), asks, strict=True):
        look = next_start(kept, rate, per, now)
        assert now <= look <= now + per
        assert allowed(kept, rate, per, look) >= 1
        assert look == now or allowed(kept, rate, per, look - 1) == 0
        may = min(wanted, allowed(kept, rate, per, now))
        if may:
            kept = started(kept, rate, per, now, may)
            real.append((now, may))
        assert len(kept) <= max(rate, GRAINS + 2)
        assert sum(count for at, count in real if at > now - per) <= rate


@given(rate=st.integers(1, 500), per=st.integers(1_000, 60 * S))
def test_a_backlog_gets_the_whole_rate(rate: int, per: int) -> None:
    kept: list[tuple[int, int]] = []
    now = total = 0
    for _ in range(20):
        now = next_start(kept, rate, per, now)
        may = allowed(kept, rate, per, now)
        total += may
        kept = started(kept, rate, per, now, may)
    assert total == rate * 20
    assert now == per * 19


A, B = ("t", "a"), ("t", "b")


@pytest.mark.parametrize(
    ("groups", "running", "per_group", "most", "start", "wait"),
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
def test_a_group_has_so_many_at_once_and_the_rest_of_it_waits(
    groups: list[tuple[str, str] | None], running: dict[tuple[str, str], int], per_group: int, most: int,
    start: list[int], wait: list[int],
) -> None:  # fmt: skip
    assert admitted(groups, Counter(running), per_group, most) == (start, wait)


@given(
    groups=st.lists(st.sampled_from([None, A, B, ("u", "a")]), max_size=40),
    running=st.dictionaries(st.sampled_from([A, B]), st.integers(0, 4)),
    per_group=st.integers(1, 4),
    most=st.integers(1, 40),
)
def test_who_waits_waits_for_a_full_group_and_nobody_for_an_empty_one(
    groups: list[tuple[str, str] | None], running: dict[tuple[str, str], int], per_group: int, most: int
) -> None:
    before, counts = Counter(running), Counter(running)
    start, wait = admitted(groups, counts, per_group, most)
    assert not set(start) & set(wait)
    assert len(start) <= most
    assert counts == before + Counter(groups[at] for at in start if groups[at] is not None)
    assert all(counts[groups[at]] >= per_group for at in wait)  # type: ignore[index]
    assert all(counts[group] <= max(per_group, before[group]) for group in counts)
    if len(start) < most:
        assert sorted(start + wait) == list(range(len(groups)))


def test_each_tenant_has_one_before_any_has_two() -> None:
    order = in_turns(["a", "a", "a", "b", "b", "c"])
    assert order == [0, 3, 5, 1, 4, 2]
    assert in_turns([]) == []


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"concurrency": 0}, "INVALID_CONCURRENCY"),
        ({"concurrency": True}, "INVALID_CONCURRENCY"),
        ({"concurrency_per_group": 1.5}, "INVALID_CONCURRENCY_PER_GROUP"),
        ({"rate": 0}, "INVALID_RATE"),
        ({"rate": 0.1}, "INVALID_RATE"),
        ({"rate": "9"}, "INVALID_RATE"),
        ({"rate": 10**7}, "INVALID_RATE"),
        ({"rate": 1, "per": 0}, "INVALID_DURATION"),
        ({"rate": 1, "per": timedelta(0)}, "INVALID_DURATION"),
    ],
)
def test_limits_that_are_none_are_refused(given: dict[str, object], code: str) -> None:
    limits = {"concurrency": None, "rate": None, "per": 1.0, "concurrency_per_group": None, **given}
    with pytest.raises(InvalidInput) as refused:
        Limits.read(**limits)  # type: ignore[arg-type]
    assert refused.value.code == code


def test_limits_as_they_are_given() -> None:
    assert Limits.read(None, 5, timedelta(minutes=1), None) == Limits(rate=5, per=60.0)
    assert Limits.read(None, None, 1.0, None) == Limits()
