"""Actions on schedules: pause, resume, trigger, backfill, release, revert and delete."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.ids import new_id
from timebell.model.job import Hold, Kind
from timebell.recurrence import Every
from timebell.store.jobs import dead_letters, queues, repository, serial
from timebell.store.schedules import actions, overrides, queries

from .helpers import (
    T0,
    CatchUp,
    JobState,
    Overlap,
    Store,
    after,
    at_minutes,
    build_job,
    claim,
    end,
    ending,
    everything,
    fire,
    minutes,
    put,
    replace,
    schedule,
    stored,
    stored_schedule,
)


async def steer(store: Store, verb: Any, at: datetime, *args: Any, id_: str | None = None) -> Any:
    return await store.run(verb, "default", id_ or (await stored_schedule(store)).id, *args, build_job, at)


async def _rows(store: Store) -> list[tuple[int, str, str | None]]:
    return [(at_minutes([one])[0], one.state.value, one.reason) for one in await everything(store)]


# Pause and resume.


@stored
async def test_a_pause_decides_due_occurrences_and_stops_firing(store: Store) -> None:
    await put(store, schedule())
    paused = await steer(store, actions.pause_schedule, after(minutes=1, seconds=5), "a bad release")
    assert (paused.enabled, paused.pause_reason, paused.paused_at) == (
        False,
        "a bad release",
        after(minutes=1, seconds=5),
    )
    assert await _rows(store) == [(1, "pending", None)]
    assert (await fire(store, after(minutes=9))).schedules == 0


@stored
async def test_occurrences_in_a_pause_are_skipped_and_firing_resumes(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW))
    await steer(store, actions.pause_schedule, after(seconds=30), None)
    resumed = await steer(store, actions.resume_schedule, after(minutes=3), False)
    assert (resumed.enabled, resumed.paused_at, resumed.next_fire_at) == (True, None, after(minutes=4))
    assert await _rows(store) == [(minute, "skipped", "paused") for minute in (1, 2, 3)]
    await fire(store, after(minutes=4))
    assert (await _rows(store))[3:] == [(4, "pending", None)]


@stored
async def test_a_long_pause_is_one_row(store: Store) -> None:
    await put(store, schedule())
    await steer(store, actions.pause_schedule, T0, None)
    await steer(store, actions.resume_schedule, after(minutes=500), False)
    (row,) = await everything(store)
    assert (row.skipped_count, row.skipped_to, row.reason) == (500, after(minutes=500), "paused")


@stored
async def test_resuming_with_catch_up_applies_the_policy_to_the_pause(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.ALL))
    await steer(store, actions.pause_schedule, T0, None)
    await steer(store, actions.resume_schedule, after(minutes=3), True)
    await fire(store, after(minutes=3))
    assert await _rows(store) == [(minute, "pending", None) for minute in (1, 2, 3)]


@stored
async def test_pausing_and_resuming_twice_changes_nothing_more(store: Store) -> None:
    await put(store, schedule())
    await steer(store, actions.pause_schedule, after(seconds=1), "first")
    again = await steer(store, actions.pause_schedule, after(minutes=2), "second")
    assert (again.pause_reason, again.paused_at) == ("second", after(seconds=1))
    await steer(store, actions.resume_schedule, after(minutes=2, seconds=30), False)
    await steer(store, actions.resume_schedule, after(minutes=5), False)
    assert (await stored_schedule(store)).next_fire_at == after(minutes=3)


@stored
async def test_an_edit_of_a_paused_schedule_loses_nothing_and_leaves_it_paused(store: Store) -> None:
    made = schedule(overlap=Overlap.ALLOW)
    await put(store, made)
    await steer(store, actions.pause_schedule, after(seconds=1), "wait")
    await put(store, schedule(Every("PT30S", T0), overlap=Overlap.ALLOW), after(minutes=2, seconds=10), replace=True)
    edited = await stored_schedule(store)
    assert (edited.enabled, edited.pause_reason, edited.revision) == (False, "wait", 2)
    await steer(store, actions.resume_schedule, after(minutes=3), False)
    skipped = [one.scheduled_at for one in await everything(store)]
    assert skipped == [*minutes(1, 2), after(seconds=150), after(minutes=3)]


# Manual triggers.


@stored
async def test_a_manual_trigger_adds_an_occurrence_and_keeps_the_cursor(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW))
    job = await steer(store, actions.trigger_schedule, after(seconds=10))
    assert (job.kind, job.scheduled_at, job.state) == (Kind.MANUAL, after(seconds=10), JobState.PENDING)
    second = await steer(store, actions.trigger_schedule, after(seconds=10))
    assert second.occurrence_key != job.occurrence_key
    assert second.run_at == second.scheduled_at, "it does not start before its instant"
    assert (await stored_schedule(store)).next_fire_at == after(minutes=1)
    assert (await fire(store, after(minutes=1))).jobs == 1


@stored
async def test_a_manual_trigger_has_its_own_key_even_after_a_finished_one(store: Store) -> None:
    await put(store, schedule())
    first = await steer(store, actions.trigger_schedule, after(seconds=10))
    (attempt,) = await claim(store, after(seconds=10))
    await end(store, ending(attempt))
    second = await steer(store, actions.trigger_schedule, after(seconds=10))
    assert second.occurrence_key != first.occurrence_key


@stored
async def test_a_manual_trigger_respects_overlap(store: Store) -> None:
    outcomes = {}
    for policy in Overlap:
        made = schedule(name=policy.value, overlap=policy)
        await put(store, made)
        await steer(store, actions.trigger_schedule, after(seconds=1), id_=made.id)
        second = await steer(store, actions.trigger_schedule, after(seconds=2), id_=made.id)
        outcomes[policy] = (second.state.value, second.hold, second.reason)
    assert outcomes == {
        Overlap.SKIP: ("skipped", None, "overlap"),
        Overlap.QUEUE: ("pending", Hold.OVERLAP, None),
        Overlap.CANCEL_PREVIOUS: ("pending", None, None),
        Overlap.ALLOW: ("pending", None, None),
    }


@stored
async def test_a_paused_schedule_can_be_triggered(store: Store) -> None:
    await put(store, schedule())
    await steer(store, actions.pause_schedule, T0, None)
    assert (await steer(store, actions.trigger_schedule, after(seconds=1))).state is JobState.PENDING


# Backfill.


async def _backfill(store: Store, first: int, last: int, at: datetime, **options: Any) -> Any:
    edges = (after(minutes=first), after(minutes=last) + timedelta(seconds=1))
    return await steer(
        store, actions.backfill_schedule, at, *edges, options.get("overlap"), options.get("dry_run", False)
    )


@stored
async def test_a_backfill_runs_skipped_occurrences_and_repeats_none(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.SKIP, missed_after=0.0))
    await fire(store, after(minutes=3))  # 1 and 2 are missed, 3 runs
    (attempt,) = await claim(store, after(minutes=3))
    await store.run(
        serial.complete_serial, [ending(attempt, schedule_id=attempt.schedule_id)], [str(attempt.schedule_id)]
    )
    dry = await _backfill(store, 1, 3, after(minutes=3, seconds=30), dry_run=True)
    assert (dry.instants, dry.already_run, len(await everything(store))) == (list(minutes(1, 2)), 1, 3)
    done = await _backfill(store, 1, 3, after(minutes=3, seconds=30))
    assert done == dry
    made = [one for one in await everything(store) if one.kind == Kind.BACKFILL]
    assert [(one.scheduled_at, one.run_at, one.hold) for one in made] == [
        (after(minutes=1), after(minutes=3, seconds=30), None),
        (after(minutes=2), after(minutes=3, seconds=30), Hold.OVERLAP),
    ]
    again = await _backfill(store, 1, 3, after(minutes=3, seconds=40))
    assert (again.instants, again.already_run) == ([], 3)


@stored
async def test_a_backfill_may_start_before_the_schedule_and_ends_at_its_cursor(store: Store) -> None:
    await put(store, schedule())
    done = await _backfill(store, -3, 2, after(minutes=2, seconds=30), overlap=Overlap.ALLOW)
    assert done.instants == list(minutes(-3, 0))  # 1 and 2 are left to the planner, which has not fired them yet
    assert {one.hold for one in await everything(store)} == {None}
    await fire(store, after(minutes=2, seconds=30))
    assert sorted(at_minutes(await everything(store))) == [-3, -2, -1, 0, 1, 2]


@stored
async def test_a_backfill_waits_behind_live_jobs(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    await _backfill(store, -1, 0, after(minutes=1, seconds=1))
    assert [one.hold for one in await everything(store)] == [None, Hold.OVERLAP, Hold.OVERLAP]


@stored
async def test_occurrences_backfilled_in_a_pause_are_not_caught_up_again(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW, catch_up=CatchUp.ALL))
    await steer(store, actions.pause_schedule, after(seconds=30), None)
    await _backfill(store, 2, 3, after(minutes=5, seconds=30), dry_run=True)
    assert await everything(store) == []
    await _backfill(store, 2, 3, after(minutes=5, seconds=30))
    await steer(store, actions.resume_schedule, after(minutes=5, seconds=40), True)
    await fire(store, after(minutes=5, seconds=40))
    assert sorted((at_minutes([one])[0], one.kind.value, one.state.value) for one in await everything(store)) == [
        (1, "planned", "skipped"), (2, "backfill", "pending"), (2, "planned", "skipped"), (3, "backfill", "pending"),
        (3, "planned", "skipped"), (4, "planned", "pending"), (5, "planned", "pending"),
    ]  # fmt: skip


@stored
async def test_a_backfill_beyond_the_limit_is_refused(store: Store) -> None:
    await put(store, schedule())
    with pytest.raises(InvalidInput) as refused:
        await _backfill(store, -20_000, 0, after(minutes=1))
    assert refused.value.code == "BACKFILL_TOO_LARGE"
    assert await everything(store) == []


# Held backlogs.


@stored
async def test_a_large_backlog_is_held_until_it_is_released(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.ALL, hold_above=2))
    await fire(store, after(minutes=5))
    assert {one.hold for one in await everything(store)} == {Hold.BACKLOG, None}
    attempts = await claim(store, after(minutes=5))
    assert [one.scheduled_at for one in attempts] == [after(minutes=4)]
    assert await store.run(actions.release_backlog, "acme", None, False, after(minutes=5)) == 0
    assert await store.run(actions.release_backlog, "default", None, False, after(minutes=5)) == 3
    done = [ending(one, schedule_id=one.schedule_id) for one in attempts]
    await store.run(serial.complete_serial, done, [str(attempts[0].schedule_id)])
    (following,) = await claim(store, after(minutes=5))
    assert following.scheduled_at == after(minutes=1)  # in order, one at a time


@stored
async def test_a_serial_job_behind_a_concurrent_job_is_released_on_its_completion(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW))
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await put(store, schedule(overlap=Overlap.QUEUE), after(seconds=70), replace=True)
    await fire(store, after(minutes=2))
    assert await claim(store, after(minutes=2)) == []
    done = ending(attempt, at=after(minutes=3))  # its node has the attempt as it was claimed
    assert done.schedule_id is None
    assert await store.run(serial.complete_one, done) == {attempt.id}
    (following,) = await claim(store, after(minutes=3))
    assert following.scheduled_at == after(minutes=2)


@stored
async def test_a_serial_job_behind_a_concurrent_backfill_is_released_on_its_cancel(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.QUEUE))
    await _backfill(store, -2, -2, after(seconds=30), overlap=Overlap.ALLOW)
    await fire(store, after(minutes=1))
    (beside,) = [one for one in await everything(store) if one.kind is Kind.BACKFILL]
    await store.run(repository.cancel, "default", beside.id, after(minutes=1))
    (following,) = await claim(store, after(minutes=1))
    assert following.scheduled_at == after(minutes=1)


@stored
async def test_a_held_job_does_not_wait_for_later_concurrent_jobs(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.QUEUE))
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await fire(store, after(minutes=2))
    await put(store, schedule(overlap=Overlap.ALLOW), after(seconds=130), replace=True)
    await fire(store, after(minutes=3))
    assert len(await claim(store, after(minutes=3))) == 1
    done = ending(attempt, at=after(minutes=3), schedule_id=attempt.schedule_id)
    assert await store.run(serial.complete_one, done) == {attempt.id}
    assert [one.scheduled_at for one in await claim(store, after(minutes=3))] == [after(minutes=2)]


@stored
async def test_a_rescheduled_backlog_job_keeps_its_order(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.ALL, hold_above=2))
    await fire(store, after(minutes=5))
    attempts = await claim(store, after(minutes=5))
    waiting = next(one for one in await everything(store) if one.hold is Hold.BACKLOG)
    at = {"run_at": after(minutes=5), "timezone": "UTC"}
    new = new_id(T0)
    await store.run(repository.reschedule, "default", waiting.id, new, lambda _: at, after(minutes=5))
    assert await claim(store, after(minutes=5)) == [], "another job of the schedule runs"
    done = [ending(one, schedule_id=one.schedule_id) for one in attempts]
    await store.run(serial.complete_serial, done, [str(attempts[0].schedule_id)])
    assert [one.id for one in await claim(store, after(minutes=5))] == [new]


@stored
async def test_a_manually_retried_job_does_not_wait_behind_a_held_backlog(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.ALL, hold_above=2))
    await fire(store, after(minutes=5))
    (attempt,) = await claim(store, after(minutes=5))
    await end(store, ending(attempt, JobState.FAILED))
    assert await store.run(dead_letters.retry, "default", attempt.id, after(minutes=5))
    assert [one.id for one in await claim(store, after(minutes=5))] == [attempt.id]


@stored
async def test_a_backlog_may_be_discarded(store: Store) -> None:
    made = schedule(catch_up=CatchUp.ALL, hold_above=1, overlap=Overlap.ALLOW)
    await put(store, made)
    await fire(store, after(minutes=4))
    assert await store.run(actions.release_backlog, "default", made.id, True, after(minutes=5)) == 2
    assert await _rows(store) == [
        (1, "cancelled", "discarded"),
        (2, "cancelled", "discarded"),
        (3, "pending", None),
        (4, "pending", None),
    ]


@stored
async def test_a_held_backlog_does_not_stop_new_occurrences(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.ALL, hold_above=0))
    await fire(store, after(minutes=3))
    while attempts := await claim(store, after(minutes=3)):
        done = [ending(one, schedule_id=one.schedule_id) for one in attempts]
        await store.run(serial.complete_serial, done, [str(attempts[0].schedule_id)])
    fired = await fire(store, after(minutes=4))
    assert (fired.jobs, fired.skips) == (1, 0)


# Revisions.


@stored
async def test_a_revert_is_an_edit_like_any_other(store: Store) -> None:
    made = schedule(payload="old")
    await put(store, made)
    await put(store, schedule(Every("PT30S", T0), payload="new"), after(seconds=1), replace=True)
    before = await store.run(actions.list_revisions, "default", made.id)
    assert [(one.number, one.action.payload) for one in before] == [(2, "new"), (1, "old")]
    reverted, known = await steer(store, actions.revert_schedule, after(seconds=40), 1)
    assert (known, reverted.revision, reverted.action.payload) == (True, 3, "old")
    assert reverted.next_fire_at == after(minutes=1)
    assert await _rows(store) == [(0, "pending", None)]  # the occurrence at 30 s of revision 2 was not lost
    same, known = await steer(store, actions.revert_schedule, after(seconds=41), 3)
    assert (known, same.revision) == (True, 3)
    assert await steer(store, actions.revert_schedule, after(seconds=41), 9) == (same, False)


@stored
async def test_deleting_cancels_pending_jobs_and_keeps_the_history(store: Store) -> None:
    made = schedule(overlap=Overlap.QUEUE)
    await put(store, made)
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await fire(store, after(minutes=2))
    swept = await steer(store, actions.delete_schedule, after(minutes=3, seconds=1))
    assert (swept.prevented, swept.in_flight) == (2, 1)
    assert await _rows(store) == [
        (1, "running", None),
        (2, "cancelled", "schedule deleted"),
        (3, "cancelled", "schedule deleted"),
    ]
    assert (await fire(store, after(minutes=9))).schedules == 0
    await end(store, ending(attempt, JobState.FAILED, after(minutes=4)))
    assert (await everything(store))[0].state is JobState.CANCELLED
    kept = await store.run(actions.list_revisions, "default", made.id)
    assert [one.number for one in kept] == [2, 1]
    assert kept[0].recurrence.next(after(minutes=3, seconds=1)) is None
    await put(store, replace(schedule(), id=new_id(T0)))  # the name is available again


@stored
async def test_an_edit_that_read_the_time_before_an_instant_does_not_decide_it_again(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    await fire(store, after(minutes=2))  # skipped, as the first one is not finished
    early = after(minutes=2) - timedelta(milliseconds=5)
    edited = await put(store, schedule(overlap=Overlap.ALLOW), early, replace=True)
    assert edited.next_fire_at == after(minutes=3)
    (newest, _) = await store.run(actions.list_revisions, "default", edited.id)
    assert newest.effective_at == after(minutes=2)
    with pytest.raises(InvalidInput, match="has passed"):
        await steer(
            store,
            overrides.override_occurrence,
            after(minutes=3) - timedelta(seconds=62),
            "skip",
            after(minutes=2),
            None,
        )


@stored
async def test_a_schedule_takes_effect_when_it_was_drafted(store: Store) -> None:
    made = schedule()
    await put(store, made, after(seconds=61))  # its transaction began later
    await fire(store, after(seconds=62))
    (only,) = await store.run(actions.list_revisions, "default", made.id)
    assert (only.effective_at, at_minutes(await everything(store))) == (T0, [1])


@stored
async def test_a_schedule_deleted_before_its_start_has_no_occurrences(store: Store) -> None:
    made = schedule(start=after(minutes=10), max_runs=3)
    await put(store, made)
    await steer(store, actions.delete_schedule, after(minutes=3))
    kept = await store.run(actions.list_revisions, "default", made.id)
    assert kept[0].recurrence.next(after(minutes=3)) is None


@stored
async def test_every_action_on_an_unknown_schedule_returns_none(store: Store) -> None:
    stranger = new_id(T0)
    assert await steer(store, actions.pause_schedule, T0, None, id_=stranger) is None
    assert await steer(store, actions.resume_schedule, T0, False, id_=stranger) is None
    assert await steer(store, actions.trigger_schedule, T0, id_=stranger) is None
    assert await steer(store, actions.revert_schedule, T0, 1, id_=stranger) is None
    assert await steer(store, actions.delete_schedule, T0, id_=stranger) is None
    theirs = schedule(tenant_id="acme")
    await put(store, theirs)
    assert await steer(store, actions.pause_schedule, T0, None, id_=theirs.id) is None


# Next to fire.


@stored
async def test_next_to_fire_excludes_paused_errored_and_other_tenants_schedules(store: Store) -> None:
    first = await put(store, schedule(name="a"))
    second = await put(store, schedule(Every("PT2M"), name="b"))
    paused = await put(store, schedule(name="c"))
    await put(store, replace(schedule(name="d"), tenant_id="other"))
    await steer(store, actions.pause_schedule, T0, None, id_=paused.id)
    assert [one.id for one in await store.run(queries.list_firing_before, "default", after(minutes=5))] == [
        first.id,
        second.id,
    ]
    assert len(await store.run(queries.list_firing_before, None, after(minutes=5))) == 3
    assert [one.id for one in await store.run(queries.list_firing_before, "default", after(minutes=2))] == [first.id]
    assert await store.run(queries.list_firing_before, "default", after(minutes=1)) == []
    await store.run(queues.pause, queues.ALL_QUEUES, "a drill")
    assert await store.run(queries.list_firing_before, None, after(days=9)) == []
    await store.run(queues.resume, queues.ALL_QUEUES)
    assert len(await store.run(queries.list_firing_before, None, after(days=9))) == 3
