"""Firing: one transaction writes jobs and skips and moves the cursor; each occurrence fires once."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import select, update

from timebell.errors import Conflict
from timebell.ids import new_id
from timebell.model.job import Hold, Kind, NewJob, Reason
from timebell.model.policy import Retry
from timebell.recurrence import Dates, Every
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import complete, repository, serial
from timebell.store.schedules import queries
from timebell.store.schedules import schedules as verbs
from timebell.store.schedules.rows import schedule_to_row
from timebell.store.schema import revisions, schedules
from timebell.store.transaction import Transaction

from .helpers import (
    T0,
    CatchUp,
    Cron,
    JobState,
    Overlap,
    Store,
    after,
    at_minutes,
    build_job,
    claim,
    create,
    end,
    ending,
    everything,
    execute,
    fire,
    job,
    minutes,
    put,
    replace,
    schedule,
    stored,
    stored_schedule,
)

ALLOW = {"overlap": Overlap.ALLOW}


async def _pending(store: Store) -> list[int]:
    return sorted(at_minutes([made for made in await everything(store) if made.state is JobState.PENDING]))


async def _skipped(store: Store) -> dict[int, str | None]:
    return {at_minutes([made])[0]: made.reason for made in await everything(store) if made.state is JobState.SKIPPED}


@stored
async def test_a_due_occurrence_becomes_one_job_with_all_fields_of_the_schedule(store: Store) -> None:
    made = schedule(
        Cron("0 9 * * *"), timezone="Asia/Seoul", topic="digest.send", payload={"a": [0]}, metadata={"m": 1},
        owner_id="o", queue="q", priority=3, retry=Retry(attempts=2, delay=1.5), timeout=9.0, expires_after=60.0,
        tenant_id="acme", target={"kind": "http", "options": {"url": "u"}},
    )  # fmt: skip
    await put(store, made)
    nine = after(days=1).replace(hour=0)
    fired = await fire(store, nine + timedelta(seconds=1))
    assert (fired.schedules, fired.jobs, fired.skips) == (1, 1, 0)
    (seen,) = await everything(store)
    assert (seen.scheduled_at, seen.run_at, seen.created_at) == (nine, nine, nine + timedelta(seconds=1))
    assert (seen.schedule_id, seen.kind, seen.timezone, seen.topic) == (
        made.id, Kind.PLANNED, "Asia/Seoul", "digest.send",
    )  # fmt: skip
    assert (seen.payload, seen.metadata, seen.owner_id, seen.tenant_id) == ({"a": [0]}, {"m": 1}, "o", "acme")
    assert (seen.queue, seen.priority, seen.timeout, seen.expires_at) == ("q", 3, 9.0, nine + timedelta(minutes=1))
    assert seen.retry is not None
    assert Retry(**seen.retry) == Retry(attempts=2, delay=1.5)
    assert seen.target == {"kind": "http", "options": {"url": "u"}}


@stored
async def test_nothing_fires_before_its_instant(store: Store) -> None:
    await put(store, schedule())
    fired = await fire(store, after(minutes=1) - timedelta(microseconds=1))
    assert (fired.jobs, fired.next_fire_at, await everything(store)) == (0, after(minutes=1), [])
    assert (await fire(store, after(minutes=1))).jobs == 1


@stored
async def test_a_late_occurrence_keeps_its_nominal_instant(store: Store) -> None:
    made = schedule()
    await put(store, made)
    await fire(store, after(minutes=1, seconds=7.123456))
    (attempt,) = await claim(store, after(hours=1))
    assert attempt.scheduled_at == after(minutes=1)
    assert attempt.occurrence_key == f"{made.id}.20270301T120100Z"


@stored
async def test_every_occurrence_has_its_own_key(store: Store) -> None:
    await put(store, schedule(**ALLOW))
    for at in minutes(1, 3):
        await fire(store, at)
    assert len({made.occurrence_key for made in await everything(store)}) == 3


@stored
async def test_the_cursor_follows_the_nominal_instants_and_not_the_clock(store: Store) -> None:
    await put(store, schedule(Every("PT1M"), **ALLOW))
    await fire(store, after(minutes=1, seconds=59))
    assert (await stored_schedule(store)).next_fire_at == after(minutes=2)
    assert (await stored_schedule(store)).last_fired_at == after(minutes=1)


@stored
async def test_firing_again_at_the_same_instant_fires_nothing(store: Store) -> None:
    await put(store, schedule())
    assert [(await fire(store, after(minutes=1))).jobs for _ in range(3)] == [1, 0, 0]


@stored
async def test_a_clock_set_back_fires_nothing_twice(store: Store) -> None:
    await put(store, schedule(**ALLOW))
    for at in (1, 2, 1, 0, 2, 3):
        await fire(store, after(minutes=at))
    assert await _pending(store) == [1, 2, 3]


@stored
async def test_a_finished_occurrence_is_not_fired_again(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await end(store, ending(attempt))
    assert (await fire(store, after(minutes=1, seconds=30))).jobs == 0


@stored
async def test_a_crash_while_firing_rolls_everything_back(store: Store) -> None:
    await put(store, schedule())

    def crash(tx: Transaction) -> None:
        verbs.fire_due_schedules(tx, build_job, after(minutes=1), 500)
        raise ConnectionAbortedError

    with pytest.raises(Exception):  # noqa: B017 - each driver raises its own error
        await store.run(crash)
    assert await everything(store) == []
    assert (await stored_schedule(store)).next_fire_at == after(minutes=1)
    assert (await fire(store, after(minutes=1))).jobs == 1


@stored
async def test_two_planners_fire_each_occurrence_once(store: Store) -> None:
    for number in range(20):
        await put(store, schedule(name=f"s{number}", **ALLOW))
    for at in minutes(1, 5):
        while any(fired.schedules for fired in await asyncio.gather(*(fire(store, at, 3) for _ in range(4)))):
            pass
    made = await everything(store)
    assert len(made) == len({one.occurrence_key for one in made}) == 100


@stored
async def test_a_pass_fires_no_more_schedules_than_requested_and_reports_more(store: Store) -> None:
    for number in range(5):
        await put(store, schedule(name=f"s{number}"))
    fired = await fire(store, after(minutes=1), 2)
    assert (fired.schedules, fired.jobs, fired.next_fire_at) == (2, 2, after(minutes=1))


@stored
async def test_a_thousand_schedules_of_the_same_instant_fire_in_a_few_passes(store: Store) -> None:
    one = schedule(Cron("0 * * * *"))
    rows = [schedule_to_row(replace(one, id=new_id(T0), name=f"s{n}")) for n in range(1000)]

    def fill(tx: Transaction) -> None:
        tx.execute(schedules.insert(), rows)

    await store.run(fill)
    passes = [await fire(store, after(hours=1)) for _ in range(3)]
    assert [fired.jobs for fired in passes] == [500, 500, 0]
    assert passes[-1].next_fire_at == after(hours=2)


@stored
async def test_the_next_fire_is_the_soonest_of_the_enabled_schedules(store: Store) -> None:
    assert await store.run(verbs.find_next_fire_at) is None
    await put(store, schedule(Cron("0 18 * * *"), name="late"))
    await put(store, schedule(name="off", enabled=False))
    assert await store.run(verbs.find_next_fire_at) == T0.replace(hour=18)
    await put(store, schedule(Cron("30 12 * * *"), name="soon"))
    assert await store.run(verbs.find_next_fire_at) == after(minutes=30)


@stored
async def test_a_disabled_schedule_does_not_fire(store: Store) -> None:
    await put(store, schedule(enabled=False))
    assert (await fire(store, after(hours=1))).schedules == 0
    assert await everything(store) == []


@stored
async def test_an_ended_schedule_never_fires_again(store: Store) -> None:
    await put(store, schedule(Dates([after(minutes=1), after(minutes=3)]), **ALLOW))
    for at in minutes(1, 9):
        await fire(store, at)
    assert await _pending(store) == [1, 3]
    assert (await stored_schedule(store)).next_fire_at is None
    assert await store.run(verbs.find_next_fire_at) is None


@stored
async def test_max_runs_end_a_schedule(store: Store) -> None:
    await put(store, schedule(max_runs=2, **ALLOW))
    for at in minutes(1, 9):
        await fire(store, at)
    assert await _pending(store) == [1, 2]


# Overlap.


@stored
async def test_overlap_skip_leaves_a_row_while_an_earlier_occurrence_is_live(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    fired = await fire(store, after(minutes=2))
    assert (fired.jobs, fired.skips) == (0, 1)
    (attempt,) = await claim(store, after(minutes=2))
    await fire(store, after(minutes=3))
    await store.run_autocommit(complete.schedule_retries, [ending(attempt, JobState.PENDING, run_at=after(hours=1))])
    await fire(store, after(minutes=4))
    assert (await _pending(store), await _skipped(store)) == ([1], {2: "overlap", 3: "overlap", 4: "overlap"})
    (attempt,) = await claim(store, after(hours=1))
    await end(store, ending(attempt))
    assert (await fire(store, after(minutes=5))).jobs == 1


@stored
async def test_a_skipped_occurrence_has_a_row_with_its_instant_and_no_attempts(store: Store) -> None:
    made = schedule(payload={"a": 1})
    await put(store, made)
    await fire(store, after(minutes=1))
    await fire(store, after(minutes=2, seconds=1))
    (row,) = [one for one in await everything(store) if one.state is JobState.SKIPPED]
    assert (row.schedule_id, row.scheduled_at, row.kind, row.payload) == (
        made.id,
        after(minutes=2),
        Kind.PLANNED,
        {"a": 1},
    )
    assert (row.reason, row.attempt, row.attempts_used, row.started_at) == ("overlap", 0, 0, None)
    assert (row.finished_at, row.skipped_count, row.skipped_to) == (after(minutes=2, seconds=1), 1, after(minutes=2))


@stored
async def test_overlap_allow_runs_occurrences_concurrently(store: Store) -> None:
    await put(store, schedule(**ALLOW))
    for at in minutes(1, 3):
        await fire(store, at)
    assert len(await claim(store, after(minutes=3))) == 3


@stored
async def test_schedules_of_one_topic_do_not_overlap_each_other(store: Store) -> None:
    await put(store, schedule(name="a"))
    await put(store, schedule(name="b"))
    await fire(store, after(minutes=1))
    assert await _pending(store) == [1, 1]


# Catch-up.


@stored
async def test_missed_occurrences_each_have_a_row(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.LATEST))
    await fire(store, after(minutes=10, seconds=30))
    assert await _pending(store) == [10]
    assert await _skipped(store) == dict.fromkeys(range(1, 10), "coalesced")


@stored
async def test_catch_up_skip_fires_only_occurrences_that_are_not_missed(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.SKIP))
    await fire(store, after(minutes=10, seconds=30))
    assert (await _pending(store), await _skipped(store)) == ([10], dict.fromkeys(range(1, 10), "missed"))


@stored
async def test_catch_up_all_with_overlap_skip_runs_serially(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.ALL))
    await fire(store, after(minutes=5, seconds=30))
    made = await everything(store)
    assert [one.hold for one in made] == [None, *[Hold.OVERLAP] * 4]
    assert at_minutes(made) == [1, 2, 3, 4, 5]
    order = []
    for _ in range(5):
        (attempt,) = await claim(store, after(hours=1))
        order.append(attempt.scheduled_at)
        await store.run(serial.complete_serial, [ending(attempt)], [str(attempt.schedule_id)])
    assert order == list(minutes(1, 5))


@stored
async def test_catch_up_all_waits_behind_a_live_job(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.ALL))
    await fire(store, after(minutes=1))
    await fire(store, after(minutes=5, seconds=30))
    assert [one.hold for one in await everything(store)] == [None, *[Hold.OVERLAP] * 4]


@stored
async def test_a_catch_up_beyond_its_limit_leaves_range_rows_that_account_for_everything(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.ALL, catch_up_limit=10, **ALLOW))
    fired = await fire(store, after(minutes=1000, seconds=30))
    assert (fired.jobs, fired.skips) == (11, 989)
    made = await everything(store)
    (row,) = [one for one in made if one.state is JobState.SKIPPED]
    assert (row.scheduled_at, row.skipped_to, row.skipped_count) == (after(minutes=1), after(minutes=989), 989)
    assert row.reason == Reason.MISSED
    assert at_minutes([one for one in made if one is not row]) == list(range(990, 1001))


@stored
async def test_an_outage_of_a_year_of_seconds_is_one_range_row_and_takes_no_time(store: Store) -> None:
    await put(store, schedule(Cron("* * * * * *"), **ALLOW))
    year = after(days=365)
    await fire(store, year)
    counted = sum(one.skipped_count for one in await everything(store) if one.state is JobState.SKIPPED)
    fired = [one for one in await everything(store) if one.state is JobState.PENDING]
    assert counted + len(fired) == 365 * 86_400
    assert len(await everything(store)) < 200


# Schedules that fail.


def _broken(*names: str) -> object:
    def build(made: object, at: object, hold: object, now: object) -> NewJob:
        if made.name in names:  # type: ignore[attr-defined]
            raise ValueError("cannot")
        return build_job(made, at, hold, now)  # type: ignore[arg-type]

    return build


@stored
async def test_a_failing_schedule_is_errored_and_the_others_fire(store: Store) -> None:
    for name in ("a", "bad", "z"):
        await put(store, schedule(name=name, **ALLOW))
    fired = await store.run(verbs.fire_due_schedules, _broken("bad"), after(minutes=1), 500)
    assert (fired.jobs, fired.next_fire_at) == (2, after(minutes=2))
    broken = await stored_schedule(store, "bad")
    assert broken.error is not None
    assert "cannot" in broken.error
    assert broken.next_fire_at == after(minutes=1)
    assert (await fire(store, after(minutes=2))).jobs == 2


@pytest.mark.parametrize(
    "unreadable",
    [
        {"recurrence": '{"kind":"cron","spec":"* * * * *","timezone":"Mars/Olympus"}'},
        {"recurrence": '{"kind":"from-a-newer-release"}'},
        {"recurrence": "not json"},
        {"action": '{"topic": "t", "of_a_newer_release": 1}'},
        {"policies": '{"overlap": "unknown", "catch_up": "all"}'},
    ],
    ids=["zone", "kind", "text", "action", "policies"],
)
@stored
async def test_an_unreadable_schedule_does_not_stop_the_others(store: Store, unreadable: dict[str, str]) -> None:
    for name in ("a", "bad", "z"):
        await put(store, schedule(name=name, **ALLOW))
    await execute(store, update(schedules).where(schedules.c.name == "bad").values(**unreadable))
    fired = await fire(store, after(minutes=1))
    assert fired.jobs == 2
    (row,) = await execute(store, select(schedules).where(schedules.c.name == "bad"))
    assert row.error
    assert row.next_fire_at == after(minutes=1)
    assert (await fire(store, after(minutes=2))).jobs == 2


@stored
async def test_an_unreadable_schedule_is_repaired_by_an_upsert(store: Store) -> None:
    await put(store, schedule())
    await execute(store, update(schedules).values(recurrence="not json"))
    await fire(store, after(minutes=1))
    mended = await put(store, schedule(), after(minutes=1, seconds=30), replace=True)
    assert (mended.error, mended.revision) == (None, 2)
    assert (await fire(store, after(minutes=2))).jobs == 1


# Upserts and edits.


@stored
async def test_a_schedule_is_read_back_unchanged(store: Store) -> None:
    made = schedule(
        Cron("0 9 * * MON"), timezone="America/New_York", name="n", topic="a.b", payload={"ü": [None]},
        metadata={"m": 1}, owner_id="o", target={"kind": "http", "options": {}}, queue="q", priority=-1,
        retry=Retry(attempts=9), timeout=1.5, expires_after=2.5, overlap=Overlap.ALLOW, catch_up=CatchUp.ALL,
        catch_up_window=1.0, catch_up_limit=7, missed_after=30.0, start=after(days=1), end=after(days=100),
        code_hash="h",
    )  # fmt: skip
    assert await put(store, made) == made
    assert await stored_schedule(store, "n") == made


@stored
async def test_schedule_names_are_unique_per_tenant(store: Store) -> None:
    first = await put(store, schedule())
    with pytest.raises(Conflict) as refused:
        await put(store, schedule(topic="other"))
    assert (refused.value.code, refused.value.existing) == ("SCHEDULE_EXISTS", first.id)
    await put(store, schedule(tenant_id="other"))


@stored
async def test_an_identical_upsert_is_no_edit(store: Store) -> None:
    first = await put(store, schedule(payload={"a": 1}))
    again = await put(store, schedule(payload={"a": 1}), after(minutes=5), replace=True)
    assert again == first
    assert await everything(store) == []


@stored
async def test_an_edit_keeps_id_creation_and_pause_and_raises_the_revision(store: Store) -> None:
    first = await put(store, schedule(enabled=False))
    edited = await put(store, schedule(payload=1), after(seconds=30), replace=True)
    assert (edited.id, edited.created_at, edited.enabled, edited.revision) == (first.id, T0, False, 2)
    assert edited == await stored_schedule(store)


@stored
async def test_an_edit_fires_nothing_by_itself(store: Store) -> None:
    await put(store, schedule(Cron("0 18 * * *")))
    await put(store, schedule(Cron("0 11 * * *")), after(minutes=30), replace=True)
    assert await everything(store) == []
    assert (await fire(store, after(minutes=31))).jobs == 0
    assert (await stored_schedule(store)).next_fire_at == after(days=1, hours=-1)


@stored
async def test_an_edit_loses_no_occurrence_due_before_it(store: Store) -> None:
    await put(store, schedule(topic="old", **ALLOW))
    await put(store, schedule(Cron("30 * * * *"), topic="new", **ALLOW), after(minutes=2, seconds=30), replace=True)
    assert (await _skipped(store), await _pending(store)) == ({1: "coalesced"}, [2])
    assert (await stored_schedule(store)).last_fired_at == after(minutes=2)
    await fire(store, after(minutes=30))
    made = [(one.topic, *at_minutes([one])) for one in await everything(store)]
    assert sorted(made) == [("new", 30), ("old", 1), ("old", 2)]


@stored
async def test_an_edit_at_the_instant_of_an_occurrence_fires_it_once(store: Store) -> None:
    await put(store, schedule(topic="old", **ALLOW))
    drafted_before = schedule(topic="new", **ALLOW)
    assert drafted_before.next_fire_at == after(minutes=1)
    await put(store, drafted_before, after(minutes=1, microseconds=1), replace=True)
    (attempt,) = await claim(store, after(minutes=1))
    await end(store, ending(attempt))
    await fire(store, after(minutes=1, seconds=1))
    assert [one.topic for one in await everything(store)] == ["old"]


@stored
async def test_an_edit_by_a_node_whose_clock_is_behind_repeats_nothing(store: Store) -> None:
    await put(store, schedule(**ALLOW))
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await end(store, ending(attempt))
    await put(store, schedule(payload=1, **ALLOW), after(seconds=59), replace=True)
    await fire(store, after(minutes=1, seconds=1))
    assert len(await everything(store)) == 1


@stored
async def test_an_edit_and_a_planner_at_the_same_time_fire_each_occurrence_once(store: Store) -> None:
    await put(store, schedule(**ALLOW))
    for n, at in enumerate(minutes(1, 10)):
        await asyncio.gather(
            fire(store, at), put(store, schedule(payload=n, **ALLOW), at, replace=True), fire(store, at)
        )
    assert sorted(at_minutes(await everything(store))) == list(range(1, 11))


@stored
async def test_an_edit_does_not_change_existing_jobs(store: Store) -> None:
    await put(store, schedule(topic="old"))
    await fire(store, after(minutes=1))
    await put(store, schedule(topic="new"), after(minutes=1, seconds=1), replace=True)
    (attempt,) = await claim(store, after(minutes=1))
    assert (attempt.topic, attempt.revision) == ("old", 1)


@stored
async def test_every_revision_is_stored_with_its_start(store: Store) -> None:
    made = await put(store, schedule(payload=1))
    await put(store, schedule(payload=1), after(seconds=10), replace=True)
    await put(store, schedule(Cron("0 * * * *"), payload=2), after(seconds=20), replace=True)
    rows = await execute(store, select(revisions).order_by(revisions.c.revision))
    assert [(row.schedule_id, row.revision, row.effective_at) for row in rows] == [
        (made.id, 1, T0), (made.id, 2, after(seconds=20)),
    ]  # fmt: skip
    known = await store.run(queries.find_revisions, {(made.id, 1), (made.id, 2)})
    assert known[made.id, 1] == ("s", made.recurrence, 1.0, ())
    assert known[made.id, 2][1].spec == Cron("0 * * * *")


@stored
async def test_unchanged_code_is_no_edit_even_if_the_anchor_differs(store: Store) -> None:
    first = await put(store, schedule(Every("PT1H"), code_hash="same"))
    later = replace(schedule(Every("PT1H", after(minutes=7)), code_hash="same"))
    assert await put(store, later, after(minutes=7), replace=True) == first


@stored
async def test_an_edit_by_another_client_stands_until_the_code_changes(store: Store) -> None:
    await put(store, schedule(payload="code", code_hash="1"))
    await put(store, schedule(payload="edited"), after(seconds=1), replace=True)
    await put(store, schedule(payload="code", code_hash="1"), after(seconds=2), replace=True)
    assert (await stored_schedule(store)).action.payload == "edited"
    await put(store, schedule(payload="newer code", code_hash="2"), after(seconds=3), replace=True)
    assert (await stored_schedule(store)).action.payload == "newer code"


@stored
async def test_many_nodes_that_start_together_write_a_schedule_once(store: Store) -> None:
    written = await asyncio.gather(*(put(store, schedule(code_hash="same"), replace=True) for _ in range(8)))
    assert len({one.id for one in written}) == 1
    assert {one.revision for one in written} == {1}


@stored
async def test_a_live_occurrence_is_not_created_again(store: Store) -> None:
    made = await put(store, schedule(**ALLOW))
    await create(
        store, job(schedule_id=made.id, scheduled_at=after(minutes=1), kind=Kind.PLANNED, run_at=after(minutes=1))
    )
    await fire(store, after(minutes=1))
    assert len(await everything(store)) == 1


@stored
async def test_a_cancelled_occurrence_is_not_created_again(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    (made,) = await everything(store)
    await store.run(repository.cancel, None, made.id, after(minutes=1))
    assert (await fire(store, after(minutes=1, seconds=30))).jobs == 0
    assert (await fire(store, after(minutes=2))).jobs == 1


# Overlap: cancel_previous.

CANCEL_PREVIOUS = {"overlap": Overlap.CANCEL_PREVIOUS}


@stored
async def test_cancel_previous_replaces_a_pending_occurrence_immediately(store: Store) -> None:
    await put(store, schedule(**CANCEL_PREVIOUS))
    await fire(store, after(minutes=1))
    fired = await fire(store, after(minutes=2))
    assert (fired.jobs, fired.skips, fired.cancels_requested) == (1, 0, 0)
    first, second = await everything(store)
    assert (first.state, first.reason, first.replaced_by) == (JobState.CANCELLED, "superseded", second.id)
    assert (second.state, second.hold) == (JobState.PENDING, None)


@stored
async def test_cancel_previous_requests_the_cancel_of_a_running_occurrence(store: Store) -> None:
    await put(store, schedule(**CANCEL_PREVIOUS))
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    assert (await fire(store, after(minutes=2))).cancels_requested == 1
    third = await fire(store, after(minutes=3))
    assert (third.jobs, third.cancels_requested) == (1, 1)
    assert await store.run_autocommit(job_claim.list_running_attempts) == {(attempt.id, 1): (0, Hold.STOPPING)}
    first, second, last = await everything(store)
    assert (first.state, second.state, second.replaced_by) == (JobState.RUNNING, JobState.CANCELLED, last.id)
    assert last.hold is Hold.OVERLAP
    assert await claim(store, after(minutes=3)) == []
    failed = ending(attempt, JobState.FAILED, after(minutes=3), schedule_id=attempt.schedule_id)
    await store.run(serial.complete_serial, [failed], [str(attempt.schedule_id)])
    assert (await everything(store))[0].state is JobState.CANCELLED
    assert [one.id for one in await claim(store, after(minutes=3))] == [last.id]


@stored
async def test_an_occurrence_with_a_cancel_request_is_not_retried(store: Store) -> None:
    await put(store, schedule(**CANCEL_PREVIOUS))
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await fire(store, after(minutes=2))
    again = ending(attempt, JobState.PENDING, run_at=after(minutes=9))
    assert await store.run_autocommit(complete.schedule_retries, [again]) == set()
