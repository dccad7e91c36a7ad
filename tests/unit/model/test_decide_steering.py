"""The decisions on what a person asks for: pauses, runs by hand, what is made up for, and what is to come."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.model.decide import (
    QUEUED,
    ROWS,
    TINY,
    Fire,
    Plan,
    Skip,
    by_hand,
    in_turn,
    next_of,
    passed_over,
    plan,
    superseded,
    upcoming,
)
from timebell.model.job import Hold, JobState, Reason
from timebell.model.policy import CatchUp, Overlap
from timebell.model.schedule import Schedule
from timebell.recurrence import Cron, Every

from .test_decide import MINUTE, T0, schedule, schedules, skipped, whens

# Pauses.


@given(schedules, whens)
def test_a_pause_leaves_out_each_occurrence_once_and_fires_none(made: Schedule, now: datetime) -> None:
    planned = passed_over(made, now)
    assert planned.fires == []
    assert {skip.reason for skip in planned.skips} <= {Reason.PAUSED, Reason.OVERRIDE}
    rows = sorted(planned.skips, key=lambda skip: skip.at)
    assert sum(skip.count for skip in rows) == made.recurrence.count(T0 + TINY, now + TINY)
    assert planned.next_fire_at == made.recurrence.next(now)
    left_out = {skip.at for skip in rows if skip.reason is Reason.OVERRIDE}
    assert left_out == {one.at for one in made.recurrence.overrides if one.at <= now}
    assert all(skip.at <= skip.to <= now for skip in rows)


@given(schedules, whens, whens)
def test_after_a_pause_only_what_comes_later_fires(made: Schedule, paused_to: datetime, now: datetime) -> None:
    following = passed_over(made, paused_to).next_fire_at
    planned = plan(replace(made, next_fire_at=following), now, 0)
    assert all(fire.at > paused_to for fire in planned.fires)
    assert all(skip.at > paused_to for skip in planned.skips)


def test_the_table_of_pauses() -> None:
    made = schedule()
    assert passed_over(made, T0 + 59 * timedelta(seconds=1)) == Plan(next_fire_at=T0 + MINUTE)
    assert skipped(passed_over(made, T0 + 3 * MINUTE)) == dict.fromkeys((1, 2, 3), "paused")
    (many,) = passed_over(made, T0 + (ROWS + 1) * MINUTE).skips
    assert many == Skip(T0 + MINUTE, T0 + (ROWS + 1) * MINUTE, ROWS + 1, Reason.PAUSED)
    over = schedule(max_runs=2)
    assert passed_over(over, T0 + 9 * MINUTE).next_fire_at is None


def test_a_fixed_delay_begins_anew_at_the_resume() -> None:
    made = schedule(Every("PT10M", since="last_end"))
    due = made.recurrence.first(T0)
    assert due is not None
    planned = passed_over(replace(made, next_fire_at=due), due + 3 * MINUTE)
    assert planned == Plan([], [Skip(due, due, 1, Reason.PAUSED)], due + 13 * MINUTE)


# By hand.


@pytest.mark.parametrize(
    ("overlap", "live", "expected"),
    [
        (Overlap.SKIP, 0, "now"),
        (Overlap.SKIP, 1, "skipped"),
        (Overlap.QUEUE, 0, "now"),
        (Overlap.QUEUE, 1, "waits"),
        (Overlap.QUEUE, QUEUED, "waits"),
        (Overlap.QUEUE, QUEUED + 1, "skipped"),
        (Overlap.CANCEL_PREVIOUS, 0, "now"),
        (Overlap.CANCEL_PREVIOUS, 2, "supersedes"),
        (Overlap.ALLOW, 0, "now"),
        (Overlap.ALLOW, 7, "now"),
    ],
)
def test_a_run_by_hand_obeys_overlap_and_moves_nothing(overlap: Overlap, live: int, expected: str) -> None:
    made = schedule(overlap=overlap)
    now = T0 + 90 * timedelta(seconds=1)
    fires = {
        "now": [Fire(now)], "waits": [Fire(now, Hold.OVERLAP)], "supersedes": [Fire(now, Hold.OVERLAP)], "skipped": [],
    }  # fmt: skip
    skips = [Skip(now, now, 1, Reason.OVERLAP)] if expected == "skipped" else []
    assert by_hand(made, now, live) == Plan(fires[expected], skips, made.next_fire_at, expected == "supersedes")


@given(schedules, whens, st.integers(0, 200))
def test_a_run_by_hand_is_one_run_or_one_skip(made: Schedule, now: datetime, live: int) -> None:
    planned = by_hand(made, now, live)
    assert len(planned.fires) + len(planned.skips) == 1
    assert planned.next_fire_at == made.next_fire_at
    assert planned.supersedes <= (live > 0)


@given(st.lists(whens, max_size=20), st.integers(0, 3))
def test_what_is_made_up_for_takes_turns(instants: list[datetime], live: int) -> None:
    fires = in_turn(instants, live)
    assert [fire.at for fire in fires] == instants
    assert [fire.hold for fire in fires if fire.hold is None] == [None] * bool(instants and not live)


def test_what_made_way_is_cancelled_with_its_reason() -> None:
    ending = superseded("j", 3, T0)
    assert (ending.state, ending.reason, ending.attempt) == (JobState.CANCELLED, "superseded", 3)


# What is to come.


@given(schedules, whens, whens)
def test_what_is_to_come_is_what_fires_when_nothing_is_in_its_way(
    made: Schedule, start: datetime, end: datetime
) -> None:
    """Each instant is decided on time, with nothing live."""
    shown = list(upcoming(made, start, min(end, start + timedelta(hours=2))))[:50]
    assert shown == sorted(set(shown))
    first = made.next_fire_at
    fired: list[datetime] = []
    made = replace(made, policies=replace(made.policies, overlap=Overlap.ALLOW, missed_after=60.0))
    if shown:
        assert first is not None
        cursor = made.recurrence.next(max(start, first) - TINY)
        while cursor is not None and cursor <= shown[-1]:
            planned = plan(replace(made, next_fire_at=cursor), cursor, 0)
            fired += [fire.at for fire in planned.fires]
            cursor = planned.next_fire_at
        assert shown == fired


def test_nothing_is_to_come_of_what_is_paused_set_aside_or_over() -> None:
    made, end = schedule(), T0 + 5 * MINUTE
    assert list(upcoming(made, T0, end)) == [T0 + n * MINUTE for n in (1, 2, 3, 4)]
    assert list(upcoming(replace(made, next_fire_at=T0 + 3 * MINUTE), T0, end)) == [T0 + n * MINUTE for n in (3, 4)]
    for nothing in (
        replace(made, enabled=False), replace(made, fault="broken"), replace(made, next_fire_at=None),
        schedule(end=T0 + timedelta(seconds=30)),
    ):  # fmt: skip
        assert list(upcoming(nothing, T0, end)) == []
    assert list(upcoming(schedule(skip=2, move=3), T0, end)) == [
        T0 + MINUTE, T0 + 3 * MINUTE + timedelta(milliseconds=500), T0 + 4 * MINUTE,
    ]  # fmt: skip


def test_of_a_fixed_delay_only_the_next_run_is_to_come() -> None:
    made = schedule(Every("PT10M", since="last_start"))
    due = T0 + 10 * MINUTE
    waiting = replace(made, next_fire_at=due)
    assert list(upcoming(waiting, T0, T0 + timedelta(days=1))) == [due]
    assert list(upcoming(waiting, due + TINY, T0 + timedelta(days=1))) == []
    assert list(upcoming(replace(made, next_fire_at=None), T0, T0 + timedelta(days=1))) == []


def test_a_search_that_is_given_up_is_a_fault_and_no_error() -> None:
    never = Cron("0 0 * * *") - Cron("0 0 * * *")
    found, fault = next_of(never.bind("UTC", created_at=T0), T0)
    assert found is None
    assert fault is not None
    assert next_of(schedule().recurrence, T0) == (T0 + MINUTE, None)


# Fixed delay.


@given(st.sampled_from(["last_end", "last_start"]), whens, st.integers(0, 5), st.integers(0, 5))
def test_a_fixed_delay_fires_once_however_late_and_never_beside_another(
    since: str, now: datetime, serial: int, beside: int
) -> None:
    made = replace(schedule(Every("PT10M", since=since)), next_fire_at=T0 + 10 * MINUTE)  # type: ignore[arg-type]
    planned = plan(made, now, serial + beside, beside)
    if now < T0 + 10 * MINUTE:
        assert planned == Plan(next_fire_at=made.next_fire_at)
    elif serial + beside:
        assert planned.fires == []
        assert [skip.reason for skip in planned.skips] == [Reason.OVERLAP]
        assert (planned.next_fire_at is None) is (serial > 0)
    else:
        assert (planned.fires, planned.skips, planned.next_fire_at) == ([Fire(T0 + 10 * MINUTE)], [], None)


@given(schedules, whens, st.integers(1, 120))
def test_a_missed_one_is_never_left_out_for_an_overlap(made: Schedule, now: datetime, live: int) -> None:
    late = timedelta(seconds=made.policies.missed_after)
    planned = plan(made, now, live)
    assert all(now - skip.at <= late for skip in planned.skips if skip.reason is Reason.OVERLAP)
    if made.policies.catch_up is CatchUp.LATEST:  # coalesced means that another stands for it
        coalesced = [skip.to for skip in planned.skips if skip.reason is Reason.COALESCED]
        assert not coalesced or any(fire.at > max(coalesced) for fire in planned.fires)
