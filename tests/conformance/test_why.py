"""What became of one occurrence, and why, on every store: each cause by its sentence."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import delete, insert, select

from timebell.engine.runner import mark
from timebell.ids import new_id
from timebell.model import decide
from timebell.model.job import JobState
from timebell.model.policy import Retry
from timebell.model.why import Why, explain
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
    claim,
    end,
    ending,
    execute,
    fire,
    job_of,
    put,
    schedule,
    stored,
    stored_schedule,
)


async def ask(store: Store, minute: float, now: datetime = T0 + timedelta(hours=1), id_: str | None = None) -> Why:
    id_ = id_ or (await stored_schedule(store)).id
    at = after(minutes=minute)
    return explain(await store.run(occurrence_facts.facts, "default", id_, at), at, now)


def says(found: Why, *parts: str) -> None:
    """Each part is in a sentence of it, in this order."""
    text, at = "\n".join(found.sentences), 0
    for part in parts:
        assert part in text[at:], text
        at = text.index(part, at)


async def steer(store: Store, verb: Any, at: datetime, *args: Any, actor: str = "", action: str = "") -> Any:
    id_ = (await stored_schedule(store)).id
    done = await store.run(verb, "default", id_, *args, job_of, at)
    if actor:
        record = AuditRecord(id=new_id(at), tenant_id="default", at=at, actor=actor, action=action, subject=id_)
        await store.run(audit_log.write, record)
    return done


@stored
async def test_one_that_ran_has_its_attempts_its_node_and_how_long_it_took(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW))
    seen = {"name": "worker-1", "version": "1", "tzdata": "x", "routes": "{}", "started_at": T0, "seen_at": T0}
    seen["routes"] = '{"exact": [], "prefixes": [], "everything": true}'
    await execute(store, insert(nodes).values(id=NODE, **seen))
    await fire(store, after(minutes=1, seconds=2))
    (first,) = await claim(store, after(minutes=1, seconds=3))
    errors = '[{"attempt": 1, "error": "no route to host"}]'
    await store.run(complete.retry, [again(first, after(minutes=2), errors=errors)])
    (second,) = await claim(store, after(minutes=2))
    await end(store, ending(second, at=after(minutes=2, seconds=4), errors=errors))
    found = await ask(store, 1)
    assert (found.occurrence, found.outcome, found.revision, found.jobs) == (True, "completed", 1, [first.id])
    says(
        found, "Revision 1 held then", "became a job", "2.0 s late", "Attempt 1 failed: no route to host",
        "Attempt 2 began", "1 min 0 s late, on node worker-1", "completed", "after 4.0 s",
    )  # fmt: skip


@stored
async def test_none_that_is_none_has_the_nearest_ones(store: Store) -> None:
    await put(store, schedule())
    found = await ask(store, 1.5)
    assert (found.occurrence, found.outcome) == (False, "none")
    assert (found.before, found.after) == (after(minutes=1), after(minutes=2))
    says(found, "It is no occurrence of that revision.", "The nearest ones are 2027-03-01T12:01:00Z and ")


@stored
async def test_before_it_was_made_and_after_it_was_deleted(store: Store) -> None:
    made = await put(store, schedule())
    says(await ask(store, -5), "did not exist then", "made at 2027-03-01T12:00:00Z")
    await steer(store, actions.delete, after(minutes=3))
    says(await ask(store, 9, id_=made.id), "was deleted at 2027-03-01T12:03:00Z")


@stored
async def test_an_edit_took_it_away(store: Store) -> None:
    await put(store, schedule())
    record = AuditRecord(
        id=new_id(T0), tenant_id="default", at=after(minutes=2), actor="alice", action="schedule.update",
        subject=(await stored_schedule(store)).id,
    )  # fmt: skip
    await put(store, schedule(Every("PT30M", T0)), after(minutes=2), replace=True)
    await store.run(audit_log.write, record)
    says(await ask(store, 5), "Revision 2 held then", "by alice (schedule.update)", "no occurrence", "of revision 1")


@stored
async def test_a_pause_and_who_paused(store: Store) -> None:
    await put(store, schedule())
    await steer(store, actions.pause, after(seconds=30), "a bad release", actor="bob", action="schedule.pause")
    says(await ask(store, 2), "not decided yet", "paused since", "by bob", "because: a bad release")
    await steer(store, actions.resume, after(minutes=9), False, actor="carol", action="schedule.resume")
    found = await ask(store, 2)
    assert found.outcome == "paused"
    says(
        found, "skipped (paused)", "was paused then from 2027-03-01T12:00:30Z (by bob) to", "(by carol)",
        "Paused since 2027-03-01T12:00:30Z: a bad release.",
    )  # fmt: skip


@stored
async def test_a_lease_that_ended_and_who_took_the_job_back(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW))
    await fire(store, after(minutes=1))
    (lost,) = await claim(store, after(minutes=1))
    back = after(minutes=1, seconds=20)
    ending = decide.after_failure(
        lost.id, lost.number, lost.tries, Retry(), back, "LEASE_LOST", "It stopped answering."
    )
    await store.run(complete.retry, [mark(lost, ending, NODE)])
    says(
        await ask(store, 1), "Attempt 1 began at 2027-03-01T12:01:00", "its lease was not renewed any more",
        f"node {NODE} took the job back at 2027-03-01T12:01:20",
    )  # fmt: skip


@stored
async def test_an_overlap_and_with_which_job(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    await fire(store, after(minutes=2))
    (running,) = await claim(store, after(minutes=2))
    await end(store, ending(running, at=after(minutes=3)))
    found = await ask(store, 2)
    assert found.outcome == "overlap"
    says(found, f"Job {running.id}", "was not finished then (until 2027-03-01T12:03:00Z)", "overlap is skip")


@stored
async def test_an_outage_and_what_catch_up_made_of_it(store: Store) -> None:
    await put(store, schedule(catch_up=CatchUp.LATEST))
    await fire(store, after(minutes=600, seconds=30))
    found = await ask(store, 30)
    assert found.outcome == "coalesced"
    says(found, "with 598 others", "h", "No node is known", "catch-up is latest")
    (late,) = await claim(store, after(minutes=600, seconds=31))
    await end(store, ending(late, at=after(minutes=600, seconds=31)))
    assert "No attempt ended" not in "".join((await ask(store, 30)).sentences)  # of what was before nothing is known
    early = {"id": new_id(T0), "finished_at": after(minutes=2), "scheduled_at": after(seconds=1)}
    row = dict((await execute(store, select(finished).where(finished.c.id == late.id)))[0]._mapping)
    await execute(store, insert(finished).values(**row | early))
    ended = "No attempt ended between 2027-03-01T12:02:00Z and 2027-03-01T22:00:31Z, for 9 h 58 min."
    says(await ask(store, 30), ended)
    await execute(store, delete(finished))
    assert (await ask(store, 30, after(minutes=700))).outcome == "lost"


@stored
async def test_an_override_and_who_asked_for_it(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.ALLOW))
    gone, moved = (after(minutes=2), None), (after(minutes=3), after(minutes=3, seconds=20))
    await steer(store, overrides.override, T0, "skip", *gone, actor="dora", action="schedule.override")
    await steer(store, overrides.override, after(seconds=30), "move", *moved)
    for minute in (1, 2, 3, 4):
        await fire(store, after(minutes=minute))
    says(await ask(store, 2), "asked to skip it at 2027-03-01T12:00:00Z by dora", "skipped (override)")
    says(await ask(store, 3 + 1 / 3), "from 2027-03-01T12:03:00Z to 2027-03-01T12:03:20Z", "became a job")


@stored
async def test_a_calendar_left_it_out(store: Store) -> None:
    await put(store, schedule(Cron("0 9 * * *").on(Calendar.of("KR")), timezone="Asia/Seoul"))
    independence = datetime(2027, 3, 1, tzinfo=UTC)  # 09:00 in Seoul, a holiday
    found = await ask(store, (independence + timedelta(days=5) - T0) / timedelta(minutes=1))
    says(found, "no occurrence", "The calendar", "leaves that day out (roll: skip)")


@stored
async def test_clocks_jumped_over_it(store: Store) -> None:
    await put(store, schedule(Cron("30 2 * * *"), timezone="America/New_York"))
    gap = datetime(2027, 3, 14, 7, tzinfo=UTC)
    found = await ask(store, (gap - T0) / timedelta(minutes=1))
    assert found.outcome == "due"
    says(found, "does not exist on that day", "It is to come, in 12 d")


@stored
async def test_what_it_waits_for(store: Store) -> None:
    await put(store, schedule(overlap=Overlap.QUEUE))
    await fire(store, after(minutes=1))
    await fire(store, after(minutes=2))
    says(await ask(store, 2), "waits for its turn")
    says(await ask(store, 1), "no node has taken it")
    await execute(store, insert(queues).values(name="default", paused=True, pause_reason="a move"))
    says(await ask(store, 1), "the queue default is paused, because: a move")
    found = await ask(store, 9)
    assert found.outcome == "due"
    says(found, "not decided yet, 51 min 0 s late")


@stored
async def test_a_failure_says_its_error(store: Store) -> None:
    await put(store, schedule())
    await fire(store, after(minutes=1))
    (attempt,) = await claim(store, after(minutes=1))
    await end(store, ending(attempt, JobState.FAILED, after(minutes=1), error="the disk is full"))
    assert len(await execute(store, select(finished))) == 1
    says(await ask(store, 1), "It failed at", "the disk is full")
