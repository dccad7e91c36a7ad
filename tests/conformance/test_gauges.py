"""Gauges for metrics and the watchdog, and outcome notices in the transaction of a failed completion."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select, text

from timebell.features import FEATURES
from timebell.model.job import Completion, Hold, Job
from timebell.model.routes import Routes
from timebell.observe.watchdog import UnrecordedCounter
from timebell.recurrence import Every
from timebell.store import transaction
from timebell.store.audit import duplicate_runs
from timebell.store.cluster import gauges, nodes
from timebell.store.jobs import outcome_notices, queues

from .helpers import (
    T0,
    JobState,
    Store,
    after,
    claim,
    create,
    end,
    ending,
    everything,
    fire,
    job,
    one,
    put,
    schedule,
    started,
    stored,
)

GRACE = 10.0


async def read(store: Store, at: object = T0, **options: bool) -> gauges.Gauges:
    return await store.run_autocommit(gauges.read_gauges, at, GRACE, FEATURES, **options)


@stored
async def test_gauges_of_an_empty_store_are_zero(store: Store) -> None:
    assert await read(store, per_schedule=True) == gauges.Gauges(
        {"pending": 0, "running": 0, "held": 0}, {"active": 0, "paused": 0, "errored": 0}, 0, 0, {"default": 0}, 0.0,
        0.0, [], {}, 0, {
            "timebell_campaigns": {("pending",): 0, ("running",): 0, ("paused",): 0},
            "timebell_campaign_remaining": {(): 0},
            "timebell_sources": {("orphaned",): 0, ("reauthorize",): 0, ("errored",): 0},
        },
    )  # fmt: skip


@stored
async def test_jobs_are_counted_by_state(store: Store) -> None:
    await create(store, *[job(run_at=after(seconds=-9 + n)) for n in range(3)], job(run_at=after(hours=1)))
    await create(store, job(queue="mail", run_at=after(seconds=-4)), job(queue="mail", priority=5))
    await create(store, job(hold=Hold.OVERLAP), job(hold=Hold.UNHANDLED), job(queue="quiet", run_at=after(days=-1)))
    await store.run(queues.pause, "quiet", None)
    await one(store, queue="other")
    assert len(await claim(store, queue="other")) == 1
    dead = await started(store, queue="third")
    await end(store, ending(dead, JobState.FAILED, error="no", code="NO"))
    found = await read(store)
    assert found.jobs == {"pending": 7, "running": 1, "held": 2}
    assert (found.unhandled, found.dead_letters) == (1, 1)
    assert found.depths == {"default": 3, "mail": 2}
    assert found.oldest_due_age == 9.0  # the job of the paused queue does not count


@stored
async def test_schedules_are_counted_by_state_and_listed_when_overdue(store: Store) -> None:
    for n in range(3):
        await put(store, schedule(name=f"s{n}", tenant_id="acme" if n else "default"))
    await put(store, schedule(name="off", enabled=False))
    await put(store, schedule(name="broken", error="cannot be read"))
    assert (await read(store)).schedules == {"active": 3, "paused": 1, "errored": 1}
    late = after(minutes=1, seconds=11)  # each fires at the full minute
    found = await read(store, late)
    assert [one.label for one in found.overdue] == ["s0", "acme/s1", "acme/s2"]
    assert found.evaluation_lag == 11.0
    assert (await read(store, after(minutes=1, seconds=9))).overdue == []
    await fire(store, late)
    assert ((await read(store, late)).overdue, (await read(store, late)).evaluation_lag) == ([], 0.0)


@stored
async def test_no_schedule_is_overdue_while_all_firing_is_stopped(store: Store) -> None:
    await put(store, schedule())
    await store.run(queues.pause, queues.ALL_QUEUES, None)
    assert (await read(store, after(hours=1))).overdue == []


@stored
async def test_each_overdue_occurrence_is_counted_once(store: Store) -> None:
    await put(store, schedule(Every("PT10S"), name="ticks"))
    count = UnrecordedCounter()

    async def more(at: object) -> int:
        return count.count((await read(store, at)).overdue, at)  # type: ignore[arg-type]

    assert [await more(after(seconds=n)) for n in (10, 20, 21, 25, 35, 36, 60)] == [0, 0, 1, 0, 1, 0, 3]
    await fire(store, after(seconds=61))
    assert await more(after(seconds=69)) == 0
    assert await more(after(seconds=81)) == 1


@stored
async def test_the_last_success_is_that_of_the_newest_completed_job(store: Store) -> None:
    made = await put(store, schedule(tenant_id="acme"))
    for n, state in enumerate([JobState.COMPLETED, JobState.COMPLETED, JobState.FAILED], start=1):
        await fire(store, after(minutes=n))
        (attempt,) = await claim(store, after(minutes=n))
        await end(store, ending(attempt, state, after(minutes=n, seconds=5)))
    assert (await read(store, per_schedule=True)).successes == {f"acme/{made.name}": after(minutes=2, seconds=5)}


@stored
async def test_an_occurrence_with_two_executed_jobs_is_found(store: Store) -> None:
    await put(store, schedule(overlap="allow"))
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await end(store, ending(attempt, at=after(minutes=1)))
    assert await store.run_autocommit(duplicate_runs.find_duplicates, T0) == set()
    twin = job(schedule_id=attempt.schedule_id, kind="planned", scheduled_at=attempt.scheduled_at)
    await create(store, twin)
    (again,) = await claim(store, after(minutes=2))
    await end(store, ending(again, at=after(minutes=2)))
    assert await store.run_autocommit(duplicate_runs.find_duplicates, T0) == {
        (attempt.schedule_id, attempt.scheduled_at)
    }
    assert await store.run_autocommit(duplicate_runs.find_duplicates, after(minutes=3)) == set()


async def listen(store: Store, *topics: str, everything: bool = False) -> None:
    routes = Routes(frozenset(topics), frozenset(), everything)
    await store.run(nodes.announce, nodes.Node(job().id, "n", "1", "2026a", routes, 0, T0, T0))


async def fail(store: Store, *, error: str = "it broke", **fields: object) -> str:
    attempt = await started(store, **fields)
    await store.run(
        outcome_notices.complete_with_notices, [ending(attempt, JobState.FAILED, error=error, code="BROKE")]
    )
    return attempt.id


async def of_topic(store: Store, topic: str) -> list[Job]:
    return [one for one in await everything(store) if one.topic == topic]


@stored
async def test_a_dead_letter_notifies_its_handler(store: Store) -> None:
    await fail(store)
    assert await of_topic(store, outcome_notices.DEAD_JOB_TOPIC) == []  # no node handles the topic
    await listen(store, outcome_notices.DEAD_JOB_TOPIC)
    id_ = await fail(store, topic="mail.send", owner_id="ana", tenant_id="acme")
    (event,) = await of_topic(store, outcome_notices.DEAD_JOB_TOPIC)
    assert (event.state, event.run_at, event.tenant_id, event.owner_id) == (JobState.PENDING, T0, "acme", "ana")
    assert event.payload == {
        "jobId": id_, "topic": "mail.send", "error": "it broke", "code": "BROKE", "attempt": 1, "scheduleId": None,
        "scheduledAt": "2027-03-01T12:00:00Z", "ownerId": "ana",
    }  # fmt: skip
    assert [one.id for one in await claim(store)] == [event.id]


@stored
async def test_a_catch_all_handler_is_no_dead_letter_handler(store: Store) -> None:
    await listen(store)
    await fail(store)
    assert await of_topic(store, outcome_notices.DEAD_JOB_TOPIC) == []


@stored
async def test_a_failing_dead_letter_handler_does_not_recurse(store: Store) -> None:
    await listen(store, outcome_notices.DEAD_JOB_TOPIC)
    await fail(store, topic=outcome_notices.DEAD_JOB_TOPIC)
    assert len(await of_topic(store, outcome_notices.DEAD_JOB_TOPIC)) == 1


@stored
async def test_an_attempt_that_was_taken_over_or_cancelled_makes_no_dead_letter(store: Store) -> None:
    from timebell.store.jobs import repository

    await listen(store, outcome_notices.DEAD_JOB_TOPIC)
    attempt = await started(store)
    stale = Completion(attempt.id, attempt.number + 1, JobState.FAILED, T0)
    assert await store.run(outcome_notices.complete_with_notices, [stale]) == set()
    await store.run(repository.cancel, None, attempt.id, T0)
    assert await store.run(outcome_notices.complete_with_notices, [ending(attempt, JobState.FAILED)]) == {attempt.id}
    assert await of_topic(store, outcome_notices.DEAD_JOB_TOPIC) == []


@stored
async def test_a_failure_that_is_written_again_is_notified_once(store: Store) -> None:
    """A node repeats a write if it does not know the outcome of the commit."""
    await listen(store, outcome_notices.DEAD_JOB_TOPIC)
    attempt = await started(store)
    for written in ({attempt.id}, set()):
        assert await store.run(outcome_notices.complete_with_notices, [ending(attempt, JobState.FAILED)]) == written
    assert len(await of_topic(store, outcome_notices.DEAD_JOB_TOPIC)) == 1


class Struck(Exception):
    """Raised to simulate a crash at a fault point."""


@stored
async def test_a_failed_completion_and_its_notice_are_one_transaction(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await listen(store, outcome_notices.DEAD_JOB_TOPIC)
    attempt = await started(store)
    points: list[str] = []
    struck: set[str] = set()

    def strike(name: str) -> None:
        points.append(name)
        if name.startswith("complete_with_notices.") and name not in struck and not name.endswith("done"):
            struck.add(name)
            raise Struck(name)

    monkeypatch.setattr(transaction, "probe", strike)
    for _ in range(20):
        try:
            await store.run(outcome_notices.complete_with_notices, [ending(attempt, JobState.FAILED)])
            break
        except Struck:
            found = await everything(store)
            assert [one.state for one in found] == [JobState.RUNNING]
    assert len(struck) >= 6
    assert "complete_with_notices.commit" in struck
    assert len(await of_topic(store, outcome_notices.DEAD_JOB_TOPIC)) == 1


@stored
async def test_the_owner_of_a_schedule_is_notified_of_the_first_failure_and_of_the_recovery(store: Store) -> None:
    await put(store, schedule(name="billing", notify=("ops", "ana")))
    states = [JobState.FAILED, JobState.FAILED, JobState.COMPLETED, JobState.COMPLETED, JobState.FAILED]
    for n, state in enumerate(states, start=1):
        await fire(store, after(minutes=n))
        (attempt,) = [one for one in await claim(store, after(minutes=n)) if one.topic == "t"]
        await store.run(
            outcome_notices.complete_with_notices, [ending(attempt, state, after(minutes=n), error="no", code="NO")]
        )
    notices = await of_topic(store, outcome_notices.ALERT_TOPIC)
    assert [(one.payload["resolved"], one.payload["to"]) for one in notices] == [
        (False, ["ops", "ana"]), (True, ["ops", "ana"]), (False, ["ops", "ana"]),
    ]  # fmt: skip
    assert "billing (t) failed: no" in notices[0].payload["text"]
    assert all(one.target == {"kind": "alert", "options": {}} for one in notices)


@stored
async def test_schedules_without_notify_send_no_notices(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await store.run(outcome_notices.complete_with_notices, [ending(attempt, JobState.FAILED, error="no")])
    assert await of_topic(store, outcome_notices.ALERT_TOPIC) == []


def test_gauges_are_counted_from_indexes(store: Store, runner: asyncio.Runner) -> None:
    def explain(tx: transaction.Transaction) -> list[str]:
        connection = tx.execute(select(1)).connection
        counting = str(gauges.COUNTS.compile(connection, compile_kwargs={"literal_binds": True}))
        if tx.dialect.name == "sqlite":
            return [row.detail for row in tx.execute(text("EXPLAIN QUERY PLAN " + counting))]
        if tx.dialect.name.startswith("mysql"):
            plan = tx.execute(text("EXPLAIN " + counting))
            # Small tables may be read completely; jobs, finished jobs and schedules may not.
            big = ("timebell_jobs", "timebell_finished", "timebell_schedules")
            return [f"{'Seq Scan ' if row.table in big and row.type == 'ALL' else ''}{row}" for row in plan]
        tx.execute(text("SET LOCAL enable_seqscan = off"))  # on empty tables the planner would prefer it
        return [row[0] for row in tx.execute(text("EXPLAIN " + counting))]

    plan_lines: list[str] = runner.run(store.run(explain))
    assert len(plan_lines) > 8
    assert not [line for line in plan_lines if "Seq Scan" in line or ("SCAN timebell" in line and "USING" not in line)]
