"""`event.transaction()`: the writes of a handler exist if and only if its attempt completed the job."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from timebell import Arrived, Cancel, Cron, Every, Retry, Snooze, Timebell
from timebell.engine.service import Service
from timebell.errors import TimebellError
from timebell.model.job import Completion, Job, JobState
from timebell.store.jobs import complete
from timebell.testing.kit import Kit

TIMEOUT_SECONDS = 40.0
NEW = "INSERT INTO orders VALUES (:job, :attempt)"
Handle = Callable[[Arrived], Any]
PLAIN = pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])


def row(event: Arrived) -> dict[str, Any]:
    return {"job": event.job_id, "attempt": event.attempt}


class Shop:
    """An app on a real store with an application table."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = Timebell(url, timezone="UTC")

    def own_engine(self) -> Any:
        drivers = {"postgresql": "postgresql+psycopg", "mariadb": "mysql+pymysql"}
        driver = drivers.get(self.url.partition(":")[0], "sqlite")
        return create_engine(make_url(self.url).set(drivername=driver))

    def say(self, statement: str) -> Any:
        engine = self.own_engine()
        try:
            with engine.begin() as connection:
                result = connection.execute(text(statement))
                return [tuple(found) for found in result] if result.returns_rows else None
        finally:
            engine.dispose()

    def orders(self) -> list[tuple[str, int]]:
        """Return all rows."""
        found: list[tuple[str, int]] = self.say("SELECT job, attempt FROM orders ORDER BY job")
        return found

    def run(self, test: Callable[[Service], Coroutine[Any, Any, None]]) -> None:
        """Run a test while the engine runs."""

        async def body() -> None:
            try:
                async with self.app.running(poll=0.05) as service:
                    await asyncio.wait_for(test(service), TIMEOUT_SECONDS)
            finally:
                await self.app.close()

        asyncio.run(body())

    async def ended(self, job: Job) -> Job:
        """Return the job after it has finished."""
        while (found := await self.app.get(job.id)).state in (JobState.PENDING, JobState.RUNNING):
            await asyncio.sleep(0.02)
        return found

    async def done(self, **fields: Any) -> Job:
        return await self.ended(await self.app.schedule_at("order", **fields))


@pytest.fixture
def shop(store_url: str) -> Shop:
    made = Shop(store_url)
    made.say("CREATE TABLE orders (job VARCHAR(40), attempt INTEGER)")
    return made


def on(shop: Shop, plain: bool, inside: Callable[[Arrived], Any] | None = None, **options: Any) -> list[int]:
    """Register a handler that writes a row and then calls `inside` in its transaction; return its attempt numbers."""
    attempts: list[int] = []

    if plain:

        @shop.app.on("order", **options)
        def write(event: Arrived) -> None:
            attempts.append(event.attempt)
            with event.transaction() as connection:
                connection.execute(text(NEW), row(event))
                if inside is not None:
                    inside(event)

    else:

        @shop.app.on("order", **options)
        async def write_async(event: Arrived) -> None:
            attempts.append(event.attempt)
            async with event.transaction() as connection:
                await connection.execute(text(NEW), row(event))
                if inside is not None and isinstance(ran := inside(event), Awaitable):
                    await ran

    return attempts


