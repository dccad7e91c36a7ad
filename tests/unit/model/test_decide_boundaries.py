"""Planning and retries at their exact boundaries."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from zlib import crc32

import pytest

from timebell.model.decide import (
    MICROSECOND,
    Fire,
    Plan,
    Skip,
    complete_after_failure,
    complete_expired,
    plan,
    skip_paused,
    upcoming,
)
from timebell.model.job import JobState, Reason
from timebell.model.policy import CatchUp, Overlap, Retry
from timebell.recurrence import Dates, Every

from .test_decide import MINUTE, SECOND, T0, build_schedule, fired, skipped


def test_two_occurrences_that_are_due_together_both_fire() -> None:
    planned = plan(build_schedule(overlap=Overlap.ALLOW), T0 + 2 * MINUTE, 0)
    assert planned == Plan([Fire(T0 + MINUTE), Fire(T0 + 2 * MINUTE)], [], T0 + 3 * MINUTE)


def test_an_occurrence_left_out_after_one_that_fires_is_skipped() -> None:
    planned = plan(build_schedule(skip=2), T0 + 2 * MINUTE, 0)
    assert (fired(planned), skipped(planned)) == ([1], {2: "override"})


def test_a_cursor_between_two_occurrences_moves_to_the_next() -> None:
    schedule = build_schedule(cursor=T0 + 30 * SECOND)
    assert plan(schedule, T0 + 40 * SECOND, 0) == Plan([], [], T0 + MINUTE)


def test_an_occurrence_one_microsecond_later_is_not_due() -> None:
    first, second = T0 + SECOND, T0 + SECOND + MICROSECOND
    assert timedelta(microseconds=1) == MICROSECOND
    assert plan(build_schedule(Dates([first, second])), first, 0) == Plan([Fire(first)], [], second)


def test_a_fixed_delay_without_other_jobs_waits_for_the_end_of_its_run() -> None:
    due = T0 + 10 * MINUTE
    schedule = build_schedule(Every("PT10M", since="last_end"), cursor=due)
    assert plan(schedule, due, 1) == Plan([], [Skip(due, due, 1, Reason.OVERLAP)], None)
    for start, end, expected in (
        (due, due + MICROSECOND, [due]), (due - MINUTE, due, []), (due + MICROSECOND, due + MINUTE, []),
    ):  # fmt: skip
        assert list(upcoming(schedule, start, end)) == expected


def test_a_fixed_delay_has_jitter_and_no_catch_up_pace() -> None:
    due = T0 + 10 * MINUTE
    schedule = build_schedule(Every("PT10M", since="last_end"), cursor=due, catch_up_pace=30.0)
    assert plan(schedule, due + MINUTE, 0) == Plan([Fire(due)])
    share = crc32(f"s.{due.isoformat()}".encode()) / 4_294_967_296
    jittered = replace(schedule, policies=replace(schedule.policies, jitter=20.0))
    assert plan(jittered, due, 0) == Plan([Fire(due, None, due + timedelta(seconds=20 * share))])


def test_a_pause_skips_nothing_before_the_cursor_or_after_the_last_occurrence() -> None:
    due = T0 + 10 * MINUTE
    delayed = build_schedule(Every("PT10M", since="last_end"), cursor=due)
    assert skip_paused(delayed, due - MICROSECOND) == Plan(next_fire_at=due)
    assert skip_paused(replace(delayed, next_fire_at=None), due) == Plan()
    assert skipped(skip_paused(build_schedule(), T0 + MINUTE)) == {1: "paused"}


def test_up_to_a_hundred_skips_have_a_row_each() -> None:
    schedule = build_schedule(catch_up=CatchUp.SKIP, missed_after=0.0)
    assert len(plan(schedule, T0 + 101 * MINUTE, 0).skips) == 100
    assert len(plan(schedule, T0 + 102 * MINUTE, 0).skips) == 1


@pytest.mark.parametrize(("jitter", "spread"), [(30.0, 30.0), (1e6, 60.0)])
def test_jitter_is_a_share_of_the_time_until_the_next_occurrence(jitter: float, spread: float) -> None:
    at = T0 + MINUTE
    share = crc32(f"s.{at.isoformat()}".encode()) / 4_294_967_296
    assert plan(build_schedule(jitter=jitter), at, 0).fires == [Fire(at, None, at + timedelta(seconds=spread * share))]


def test_jitter_of_the_last_occurrence_is_not_limited() -> None:
    at = T0 + MINUTE
    share = crc32(f"s.{at.isoformat()}".encode()) / 4_294_967_296
    (fire,) = plan(build_schedule(Dates([at]), jitter=5000.0), at, 0).fires
    assert fire.run_at == at + timedelta(seconds=5000 * share)


def test_catch_up_of_three_is_paced_from_now() -> None:
    schedule = build_schedule(catch_up=CatchUp.ALL, catch_up_pace=30.0, missed_after=0.0, overlap=Overlap.ALLOW)
    now = T0 + 3.5 * MINUTE
    assert [fire.run_at for fire in plan(schedule, now, 0).fires] == [None, now + 30 * SECOND, now + 60 * SECOND]


def pause(attempt: int, attempts_used: int, retry: Retry, **fields: Any) -> float:
    completion = complete_after_failure("job", attempt, attempts_used, retry, T0, "C", "e", **fields)
    assert (completion.id, completion.attempt, completion.at) == ("job", attempt, T0)
    assert (completion.state, completion.uses_attempt) == (JobState.PENDING, fields.get("uses_attempt", True))
    assert completion.attempts_allowed == (retry.attempts if completion.uses_attempt else None)
    assert completion.run_at is not None
    return (completion.run_at - T0).total_seconds()


def test_the_pause_of_a_retry_has_a_share_of_its_jitter() -> None:
    share = crc32(b"job.2") / 4_294_967_296
    assert pause(2, 1, Retry(delay=10, jitter=0.5)) == pytest.approx(20 * (1 + 0.5 * share), abs=1e-5)
    assert pause(2, 0, Retry(delay=10, jitter=0.5)) == pytest.approx(10 * (1 + 0.5 * share), abs=1e-5)


@pytest.mark.parametrize(
    ("attempt", "attempts_used", "fields", "seconds"),
    [
        (1, 0, {}, 2),
        (4, 1, {}, 6),  # the third attempt that does not count
        (3, 3, {}, 2),
        (99, 0, {}, 30),
        (1, 0, {"retry_after": 1}, 2),
        (1, 0, {"retry_after": 45}, 45),
        (1, 0, {"retry_after": 1e9}, 86_400),
        (7, 6, {}, 2),  # more than are allowed
    ],
)
def test_an_attempt_that_does_not_count_is_repeated_after_at_most_30_seconds(
    attempt: int, attempts_used: int, fields: dict[str, Any], seconds: float
) -> None:
    retry = Retry(attempts=4, backoff="linear", delay=2, jitter=0)
    assert pause(attempt, attempts_used, retry, uses_attempt=False, **fields) == seconds


def test_a_permanent_failure_fails_even_if_its_attempt_does_not_count() -> None:
    for uses_attempt in (True, False):
        failed = complete_after_failure("j", 1, 0, Retry(), T0, "C", "e", retryable=False, uses_attempt=uses_attempt)
        assert (failed.id, failed.attempt, failed.state, failed.attempts_allowed) == ("j", 1, JobState.FAILED, 4)


def test_a_job_that_expires_before_a_retry_has_failed_with_a_code() -> None:
    expired = complete_expired("j", 2, T0)
    assert (expired.id, expired.attempt, expired.at) == ("j", 2, T0)
    assert (expired.code, expired.error) == ("EXPIRED", "The job expired before another attempt could start.")
    assert (complete_expired("j", 1, T0).id, complete_expired("j", 1, T0).attempt) == ("j", 1)


def test_a_paused_or_errored_schedule_has_no_upcoming_occurrence() -> None:
    schedule = build_schedule()
    assert list(upcoming(schedule, T0 + MINUTE, T0 + 2 * MINUTE)) == [T0 + MINUTE]
    for off in (replace(schedule, enabled=False), replace(schedule, error="x"), replace(schedule, next_fire_at=None)):
        assert list(upcoming(off, T0, T0 + 9 * MINUTE)) == []
