"""The decisions as pure functions: every occurrence in exactly one place, never early, in order, always the same."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.model.decide import ROWS, TINY, Fire, Plan, Skip, after_failure, expired, plan
from timebell.model.job import Hold, JobState, Reason
from timebell.model.policy import CatchUp, Lateness, Overlap, Retry
from timebell.model.schedule import Action, Policies, Schedule
from timebell.recurrence import Cron, Dates, Every, Override, Spec

T0 = datetime(2027, 3, 1, 12, tzinfo=UTC)
SECOND, MINUTE, HALF = timedelta(seconds=1), timedelta(minutes=1), timedelta(milliseconds=500)
MINUTELY = Cron("* * * * *")


def schedule(spec: Spec = MINUTELY, cursor: datetime | None = None, **policies: Any) -> Schedule:
    bounds = {name: policies.pop(name) for name in ("start", "end", "max_runs") if name in policies}
    left_out, moved = policies.pop("skip", 0), policies.pop("move", 0)
    recurrence = spec.bind("America/New_York", created_at=T0, **bounds)
    coming = list(islice(recurrence.between(T0 + TINY, T0 + timedelta(days=400)), max(left_out, moved)))
    overrides = [Override(at) for n, at in enumerate(coming, 1) if n == left_out]
    overrides += [Override(at, at + HALF) for n, at in enumerate(coming, 1) if n == moved != left_out]
    recurrence = replace(recurrence, overrides=tuple(overrides))
    return Schedule(
        id="s", tenant_id="default", name="s", recurrence=recurrence, action=Action(topic="t"),
        policies=Policies(**policies), created_at=T0, updated_at=T0,
        next_fire_at=recurrence.next(T0) if cursor is None else cursor,
    )  # fmt: skip


def fired(made: Plan) -> list[int]:
    """Minutes after T0."""
    return [round((fire.at - T0) / MINUTE) for fire in made.fires]


def skipped(made: Plan) -> dict[int, str]:
    return {round((skip.at - T0) / MINUTE): skip.reason.value for skip in made.skips}


specs = st.sampled_from(
    [MINUTELY, Cron("*/7 * * * * *"), Cron("30 2 * * *"), Cron("0 * * * *"), Every("PT90S"), Every("P1D"),
     Every("PT1S"), Dates([T0 + n * n * MINUTE for n in range(1, 60)])]
)  # fmt: skip
whens = st.floats(0, 40 * 86_400).map(lambda seconds: T0 + timedelta(seconds=seconds))
schedules = st.builds(
    schedule, specs, overlap=st.sampled_from(Overlap), catch_up=st.sampled_from(CatchUp),
    catch_up_window=st.sampled_from([0.0, 60.0, 3600.0, 86_400.0, 1e9]), catch_up_limit=st.sampled_from([0, 1, 5, 100]),
    missed_after=st.sampled_from([0.0, 1.0, 60.0, 7200.0]), max_runs=st.sampled_from([None, 1, 50]),
    lateness=st.sampled_from(Lateness), catch_up_pace=st.sampled_from([0.0, 30.0]),
    hold_above=st.sampled_from([0, 4, 1000]), jitter=st.sampled_from([0.0, 20.0, 1e6]),
    skip=st.integers(0, 4), move=st.integers(0, 4),
)  # fmt: skip


@given(schedules, whens, st.integers(0, 120))
def test_every_occurrence_is_in_exactly_one_fire_or_skip(made: Schedule, now: datetime, live: int) -> None:
    planned = plan(made, now, live)
    rows = [Skip(fire.at, fire.at, 1, Reason.MISSED) for fire in planned.fires]
    rows = sorted([*rows, *planned.skips], key=lambda row: row.at)
    assert sum(row.count for row in rows) == made.recurrence.count(
        T0 + timedelta(microseconds=1), now + timedelta(microseconds=1)
    )
    end = T0
    for row in rows:  # one that is left out on purpose has a row of its own, also within a range
        if row.reason is not Reason.OVERRIDE:
            assert end < row.at <= row.to <= now
            assert row.count == made.recurrence.fired().count(row.at, row.to + TINY)
            end = row.to


@given(schedules, whens, st.integers(0, 120))
def test_nothing_fires_early_twice_or_out_of_order(made: Schedule, now: datetime, live: int) -> None:
    planned = plan(made, now, live)
    instants = [fire.at for fire in planned.fires]
    assert instants == sorted(set(instants))
    assert all(at <= now for at in instants)
    overridden = {one.at for one in made.recurrence.overrides}
    assert overridden.isdisjoint(instants)
    left_out = {skip.at for skip in planned.skips if skip.reason is Reason.OVERRIDE}
    assert left_out == {at for at in overridden if T0 < at <= now}
    assert planned.next_fire_at == made.recurrence.next(now)
    if made.policies.overlap is not Overlap.ALLOW:  # at most one is free to run at once
        holds = [fire.hold for fire in planned.fires if fire.hold is not Hold.RECOVER]
        assert sum(hold is None for hold in holds) <= (0 if live else 1)
        assert holds[1:] == [Hold.OVERLAP] * (len(holds) - 1 if holds else 0)
    else:
        assert all(fire.hold in (None, Hold.RECOVER) for fire in planned.fires)
    for fire in planned.fires:  # forward only, and jitter ends before the next occurrence
        following = made.recurrence.next(fire.at)
        assert fire.run_at is None or fire.run_at >= fire.at
        if fire.run_at is not None and now - fire.at <= timedelta(seconds=made.policies.missed_after):
            assert following is None or fire.run_at < following


@given(schedules, whens, st.integers(0, 120))
def test_catch_up_is_bounded(made: Schedule, now: datetime, live: int) -> None:
    """Invariant 7."""
    policies = made.policies
    late = [fire.at for fire in plan(made, now, live).fires if now - fire.at > timedelta(seconds=policies.missed_after)]
    limit = {CatchUp.SKIP: 0, CatchUp.LATEST: 1, CatchUp.ALL: policies.catch_up_limit}[policies.catch_up]
    assert len(late) <= limit
    assert all(now - at <= made.catch_up_from for at in late)


@given(schedules, whens, st.integers(0, 120))
def test_the_same_facts_give_the_same_plan(made: Schedule, now: datetime, live: int) -> None:
    assert plan(made, now, live) == plan(made, now, live)


@given(schedules, st.lists(whens, min_size=2, max_size=6))
def test_looking_often_or_seldom_loses_and_repeats_nothing(made: Schedule, looks: list[datetime]) -> None:
    decided: list[tuple[datetime, datetime, int]] = []
    overridden: list[datetime] = []
    cursor = made
    for now in sorted(looks):
        planned = plan(cursor, now, False)
        decided += [(fire.at, fire.at, 1) for fire in planned.fires]
        overridden += [skip.at for skip in planned.skips if skip.reason is Reason.OVERRIDE]
        decided += [(skip.at, skip.to, skip.count) for skip in planned.skips if skip.reason is not Reason.OVERRIDE]
        if planned.next_fire_at is None:
            break
        cursor = replace(made, next_fire_at=planned.next_fire_at)
    decided.sort()
    assert all(a[1] < b[0] for a, b in pairwise(decided))
    total = made.recurrence.count(T0 + timedelta(microseconds=1), max(looks) + timedelta(microseconds=1))
    assert sum(count for _, _, count in decided) + len(overridden) == total
    assert len(overridden) == len(set(overridden))


# The table.


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
        # What overlap leaves out makes up for nothing: the newest missed one waits its turn instead.
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
def test_the_table_of_policies(policies: dict[str, Any], live: int, fires: list[int], skips: dict[int, str]) -> None:
    planned = plan(schedule(**policies), T0 + 6 * MINUTE, live)
    assert (fired(planned), skipped(planned)) == (fires, skips)


@pytest.mark.parametrize("live", [0, 1, 5])
def test_only_a_new_occurrence_of_cancel_previous_supersedes_what_is_live(live: int) -> None:
    for overlap in Overlap:
        for catch_up in CatchUp:
            planned = plan(schedule(overlap=overlap, catch_up=catch_up), T0 + 6 * MINUTE, live)
            due = overlap is Overlap.CANCEL_PREVIOUS and catch_up is not CatchUp.ALL
            assert planned.supersedes is bool(live and due)
            assert [fire.hold for fire in planned.fires][:1] in ([], [Hold.OVERLAP if live else None], [None])


def test_nothing_is_planned_before_the_cursor() -> None:
    made = schedule()
    assert plan(made, T0 + 59 * SECOND, False) == Plan(next_fire_at=T0 + MINUTE)
    assert plan(made, T0 - timedelta(days=9), False) == Plan(next_fire_at=T0 + MINUTE)
    assert plan(made, T0 + MINUTE, False) == Plan([Fire(T0 + MINUTE)], [], T0 + 2 * MINUTE)


def test_what_is_made_up_for_keeps_its_pace() -> None:
    made = schedule(catch_up=CatchUp.ALL, catch_up_pace=30.0, **ALLOW)
    now = T0 + 4 * MINUTE
    starts = [fire.run_at for fire in plan(made, now, 0).fires]
    assert starts == [None, now + 30 * SECOND, None, None]  # 1 and 2 are missed, 3 and 4 are not


def test_a_backlog_above_the_limit_waits_for_recover_and_what_is_new_goes_on() -> None:
    for overlap in Overlap:
        made = schedule(catch_up=CatchUp.ALL, hold_above=2, overlap=overlap)
        held = plan(made, T0 + 5 * MINUTE, 0)
        assert [fire.hold for fire in held.fires[:3]] == [Hold.RECOVER] * 3
        assert held.fires[3].hold is None
        few = plan(made, T0 + 4 * MINUTE, 0)
        assert Hold.RECOVER not in [fire.hold for fire in few.fires]


@pytest.mark.parametrize("catch_up", list(CatchUp))
def test_an_anchored_occurrence_is_void_when_missed(catch_up: CatchUp) -> None:
    made = schedule(catch_up=catch_up, lateness=Lateness.ANCHORED, **ALLOW)
    planned = plan(made, T0 + 6 * MINUTE, 0)
    assert (fired(planned), skipped(planned)) == ([5, 6], minutes(1, 4, "expired"))


def test_jitter_is_the_same_every_time_differs_by_schedule_and_spreads() -> None:
    def starts(id_: str) -> list[float]:
        made = replace(schedule(jitter=30.0, **ALLOW), id=id_)
        found = []
        for n in range(1, 200):
            (fire,) = plan(replace(made, next_fire_at=T0 + n * MINUTE), T0 + n * MINUTE, 0).fires
            assert fire.run_at is not None
            found.append((fire.run_at - fire.at).total_seconds())
        return found

    assert starts("a") == starts("a") != starts("b")
    assert 0 <= min(starts("a")) < 3
    assert 27 < max(starts("a")) < 30


def test_a_minute_late_is_not_missed_and_a_moment_more_is() -> None:
    made = schedule(Dates([T0 + MINUTE]), catch_up=CatchUp.SKIP)
    assert fired(plan(made, T0 + 2 * MINUTE, False)) == [1]
    assert skipped(plan(made, T0 + 2 * MINUTE + timedelta(microseconds=1), False)) == {1: "missed"}


def test_many_skips_become_one_row_and_few_stay_rows() -> None:
    made = schedule(catch_up=CatchUp.SKIP, missed_after=0.0)
    few, many = (plan(made, T0 + n * MINUTE, False).skips for n in (ROWS + 1, ROWS + 2))
    assert [skip.count for skip in few] == [1] * ROWS
    assert many == [Skip(T0 + MINUTE, T0 + (ROWS + 1) * MINUTE, ROWS + 1, Reason.MISSED)]


# What follows a failure.

retries = st.builds(
    Retry, attempts=st.integers(1, 1000), backoff=st.sampled_from(["fixed", "linear", "exponential"]),
    delay=st.floats(0, 1e6), max_delay=st.floats(0, 1e6), jitter=st.floats(0, 1),
)  # fmt: skip


@given(retries, st.integers(1, 5000), st.floats(0, 1, exclude_max=True))
def test_a_pause_is_between_its_base_and_its_jitter_and_never_beyond_the_longest(
    retry: Retry, tries: int, fraction: float
) -> None:
    delay, longest = float(retry.delay), float(retry.max_delay)  # type: ignore[arg-type]
    grown = {"fixed": delay, "linear": delay * tries, "exponential": delay * 2.0 ** min(tries - 1, 60)}
    base = min(grown[str(retry.backoff)], longest)
    pause = retry.pause(tries, fraction)
    assert base <= pause <= base * (1 + retry.jitter)
    assert retry.pause(tries, 0.0) == base


@given(retries, st.floats(0, 1, exclude_max=True))
def test_pauses_do_not_shrink(retry: Retry, fraction: float) -> None:
    pauses = [retry.pause(tries, fraction) for tries in range(1, 70)]
    assert pauses == sorted(pauses)


@given(retries, st.integers(0, 2000), st.text(max_size=20))
def test_a_failure_is_tried_again_exactly_while_tries_are_left(retry: Retry, tries: int, error: str) -> None:
    ending = after_failure("job", 7, tries, retry, T0, "CODE", error)
    assert ending == after_failure("job", 7, tries, retry, T0, "CODE", error)
    assert (ending.attempt, ending.counts, ending.code, ending.error) == (7, True, "CODE", error)
    if tries + 1 < retry.attempts:
        assert ending.state is JobState.PENDING
        assert ending.run_at is not None
        assert ending.run_at >= T0
    else:
        assert (ending.state, ending.run_at) == (JobState.FAILED, None)


def test_S1_F8_n_attempts_are_n_tries() -> None:
    states = [after_failure("j", n + 1, n, Retry(attempts=3), T0, "C", "e").state for n in range(3)]
    assert states == [JobState.PENDING, JobState.PENDING, JobState.FAILED]


def test_what_cannot_succeed_is_not_tried_again() -> None:
    assert after_failure("j", 1, 0, Retry(), T0, "C", "e", retryable=False).state is JobState.FAILED


def test_a_receivers_wish_lengthens_the_pause_and_never_shortens_it() -> None:
    retry = Retry(delay=10, jitter=0)
    pauses = [after_failure("j", 1, 0, retry, T0, "C", "e", retry_after=wish).run_at for wish in (None, 1, 60, 1e9)]
    assert pauses == [T0 + timedelta(seconds=seconds) for seconds in (10, 10, 60, 86_400)]


def test_jobs_that_fail_together_come_back_apart() -> None:
    times = {after_failure(f"job-{n}", 1, 0, Retry(delay=100), T0, "C", "e").run_at for n in range(200)}
    assert len(times) > 190


def test_out_of_time_is_skipped_when_never_started_and_failed_when_it_was() -> None:
    first, later = expired("j", 1, T0), expired("j", 2, T0)
    assert (first.state, first.reason, first.counts) == (JobState.SKIPPED, "expired", False)
    assert (later.state, later.reason, later.counts) == (JobState.FAILED, "expired", False)


def test_the_latest_missed_one_waits_its_turn_behind_a_live_job() -> None:
    planned = plan(schedule(catch_up=CatchUp.LATEST, missed_after=10.0), T0 + 6.5 * MINUTE, True)
    assert [(fire.at, fire.hold) for fire in planned.fires] == [(T0 + 6 * MINUTE, Hold.OVERLAP)]
    assert skipped(planned) == minutes(1, 5, "coalesced")


@pytest.mark.parametrize(("live", "beside", "later"), [(1, 0, None), (2, 1, None), (2, 2, 10)])
def test_a_fixed_delay_that_is_due_while_a_run_goes_on_leaves_the_next_to_its_end(
    live: int, beside: int, later: int | None
) -> None:
    made = schedule(Every("PT10M", since="last_end"))
    due = made.recurrence.first(T0)
    assert due is not None
    waiting = replace(made, next_fire_at=due)
    assert plan(waiting, due + timedelta(days=9), 0) == Plan([Fire(due)])
    expected = None if later is None else due + timedelta(minutes=later)
    assert plan(waiting, due, live, beside) == Plan([], [Skip(due, due, 1, Reason.OVERLAP)], expected)