def timebell_logs(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """Return Timebell's log messages of at least this level."""
    ours = [line for line in caplog.records if line.name.startswith("timebell")]
    return [line.getMessage() for line in ours if line.levelno >= level]


@PLAIN
def test_the_job_and_the_rows_commit_together_once(shop: Shop, plain: bool, caplog: pytest.LogCaptureFixture) -> None:
    def result(event: Arrived) -> None:
        event.result = {"order": event.attempt}

    on(shop, plain, result)

    async def test(service: Service) -> None:
        job = await shop.done()
        assert (job.state, job.result, job.attempt) == (JobState.COMPLETED, {"order": 1}, 1)
        while service.node.running_attempts:
            await asyncio.sleep(0.01)
        assert shop.orders() == [(job.id, 1)]
        assert (service.node.counters.ended, service.node.counters.fenced) == (1, 0)

    shop.run(test)
    assert timebell_logs(caplog, logging.WARNING) == []


@PLAIN
def test_an_error_inside_rolls_back_and_fails_the_attempt(shop: Shop, plain: bool) -> None:
    def fails_first(event: Arrived) -> None:
        if event.attempt == 1:
            raise ValueError("no")
        if event.attempt == 2:
            raise Snooze(0)

    attempts = on(shop, plain, fails_first, retry=Retry(attempts=2, delay=0))

    async def test(_: Service) -> None:
        job = await shop.done()
        assert (job.state, job.attempt, job.attempts_used) == (JobState.COMPLETED, 3, 2)
        assert [each["code"] for each in job.attempts] == ["ValueError", "POSTPONED"]
        assert shop.orders() == [(job.id, 3)]

    shop.run(test)
    assert attempts == [1, 2, 3]


@PLAIN
def test_raise_cancel_inside_writes_nothing(shop: Shop, plain: bool) -> None:
    def cancel(_: Arrived) -> None:
        raise Cancel("not wanted")

    on(shop, plain, cancel)

    async def test(_: Service) -> None:
        job = await shop.done()
        assert (job.state, job.reason) == (JobState.CANCELLED, "not wanted")
        assert shop.orders() == []

    shop.run(test)


@PLAIN
def test_a_failure_after_the_commit_is_logged_and_the_job_stays_completed(
    shop: Shop, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if plain:

        @shop.app.on("order")
        def write(event: Arrived) -> None:
            with event.transaction() as connection:
                connection.execute(text(NEW), row(event))
            raise ValueError("afterwards")

    else:

        @shop.app.on("order")
        async def write_async(event: Arrived) -> None:
            async with event.transaction() as connection:
                await connection.execute(text(NEW), row(event))
            raise ValueError("afterwards")

    async def test(service: Service) -> None:
        job = await shop.done()
        while service.node.running_attempts:
            await asyncio.sleep(0.01)
        found = await shop.app.get(job.id)
        assert (found.state, found.attempt, found.error) == (JobState.COMPLETED, 1, None)
        assert shop.orders() == [(job.id, 1)]

    shop.run(test)
    (line,) = timebell_logs(caplog, logging.ERROR)
    assert "had completed the job" in line
    assert "ValueError: afterwards" in line


def test_a_return_value_after_the_commit_is_discarded_and_logged(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    @shop.app.on("order")
    async def write(event: Arrived) -> str:
        async with event.transaction():
            event.result = "kept"
        return "late"

    async def test(_: Service) -> None:
        assert (await shop.done()).result == "kept"

    shop.run(test)
    assert any("is discarded" in line.getMessage() for line in caplog.records)


@PLAIN
def test_a_superseded_attempt_writes_nothing(shop: Shop, plain: bool) -> None:
    errors: list[TimebellError] = []
    taken = threading.Event()

    async def reclaim_job(job_id: str) -> None:
        """Reclaim the job like another node that considers this one dead."""
        completion = Completion(job_id, 1, JobState.PENDING, shop.app.clock.now(), run_at=shop.app.clock.now())
        assert await shop.app.store.run(complete.schedule_retries, [completion]) == {job_id}
        taken.set()

    if plain:

        @shop.app.on("order")
        def write(event: Arrived) -> None:
            assert taken.wait(TIMEOUT_SECONDS)
            try:
                with event.transaction() as connection:
                    connection.execute(text(NEW), row(event))
            except TimebellError as error:
                errors.append(error)
                raise

    else:

        @shop.app.on("order")
        async def write_async(event: Arrived) -> None:
            while not taken.is_set():
                await asyncio.sleep(0.01)
            try:
                async with event.transaction() as connection:
                    await connection.execute(text(NEW), row(event))
            except TimebellError as error:
                errors.append(error)
                raise

    async def test(service: Service) -> None:
        job = await shop.app.schedule_at("order")
        while (await shop.app.get(job.id)).state is JobState.PENDING:
            await asyncio.sleep(0.01)
        await reclaim_job(job.id)
        job = await shop.ended(job)
        assert (job.state, job.attempt, job.attempts) == (JobState.COMPLETED, 2, [])
        assert shop.orders() == [(job.id, 2)]
        async with asyncio.timeout(TIMEOUT_SECONDS):  # the superseded attempt is fenced later
            while not service.node.counters.fenced:
                await asyncio.sleep(0.01)
        assert service.node.counters.fenced == 1

    shop.run(test)
    assert [error.code for error in errors] == ["ATTEMPT_ENDED"]


def test_a_timeout_in_the_block_rolls_back(shop: Shop) -> None:
    async def hang(event: Arrived) -> None:
        if event.attempt == 1:
            await asyncio.sleep(TIMEOUT_SECONDS)

    on(shop, False, hang, timeout=0.5, retry=Retry(attempts=20, delay=0))  # a busy machine may need some

    async def test(_: Service) -> None:
        job = await shop.done()
        assert [each["code"] for each in job.attempts] == ["TIMEOUT"] * (job.attempt - 1)
        assert job.attempt > 1
        assert shop.orders() == [(job.id, job.attempt)]

    shop.run(test)


def test_a_thread_that_timed_out_before_its_block_writes_nothing(shop: Shop) -> None:
    over = threading.Event()
    errors: list[TimebellError] = []

    @shop.app.on("order", timeout=2, retry=Retry(attempts=1))  # enough to start the thread
    def write(event: Arrived) -> None:
        assert over.wait(TIMEOUT_SECONDS)
        try:
            with event.transaction() as connection:
                connection.execute(text(NEW), row(event))
        except TimebellError as error:
            errors.append(error)

    async def test(_: Service) -> None:
        job = await shop.done()
        assert job.state is JobState.FAILED
        over.set()
        while not errors:
            await asyncio.sleep(0.01)
        assert shop.orders() == []
        assert (await shop.app.get(job.id)).state is JobState.FAILED

    shop.run(test)
    assert [error.code for error in errors] == ["ATTEMPT_ENDED"]


def test_a_cancel_request_does_not_undo_a_success(shop: Shop) -> None:
    started, may_finish = asyncio.Event(), asyncio.Event()

    @shop.app.on("order")
    async def write(event: Arrived) -> None:
        started.set()
        await may_finish.wait()
        async with event.transaction() as connection:
            await connection.execute(text(NEW), row(event))

    async def test(_: Service) -> None:
        job = await shop.app.schedule_at("order")
        await started.wait()
        assert (await shop.app.cancel(job.id)).outcome == "in_flight"
        may_finish.set()
        assert (await shop.ended(job)).state is JobState.COMPLETED
        assert shop.orders() == [(job.id, 1)]
        assert (await shop.app.cancel(job.id)).outcome == "in_flight"

    shop.run(test)


def test_jobs_and_sessions_inside_commit_with_the_transaction(shop: Shop) -> None:
    @shop.app.on("order", retry=Retry(attempts=2, delay=0))
    async def write(event: Arrived) -> None:
        async with event.transaction() as connection, AsyncSession(connection) as session:
            await session.execute(text(NEW), row(event))
            await session.commit()
            await shop.app.schedule_at("order.next", payload=event.attempt, connection=connection)
            if event.attempt == 1:
                raise ValueError

    async def test(_: Service) -> None:
        job = await shop.done()
        assert shop.orders() == [(job.id, 2)]
        assert [made.payload for made in await shop.app.list(topic="order.next")] == [2]

    shop.run(test)


def test_a_handler_reads_its_own_writes(shop: Shop) -> None:
    @shop.app.on("order")
    async def write(event: Arrived) -> None:
        async with event.transaction() as connection:
            await connection.execute(text(NEW), row(event))
            event.result = (await connection.execute(text("SELECT count(*) FROM orders"))).scalar_one()

    async def test(_: Service) -> None:
        job = await shop.done()
        assert (job.state, job.result) == (JobState.COMPLETED, 1)

    shop.run(test)


def test_sessions_in_threads(shop: Shop) -> None:
    @shop.app.on("order")
    def write(event: Arrived) -> None:
        with event.transaction() as connection, Session(connection) as session:
            session.execute(text(NEW), row(event))
            session.commit()
            shop.app.sync.schedule_at("order.next", connection=session)

    async def test(_: Service) -> None:
        job = await shop.done()
        assert shop.orders() == [(job.id, 1)]
        assert len(await shop.app.list(topic="order.next")) == 1

    shop.run(test)
    shop.app.sync.close()


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_a_block_that_ends_its_transaction_by_hand_does_not_complete_the_job(shop: Shop, verb: str) -> None:
    @shop.app.on("order", retry=Retry(attempts=1))
    async def write(event: Arrived) -> None:
        async with event.transaction() as connection:
            await connection.execute(text(NEW), row(event))
            await getattr(connection, verb)()

    async def test(_: Service) -> None:
        job = await shop.done()
        assert (job.state, job.attempts[0]["code"]) == (JobState.FAILED, "TimebellError")
        assert "do not call commit()" in (job.error or "").lower()
        assert len(shop.orders()) == (verb == "commit")

    shop.run(test)


def test_a_transaction_requires_a_single_handler(shop: Shop) -> None:
    seen: list[str] = []

    @shop.app.on("order", retry=Retry(attempts=1))
    async def write(event: Arrived) -> None:
        async with event.transaction() as connection:
            await connection.execute(text(NEW), row(event))

    @shop.app.on("order.two", retry=Retry(attempts=1))
    @shop.app.on("order.*", retry=Retry(attempts=1))
    async def both(event: Arrived) -> None:
        event.transaction()

    @shop.app.on("*")
    async def observe(event: Arrived) -> None:
        seen.append(event.topic)
        if event.topic == "order":
            with pytest.raises(TimebellError):
                event.transaction()
            raise ValueError("who only looks on fails nothing that is done")

    async def test(_: Service) -> None:
        job = await shop.done()
        assert job.state is JobState.COMPLETED
        refused = await shop.ended(await shop.app.schedule_at("order.two"))
        assert refused.state is JobState.FAILED
        assert "requires a single handler" in (refused.error or "")
        assert shop.orders() == [(job.id, 1)]

    shop.run(test)
    assert sorted(seen) == ["order", "order.two"]


def test_a_blocking_with_in_the_event_loop_and_a_second_transaction_are_refused(shop: Shop) -> None:
    codes: list[str] = []

    @shop.app.on("order")
    async def write(event: Arrived) -> None:
        with pytest.raises(TimebellError) as refused, event.transaction():
            pass
        codes.append(refused.value.code)
        async with event.transaction():
            pass
        with pytest.raises(TimebellError) as refused:
            async with event.transaction():
                pass
        codes.append(refused.value.code)

    async def test(_: Service) -> None:
        assert (await shop.done()).state is JobState.COMPLETED

    shop.run(test)
    assert codes == ["BLOCKING_IN_LOOP", "ATTEMPT_ENDED"]


@PLAIN
def test_concurrent_jobs_each_write_their_row(shop: Shop, plain: bool) -> None:
    on(shop, plain)

    async def test(_: Service) -> None:
        made = [await shop.app.schedule_at("order") for _ in range(40)]
        jobs = [await shop.ended(job) for job in made]
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        assert shop.orders() == sorted((job.id, job.attempt) for job in jobs)

    shop.run(test)


def test_work_after_the_commit_is_not_treated_as_a_lost_lease(shop: Shop) -> None:
    over: list[int] = []
    may_finish = asyncio.Event()

    @shop.app.on("order")
    async def write(event: Arrived) -> None:
        async with event.transaction() as connection:
            await connection.execute(text(NEW), row(event))
        await may_finish.wait()
        over.append(event.attempt)

    async def body() -> None:
        async with shop.app.running(poll=0.05, lease=0.5, heartbeat=0.1) as service, asyncio.timeout(TIMEOUT_SECONDS):
            job = await shop.done()
            until, heartbeat = time.monotonic() + 1.0, service.heartbeat.node_record.heartbeat
            while (
                time.monotonic() < until or service.heartbeat.node_record.heartbeat < heartbeat + 3
            ):  # its lease has expired
                await asyncio.sleep(0.02)
            assert over == []
            may_finish.set()
            while not over:
                await asyncio.sleep(0.02)
            assert over == [job.attempt]
            assert (await shop.app.get(job.id)).attempt == job.attempt
        await shop.app.close()

    asyncio.run(body())


# On virtual time.


def tables(timebell: Kit) -> None:
    with timebell.connect() as connection:
        connection.execute(text("CREATE TABLE orders (job TEXT, attempt INTEGER)"))


def list_orders(timebell: Kit) -> list[tuple[str, int]]:
    with timebell.connect() as connection:
        return sorted((found.job, found.attempt) for found in connection.execute(text("SELECT * FROM orders")))


def completed(timebell: Kit) -> list[tuple[str, int]]:
    history = timebell.world.history()
    return sorted((run.job_id, run.attempt) for run in history if run.state is JobState.COMPLETED)


@PLAIN
def test_serial_and_fixed_delay_schedules_keep_their_order(timebell: Kit, plain: bool) -> None:
    tables(timebell)
    order: list[int] = []

    if plain:

        @timebell.app.on("queued")
        def write(event: Arrived) -> None:
            order.append(event.scheduled_at.minute)
            with event.transaction() as connection:
                connection.execute(text(NEW), row(event))

    else:

        @timebell.app.on("queued")
        async def write_async(event: Arrived) -> None:
            order.append(event.scheduled_at.minute)
            await asyncio.sleep(88)
            async with event.transaction() as connection:
                await connection.execute(text(NEW), row(event))
                await asyncio.sleep(2)

    timebell.app.on("delay")(timebell.app._handlers.handlers_for("queued")[0].function)
    timebell.run(timebell.app.schedule_repeat("queued", Cron("* * * * *"), overlap="queue", max_runs=4, timeout=300))
    timebell.run(
        timebell.app.schedule_repeat(
            "delay", Every("PT10M", since="last_end"), end=timebell.now + timedelta(minutes=35)
        )
    )
    timebell.advance(hours=2)
    assert len(completed(timebell)) == 7
    assert list_orders(timebell) == completed(timebell)
    ends = [run for run in timebell.world.history() if run.topic == "delay"]
    gaps = {(b.scheduled_at - a.scheduled_at).total_seconds() for a, b in pairwise(ends)}
    assert gaps == ({600.0} if plain else {690.0})


@pytest.mark.heartbeats
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("point", ["1", "2", "3", "release", "delay", "commit", "done"])
def test_rows_match_completed_jobs_wherever_a_node_crashes(timebell: Kit, nodes: int, serial: bool, point: str) -> None:
    if not serial and point in ("3", "release", "delay"):
        pytest.skip("a completion outside a serial schedule has two statements")
    tables(timebell)
    started: list[tuple[str, int]] = []

    @timebell.app.on("order")
    async def write(event: Arrived) -> None:
        started.append((event.job_id, event.attempt))
        async with event.transaction() as connection:
            await connection.execute(text(NEW), row(event))
            await asyncio.sleep(3)

    if point == "delay":  # a fixed delay gets its next instant by the fourth statement
        timebell.run(
            timebell.app.schedule_repeat(
                "order", Every("PT10S", since="last_end"), end=timebell.now + timedelta(seconds=80)
            )
        )
    else:
        overlap = "queue" if serial else "allow"
        every = "PT2S" if point == "release" else "PT10S"  # the next waiting job is released by the fourth statement
        timebell.run(timebell.app.schedule_repeat("order", Every(every), overlap=overlap, max_runs=6))
    timebell.start(nodes=nodes)
    timebell.crash(at=f"complete_one.{4 if point in ('release', 'delay') else point}", down=5)
    timebell.advance(minutes=10)
    assert list_orders(timebell) == completed(timebell)
    done = {job for job, _ in completed(timebell)}
    assert len(done) >= 4 if point == "delay" else len(done) == 6
    assert len(started) == len(done) + (point != "done"), "the crash happened"


def test_a_call_without_connection_waits_for_the_lock(timebell: Kit) -> None:
    codes: list[str] = []

    @timebell.app.on("order")
    async def write(event: Arrived) -> None:
        async with event.transaction():
            with pytest.raises(TimebellError) as failed:
                await timebell.app.schedule_at("next")
            codes.append(failed.value.code)

    timebell.run(timebell.app.schedule_at("order"))
    timebell.advance(minutes=1)
    assert codes == ["DATABASE_UNREACHABLE"]
    assert len(completed(timebell)) == 1


def test_plain_and_async_transactions_take_turns(timebell: Kit) -> None:
    tables(timebell)

    @timebell.app.on("order.plain")
    def plain(event: Arrived) -> None:
        with event.transaction() as connection:
            connection.execute(text(NEW), row(event))
            time.sleep(0.002)

    @timebell.app.on("order.async")
    async def awaited(event: Arrived) -> None:
        async with event.transaction() as connection:
            await asyncio.sleep(0.5)
            await connection.execute(text(NEW), row(event))

    for topic in ("order.plain", "order.async"):
        for _ in range(10):
            timebell.run(timebell.app.schedule_at(topic))
    timebell.advance(minutes=5)
    assert len(list_orders(timebell)) == 20
    assert list_orders(timebell) == completed(timebell)
