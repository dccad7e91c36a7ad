"""Problems for alerts: failed jobs, missed occurrences and errored schedules."""

from __future__ import annotations

from sqlalchemy import insert

from timebell.features import FEATURES
from timebell.features.campaigns.store.tables import campaigns
from timebell.ids import new_id
from timebell.store.cluster.problems import ObjectProblem, list_problems

from .helpers import T0, JobState, Store, after, end, ending, put, schedule, started, stored


async def read(store: Store, **later: float) -> list[ObjectProblem]:
    return await store.run(list_problems, after(**later), FEATURES)


async def fail(store: Store, topic: str, error: str, minute: float, **fields: object) -> str:
    attempt = await started(store, topic=topic, **fields)
    await end(store, ending(attempt, JobState.FAILED, at=after(minutes=minute), error=error, code="NO"))
    return attempt.id


@stored
async def test_an_empty_store_has_no_problems(store: Store) -> None:
    assert await read(store) == []


@stored
async def test_failures_are_grouped_by_topic_with_the_error_of_the_last_one(store: Store) -> None:
    await fail(store, "mail", "the newest", 9)
    await fail(store, "mail", "an older one", 3)  # a newer job that failed earlier
    single = await fail(store, "ai", "no model", 5)
    mail, ai = await read(store, hours=1)
    assert (mail.code, mail.events, mail.path) == ("JOB_FAILED", 2, "/ui/dead-letters?topic=mail")
    assert mail.text == "2 jobs of mail failed permanently within a day. Last error: the newest"
    assert (ai.events, ai.path) == (1, f"/ui/jobs/{single}")
    (after_a_day,) = await read(store, days=1, minutes=6)
    assert (after_a_day.events, after_a_day.label) == (1, "mail")


@stored
async def test_a_failed_schedule_is_a_problem_until_it_succeeds(store: Store) -> None:
    await put(store, made := schedule(name="nightly"))
    await fail(store, "report", "no disk", 1, schedule_id=made.id)
    (problem,) = await read(store, minutes=2)
    assert (problem.label, problem.events) == ("nightly", 1)
    attempt = await started(store, topic="report", schedule_id=made.id, scheduled_at=after(minutes=10))
    await end(store, ending(attempt, at=after(minutes=11)))
    assert await read(store, minutes=12) == []


@stored
async def test_an_errored_schedule_is_a_problem(store: Store) -> None:
    await put(store, schedule(name="broken", error="cannot be read"))
    (problem,) = await read(store)
    assert (problem.code, problem.text) == ("SCHEDULE_ERRORED", "broken cannot fire: cannot be read")


@stored
async def test_pages_of_problems_select_the_tenant(store: Store) -> None:
    await fail(store, "mail", "no", 1, tenant_id="acme/eu")
    await fail(store, "mail", "no", 2, tenant_id="acme/eu")
    (problem,) = await read(store, minutes=3)
    assert problem.path == "/ui/dead-letters?topic=mail&tenant=acme%2Feu"


@stored
async def test_a_failed_campaign_is_a_problem_for_a_day(store: Store) -> None:
    fields = {
        "tenant_id": "default",
        "spec": "{}",
        "send_at": T0,
        "timezone": "UTC",
        "created_at": T0,
        "updated_at": T0,
    }
    ended = {"refused": ("failed", "all refused"), "half": ("partly_sent", None), "sent": ("completed", None)}
    rows = [
        {"id": new_id(T0), "name": name, "state": state, "reason": reason, "ended_at": after(hours=1)} | fields
        for name, (state, reason) in ended.items()
    ]
    await store.run(lambda tx: tx.execute(insert(campaigns), rows))
    problems = {problem.label: problem for problem in await read(store, hours=2)}
    assert problems.keys() == {"refused", "half"}
    assert problems["refused"].text == "The campaign refused failed: all refused"
    assert problems["half"].path == f"/ui/campaigns/{rows[1]['id']}"
    assert await read(store, hours=26) == []
