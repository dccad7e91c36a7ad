"""One-time jobs: on time and once, with retries, timeouts, priorities, limits, and their recorded results."""

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
from timebell.client.created import job_from_new
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
    assert (done.state, done.attempts_used, done.attempt, done.attempts) == (JobState.COMPLETED, 1, 1, [])
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
async def test_a_job_created_while_the_engine_sleeps_until_a_later_one_is_on_time(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    await app.schedule_at("a", after(seconds=60))
    async with engine(app, poll=1000.0, heartbeat=1000.0):
        await world.advance(seconds=10)
        await app.schedule_at("a", after(seconds=10.5))
        await world.advance(seconds=60)
    assert log.fired == [10.5, 60]


@pytest.mark.heartbeats
@virtual
async def test_a_job_created_by_another_process_is_found_within_a_second(world: World) -> None:
    app, log, other = world.app(), Log(), world.app()
    app.on("a")(log)
    async with engine(app):
        await world.advance(seconds=2.5)
        await other.schedule_at("a")
        await world.advance(seconds=2)
    (event,) = log.events
    assert event.late_by <= timedelta(seconds=1)


@virtual
async def test_jobs_due_while_no_engine_ran_run_when_one_starts(world: World) -> None:
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
async def test_the_return_value_of_a_handler_is_stored_with_the_job(world: World) -> None:
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
async def test_plain_functions_run_in_parallel_threads(world: World) -> None:
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
async def test_failed_attempts_are_retried_with_backoff(world: World) -> None:
    app, log = world.app(), Log(raises(ValueError("no")))
    app.on("a")(log)
    job = await app.schedule_at("a", retry=FAST)
    async with engine(app):
        await world.advance(minutes=5)
    assert log.fired == [0, 10, 20]
    assert [event.attempt for event in log.events] == [1, 2, 3]
    dead = await app.get(job.id)
    assert (dead.state, dead.attempts_used, dead.attempt) == (JobState.FAILED, 3, 3)


@virtual
async def test_the_default_retry_policy_is_four_attempts_with_exponential_backoff_and_jitter(world: World) -> None:
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
async def test_linear_backoff_grows_by_its_delay_up_to_its_maximum(world: World) -> None:
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
async def test_a_job_that_succeeds_after_retries_is_completed_with_its_failed_attempts(world: World) -> None:
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
    assert (done.state, done.result, done.attempts_used, len(done.attempts)) == (JobState.COMPLETED, "done", 3, 2)
    assert len({event.occurrence_key for event in log.events}) == 1


@virtual
async def test_the_retry_policy_of_a_job_overrides_its_handler_and_the_default(world: World) -> None:
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
async def test_any_exception_of_a_handler_is_a_failed_attempt(world: World, error: BaseException) -> None:
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
async def test_an_attempt_is_stopped_at_its_timeout_and_retried(world: World) -> None:
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
async def test_the_timeout_of_a_job_overrides_its_handler_and_the_default(world: World) -> None:
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
async def test_an_attempt_longer_than_its_lease_keeps_the_lease(world: World) -> None:
    app = world.app()
    log = Log(lambda _: asyncio.sleep(55, "slow"))
    app.on("a")(log)
    job = await app.schedule_at("a")
    async with engine(app):
        await world.advance(minutes=2)
    assert (log.fired, (await app.get(job.id)).result) == ([0], "slow")


@virtual
async def test_an_attempt_that_starts_while_the_previous_completion_is_written_keeps_its_lease(world: World) -> None:
    app = world.app()

    async def second_time(event: Arrived) -> None:
        if event.attempt == 1:
            raise ValueError
        await asyncio.sleep(55)

    log = Log(second_time)
    app.on("a")(log)
    async with engine(app) as service:
        write = service.completer.write

        async def slowly(batch: Any) -> Any:  # as in a long queue of completions
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
async def test_a_snooze_delays_the_job_and_uses_no_attempt(world: World) -> None:
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
    assert (done.state, done.result, done.attempts_used) == (JobState.COMPLETED, "now", 1)
    assert [each["code"] for each in done.attempts] == ["POSTPONED"] * 3


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
async def test_a_job_cancelled_in_flight_is_not_retried(world: World) -> None:
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
async def test_a_queue_respects_its_concurrency(world: World) -> None:
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
    assert max(log.fired) < 22  # three rounds of ten seconds, with almost no delay between them


@virtual
async def test_no_more_attempts_run_than_there_are_slots(world: World) -> None:
    app, log = world.app(), Log(lambda _: asyncio.sleep(10))
    app.on("a")(log)
    await app.schedule_many([JobSpec(topic="a") for _ in range(9)])
    async with engine(app, slots=3):
        await world.advance(minutes=1)
    assert [round(at) for at in log.fired] == [0] * 3 + [10] * 3 + [20] * 3


@virtual
async def test_a_paused_queue_does_not_affect_others(world: World) -> None:
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


# Expiry.


@virtual
async def test_a_job_that_did_not_start_before_it_expired_is_skipped(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    late = await app.schedule_at("a", expires_after=60)
    in_time = await app.schedule_at("a", after(seconds=600), expires_after=60)
    await world.advance(seconds=60)
    async with engine(app):
        await world.advance(minutes=15)
    skipped = await app.get(late.id)
    assert (skipped.state, skipped.reason, skipped.attempts_used) == (JobState.SKIPPED, "expired", 0)
    assert (log.fired, (await app.get(in_time.id)).state) == ([600], JobState.COMPLETED)


@virtual
async def test_a_job_that_expires_between_attempts_is_a_dead_letter(world: World) -> None:
    app, log = world.app(), Log(raises(ValueError("no")))
    app.on("a")(log)
    job = await app.schedule_at("a", expires_after=25, retry=Retry(attempts=9, backoff="fixed", delay=10, jitter=0))
    async with engine(app):
        await world.advance(minutes=2)
    dead = await app.get(job.id)
    assert log.fired == [0, 10, 20]
    assert (dead.state, dead.reason, dead.attempts_used) == (JobState.FAILED, "expired", 3)


@virtual
async def test_a_job_that_expires_after_a_snooze_is_a_dead_letter(world: World) -> None:
    app, log = world.app(), Log(raises(Snooze(60)))
    app.on("a")(log)
    job = await app.schedule_at("a", expires_after=30)
    async with engine(app):
        await world.advance(minutes=2)
    assert (len(log.events), (await app.get(job.id)).state) == (1, JobState.FAILED)


# Matching handlers.


@virtual
async def test_an_unhandled_job_waits_and_runs_when_a_handler_appears(world: World) -> None:
    unhandled = world.app()
    unhandled.on("other")(Log())
    job = await unhandled.schedule_at("a")
    async with engine(unhandled) as service:
        await world.advance(seconds=30)
        held = await unhandled.get(job.id)
        assert (held.state, held.hold, held.attempt) == (JobState.PENDING, "unhandled", 0)
        assert service.node.counters.unhandled == 1
    app, log = world.app(), Log()
    app.on("a")(log)
    async with engine(app):
        await world.advance(seconds=30)
    assert len(log.events) == 1
    assert (await app.get(job.id)).state is JobState.COMPLETED


@virtual
async def test_a_wildcard_observer_does_not_make_a_topic_handled(world: World) -> None:
    app, exact, everything = world.app(), Log(), Log()
    app.on("a.b")(exact)
    app.on("*")(everything)
    await app.schedule_at("a.b")
    unhandled = await app.schedule_at("c")
    async with engine(app):
        await world.advance(seconds=30)
    assert ([event.topic for event in everything.events], len(exact.events)) == (["a.b"], 1)
    assert (await app.get(unhandled.id)).hold == "unhandled"


@virtual
async def test_a_wildcard_registered_with_handles_handles_every_topic(world: World) -> None:
    app, everything = world.app(), Log()
    app.on("*", handles=True)(everything)
    await app.schedule_at("c")
    async with engine(app):
        await world.advance(seconds=1)
    assert [event.topic for event in everything.events] == ["c"]


@virtual
async def test_a_prefix_handles_the_topics_below_it_and_not_its_own_name(world: World) -> None:
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


# Repeated requests.


@virtual
async def test_a_repeated_request_after_completion_creates_no_second_job(world: World) -> None:
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


# Life cycle of an engine.


@virtual
async def test_a_drain_finishes_running_jobs_and_claims_no_more(world: World) -> None:
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
async def test_a_job_that_cannot_finish_during_the_drain_is_returned_without_using_an_attempt(world: World) -> None:
    app, log = world.app(), Log(lambda event: asyncio.sleep(50 if event.attempt == 1 else 1, event.attempt))
    app.on("a")(log)
    job = await app.schedule_at("a", retry=Retry(attempts=1))
    async with engine(app, drain=5.0):
        await world.advance(seconds=2)
    back = await app.get(job.id)
    assert (back.state, back.attempts_used, back.attempt) == (JobState.PENDING, 0, 1)
    assert [each["error"] for each in back.attempts] == ["The node stopped during the attempt."]
    second = world.app()
    second.on("a")(log)
    async with engine(second):
        await world.advance(seconds=5)
    done = await second.get(job.id)
    assert (done.state, done.attempts_used, done.result) == (JobState.COMPLETED, 1, 2)


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
async def test_a_second_engine_on_the_same_file_is_refused_without_harm(world: World) -> None:
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
async def test_jobs_left_running_by_a_dead_engine_are_retried_immediately(world: World) -> None:
    app = world.app()
    app.on("a")(Log(lambda _: asyncio.sleep(1000)))
    job = await app.schedule_at("a")
    async with engine(app, drain=0.0) as service:
        await world.advance(seconds=1)
        service.failing_services["completer"] = None  # type: ignore[assignment] # dies without returning its jobs
        service.node.running_attempts[job.id].task.cancel()  # type: ignore[union-attr]
        service.completer.submit = lambda _: None  # type: ignore[method-assign]
        assert (await app.get(job.id)).state is JobState.RUNNING
        service.failing_services.clear()
        service.node.running_attempts.clear()
    second, log = world.app(), Log()
    second.on("a")(log)
    async with engine(second):
        await world.advance(seconds=1)
    (event,) = log.events
    assert (event.attempt, event.occurrence_key) == (2, job.id)
    done = await second.get(job.id)
    assert (done.state, done.attempts_used, [one["code"] for one in done.attempts]) == (
        JobState.COMPLETED,
        2,
        ["LEASE_LOST"],
    )


@virtual
async def test_wait_until_idle_returns_after_all_due_jobs(world: World) -> None:
    app, log = world.app(), Log(lambda _: asyncio.sleep(3))
    app.on("a")(log)
    await app.schedule_many([JobSpec(topic="a") for _ in range(3)])
    later = await app.schedule_at("a", after(hours=1))
    async with engine(app) as service:
        await service.wait_until_idle()
        assert {job.state for job in await jobs(app)} == {JobState.COMPLETED, JobState.PENDING}
    assert (len(log.events), (await app.get(later.id)).state) == (3, JobState.PENDING)


@virtual
async def test_an_engine_with_a_claim_in_progress_is_not_idle(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    claimed, may_continue = asyncio.Event(), asyncio.Event()
    async with engine(app) as service:
        learn = service.worker.lane_claims.cache_revisions

        async def slowly(attempts: Any) -> None:
            if attempts:  # running in the store, but not yet in `running_attempts`
                claimed.set()
                await may_continue.wait()
            await learn(attempts)

        service.worker.lane_claims.cache_revisions = slowly  # type: ignore[method-assign]
        job = await app.schedule_at("a")
        await claimed.wait()
        idle = asyncio.create_task(service.wait_until_idle())
        await world.advance(seconds=1)
        assert not idle.done()
        may_continue.set()
        await idle
        assert (await app.get(job.id)).state == JobState.COMPLETED


def test_an_app_can_be_created_outside_an_event_loop(sqlite_url: str) -> None:
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
            await service.wait_until_idle()
        await app.close()

    asyncio.run(body(1))
    asyncio.run(body(2))
    assert ran == [1, 2]
    assert START.tzinfo is UTC


@pytest.mark.parametrize(
    "error", [StopIteration(), SystemExit(1), ValueError("\ud800")], ids=lambda e: type(e).__name__
)
@virtual
async def test_any_exception_of_a_plain_function_is_a_failed_attempt(world: World, error: BaseException) -> None:
    app = world.app()

    @app.on("a")
    def plain(_: Arrived) -> None:
        raise error

    job = await app.schedule_at("a", retry=Retry(attempts=2, delay=1))
    async with engine(app):
        await world.advance(minutes=1)
    dead = await app.get(job.id)
    assert (dead.state, len(dead.attempts)) == (JobState.FAILED, 2)


@pytest.mark.heartbeats
@virtual
async def test_a_job_created_in_a_transaction_runs_if_and_only_if_it_commits(world: World) -> None:
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
async def test_a_thousand_jobs_due_at_one_instant_all_run_then(world: World) -> None:
    app, log = world.app(), Log()
    app.on("a")(log)
    await app.schedule_many([JobSpec(topic="a", run_at=after(seconds=30), payload=n) for n in range(1000)])
    async with engine(app):
        await world.advance(minutes=1)
    assert sorted(log.payloads) == list(range(1000))
    assert set(log.fired) == {30}


@virtual
async def test_schedule_many_creates_the_same_jobs_as_schedule_at(world: World) -> None:
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
            assert job == job_from_new(app._jobs.draft(spec, job.id, now))
            kept = await app.get(job.id)
            assert dataclasses.replace(kept, adjusted=job.adjusted) == job
