"""A row locked by another session, such as a node stalled in a transaction, delays no other rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from timebell import Arrived, Every, JobSpec, Timebell
from timebell.engine.service import Service
from timebell.model.job import JobState, NewJob
from timebell.model.schedule import Schedule
from timebell.store.dialects.postgres import stalled_sessions as silence

TIMEOUT_SECONDS = 60.0
DRIVERS = {"postgresql": "postgresql+psycopg", "mariadb": "mysql+pymysql"}
Test = Callable[[Service], Coroutine[Any, Any, None]]


class World:
    """An app whose handlers end on a signal, and a second session that locks rows."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = Timebell(url, timezone="UTC")
        self.may_end = asyncio.Event()
        self.attempts: list[tuple[str, int]] = []
        self.app.on("waits")(self.wait)
        self.app.on("plain")(self.note)

    async def wait(self, event: Arrived) -> None:
        self.attempts.append((event.job_id, event.attempt))
        await self.may_end.wait()

    async def note(self, event: Arrived) -> None:
        self.attempts.append((event.job_id, event.attempt))

    def run(self, test: Test, **options: Any) -> None:
        async def body() -> None:
            try:
                async with self.app.running(**{"poll": 0.05, **options}) as service:
                    await asyncio.wait_for(test(service), TIMEOUT_SECONDS)
            finally:
                await self.app.close()

        asyncio.run(body())

    @asynccontextmanager
    async def locked(self, table: str, id_: str) -> AsyncIterator[None]:
        """Lock a row in another transaction for the duration of the block."""
        driver = DRIVERS[self.url.partition(":")[0]]
        engine: Engine = create_engine(make_url(self.url).set(drivername=driver))
        connection = engine.connect()
        try:
            lock = text(f"SELECT id FROM {table} WHERE id = :id FOR UPDATE")
            assert (await asyncio.to_thread(connection.execute, lock, {"id": id_})).all()
            yield
        finally:
            connection.close()
            engine.dispose()

    async def states(self, ids: list[str]) -> set[JobState]:
        return {(await self.app.get(id_)).state for id_ in ids}

    async def until(self, ids: list[str], state: JobState) -> None:
        while await self.states(ids) != {state}:
            await asyncio.sleep(0.02)


def test_a_batch_of_completions_is_written_except_for_the_locked_row(nodes_url: str) -> None:
    world = World(nodes_url)

    async def test(service: Service) -> None:
        jobs = await world.app.schedule_many([JobSpec(topic="waits") for _ in range(20)])
        held, *others = [job.id for job in jobs]
        await world.until([held, *others], JobState.RUNNING)
        async with world.locked("timebell_jobs", held):
            world.may_end.set()
            await world.until(others, JobState.COMPLETED)
            later = await world.app.schedule_at("plain")
            await world.until([later.id], JobState.COMPLETED)
            assert await world.states([held]) == {JobState.RUNNING}
            assert held in service.node.running_attempts
        await world.until([held], JobState.COMPLETED)
        assert sorted(world.attempts) == sorted((id_, 1) for id_ in [held, *others, later.id])
        assert service.node.counters.fenced == 0

    world.run(test)


def test_a_retry_waits_only_for_its_own_row(nodes_url: str) -> None:
    world = World(nodes_url)

    @world.app.on("fails", retry={"attempts": 2, "backoff": "fixed", "delay": 0, "jitter": 0})
    async def fails(event: Arrived) -> None:
        await world.wait(event)
        if event.attempt == 1:
            raise ValueError

    async def test(service: Service) -> None:
        held, *others = [job.id for job in await world.app.schedule_many([JobSpec(topic="fails") for _ in range(5)])]
        await world.until([held, *others], JobState.RUNNING)
        async with world.locked("timebell_jobs", held):
            world.may_end.set()
            await world.until(others, JobState.COMPLETED)
            assert (held, 2) not in world.attempts
        await world.until([held], JobState.COMPLETED)
        assert sorted(world.attempts) == sorted((id_, number) for id_ in [held, *others] for number in (1, 2))
        assert service.node.counters.fenced == 0

    world.run(test)


