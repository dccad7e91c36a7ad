"""Explanations of single occurrences: each cause has its sentence."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import delete, insert, select

from timebell.ids import new_id
from timebell.model import decide
from timebell.model.attempts import finalize_completion
from timebell.model.job import JobState
from timebell.model.policy import Retry
from timebell.model.why import Explanation, explain
from timebell.recurrence import Calendar, Every
from timebell.store.audit import audit_log, occurrence_facts
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.jobs import complete
from timebell.store.schedules import actions, overrides
from timebell.store.schema import finished, nodes, queues

from .helpers import (
    NODE,
    T0,
    CatchUp,
    Cron,
    Overlap,
    Store,
    after,
    again,
    build_job,
    claim,
    end,
    ending,
    execute,
    fire,
    put,
    schedule,
    stored,
    stored_schedule,
)


async def ask(
    store: Store, minute: float, now: datetime = T0 + timedelta(hours=1), id_: str | None = None
) -> Explanation:
    id_ = id_ or (await stored_schedule(store)).id
    at = after(minutes=minute)
    return explain(await store.run(occurrence_facts.collect_facts, "default", id_, at), at, now)


def assert_explains(found: Explanation, *parts: str) -> None:
    """Assert that each part is in a sentence of the explanation, in this order."""
    text, at = "\n".join(found.sentences), 0
    for part in parts:
        assert part in text[at:], text
        at = text.index(part, at)


async def steer(store: Store, verb: Any, at: datetime, *args: Any, actor: str = "", action: str = "") -> Any:
    id_ = (await stored_schedule(store)).id
    done = await store.run(verb, "default", id_, *args, build_job, at)
    if actor:
        record = AuditRecord(
            id=new_id(at), tenant_id="default", at=at, actor=actor, actor_kind="user", action=action, subject=id_
        )
        await store.run(audit_log.write_record, record)
    return done


@stored
async def test_an_executed_occurrence_has_attempts_node_and_duration(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW))
    seen = {"name": "worker-1", "version": "1", "tzdata": "x", "routes": "{}", "started_at": T0, "seen_at": T0}
    seen["routes"] = '{"exact": [], "prefixes": [], "allTopics": true}'
    await execute(store, insert(nodes).values(id=NODE, **seen))
    await fire(store, after(minutes=1, seconds=2))
    (first,) = await claim(store, after(minutes=1, seconds=3))
    errors = '[{"attempt": 1, "error": "no route to host"}]'
    await store.run(complete.schedule_retries, [again(first, after(minutes=2), errors=errors)])
    (second,) = await claim(store, after(minutes=2))
    await end(store, ending(second, at=after(minutes=2, seconds=4), errors=errors))
    found = await ask(store, 1)
    assert (found.occurrence, found.outcome, found.revision, found.jobs) == (True, "completed", 1, [first.id])
    assert_explains(
        found, "Revision 1, created at", "created job", "2.0 s late", "Attempt 1 failed: no route to host",
        "Attempt 2 started", "1 min 0 s late, on node worker-1", "completed", "after 4.0 s",
    )  # fmt: skip


@stored
async def test_an_instant_without_occurrence_has_its_nearest_occurrences(store: Store) -> None:
    await put(store, schedule())
    found = await ask(store, 1.5)
    assert (found.occurrence, found.outcome) == (False, "none")
    assert (found.before, found.after) == (after(minutes=1), after(minutes=2))
    assert_explains(
        found, "It is not an occurrence of that revision.", "The nearest occurrences are 2027-03-01T12:01:00Z and "
    )


@stored
async def test_instants_before_creation_and_after_deletion_are_explained(store: Store) -> None:
    made = await put(store, schedule())
    assert_explains(await ask(store, -5), "did not exist then", "created at 2027-03-01T12:00:00Z")
    await steer(store, actions.delete_schedule, after(minutes=3))
    assert_explains(await ask(store, 9, id_=made.id), "was deleted at 2027-03-01T12:03:00Z")


@stored
async def test_an_occurrence_removed_by_an_edit_is_explained(store: Store) -> None:
    await put(store, schedule())
    record = AuditRecord(
        id=new_id(T0), tenant_id="default", at=after(minutes=2), actor="alice", actor_kind="user",
        action="schedule.update", subject=(await stored_schedule(store)).id,
    )  # fmt: skip
    await put(store, schedule(Every("PT30M", T0)), after(minutes=2), replace=True)
    await store.run(audit_log.write_record, record)
    assert_explains(
        await ask(store, 5),
        "Revision 2, created at",
        "by alice (schedule.update)",
        "not an occurrence",
        "of revision 1",
    )


@stored
async def test_a_paused_occurrence_is_explained_with_the_actor(store: Store) -> None:
    await put(store, schedule())
    await steer(store, actions.pause_schedule, after(seconds=30), "a bad release", actor="bob", action="schedule.pause")
    assert_explains(await ask(store, 2), "not decided yet", "paused since", "by bob", "because: a bad release")
    await steer(store, actions.resume_schedule, after(minutes=9), False, actor="carol", action="schedule.resume")
    found = await ask(store, 2)
    assert found.outcome == "paused"
    assert_explains(
        found, "skipped (paused)", "was paused from 2027-03-01T12:00:30Z (by bob) to", "(by carol)",
        "Paused since 2027-03-01T12:00:30Z: a bad release.",
    )  # fmt: skip


@stored
async def test_a_lost_lease_is_explained_with_the_reclaiming_node(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW))
    await fire(store, after(minutes=1))
    (lost,) = await claim(store, after(minutes=1))
    back = after(minutes=1, seconds=20)
    ending = decide.complete_after_failure(
        lost.id, lost.number, lost.attempts_used, Retry(), back, "LEASE_LOST", "It stopped answering."
    )
    await store.run(complete.schedule_retries, [finalize_completion(lost, ending, "lost-node", NODE)])
    assert_explains(
        await ask(store, 1), "Attempt 1 started at 2027-03-01T12:01:00+00:00 on node lost-node; its lease expired",
        f"node {NODE} reclaimed the job at 2027-03-01T12:01:20",
    )  # fmt: skip


@stored
async def test_an_overlap_skip_is_explained_with_the_live_job(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    await fire(store, after(minutes=2))
    (running,) = await claim(store, after(minutes=2))
    await end(store, ending(running, at=after(minutes=3)))
    found = await ask(store, 2)
    assert found.outcome == "overlap"
    assert_explains(
        found,
        f"Job {running.id}",
        "was not finished at that time (it finished at 2027-03-01T12:03:00Z)",
        "of the schedule is skip",
    )


@stored
async def test_an_outage_is_explained_with_the_catch_up_result(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.LATEST))
    await fire(store, after(minutes=600, seconds=30))
    found = await ask(store, 30)
    assert found.outcome == "coalesced"
    assert_explains(found, "with 598 others", "h", "No recorded node was alive", "The catch-up policy is latest")
    (late,) = await claim(store, after(minutes=600, seconds=31))
    await end(store, ending(late, at=after(minutes=600, seconds=31)))
    assert "No attempt ended" not in "".join((await ask(store, 30)).sentences)  # earlier periods are unknown
    early = {"id": new_id(T0), "finished_at": after(minutes=2), "scheduled_at": after(seconds=1)}
    row = dict((await execute(store, select(finished).where(finished.c.id == late.id)))[0]._mapping)
    await execute(store, insert(finished).values(**row | early))
    ended = "No attempt ended between 2027-03-01T12:02:00Z and 2027-03-01T22:00:31Z, for 9 h 58 min."
    assert_explains(await ask(store, 30), ended)
    await execute(store, delete(finished))
    assert (await ask(store, 30, after(minutes=700))).outcome == "lost"


@stored
async def test_an_override_is_explained_with_the_actor(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW))
    gone, moved = (after(minutes=2), None), (after(minutes=3), after(minutes=3, seconds=20))
    await steer(store, overrides.override_occurrence, T0, "skip", *gone, actor="dora", action="schedule.override")
    await steer(store, overrides.override_occurrence, after(seconds=30), "move", *moved)
    for minute in (1, 2, 3, 4):
        await fire(store, after(minutes=minute))
    assert_explains(await ask(store, 2), "to skip it was set at 2027-03-01T12:00:00Z by dora", "skipped (override)")
    assert_explains(await ask(store, 3 + 1 / 3), "from 2027-03-01T12:03:00Z to 2027-03-01T12:03:20Z", "created job")


@stored
async def test_an_occurrence_excluded_by_a_calendar_is_explained(store: Store) -> None:
    await put(store, schedule(Cron("0 9 * * *").on(Calendar.of("KR")), timezone="Asia/Seoul"))
    independence = datetime(2027, 3, 1, tzinfo=UTC)  # 09:00 in Seoul, a holiday
    found = await ask(store, (independence + timedelta(days=5) - T0) / timedelta(minutes=1))
    assert_explains(found, "not an occurrence", "The calendar", "excludes that day (roll: skip)")


@stored
async def test_an_occurrence_in_a_gap_is_explained(store: Store) -> None:
    await put(store, schedule(Cron("30 2 * * *"), timezone="America/New_York"))
    gap = datetime(2027, 3, 14, 7, tzinfo=UTC)
    found = await ask(store, (gap - T0) / timedelta(minutes=1))
    assert found.outcome == "due"
    assert_explains(found, "skips its local time on that day", "It is due in 12 d")


@stored
async def test_a_pending_occurrence_is_explained_with_its_hold(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.QUEUE))
    await fire(store, after(minutes=1))
    await fire(store, after(minutes=2))
    assert_explains(await ask(store, 2), "waits for other jobs of the schedule")
    assert_explains(await ask(store, 1), "no node has claimed it")
    await execute(store, insert(queues).values(name="default", paused=True, pause_reason="a move"))
    assert_explains(await ask(store, 1), "the queue default is paused, because: a move")
    found = await ask(store, 9)
    assert found.outcome == "due"
    assert_explains(found, "not decided yet, 51 min 0 s late")


@stored
async def test_a_failed_occurrence_is_explained_with_its_error(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await end(store, ending(attempt, JobState.FAILED, after(minutes=1), error="the disk is full"))
    assert len(await execute(store, select(finished))) == 1
    assert_explains(await ask(store, 1), "It failed at", "the disk is full")
