"""Decisions on user actions: pauses, manual runs, backfills and upcoming occurrences."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.model.decide import (
    MAX_QUEUED_OCCURRENCES,
    MAX_SKIP_ROWS,
    MICROSECOND,
    Fire,
    Plan,
    Skip,
    complete_stopped,
    next_cursor,
    plan,
    plan_manual,
    queue_in_order,
    skip_paused,
    upcoming,
)
from timebell.model.job import Hold, JobState, Reason
from timebell.model.policy import CatchUp, Overlap
from timebell.model.schedule import Schedule
from timebell.recurrence import Cron, Every

from .test_decide import MINUTE, T0, build_schedule, schedules, skipped, whens

# Pauses.


@given(schedules, whens)
def test_pause_skips_each_occurrence_once_and_fires_none(schedule: Schedule, now: datetime) -> None:
    planned = skip_paused(schedule, now)
    assert planned.fires == []
    assert {skip.reason for skip in planned.skips} <= {Reason.PAUSED, Reason.OVERRIDE}
    rows = sorted(planned.skips, key=lambda skip: skip.at)
    assert sum(skip.count for skip in rows) == schedule.recurrence.count(T0 + MICROSECOND, now + MICROSECOND)
    assert planned.next_fire_at == schedule.recurrence.next(now)
    left_out = {skip.at for skip in rows if skip.reason is Reason.OVERRIDE}
    assert left_out == {one.at for one in schedule.recurrence.overrides if one.at <= now}
    assert all(skip.at <= skip.last <= now for skip in rows)


@given(schedules, whens, whens)
def test_after_a_pause_only_later_occurrences_fire(schedule: Schedule, paused_to: datetime, now: datetime) -> None:
    following = skip_paused(schedule, paused_to).next_fire_at
    planned = plan(replace(schedule, next_fire_at=following), now, 0)
    assert all(fire.at > paused_to for fire in planned.fires)
    assert all(skip.at > paused_to for skip in planned.skips)


def test_skips_of_a_pause_and_their_range_row() -> None:
    schedule = build_schedule()
    assert skip_paused(schedule, T0 + 59 * timedelta(seconds=1)) == Plan(next_fire_at=T0 + MINUTE)
    assert skipped(skip_paused(schedule, T0 + 3 * MINUTE)) == dict.fromkeys((1, 2, 3), "paused")
    (many,) = skip_paused(schedule, T0 + (MAX_SKIP_ROWS + 1) * MINUTE).skips
    assert many == Skip(T0 + MINUTE, T0 + (MAX_SKIP_ROWS + 1) * MINUTE, MAX_SKIP_ROWS + 1, Reason.PAUSED)
    limited = build_schedule(max_runs=2)
    assert skip_paused(limited, T0 + 9 * MINUTE).next_fire_at is None


def test_fixed_delay_restarts_at_the_resume() -> None:
    schedule = build_schedule(Every("PT10M", since="last_end"))
    due = schedule.recurrence.first_fire(T0)
    assert due is not None
    planned = skip_paused(replace(schedule, next_fire_at=due), due + 3 * MINUTE)
    assert planned == Plan([], [Skip(due, due, 1, Reason.PAUSED)], due + 13 * MINUTE)


# Manual runs.


@pytest.mark.parametrize(
    ("overlap", "live", "expected"),
    [
        (Overlap.SKIP, 0, "now"),
        (Overlap.SKIP, 1, "skipped"),
        (Overlap.QUEUE, 0, "now"),
        (Overlap.QUEUE, 1, "queued"),
        (Overlap.QUEUE, MAX_QUEUED_OCCURRENCES, "queued"),
        (Overlap.QUEUE, MAX_QUEUED_OCCURRENCES + 1, "skipped"),
        (Overlap.CANCEL_PREVIOUS, 0, "now"),
        (Overlap.CANCEL_PREVIOUS, 2, "supersedes"),
        (Overlap.ALLOW, 0, "now"),
        (Overlap.ALLOW, 7, "now"),
    ],
)
def test_manual_run_obeys_overlap_and_keeps_the_cursor(overlap: Overlap, live: int, expected: str) -> None:
    schedule = build_schedule(overlap=overlap)
    now = T0 + 90 * timedelta(seconds=1)
    fires = {
        "now": [Fire(now)], "queued": [Fire(now, Hold.OVERLAP)], "supersedes": [Fire(now, Hold.OVERLAP)], "skipped": [],
    }  # fmt: skip
    skips = [Skip(now, now, 1, Reason.OVERLAP)] if expected == "skipped" else []
    assert plan_manual(schedule, now, live) == Plan(
        fires[expected], skips, schedule.next_fire_at, expected == "supersedes"
    )


@given(schedules, whens, st.integers(0, 200))
def test_manual_run_is_one_fire_or_one_skip(schedule: Schedule, now: datetime, live: int) -> None:
    planned = plan_manual(schedule, now, live)
    assert len(planned.fires) + len(planned.skips) == 1
    assert planned.next_fire_at == schedule.next_fire_at
    assert planned.supersedes <= (live > 0)


@given(st.lists(whens, max_size=20), st.integers(0, 3))
def test_backfilled_occurrences_are_queued_in_order(instants: list[datetime], live: int) -> None:
    fires = queue_in_order(instants, live)
    assert [fire.at for fire in fires] == instants
    assert [fire.hold for fire in fires if fire.hold is None] == [None] * bool(instants and not live)


def test_superseded_job_is_cancelled_with_its_reason() -> None:
    completion = complete_stopped("j", 3, T0, Hold.STOPPING)
    assert (completion.state, completion.reason, completion.attempt) == (JobState.CANCELLED, "superseded", 3)


# Upcoming occurrences.


@given(schedules, whens, whens)
def test_upcoming_occurrences_fire_when_nothing_interferes(schedule: Schedule, start: datetime, end: datetime) -> None:
    """Each instant is decided on time, with nothing live."""
    listed = list(upcoming(schedule, start, min(end, start + timedelta(hours=2))))[:50]
    assert listed == sorted(set(listed))
    first = schedule.next_fire_at
    fired: list[datetime] = []
    schedule = replace(schedule, policies=replace(schedule.policies, overlap=Overlap.ALLOW, missed_after=60.0))
    if listed:
        assert first is not None
        cursor = schedule.recurrence.next(max(start, first) - MICROSECOND)
        while cursor is not None and cursor <= listed[-1]:
            planned = plan(replace(schedule, next_fire_at=cursor), cursor, 0)
            fired += [fire.at for fire in planned.fires]
            cursor = planned.next_fire_at
        assert listed == fired


def test_paused_errored_or_ended_schedules_have_no_upcoming_occurrences() -> None:
    schedule, end = build_schedule(), T0 + 5 * MINUTE
    assert list(upcoming(schedule, T0, end)) == [T0 + n * MINUTE for n in (1, 2, 3, 4)]
    assert list(upcoming(replace(schedule, next_fire_at=T0 + 3 * MINUTE), T0, end)) == [T0 + n * MINUTE for n in (3, 4)]
    for nothing in (
        replace(schedule, enabled=False), replace(schedule, error="broken"), replace(schedule, next_fire_at=None),
        build_schedule(end=T0 + timedelta(seconds=30)),
    ):  # fmt: skip
        assert list(upcoming(nothing, T0, end)) == []
    assert list(upcoming(build_schedule(skip=2, move=3), T0, end)) == [
        T0 + MINUTE, T0 + 3 * MINUTE + timedelta(milliseconds=500), T0 + 4 * MINUTE,
    ]  # fmt: skip


def test_fixed_delay_has_one_upcoming_occurrence() -> None:
    schedule = build_schedule(Every("PT10M", since="last_start"))
    due = T0 + 10 * MINUTE
    waiting = replace(schedule, next_fire_at=due)
    assert list(upcoming(waiting, T0, T0 + timedelta(days=1))) == [due]
    assert list(upcoming(waiting, due + MICROSECOND, T0 + timedelta(days=1))) == []
    assert list(upcoming(replace(schedule, next_fire_at=None), T0, T0 + timedelta(days=1))) == []


def test_abandoned_search_is_returned_as_an_error_text() -> None:
    never = Cron("0 0 * * *") - Cron("0 0 * * *")
    found, error = next_cursor(never.bind("UTC", created_at=T0), T0)
    assert found is None
    assert error is not None
    assert next_cursor(build_schedule().recurrence, T0) == (T0 + MINUTE, None)


# Fixed delay.


@given(st.sampled_from(["last_end", "last_start"]), whens, st.integers(0, 5), st.integers(0, 5))
def test_fixed_delay_fires_once_and_never_in_parallel(since: str, now: datetime, serial: int, parallel: int) -> None:
    schedule = replace(build_schedule(Every("PT10M", since=since)), next_fire_at=T0 + 10 * MINUTE)  # type: ignore[arg-type]
    planned = plan(schedule, now, serial + parallel, parallel)
    if now < T0 + 10 * MINUTE:
        assert planned == Plan(next_fire_at=schedule.next_fire_at)
    elif serial + parallel:
        assert planned.fires == []
        assert [skip.reason for skip in planned.skips] == [Reason.OVERLAP]
        assert (planned.next_fire_at is None) is (serial > 0)
    else:
        assert (planned.fires, planned.skips, planned.next_fire_at) == ([Fire(T0 + 10 * MINUTE)], [], None)


@given(schedules, whens, st.integers(1, 120))
def test_missed_occurrence_is_never_skipped_for_overlap(schedule: Schedule, now: datetime, live: int) -> None:
    late = timedelta(seconds=schedule.policies.missed_after)
    planned = plan(schedule, now, live)
    assert all(now - skip.at <= late for skip in planned.skips if skip.reason is Reason.OVERLAP)
    if schedule.policies.catch_up is CatchUp.LATEST:  # another occurrence runs in place of a coalesced one
        coalesced = [skip.last for skip in planned.skips if skip.reason is Reason.COALESCED]
        assert not coalesced or any(fire.at > max(coalesced) for fire in planned.fires)