def test_a_serial_run_whose_schedule_is_locked_completes_later_and_releases_the_next(nodes_url: str) -> None:
    world = World(nodes_url)

    async def test(service: Service) -> None:
        schedule = await world.app.schedule_repeat("waits", Every("PT1H"), overlap="queue")
        first = await world.app.schedules.trigger(schedule.id)
        await world.until([first.id], JobState.RUNNING)
        second = await world.app.schedules.trigger(schedule.id)
        other = await world.app.schedule_at("waits")
        await world.until([other.id], JobState.RUNNING)
        async with world.locked("timebell_schedules", schedule.id):
            world.may_end.set()
            await world.until([other.id], JobState.COMPLETED)
            later = await world.app.schedule_at("plain")
            await world.until([later.id], JobState.COMPLETED)
            assert await world.states([first.id]) == {JobState.RUNNING}
            assert await world.states([second.id]) == {JobState.PENDING}
        await world.until([first.id, second.id], JobState.COMPLETED)
        assert [id_ for id_, _ in world.attempts if id_ in (first.id, second.id)] == [first.id, second.id]
        assert service.node.counters.fenced == 0

    world.run(test)


def test_a_locked_row_does_not_prevent_the_renewal_of_other_leases(nodes_url: str) -> None:
    world = World(nodes_url)

    async def test(service: Service) -> None:
        held, other = [job.id for job in await world.app.schedule_many([JobSpec(topic="waits") for _ in range(2)])]
        await world.until([held, other], JobState.RUNNING)
        async with world.locked("timebell_jobs", held):
            for _ in range(2):
                lease = service.node.running_attempts[other].lease_until
                while service.node.running_attempts[other].lease_until == lease:
                    await asyncio.sleep(0.02)
            assert held in service.node.running_attempts
        world.may_end.set()
        await world.until([held, other], JobState.COMPLETED)
        assert sorted(world.attempts) == sorted([(held, 1), (other, 1)])

    world.run(test, heartbeat=0.2, lease=30.0)


