"""A job due at a time happens then, once; with retries, timeouts, priorities, limits, and all it leaves behind."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from datetime import UTC, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import create_engine

from timebell import Arrived, Cancel, JobSpec, Retry, Snooze
from timebell.client.created import shown
from timebell.errors import Conflict, NotFound, StoreInUse
from timebell.model.job import JobState

from .world import START, Log, World, after, engine, jobs, offset, raises, virtual

FAST = Retry(attempts=3, backoff="fixed", delay=10, jitter=0)


@virtual
async def test_a_job_runs_at_its_instant_and_is_completed(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    job = await app.schedule_at(
        "a", after(seconds=90.25), payload={"n": 0}, owner_id="o", correlation_id="c", metadata={"m": [1]}
    )
    async with engine(app):
        await world.until(after(seconds=90.2))
        assert log.events == []
        await world.advance(seconds=1)
    (event,) = log.events
    assert (event.topic, event.payload, event.timezone) == ("a", {"n": 0}, "UTC")
    assert event.metadata == {"m": [1], "owner_id": "o", "correlation_id": "c"}
    assert (event.scheduled_at, event.fired_at, event.late_by) == (
        after(seconds=90.25),
        after(seconds=90.25),
        timedelta(0),
    )
    assert (event.job_id, event.occurrence_key, event.schedule_id, event.attempt) == (job.id, job.id, None, 1)
    assert event.upcoming == []
    done = await app.get(job.id)
    assert (done.state, done.tries, done.attempt, done.attempts) == (JobState.COMPLETED, 1, 1, [])
    assert (done.started_at, done.finished_at) == (after(seconds=90.25), after(seconds=90.25))


@virtual
async def test_a_job_without_a_time_runs_now(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    async with engine(app):
        await world.advance(seconds=7.5)
        await app.schedule_at("a")
        await world.advance(seconds=0.01)
    assert log.fired == [pytest.approx(7.5, abs=0.005)]


@virtual
async def test_a_job_made_while_the_engine_sleeps_for_a_later_one_is_on_time(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    await app.schedule_at("a", after(seconds=60))
    async with engine(app, poll=1000.0, heartbeat=1000.0):
        await world.advance(seconds=10)
        await app.schedule_at("a", after(seconds=10.5))
        await world.advance(seconds=60)
    assert log.fired == [10.5, 60]


@virtual
async def test_a_job_that_another_process_makes_is_found_within_a_second(world: World) -> None:
    app, log, other = world.app(), Log(), world.app()
    app.on("a")(log)
    async with engine(app):
        await world.advance(seconds=2.5)
        await other.schedule_at("a")
        await world.advance(seconds=2)
    (event,) = log.events
    assert event.late_by <= timedelta(seconds=1)


@virtual
async def test_S0_F1_jobs_due_while_no_engine_ran_run_when_one_starts(world: World) -> None:
    client = world.app()
    await client.schedule_many([JobSpec(topic="a", run_at=after(minutes=n)) for n in range(1, 6)])
    await world.advance(hours=30)
    app, log = world.app(), Log()
    app.on("a")(log)
    async with engine(app):
        await world.advance(seconds=1)
    assert log.scheduled == [60.0 * n for n in range(1, 6)]
    assert all(event.late_by >= timedelta(hours=29) for event in log.events)


@virtual
async def test_what_a_handler_returns_is_kept_with_the_job(world: World) -> None:
    app = world.app()
    app.on("a")(Log(lambda _: {"sent": 3, "to": ["ü"]}))
    app.on("b")(Log(lambda _: object()))
    kept, lost = await app.schedule_at("a"), await app.schedule_at("b")
    async with engine(app):
        await world.advance(seconds=1)
    assert (await app.get(kept.id)).result == {"sent": 3, "to": ["ü"]}
    done = await app.get(lost.id)
    assert (done.state, done.result) == (JobState.COMPLETED, None)
    assert done.reason is not None
    assert "result" in done.reason


@virtual
async def test_plain_functions_run_in_threads_beside_each_other(world: World) -> None:
    app, both = world.app(), threading.Barrier(2)
    names: list[str] = []

    @app.on("a")
    def plain(_: Arrived) -> str:
        both.wait(20)
        names.append(threading.current_thread().name)
        return "fine"

    made = await app.schedule_many([JobSpec(topic="a"), JobSpec(topic="a")])
    async with engine(app):
        await world.advance(seconds=1)
    assert [(await app.get(job.id)).result for job in made] == ["fine", "fine"]
    assert threading.main_thread().name not in names


# Retries.


@virtual
async def test_S1_F8_attempts_are_tries_and_the_gaps_are_the_backoff(world: World) -> None:
    app, log = world.app(), Log(raises(ValueError("no")))
    app.on("a")(log)
    job = await app.schedule_at("a", retry=FAST)
    async with engine(app):
        await world.advance(minutes=5)
    assert log.fired == [0, 10, 20]
    assert [event.attempt for event in log.events] == [1, 2, 3]
    dead = await app.get(job.id)
    assert (dead.state, dead.tries, dead.attempt) == (JobState.FAILED, 3, 3)


@virtual
async def test_by_default_there_are_four_tries_with_exponential_pauses_and_a_little_jitter(world: World) -> None:
    app, log = world.app(), Log(raises(ValueError("no")))
    app.on("a")(log)
    await app.schedule_at("a")
    async with engine(app):
        await world.advance(minutes=5)
    gaps = [later - earlier for earlier, later in zip(log.fired, log.fired[1:], strict=False)]
    assert len(gaps) == 3
    for gap, base in zip(gaps, (5, 10, 20), strict=True):
        assert base <= gap < base * 1.1


@virtual
async def test_linear_backoff_grows_by_its_delay_up_to_its_longest(world: World) -> None:
    app, log = world.app(), Log(raises(ValueError("no")))
    app.on("a", retry=Retry(attempts=5, backoff="linear", delay=10, max_delay=25, jitter=0))(log)
    await app.schedule_at("a")
    async with engine(app):
        await world.advance(minutes=5)
    assert log.fired == [0, 10, 30, 55, 80]


@virtual
async def test_a_dead_letter_lists_its_attempts(world: World) -> None:
    app = world.app()
    errors = iter([ValueError("first"), KeyError("second"), ZeroDivisionError("third")])

    def fail(_: Arrived) -> None:
        raise next(errors)

    app.on("a")(Log(fail))
    job = await app.schedule_at("a", retry=FAST)
    async with engine(app):
        await world.advance(minutes=1)
    (dead,) = await app.list(status="failure")
    assert dead.id == job.id
    assert [(one["attempt"], one["code"]) for one in dead.attempts] == [
        (1, "ValueError"), (2, "KeyError"), (3, "ZeroDivisionError"),
    ]  # fmt: skip
    assert [one["startedAt"] for one in dead.attempts] == [after(seconds=n).isoformat() for n in (0, 10, 20)]
    assert "first" in dead.attempts[0]["error"]
    assert dead.error is not None
    assert "third" in dead.error


@virtual
async def test_a_job_that_succeeds_at_last_is_completed_and_remembers(world: World) -> None:
    app = world.app()

    def twice(event: Arrived) -> str:
        if event.attempt < 3:
            raise ValueError("not yet")
        return "done"

    log = Log(twice)
    app.on("a")(log)
    job = await app.schedule_at("a", retry=FAST)
    async with engine(app):
        await world.advance(minutes=1)
    done = await app.get(job.id)
    assert (done.state, done.result, done.tries, len(done.attempts)) == (JobState.COMPLETED, "done", 3, 2)
    assert len({event.occurrence_key for event in log.events}) == 1


@virtual
async def test_the_jobs_own_retry_wins_over_its_handlers_and_that_over_the_default(world: World) -> None:
    app, mine, default = world.app(), Log(raises(ValueError())), Log(raises(ValueError()))
    app.on("mine", retry=Retry(attempts=2, delay=1))(mine)
    app.on("default")(default)
    await app.schedule_at("mine", payload="handler's")
    await app.schedule_at("mine", payload="own", retry={"attempts": 1})
    await app.schedule_at("default")
    async with engine(app):
        await world.advance(minutes=5)
    assert sorted(mine.payloads) == ["handler's", "handler's", "own"]
    assert len(default.events) == 4


@pytest.mark.parametrize(
    "error",
    [
        ValueError("\ud800 lone"),
        ValueError("a\x00b"),
        ValueError("long " * 10_000),
        type("A" * 300, (Exception,), {})("a long name"),
        type("Ошибка", (Exception,), {})("ü"),
        asyncio.CancelledError(),
        TimeoutError("mine"),
        type("Mute", (Exception,), {"__str__": lambda _: 1 / 0})(),
    ],
    ids=["surrogate", "nul", "long", "long name", "unicode name", "cancelled", "timeout", "mute"],
)
@virtual
async def test_whatever_a_handler_raises_is_a_failed_attempt(world: World, error: BaseException) -> None:
    app, log, fine = world.app(), Log(raises(error)), Log()
    app.on("a")(log)
    app.on("b")(fine)
    bad = await app.schedule_at("a", retry=FAST)
    good = await app.schedule_at("b")
    async with engine(app):
        await world.advance(minutes=2)
    assert log.fired == [0, 10, 20]
    assert (await app.get(bad.id)).state is JobState.FAILED
    assert len((await app.get(bad.id)).attempts) == 3
    assert (await app.get(good.id)).state is JobState.COMPLETED


# Timeouts.


@virtual
async def test_an_attempt_is_stopped_at_its_timeout_and_tried_again(world: World) -> None:
    app, stopped = world.app(), []

    async def hang(_: Arrived) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.append(offset(world.clock.now()))

    app.on("a")(Log(hang))
    job = await app.schedule_at("a", timeout=7, retry=Retry(attempts=2, backoff="fixed", delay=10, jitter=0))
    async with engine(app):
        await world.advance(minutes=2)
    dead = await app.get(job.id)
    assert stopped == [7, 24]
    assert (dead.state, [one["code"] for one in dead.attempts]) == (JobState.FAILED, ["TIMEOUT", "TIMEOUT"])


@virtual
async def test_the_timeout_is_the_jobs_own_or_its_handlers_or_a_minute(world: World) -> None:
    app, stopped = world.app(), {}

    def hang(name: str) -> Log:
        async def act(event: Arrived) -> None:
            try:
                await asyncio.sleep(10_000)
            finally:
                stopped[name, event.payload] = offset(world.clock.now())

        return Log(act)

    app.on("mine", timeout=5)(hang("mine"))
    app.on("default")(hang("default"))
    once = {"retry": {"attempts": 1}}
    await app.schedule_at("mine", timeout=2, payload="own", **once)
    await app.schedule_at("mine", payload="handler's", **once)
    await app.schedule_at("default", payload="none", **once)
    async with engine(app):
        await world.advance(minutes=2)
    assert stopped == {("mine", "own"): 2, ("mine", "handler's"): 5, ("default", "none"): 60}


@virtual
async def test_work_longer_than_the_lease_keeps_its_lease(world: World) -> None:
    app = world.app()
    log = Log(lambda _: asyncio.sleep(55, "slow"))
    app.on("a")(log)
    job = await app.schedule_at("a")
    async with engine(app):
        await world.advance(minutes=2)
    assert (log.fired, (await app.get(job.id)).result) == ([0], "slow")


@virtual
async def test_an_attempt_that_begins_while_the_end_of_the_last_one_is_written_keeps_its_lease(world: World) -> None:
    app = world.app()

    async def second_time(event: Arrived) -> None:
        if event.attempt == 1:
            raise ValueError
        await asyncio.sleep(55)

    log = Log(second_time)
    app.on("a")(log)
    async with engine(app) as service:
        write = service.completer.write

        async def slowly(batch: Any) -> Any:  # as where much has ended at once, and this is not the last of it
            locked = await write(batch)
            await asyncio.sleep(1)
            return locked

        service.completer.write = slowly  # type: ignore[method-assign]
        job = await app.schedule_at("a", retry=Retry(attempts=5, backoff="fixed", delay=0, jitter=0))
        await world.advance(minutes=2)
    assert [event.attempt for event in log.events] == [1, 2]
    assert (await app.get(job.id)).state is JobState.COMPLETED


# Snooze and Cancel.


@virtual
async def test_a_snooze_runs_later_and_uses_up_no_try(world: World) -> None:
    app = world.app()

    def thrice(event: Arrived) -> str:
        if event.attempt <= 3:
            raise Snooze(timedelta(minutes=event.attempt))
        return "now"

    log = Log(thrice)
    app.on("a")(log)
    job = await app.schedule_at("a", retry=Retry(attempts=1))
    async with engine(app):
        await world.advance(minutes=10)
    assert log.fired == [0, 60, 180, 360]
    done = await app.get(job.id)
    assert (done.state, done.result, done.tries, done.attempts) == (JobState.COMPLETED, "now", 1, [])


@pytest.mark.parametrize("reason", ["", "no longer wanted", "x" * 5000, "nul \x00", "lone \ud800"])
@virtual
async def test_a_handler_can_end_its_job_as_cancelled(world: World, reason: str) -> None:
    app, log = world.app(), Log(raises(Cancel(reason)))
    app.on("a")(log)
    job = await app.schedule_at("a")
    async with engine(app):
        await world.advance(minutes=5)
    done = await app.get(job.id)
    assert (len(log.events), done.state) == (1, JobState.CANCELLED)
    if reason == "no longer wanted":
        assert done.reason == reason


# Cancelling from outside.


@virtual
async def test_a_cancelled_job_does_not_run(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    job = await app.schedule_at("a", after(seconds=30))
    async with engine(app):
        assert [(await app.cancel(job.id)).outcome for _ in range(2)] == ["prevented", "prevented"]
        await world.advance(minutes=1)
    assert log.events == []


@virtual
async def test_a_job_cancelled_in_flight_is_not_tried_again(world: World) -> None:
    app = world.app()

    async def fail_slowly(_: Arrived) -> None:
        await asyncio.sleep(10)
        raise ValueError

    log = Log(fail_slowly)
    app.on("a")(log)
    job = await app.schedule_at("a")
    async with engine(app):
        await world.advance(seconds=5)
        assert (await app.cancel(job.id)).outcome == "in_flight"
        await world.advance(minutes=5)
        assert (await app.cancel(job.id)).outcome == "in_flight"
    assert (len(log.events), (await app.get(job.id)).state) == (1, JobState.CANCELLED)


@virtual
async def test_a_job_cancelled_in_flight_that_succeeds_is_completed(world: World) -> None:
    app = world.app()
    app.on("a")(Log(lambda _: asyncio.sleep(10, "done")))
    job = await app.schedule_at("a")
    async with engine(app):
        await world.advance(seconds=5)
        await app.cancel(job.id)
        await world.advance(seconds=10)
    assert (await app.get(job.id)).state is JobState.COMPLETED


# Priorities, queues.


@virtual
async def test_the_most_urgent_job_runs_first_and_within_a_priority_the_oldest(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    specs = [(5, 1), (0, 3), (-3, 4), (0, 2), (5, 0)]
    await app.schedule_many([JobSpec(topic="a", run_at=after(seconds=s), priority=p, payload=[p, s]) for p, s in specs])
    await world.advance(seconds=10)
    async with engine(app, slots=1):
        await world.advance(seconds=10)
    assert log.payloads == [[-3, 4], [0, 2], [0, 3], [5, 0], [5, 1]]


@virtual
async def test_a_queue_runs_no_more_at_once_than_it_may(world: World) -> None:
    app, now_running, most = world.app(), 0, 0

    async def count(_: Arrived) -> None:
        nonlocal now_running, most
        now_running += 1
        most = max(most, now_running)
        await asyncio.sleep(10)
        now_running -= 1

    log = Log(count)
    app.on("a")(log)
    app.queue("narrow", concurrency=2)
    await app.schedule_many([JobSpec(topic="a", queue="narrow") for _ in range(6)])
    async with engine(app):
        await world.advance(minutes=1)
    assert (most, len(log.events)) == (2, 6)
    assert max(log.fired) < 22  # three rounds of ten seconds, hardly anything lost between them


@virtual
async def test_no_more_attempts_run_at_once_than_there_are_slots(world: World) -> None:
    app, log = world.app(), Log(lambda _: asyncio.sleep(10))
    app.on("a")(log)
    await app.schedule_many([JobSpec(topic="a") for _ in range(9)])
    async with engine(app, slots=3):
        await world.advance(minutes=1)
    assert [round(at) for at in log.fired] == [0] * 3 + [10] * 3 + [20] * 3


@virtual
async def test_a_paused_queue_waits_while_others_go_on(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    await app.pause_queue("q", "maintenance")
    await app.schedule_at("a", queue="q", payload="paused")
    await app.schedule_at("a", payload="free")
    async with engine(app):
        await world.advance(seconds=30)
        assert log.payloads == ["free"]
        await app.resume_queue("q")
        await world.advance(seconds=1)
    assert log.payloads == ["free", "paused"]


# Too late.


@virtual
async def test_a_job_that_never_started_in_time_is_skipped_as_expired(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    late = await app.schedule_at("a", expires_after=60)
    in_time = await app.schedule_at("a", after(seconds=600), expires_after=60)
    await world.advance(seconds=60)
    async with engine(app):
        await world.advance(minutes=15)
    skipped = await app.get(late.id)
    assert (skipped.state, skipped.reason, skipped.tries) == (JobState.SKIPPED, "expired", 0)
    assert (log.fired, (await app.get(in_time.id)).state) == ([600], JobState.COMPLETED)


@virtual
async def test_a_job_that_was_tried_and_ran_out_of_time_is_a_dead_letter(world: World) -> None:
    app, log = world.app(), Log(raises(ValueError("no")))
    app.on("a")(log)
    job = await app.schedule_at("a", expires_after=25, retry=Retry(attempts=9, backoff="fixed", delay=10, jitter=0))
    async with engine(app):
        await world.advance(minutes=2)
    dead = await app.get(job.id)
    assert log.fired == [0, 10, 20]
    assert (dead.state, dead.reason, dead.tries) == (JobState.FAILED, "expired", 3)


@virtual
async def test_a_job_that_snoozed_past_its_time_was_tried_and_is_a_dead_letter(world: World) -> None:
    app, log = world.app(), Log(raises(Snooze(60)))
    app.on("a")(log)
    job = await app.schedule_at("a", expires_after=30)
    async with engine(app):
        await world.advance(minutes=2)
    assert (len(log.events), (await app.get(job.id)).state) == (1, JobState.FAILED)


# Who hears.


@virtual
async def test_S2_F7_a_job_nobody_hears_waits_and_runs_when_a_listener_appears(world: World) -> None:
    deaf = world.app()
    deaf.on("other")(Log())
    job = await deaf.schedule_at("a")
    async with engine(deaf) as service:
        await world.advance(seconds=30)
        held = await deaf.get(job.id)
        assert (held.state, held.hold, held.attempt) == (JobState.PENDING, "unheard", 0)
        assert service.node.counters.unheard == 1
    app, log = world.app(), Log()
    app.on("a")(log)
    async with engine(app):
        await world.advance(seconds=30)
    assert len(log.events) == 1
    assert (await app.get(job.id)).state is JobState.COMPLETED


@virtual
async def test_a_wildcard_observes_every_firing_and_makes_no_topic_heard(world: World) -> None:
    app, heard, everything = world.app(), Log(), Log()
    app.on("a.b")(heard)
    app.on("*")(everything)
    await app.schedule_at("a.b")
    deaf = await app.schedule_at("c")
    async with engine(app):
        await world.advance(seconds=30)
    assert ([event.topic for event in everything.events], len(heard.events)) == (["a.b"], 1)
    assert (await app.get(deaf.id)).hold == "unheard"


@virtual
async def test_a_wildcard_that_handles_hears_everything(world: World) -> None:
    app, everything = world.app(), Log()
    app.on("*", handles=True)(everything)
    await app.schedule_at("c")
    async with engine(app):
        await world.advance(seconds=1)
    assert [event.topic for event in everything.events] == ["c"]


@virtual
async def test_a_prefix_hears_all_below_it_and_not_its_own_name(world: World) -> None:
    app, log = world.app(), Log()
    app.on("billing.*")(log)
    for topic in ("billing.due", "billing.due.soon", "billing", "billings.due"):
        await app.schedule_at(topic)
    async with engine(app):
        await world.advance(seconds=1)
    assert sorted(event.topic for event in log.events) == ["billing.due", "billing.due.soon"]


@virtual
async def test_all_matching_handlers_run_and_any_failure_fails_the_attempt(world: World) -> None:
    app, exact, prefix = world.app(), Log(lambda _: "exact"), Log()
    flaky = Log(lambda event: raises(ValueError("observer"))(event) if event.attempt == 1 else "observed")
    app.on("*")(flaky)
    app.on("a.*")(prefix)
    app.on("a.b")(exact)
    job = await app.schedule_at("a.b", retry=FAST)
    async with engine(app):
        await world.advance(minutes=1)
    assert [len(log.events) for log in (exact, prefix, flaky)] == [2, 2, 2]
    done = await app.get(job.id)
    assert (done.state, done.result, len(done.attempts)) == (JobState.COMPLETED, "exact", 1)


@virtual
async def test_the_most_specific_handler_supplies_the_policy(world: World) -> None:
    app, exact, wide = world.app(), Log(raises(ValueError())), Log()
    app.on("*", retry=Retry(attempts=9))(wide)
    app.on("a.*", retry=Retry(attempts=8))(Log())
    app.on("a.b", retry=Retry(attempts=1))(exact)
    await app.schedule_at("a.b")
    async with engine(app):
        await world.advance(minutes=1)
    assert len(exact.events) == 1


# Requests that come twice.


@virtual
async def test_the_same_request_again_after_the_job_is_done_makes_no_second_one(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    job = await app.schedule_at("a", client_request_id="r-1")
    assert job.client_request_id == "r-1"
    async with engine(app):
        await world.advance(minutes=1)
        with pytest.raises(Conflict) as refused:
            await app.schedule_at("a", client_request_id="r-1")
        same = await app.schedule_at("a", client_request_id="r-1", on_conflict="keep")
        await world.advance(minutes=1)
    assert (refused.value.code, refused.value.existing) == ("SCHEDULE_CLIENT_REQUEST_ID_IN_USE", job.id)
    assert (same.id, same.state, len(log.events)) == (job.id, JobState.COMPLETED, 1)


@virtual
async def test_a_keyed_job_is_kept_or_replaced(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    first = await app.schedule_at("a", after(seconds=10), key="k", payload=1)
    kept = await app.schedule_at("a", after(seconds=20), key="k", payload=2, on_conflict="keep")
    new = await app.schedule_at("a", after(seconds=30), key="k", payload=3, on_conflict="replace")
    assert (kept.id, kept.payload, new.replaces) == (first.id, 1, first.id)
    assert (await app.get(first.id)).replaced_by == new.id
    async with engine(app):
        await world.advance(minutes=1)
    assert (log.payloads, log.fired) == ([3], [30])


# The life of an engine.


@virtual
async def test_a_drain_lets_what_runs_finish_and_claims_nothing_more(world: World) -> None:
    app, log = world.app(), Log(lambda _: asyncio.sleep(10, "finished"))
    app.on("a")(log)
    running = await app.schedule_at("a")
    later = await app.schedule_at("a", after(seconds=3))
    async with engine(app):
        await world.advance(seconds=2)
    assert offset(world.clock.now()) < 12
    assert ((await app.get(running.id)).state, (await app.get(running.id)).result) == (JobState.COMPLETED, "finished")
    assert ((await app.get(later.id)).state, (await app.get(later.id)).attempt) == (JobState.PENDING, 0)


@virtual
async def test_what_cannot_finish_in_the_drain_is_given_back_without_using_a_try(world: World) -> None:
    app, log = world.app(), Log(lambda event: asyncio.sleep(50 if event.attempt == 1 else 1, event.attempt))
    app.on("a")(log)
    job = await app.schedule_at("a", retry=Retry(attempts=1))
    async with engine(app, drain=5.0):
        await world.advance(seconds=2)
    back = await app.get(job.id)
    assert (back.state, back.tries, back.attempt, back.attempts) == (JobState.PENDING, 0, 1, [])
    second = world.app()
    second.on("a")(log)
    async with engine(second):
        await world.advance(seconds=5)
    done = await second.get(job.id)
    assert (done.state, done.tries, done.result) == (JobState.COMPLETED, 1, 2)


@virtual
async def test_the_same_app_can_run_again(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    for number in range(3):
        await app.schedule_at("a", payload=number)
        async with engine(app):
            await world.advance(seconds=5)
            await app.schedule_at("a", payload=number + 10)
            await world.advance(seconds=5)
    assert log.payloads == [0, 10, 1, 11, 2, 12]


@virtual
async def test_an_app_can_be_closed_and_used_again(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    await app.schedule_at("a")
    await app.close()
    async with engine(app):
        await world.advance(seconds=5)
    assert len(log.events) == 1


@virtual
async def test_a_second_engine_on_the_same_file_is_told_so_and_harms_nothing(world: World) -> None:
    app, other, log = world.app(), world.app(), Log()
    app.on("a")(log)
    async with engine(app):
        with pytest.raises(StoreInUse) as refused:
            async with engine(other):
                pass
        assert refused.value.code == "SQLITE_IN_USE"
        await other.schedule_at("a")
        await world.advance(seconds=5)
    assert len(log.events) == 1
    async with engine(other):
        pass


@virtual
async def test_S1_F6_what_a_dead_engine_left_running_is_tried_again_at_once(world: World) -> None:
    app = world.app()
    app.on("a")(Log(lambda _: asyncio.sleep(1000)))
    job = await app.schedule_at("a")
    async with engine(app, drain=0.0) as service:
        await world.advance(seconds=1)
        service.failing["completer"] = None  # type: ignore[assignment] # dies without giving anything back
        service.node.held[job.id].task.cancel()  # type: ignore[union-attr]
        service.completer.put = lambda _: None  # type: ignore[method-assign]
        assert (await app.get(job.id)).state is JobState.RUNNING
        service.failing.clear()
        service.node.held.clear()
    second, log = world.app(), Log()
    second.on("a")(log)
    async with engine(second):
        await world.advance(seconds=1)
    (event,) = log.events
    assert (event.attempt, event.occurrence_key) == (2, job.id)
    done = await second.get(job.id)
    assert (done.state, done.tries, [one["code"] for one in done.attempts]) == (JobState.COMPLETED, 2, ["LEASE_LOST"])


@virtual
async def test_until_idle_everything_due_is_done(world: World) -> None:
    app, log = world.app(), Log(lambda _: asyncio.sleep(3))
    app.on("a")(log)
    await app.schedule_many([JobSpec(topic="a") for _ in range(3)])
    later = await app.schedule_at("a", after(hours=1))
    async with engine(app) as service:
        await service.idle()
        assert {job.state for job in await jobs(app)} == {JobState.COMPLETED, JobState.PENDING}
    assert (len(log.events), (await app.get(later.id)).state) == (3, JobState.PENDING)


@virtual
async def test_an_engine_that_is_just_claiming_is_not_idle(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    claimed, go_on = asyncio.Event(), asyncio.Event()
    async with engine(app) as service:
        learn = service.worker._learn

        async def slowly(attempts: Any) -> None:
            if attempts:  # they run, as far as the store knows, and nobody here holds them yet
                claimed.set()
                await go_on.wait()
            await learn(attempts)

        service.worker._learn = slowly  # type: ignore[method-assign]
        job = await app.schedule_at("a")
        await claimed.wait()
        idle = asyncio.create_task(service.idle())
        await world.advance(seconds=1)
        assert not idle.done()
        go_on.set()
        await idle
        assert (await app.get(job.id)).state == JobState.COMPLETED


def test_an_app_is_made_outside_of_any_event_loop(sqlite_url: str) -> None:
    from timebell import Timebell

    app = Timebell(sqlite_url, timezone="UTC")
    ran: list[Any] = []

    @app.on("a")
    async def handler(event: Arrived) -> None:
        ran.append(event.payload)

    @app.schedule("s", cron="0 0 1 1 *")
    async def yearly(_: Arrived) -> None: ...

    async def body(payload: int) -> None:
        await app.schedule_at("a", payload=payload)
        async with app.running() as service:
            await service.idle()
        await app.close()

    asyncio.run(body(1))
    asyncio.run(body(2))
    assert ran == [1, 2]
    assert START.tzinfo is UTC


@pytest.mark.parametrize(
    "error", [StopIteration(), SystemExit(1), ValueError("\ud800")], ids=lambda e: type(e).__name__
)
@virtual
async def test_whatever_a_plain_function_raises_is_a_failed_attempt(world: World, error: BaseException) -> None:
    app = world.app()

    @app.on("a")
    def plain(_: Arrived) -> None:
        raise error

    job = await app.schedule_at("a", retry=Retry(attempts=2, delay=1))
    async with engine(app):
        await world.advance(minutes=1)
    dead = await app.get(job.id)
    assert (dead.state, len(dead.attempts)) == (JobState.FAILED, 2)


@virtual
async def test_S2_F1_a_job_made_in_a_callers_transaction_runs_if_and_only_if_that_commits(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    callers = create_engine(world.url)
    async with engine(app):
        with callers.connect() as connection:
            ghost = await app.schedule_at("a", payload="ghost", connection=connection)
            connection.rollback()
            await world.advance(seconds=5)
            await app.schedule_at("a", payload="real", connection=connection)
            connection.commit()
        await world.advance(seconds=2)
    callers.dispose()
    assert log.payloads == ["real"]
    with pytest.raises(NotFound):
        await app.get(ghost.id)


@virtual
async def test_a_thousand_jobs_of_one_instant_all_run_at_it(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    await app.schedule_many([JobSpec(topic="a", run_at=after(seconds=30), payload=n) for n in range(1000)])
    async with engine(app):
        await world.advance(minutes=1)
    assert sorted(log.payloads) == list(range(1000))
    assert set(log.fired) == {30}


@virtual
async def test_each_of_many_is_what_it_would_be_alone(world: World) -> None:
    app, at = world.app(), after(hours=1)
    app.on("versioned", version=2, upgrade={1: lambda payload: payload})(Log())
    labels, retry = {"m": 1}, Retry(attempts=2)
    specs = [
        JobSpec(topic="a", run_at=at, payload={"n": 1}),
        JobSpec(topic="a", run_at=after(hours=2), payload=[2]),
        JobSpec(topic="a"),
        JobSpec(topic="a", run_at="2027-03-14T02:30:00", timezone="America/New_York"),
        JobSpec(topic="a", run_at=at, timezone="Asia/Seoul"),
        *(JobSpec(topic="a", run_at=at, metadata=labels, owner_id="o") for _ in range(2)),
        *(JobSpec(topic="a", run_at=at, priority=priority) for priority in (1, 1, 2)),
        *(JobSpec(topic="b", run_at=at, retry=retry, timeout=5, queue="q", group="g") for _ in range(2)),
        *(JobSpec(topic="a", run_at=after(hours=n), expires_after=60) for n in (1, 2)),
        *(JobSpec(topic="a", run_at=at, condition=[{"field": "n", "op": "eq", "value": 1}]) for _ in range(2)),
        *(JobSpec(topic="versioned", run_at=at, payload=n) for n in range(2)),
        *(JobSpec(topic="a", run_at=at, tenant_id=tenant) for tenant in ("t", "t", "u")),
    ]
    seoul = after(hours=3).astimezone(ZoneInfo("Asia/Seoul"))
    specs += [JobSpec(topic="a", run_at=seoul + timedelta(hours=n), payload=n) for n in range(2)]
    for many in (specs, *([one, dataclasses.replace(one, payload={"twin": "é"})] for one in specs)):
        made = await app.schedule_many(many)
        now = world.clock.now()
        for spec, job in zip(many, made, strict=True):
            assert job == shown(app.jobs.draft(spec, job.id, now))
            kept = await app.get(job.id)
            assert dataclasses.replace(kept, adjusted=job.adjusted) == job
