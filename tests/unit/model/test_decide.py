"""Planning as pure functions: each occurrence is decided once, never early, in order and deterministically."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.model.decide import (
    MAX_SKIP_ROWS,
    MICROSECOND,
    Fire,
    Plan,
    Skip,
    complete_after_failure,
    complete_expired,
    plan,
)
from timebell.model.job import Hold, JobState, Reason
from timebell.model.policy import CatchUp, Overlap, Retry, WhenLate
from timebell.model.schedule import Action, Policies, Schedule
from timebell.recurrence import Cron, Dates, Every, Override, Spec

T0 = datetime(2027, 3, 1, 12, tzinfo=UTC)
SECOND, MINUTE, HALF = timedelta(seconds=1), timedelta(minutes=1), timedelta(milliseconds=500)
MINUTELY = Cron("* * * * *")


def build_schedule(spec: Spec = MINUTELY, cursor: datetime | None = None, **policies: Any) -> Schedule:
    bounds = {name: policies.pop(name) for name in ("start", "end", "max_runs") if name in policies}
    left_out, moved = policies.pop("skip", 0), policies.pop("move", 0)
    recurrence = spec.bind("America/New_York", created_at=T0, **bounds)
    coming = list(islice(recurrence.between(T0 + MICROSECOND, T0 + timedelta(days=400)), max(left_out, moved)))
    overrides = [Override(at) for n, at in enumerate(coming, 1) if n == left_out]
    overrides += [Override(at, at + HALF) for n, at in enumerate(coming, 1) if n == moved != left_out]
    recurrence = replace(recurrence, overrides=tuple(overrides))
    return Schedule(
        id="s", tenant_id="default", name="s", recurrence=recurrence, action=Action(topic="t"),
        policies=Policies(**policies), created_at=T0, updated_at=T0,
        next_fire_at=recurrence.next(T0) if cursor is None else cursor,
    )  # fmt: skip


def fired(decided: Plan) -> list[int]:
    """Return the fired instants in minutes after T0."""
    return [round((fire.at - T0) / MINUTE) for fire in decided.fires]


def skipped(decided: Plan) -> dict[int, str]:
    return {round((skip.at - T0) / MINUTE): skip.reason.value for skip in decided.skips}


specs = st.sampled_from(
    [MINUTELY, Cron("*/7 * * * * *"), Cron("30 2 * * *"), Cron("0 * * * *"), Every("PT90S"), Every("P1D"),
     Every("PT1S"), Dates([T0 + n * n * MINUTE for n in range(1, 60)])]
)  # fmt: skip
whens = st.floats(0, 40 * 86_400).map(lambda seconds: T0 + timedelta(seconds=seconds))
schedules = st.builds(
    build_schedule, specs, overlap=st.sampled_from(Overlap), catch_up=st.sampled_from(CatchUp),
    catch_up_window=st.sampled_from([0.0, 60.0, 3600.0, 86_400.0, 1e9]), catch_up_limit=st.sampled_from([0, 1, 5, 100]),
    missed_after=st.sampled_from([0.0, 1.0, 60.0, 7200.0]), max_runs=st.sampled_from([None, 1, 50]),
    when_late=st.sampled_from(WhenLate), catch_up_pace=st.sampled_from([0.0, 30.0]),
    hold_above=st.sampled_from([0, 4, 1000]), jitter=st.sampled_from([0.0, 20.0, 1e6]),
    skip=st.integers(0, 4), move=st.integers(0, 4),
)  # fmt: skip


@given(schedules, whens, st.integers(0, 120))
def test_every_occurrence_is_in_exactly_one_fire_or_skip(schedule: Schedule, now: datetime, live: int) -> None:
    planned = plan(schedule, now, live)
    rows = [Skip(fire.at, fire.at, 1, Reason.MISSED) for fire in planned.fires]
    rows = sorted([*rows, *planned.skips], key=lambda row: row.at)
    assert sum(row.count for row in rows) == schedule.recurrence.count(
        T0 + timedelta(microseconds=1), now + timedelta(microseconds=1)
    )
    end = T0
    for row in rows:  # an overridden occurrence has its own row, even inside a range
        if row.reason is not Reason.OVERRIDE:
            assert end < row.at <= row.last <= now
            assert row.count == schedule.recurrence.effective().count(row.at, row.last + MICROSECOND)
            end = row.last


@given(schedules, whens, st.integers(0, 120))
def test_nothing_fires_early_twice_or_out_of_order(schedule: Schedule, now: datetime, live: int) -> None:
    planned = plan(schedule, now, live)
    instants = [fire.at for fire in planned.fires]
    assert instants == sorted(set(instants))
    assert all(at <= now for at in instants)
    overridden = {one.at for one in schedule.recurrence.overrides}
    assert overridden.isdisjoint(instants)
    left_out = {skip.at for skip in planned.skips if skip.reason is Reason.OVERRIDE}
    assert left_out == {at for at in overridden if T0 < at <= now}
    assert planned.next_fire_at == schedule.recurrence.next(now)
    if schedule.policies.overlap is not Overlap.ALLOW:  # at most one may run simultaneously
        holds = [fire.hold for fire in planned.fires if fire.hold is not Hold.BACKLOG]
        assert sum(hold is None for hold in holds) <= (0 if live else 1)
        assert holds[1:] == [Hold.OVERLAP] * (len(holds) - 1 if holds else 0)
    else:
        assert all(fire.hold in (None, Hold.BACKLOG) for fire in planned.fires)
    for fire in planned.fires:  # forward only, and jitter ends before the next occurrence
        following = schedule.recurrence.next(fire.at)
        assert fire.run_at is None or fire.run_at >= fire.at
        if fire.run_at is not None and now - fire.at <= timedelta(seconds=schedule.policies.missed_after):
            assert following is None or fire.run_at < following


@given(schedules, whens, st.integers(0, 120))
def test_catch_up_is_bounded(schedule: Schedule, now: datetime, live: int) -> None:
    policies = schedule.policies
    late = [
        fire.at for fire in plan(schedule, now, live).fires if now - fire.at > timedelta(seconds=policies.missed_after)
    ]
    limit = {CatchUp.SKIP: 0, CatchUp.LATEST: 1, CatchUp.ALL: policies.catch_up_limit}[policies.catch_up]
    assert len(late) <= limit
    assert all(now - at <= schedule.catch_up_span for at in late)


@given(schedules, whens, st.integers(0, 120))
def test_the_same_facts_give_the_same_plan(schedule: Schedule, now: datetime, live: int) -> None:
    assert plan(schedule, now, live) == plan(schedule, now, live)


@given(schedules, st.lists(whens, min_size=2, max_size=6))
def test_planning_often_or_rarely_loses_and_repeats_nothing(schedule: Schedule, scan_times: list[datetime]) -> None:
    decided: list[tuple[datetime, datetime, int]] = []
    overridden: list[datetime] = []
    cursor = schedule
    for now in sorted(scan_times):
        planned = plan(cursor, now, False)
        decided += [(fire.at, fire.at, 1) for fire in planned.fires]
        overridden += [skip.at for skip in planned.skips if skip.reason is Reason.OVERRIDE]
        decided += [(skip.at, skip.last, skip.count) for skip in planned.skips if skip.reason is not Reason.OVERRIDE]
        if planned.next_fire_at is None:
            break
        cursor = replace(schedule, next_fire_at=planned.next_fire_at)
    decided.sort()
    assert all(a[1] < b[0] for a, b in pairwise(decided))
    total = schedule.recurrence.count(T0 + timedelta(microseconds=1), max(scan_times) + timedelta(microseconds=1))
    assert sum(count for _, _, count in decided) + len(overridden) == total
    assert len(overridden) == len(set(overridden))


# Policies.


def minutes(first: int, last: int, reason: str, **others: int) -> dict[int, str]:
    """Skips of each minute in turn, and others after them."""
    return dict.fromkeys(range(first, last + 1), reason) | {minute: other for other, minute in others.items()}


ALLOW: dict[str, Any] = {"overlap": Overlap.ALLOW}
QUEUE: dict[str, Any] = {"overlap": Overlap.QUEUE}
CANCEL: dict[str, Any] = {"overlap": Overlap.CANCEL_PREVIOUS}
LATEST, ALL, NONE = CatchUp.LATEST, CatchUp.ALL, CatchUp.SKIP


@pytest.mark.parametrize(
    ("policies", "live", "fires", "skips"),
    [
        # Minutes 1 to 4 are missed, 5 and 6 are not.
        ({"catch_up": LATEST, **ALLOW}, False, [5, 6], minutes(1, 4, "coalesced")),
        ({"catch_up": NONE, **ALLOW}, False, [5, 6], minutes(1, 4, "missed")),
        ({"catch_up": ALL, **ALLOW}, False, [1, 2, 3, 4, 5, 6], {}),
        ({"catch_up": ALL}, False, [1, 2, 3, 4, 5, 6], {}),
        ({"catch_up": ALL}, True, [1, 2, 3, 4, 5, 6], {}),
        ({"catch_up": ALL, "catch_up_limit": 2, **ALLOW}, False, [3, 4, 5, 6], minutes(1, 2, "missed")),
        ({"catch_up": ALL, "catch_up_limit": 0, **ALLOW}, False, [5, 6], minutes(1, 4, "missed")),
        ({"catch_up": ALL, "catch_up_window": 180.0, **ALLOW}, False, [3, 4, 5, 6], minutes(1, 2, "missed")),
        ({"catch_up": LATEST}, False, [5], minutes(1, 4, "coalesced", overlap=6)),
        # An occurrence skipped for overlap catches up nothing: the newest missed one is queued instead.
        ({"catch_up": LATEST}, True, [4], minutes(1, 3, "coalesced") | minutes(5, 6, "overlap")),
        ({"catch_up": LATEST, **QUEUE}, 101, [4], minutes(1, 3, "coalesced") | minutes(5, 6, "overlap")),
        ({"catch_up": LATEST, **CANCEL}, 1, [6], minutes(1, 4, "coalesced", overlap=5)),
        ({"catch_up": LATEST, "catch_up_window": 0.0}, 1, [], minutes(1, 4, "missed") | minutes(5, 6, "overlap")),
        ({"catch_up": NONE, "missed_after": 0.0, **ALLOW}, False, [6], minutes(1, 5, "missed")),
        ({"catch_up": LATEST, "missed_after": 1e6, **ALLOW}, False, [1, 2, 3, 4, 5, 6], {}),
        ({"catch_up": NONE, **QUEUE}, 0, [5, 6], minutes(1, 4, "missed")),
        ({"catch_up": NONE, **QUEUE}, 1, [5, 6], minutes(1, 4, "missed")),
        ({"catch_up": NONE, **QUEUE}, 100, [5], minutes(1, 4, "missed", overlap=6)),
        ({"catch_up": NONE, **QUEUE}, 101, [], minutes(1, 4, "missed") | minutes(5, 6, "overlap")),
        ({"catch_up": ALL, **QUEUE}, 101, [1, 2, 3, 4], minutes(5, 6, "overlap")),
        ({"catch_up": NONE, **CANCEL}, 0, [6], minutes(1, 4, "missed", overlap=5)),
        ({"catch_up": NONE, **CANCEL}, 3, [6], minutes(1, 4, "missed", overlap=5)),
        ({"catch_up": ALL, **CANCEL}, 1, [1, 2, 3, 4, 5, 6], {}),
    ],
)
def test_fires_and_skips_of_each_policy(
    policies: dict[str, Any], live: int, fires: list[int], skips: dict[int, str]
) -> None:
    planned = plan(build_schedule(**policies), T0 + 6 * MINUTE, live)
    assert (fired(planned), skipped(planned)) == (fires, skips)


@pytest.mark.parametrize("live", [0, 1, 5])
def test_only_a_new_occurrence_of_cancel_previous_supersedes_live_jobs(live: int) -> None:
    for overlap in Overlap:
        for catch_up in CatchUp:
            planned = plan(build_schedule(overlap=overlap, catch_up=catch_up), T0 + 6 * MINUTE, live)
            due = overlap is Overlap.CANCEL_PREVIOUS and catch_up is not CatchUp.ALL
            assert planned.supersedes is bool(live and due)
            assert [fire.hold for fire in planned.fires][:1] in ([], [Hold.OVERLAP if live else None], [None])


def test_nothing_is_planned_before_the_cursor() -> None:
    schedule = build_schedule()
    assert plan(schedule, T0 + 59 * SECOND, False) == Plan(next_fire_at=T0 + MINUTE)
    assert plan(schedule, T0 - timedelta(days=9), False) == Plan(next_fire_at=T0 + MINUTE)
    assert plan(schedule, T0 + MINUTE, False) == Plan([Fire(T0 + MINUTE)], [], T0 + 2 * MINUTE)


def test_catch_up_respects_its_pace() -> None:
    schedule = build_schedule(catch_up=CatchUp.ALL, catch_up_pace=30.0, **ALLOW)
    now = T0 + 4 * MINUTE
    starts = [fire.run_at for fire in plan(schedule, now, 0).fires]
    assert starts == [None, now + 30 * SECOND, None, None]  # 1 and 2 are missed, 3 and 4 are not


def test_backlog_above_the_limit_is_held_and_new_occurrences_fire() -> None:
    for overlap in Overlap:
        schedule = build_schedule(catch_up=CatchUp.ALL, hold_above=2, overlap=overlap)
        held = plan(schedule, T0 + 5 * MINUTE, 0)
        assert [fire.hold for fire in held.fires[:3]] == [Hold.BACKLOG] * 3
        assert held.fires[3].hold is None
        few = plan(schedule, T0 + 4 * MINUTE, 0)
        assert Hold.BACKLOG not in [fire.hold for fire in few.fires]


@pytest.mark.parametrize("catch_up", list(CatchUp))
def test_missed_occurrence_with_when_late_expire_is_skipped(catch_up: CatchUp) -> None:
    schedule = build_schedule(catch_up=catch_up, when_late=WhenLate.EXPIRE, **ALLOW)
    planned = plan(schedule, T0 + 6 * MINUTE, 0)
    assert (fired(planned), skipped(planned)) == ([5, 6], minutes(1, 4, "expired"))


def test_jitter_is_deterministic_differs_by_schedule_and_spreads() -> None:
    def starts(id_: str) -> list[float]:
        schedule = replace(build_schedule(jitter=30.0, **ALLOW), id=id_)
        found = []
        for n in range(1, 200):
            (fire,) = plan(replace(schedule, next_fire_at=T0 + n * MINUTE), T0 + n * MINUTE, 0).fires
            assert fire.run_at is not None
            found.append((fire.run_at - fire.at).total_seconds())
        return found

    assert starts("a") == starts("a") != starts("b")
    assert 0 <= min(starts("a")) < 3
    assert 27 < max(starts("a")) < 30


def test_occurrence_is_missed_only_after_a_minute() -> None:
    schedule = build_schedule(Dates([T0 + MINUTE]), catch_up=CatchUp.SKIP)
    assert fired(plan(schedule, T0 + 2 * MINUTE, False)) == [1]
    assert skipped(plan(schedule, T0 + 2 * MINUTE + timedelta(microseconds=1), False)) == {1: "missed"}


def test_many_skips_become_one_range_row() -> None:
    schedule = build_schedule(catch_up=CatchUp.SKIP, missed_after=0.0)
    few, many = (plan(schedule, T0 + n * MINUTE, False).skips for n in (MAX_SKIP_ROWS + 1, MAX_SKIP_ROWS + 2))
    assert [skip.count for skip in few] == [1] * MAX_SKIP_ROWS
    assert many == [Skip(T0 + MINUTE, T0 + (MAX_SKIP_ROWS + 1) * MINUTE, MAX_SKIP_ROWS + 1, Reason.MISSED)]


# Retries.

retries = st.builds(
    Retry, attempts=st.integers(1, 1000), backoff=st.sampled_from(["fixed", "linear", "exponential"]),
    delay=st.floats(0, 1e6), max_delay=st.floats(0, 1e6), jitter=st.floats(0, 1),
)  # fmt: skip


@given(retries, st.integers(1, 5000), st.floats(0, 1, exclude_max=True))
def test_retry_pause_lies_between_base_and_jitter_and_is_bounded(
    retry: Retry, attempts_used: int, fraction: float
) -> None:
    delay, longest = float(retry.delay), float(retry.max_delay)  # type: ignore[arg-type]
    grown = {"fixed": delay, "linear": delay * attempts_used, "exponential": delay * 2.0 ** min(attempts_used - 1, 60)}
    base = min(grown[str(retry.backoff)], longest)
    pause = retry.pause_seconds(attempts_used, fraction)
    assert base <= pause <= base * (1 + retry.jitter)
    assert retry.pause_seconds(attempts_used, 0.0) == base


@given(retries, st.floats(0, 1, exclude_max=True))
def test_retry_pauses_never_decrease(retry: Retry, fraction: float) -> None:
    pauses = [retry.pause_seconds(attempts_used, fraction) for attempts_used in range(1, 70)]
    assert pauses == sorted(pauses)


@given(retries, st.integers(0, 2000), st.text(max_size=20))
def test_failure_is_retried_exactly_while_attempts_are_left(retry: Retry, attempts_used: int, error: str) -> None:
    completion = complete_after_failure("job", 7, attempts_used, retry, T0, "CODE", error)
    assert completion == complete_after_failure("job", 7, attempts_used, retry, T0, "CODE", error)
    assert (completion.attempt, completion.uses_attempt, completion.code, completion.error) == (7, True, "CODE", error)
    if attempts_used + 1 < retry.attempts:
        assert completion.state is JobState.PENDING
        assert completion.run_at is not None
        assert completion.run_at >= T0
    else:
        assert (completion.state, completion.run_at) == (JobState.FAILED, None)


def test_three_attempts_mean_two_retries() -> None:
    states = [complete_after_failure("j", n + 1, n, Retry(attempts=3), T0, "C", "e").state for n in range(3)]
    assert states == [JobState.PENDING, JobState.PENDING, JobState.FAILED]


def test_permanent_failure_is_not_retried() -> None:
    assert complete_after_failure("j", 1, 0, Retry(), T0, "C", "e", retryable=False).state is JobState.FAILED


def test_retry_after_lengthens_but_never_shortens_the_pause() -> None:
    retry = Retry(delay=10, jitter=0)
    pauses = [
        complete_after_failure("j", 1, 0, retry, T0, "C", "e", retry_after=retry_after).run_at
        for retry_after in (None, 1, 60, 1e9)
    ]
    assert pauses == [T0 + timedelta(seconds=seconds) for seconds in (10, 10, 60, 86_400)]


def test_jobs_that_fail_together_are_retried_at_different_instants() -> None:
    times = {complete_after_failure(f"job-{n}", 1, 0, Retry(delay=100), T0, "C", "e").run_at for n in range(200)}
    assert len(times) > 190


def test_expired_job_is_skipped_if_never_started_and_failed_otherwise() -> None:
    first, later = complete_expired("j", 1, T0), complete_expired("j", 2, T0)
    assert (first.state, first.reason, first.uses_attempt) == (JobState.SKIPPED, "expired", False)
    assert (later.state, later.reason, later.uses_attempt) == (JobState.FAILED, "expired", False)


def test_latest_missed_occurrence_waits_behind_a_live_job() -> None:
    planned = plan(build_schedule(catch_up=CatchUp.LATEST, missed_after=10.0), T0 + 6.5 * MINUTE, True)
    assert [(fire.at, fire.hold) for fire in planned.fires] == [(T0 + 6 * MINUTE, Hold.OVERLAP)]
    assert skipped(planned) == minutes(1, 5, "coalesced")


@pytest.mark.parametrize(("live", "parallel", "later"), [(1, 0, None), (2, 1, None), (2, 2, 10)])
def test_fixed_delay_due_during_a_run_is_planned_again_at_its_end(live: int, parallel: int, later: int | None) -> None:
    schedule = build_schedule(Every("PT10M", since="last_end"))
    due = schedule.recurrence.first_fire(T0)
    assert due is not None
    waiting = replace(schedule, next_fire_at=due)
    assert plan(waiting, due + timedelta(days=9), 0) == Plan([Fire(due)])
    expected = None if later is None else due + timedelta(minutes=later)
    assert plan(waiting, due, live, parallel) == Plan([], [Skip(due, due, 1, Reason.OVERLAP)], expected)