def test_a_planner_waiting_for_a_row_does_not_block_the_slots_of_due_jobs(
    nodes_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(nodes_url)

    async def repeat(every: str) -> str:
        schedule = await world.app.schedule_repeat(
            "waits", Every(every), name="s", overlap="cancel_previous", replace=True
        )  # fmt: skip
        return schedule.id

    async def late(service: Service) -> None:
        fired: list[str] = []
        build = service.planner.build

        def note_and_build(schedule: Schedule, *args: Any) -> NewJob:
            fired.append(schedule.id)
            return build(schedule, *args)

        monkeypatch.setattr(service.planner, "build", note_and_build)
        await world.app.schedule_at("waits")
        live = await world.app.schedules.trigger(await repeat("PT1H"))
        await _until(lambda: len(world.attempts) == 2)
        async with world.locked("timebell_jobs", live.id):
            await repeat("PT1S")
            await _until(lambda: bool(fired))  # in the same transaction, the planner cancels that job: it waits
            made = await world.app.schedule_at("plain")
            await _until(lambda: (made.id, 1) in world.attempts)
            assert service.worker.reserved_slots
        world.may_end.set()

    world.run(late, slots=4)


async def _nothing() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def _parsed(connection: asyncpg.Connection[Any]) -> None:
    """Stall after the parse message that precedes the first execution of a statement."""
    await connection.prepare("SELECT id FROM timebell_jobs")


async def _not_reading(connection: asyncpg.Connection[Any]) -> None:
    """Stop reading a response that is larger than the buffers of the server, without a preceding parse message."""
    connection._transport.pause_reading()
    await connection.execute("SELECT id, repeat('-', 50000000) FROM timebell_schedules")


async def _copying(connection: asyncpg.Connection[Any]) -> None:
    """Stall in a COPY, as used for bulk inserts."""
    await connection.copy_to_table("timebell_jobs", source=_nothing())


async def _idle(connection: asyncpg.Connection[Any]) -> None:
    """Stay idle between two statements of a transaction, for which the database has its own timeout."""
    await connection.execute("SELECT id FROM timebell_jobs")
    await asyncio.Event().wait()


async def _sleeping(connection: asyncpg.Connection[Any]) -> None:
    await connection.execute("SELECT pg_sleep(60) FROM timebell_schedules")


async def _reading_its_own(connection: asyncpg.Connection[Any]) -> None:
    connection._transport.pause_reading()
    await connection.execute("SELECT repeat('-', 50000000)")


async def _parsed_its_own(connection: asyncpg.Connection[Any]) -> None:
    await connection.prepare("SELECT id FROM mine")
    await asyncio.Event().wait()


async def _reading_with_nothing_locked(connection: asyncpg.Connection[Any]) -> None:
    """Read a large result slowly without holding locks, as an export does."""
    await connection.execute("ROLLBACK")
    await _not_reading(connection)


Silent = Callable[["asyncpg.Connection[Any]"], Coroutine[Any, Any, None]]


@pytest.mark.parametrize("silent", [_parsed, _not_reading])
def test_a_session_that_stalls_in_the_middle_of_a_statement_loses_its_locks(
    postgres_url: str, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database would wait: `idle_in_transaction_session_timeout` does not apply within a statement."""
    monkeypatch.setattr(silence, "CLIENT_READ_TIMEOUT", timedelta(seconds=0.5))
    monkeypatch.setattr(silence, "CLIENT_WRITE_TIMEOUT", timedelta(seconds=0.5))
    world = World(postgres_url)

    async def test(service: Service) -> None:
        schedule = await world.app.schedule_repeat("plain", Every("PT1S"), name="ticks")
        stuck = await _connection(postgres_url)
        async with _locked_and(silent, stuck, "schedules", schedule.id):
            before = len(world.attempts)
            await _until(lambda: len(world.attempts) >= before + 2)

    world.run(test, heartbeat=0.2)


@pytest.mark.parametrize(
    ("silent", "name"),
    [
        *[(each, "timebell") for each in (_idle, _sleeping, _copying, _not_reading)],
        *[(each, "timebell") for each in (_parsed_its_own, _reading_its_own, _reading_with_nothing_locked)],
        (_parsed, "theirs"),
    ],
)
def test_a_busy_or_unrelated_session_is_not_terminated(
    postgres_url: str, silent: Silent, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "CLIENT_READ_TIMEOUT", timedelta(seconds=0.5))
    monkeypatch.setattr(silence, "CLIENT_WRITE_TIMEOUT", timedelta(seconds=0.5 if silent is not _not_reading else 60))
    world = World(postgres_url)

    async def test(service: Service) -> None:
        schedule = await world.app.schedule_repeat("plain", Every("PT1H"), name="rarely")
        busy, asking = await _connection(postgres_url, name), await _connection(postgres_url)
        await busy.execute("CREATE TEMP TABLE mine (id text)")
        its = "SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event IS NOT NULL AND query NOT LIKE '%UPDATE'"
        async with _locked_and(silent, busy, "schedules", schedule.id) as doing:
            while not await asking.fetch(its, busy.get_server_pid()):
                await asyncio.sleep(0.02)
            for _ in range(2):  # the check that terminates the second one would also have terminated the busy one
                stuck = await _connection(postgres_url)
                async with _locked_and(_parsed, stuck, "tenants", "default"):
                    await _until(stuck.is_closed)
            assert await asking.fetch(its, busy.get_server_pid())  # its own termination would not be visible
            assert not doing.done() or silent is _parsed
        await asking.close()

    world.run(test, heartbeat=0.2)


async def _connection(url: str, name: str = "timebell") -> asyncpg.Connection[Any]:
    return await asyncpg.connect(url, server_settings={"application_name": name})


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


@asynccontextmanager
async def _locked_and(
    silent: Silent, connection: asyncpg.Connection[Any], table: str, id_: str
) -> AsyncIterator[asyncio.Task[None]]:
    """Lock a row in a session that then runs `silent`, for the duration of the block."""
    await connection.execute("BEGIN")
    await connection.execute(f"SELECT id FROM timebell_{table} WHERE id = '{id_}' FOR UPDATE")
    doing = asyncio.create_task(silent(connection))
    try:
        yield doing
    finally:
        connection.terminate()
        doing.cancel()
        await asyncio.wait([doing])
