"""`app.sync`: blocking methods for scripts, threads and forked workers, also in the caller's transaction."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pymysql
import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from timebell import Arrived, Every, JobSpec, Timebell
from timebell.client.schedules import Schedules
from timebell.errors import Conflict, InvalidInput, NotFound, StoreError, TimebellError
from timebell.sync import Blocking, BlockingSchedules
from timebell.testing.kit import Kit

TIMEOUT_SECONDS = 30.0


@pytest.fixture
def app(store_url: str) -> Iterator[Timebell]:
    made = Timebell(store_url, timezone="UTC")
    yield made
    made.sync.close()


def portals() -> int:
    return sum(thread.name == "timebell-sync" for thread in threading.enumerate())


def exists(app: Timebell, job_id: str) -> bool:
    try:
        app.sync.get(job_id)
    except NotFound:
        return False
    return True


# Methods.


NOT_OFFERED = {"run", "put", "find_created_at", "find_calendar"}
APP_ONLY = {"get_calendar", "save_calendar"}


@pytest.mark.parametrize(
    ("async_class", "sync_class", "excluded"),
    [(Timebell, Blocking, NOT_OFFERED), (Schedules, BlockingSchedules, NOT_OFFERED | APP_ONLY)],
)
def test_every_method_of_the_app_is_available(async_class: type, sync_class: type, excluded: set[str]) -> None:
    methods = {name for name, _ in inspect.getmembers(async_class, inspect.iscoroutinefunction) if name[0] != "_"}
    assert methods - excluded - set(vars(sync_class)) == set(), "add the new method to timebell/sync.py"


def test_methods_behave_like_their_async_counterparts(app: Timebell) -> None:
    job = app.sync.schedule_at("mail.send", payload={"to": "ana"}, owner_id="ana", key="k")
    assert app.sync.get(job.id) == job
    assert [made.topic for made in app.sync.schedule_many([JobSpec(topic="a"), JobSpec(topic="b")])] == ["a", "b"]
    assert {seen.topic for seen in app.sync.list(limit=10)} == {"mail.send", "a", "b"}
    assert app.sync.cancel(job.id).outcome == "prevented"
    schedule = app.sync.schedule_repeat("tick", Every("PT1H"), name="ticks")
    assert app.sync.schedules.pause(schedule.id, "lunch").enabled is False
    assert [seen.name for seen in app.sync.schedules.list(None, 10, None)] == ["ticks"]
    with pytest.raises(Conflict) as refused:
        app.sync.schedule_repeat("tick", Every("PT1H"), name="ticks")
    assert refused.value.code == "SCHEDULE_EXISTS"


def test_one_event_loop_serves_any_number_of_threads_and_closing_ends_it(app: Timebell) -> None:
    before = portals()
    with ThreadPoolExecutor(12) as threads:
        made = list(threads.map(lambda number: app.sync.schedule_at("t", payload=number).id, range(120)))
        assert portals() == before + 1
    assert len(set(made)) == 120 == len(app.sync.list(limit=500).items)
    app.sync.close()
    assert portals() == before
    assert exists(app, made[0])  # and it opens again
    app.sync.close()
    app.sync.close()


def test_a_call_inside_an_event_loop_is_refused_with_a_hint_to_await(app: Timebell) -> None:
    async def body() -> None:
        with pytest.raises(TimebellError) as refused:
            app.sync.schedule_at("t")
        assert refused.value.code == "BLOCKING_IN_LOOP"
        assert "await app.schedule_at" in str(refused.value)
        await asyncio.to_thread(app.sync.schedule_at, "t")  # another thread may call it

    asyncio.run(body())
    assert len(app.sync.list().items) == 1


def test_the_app_can_run_on_another_loop_simultaneously(app: Timebell) -> None:
    ran: list[str] = []

    @app.on("first")
    def first(event: Arrived) -> None:
        app.sync.schedule_at("second", payload=event.job_id)

    @app.on("second")
    async def second(event: Arrived) -> None:
        ran.append(event.payload)

    async def body() -> str:
        async with app.running(poll=3600.0, heartbeat=1000.0, lease=3000.0):
            made = await app.schedule_at("first")
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while not ran:
                    await asyncio.sleep(0.01)
        await app.close()
        return made.id

    assert ran == [asyncio.run(body())]


def test_a_job_created_by_another_thread_wakes_the_engine(sqlite_url: str) -> None:
    app, ran = Timebell(sqlite_url, timezone="UTC"), threading.Event()
    app.on("t")(lambda event: ran.set())

    async def body() -> None:
        async with app.running(poll=3600.0, heartbeat=1000.0, lease=3000.0) as service:
            await service.wait_until_idle()
            await asyncio.sleep(0.2)
            await asyncio.to_thread(app.sync.schedule_at, "t")
            assert await asyncio.to_thread(ran.wait, TIMEOUT_SECONDS)
        await app.close()

    asyncio.run(body())
    app.sync.close()


# Processes.

SCRIPT = """
import logging, os, sys, threading
from timebell import Timebell
logging.getLogger("asyncio").setLevel("ERROR")  # -X dev warns of each step that took 0.1 s, on a busy machine
app = Timebell(sys.argv[1], timezone="UTC")
"""


def run(script: str, url: str, tmp_path: Path) -> list[str]:
    """Run a script in a separate process with warnings as errors; return the words it prints."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + script)
    command = [sys.executable, "-X", "dev", "-W", "error", "-W", "ignore::DeprecationWarning:alembic", str(file), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS * 2)
    # The development mode reports slow steps, which a busy machine may cause.
    unexpected = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    assert (done.returncode, unexpected) == (0, [])
    return done.stdout.split()


def test_a_script_exits_cleanly_without_closing_the_app(store_url: str, tmp_path: Path) -> None:
    assert run('print(app.sync.schedule_at("t").state)', store_url, tmp_path) == ["pending"]


def test_importing_and_creating_an_app_starts_no_thread(store_url: str, tmp_path: Path) -> None:
    assert run("app.sync; print(threading.active_count())", store_url, tmp_path) == ["1"]


ENGINE = """
import asyncio, uvloop

@app.on("async")
async def wait_briefly(event): await asyncio.sleep(0.01)

@app.on("plain")
def schedule_another(event): app.sync.schedule_at("async", key="another")

async def main():
    async with app.running():
        jobs = [await app.schedule_in(topic, 0.05) for topic in ("async", "plain")]
        print(*[(await app.wait(job.id, 25)).state for job in jobs])
    await app.close()

RUN(main())
"""


@pytest.mark.parametrize("run_loop", ["asyncio.run", "uvloop.run"])
def test_an_engine_runs_without_warnings_on_both_event_loops(store_url: str, tmp_path: Path, run_loop: str) -> None:
    assert run(ENGINE.replace("RUN", run_loop), store_url, tmp_path) == ["completed", "completed"]


FORK = """
app.sync.schedule_at("before")
children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        threads = [threading.Thread(target=app.sync.schedule_at, args=(f"child{number}",)) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        sys.stdout.flush()
        os._exit(0 if app.sync.list(topic=f"child{number}", limit=10).items else 1)
    children.append(child)
app.sync.schedule_at("after")
print(*(os.waitpid(child, 0)[1] for child in children), len(app.sync.list(limit=100).items))
"""


def test_a_forked_worker_starts_its_own_event_loop(store_url: str, tmp_path: Path) -> None:
    assert run(FORK, store_url, tmp_path) == ["0", "0", "0", "14"]


# In the caller's transaction.


class Rollback(Exception):
    """Raised to roll back the transaction of the caller."""


@pytest.fixture
def engine(app: Timebell, store_url: str) -> Iterator[Engine]:
    app.sync.open()  # not inside a transaction, which SQLite would wait for
    drivers = {"postgresql": "postgresql+psycopg", "mariadb": "mysql+pymysql"}
    driver = drivers.get(store_url.partition(":")[0], "sqlite")
    made = create_engine(make_url(store_url).set(drivername=driver))
    with made.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id integer)"))
    yield made
    made.dispose()


@contextmanager
def _connection(engine: Engine) -> Iterator[Any]:
    with engine.begin() as connection:
        yield connection


@contextmanager
def _session(engine: Engine) -> Iterator[Any]:
    with Session(engine) as session, session.begin():
        yield session


both = pytest.mark.parametrize("begin", [_connection, _session], ids=["Connection", "Session"])
Begin = Callable[[Engine], Any]


@both
def test_a_job_exists_if_and_only_if_the_caller_commits(app: Timebell, engine: Engine, begin: Begin) -> None:
    kept: list[str] = []
    lost: list[str] = []
    for made in (kept, lost):
        try:
            with begin(engine) as connection:
                connection.execute(text("INSERT INTO orders VALUES (1)"))
                made.append(app.sync.schedule_at("t", connection=connection).id)
                made.append(app.sync.schedule_at("t", connection=connection).id)
                if made is lost:
                    raise Rollback
        except Rollback:
            pass
    assert [exists(app, job_id) for job_id in kept + lost] == [True, True, False, False]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM orders")).scalar() == 1


@both
def test_a_rolled_back_savepoint_removes_only_its_jobs(app: Timebell, engine: Engine, begin: Begin) -> None:
    with begin(engine) as connection:
        first = app.sync.schedule_at("t", connection=connection)
        with pytest.raises(Rollback), connection.begin_nested():
            lost = app.sync.schedule_at("t", connection=connection)
            raise Rollback
        with connection.begin_nested():
            second = app.sync.schedule_at("t", connection=connection)
    assert [exists(app, job.id) for job in (first, lost, second)] == [True, False, True]


@both
def test_a_released_savepoint_still_depends_on_the_transaction(app: Timebell, engine: Engine, begin: Begin) -> None:
    with pytest.raises(Rollback), begin(engine) as connection:
        connection.execute(text("INSERT INTO orders VALUES (1)"))
        with connection.begin_nested():
            lost = app.sync.schedule_at("t", connection=connection)
        raise Rollback
    assert not exists(app, lost.id)


@both
def test_edits_and_cancels_apply_if_and_only_if_the_caller_commits(app: Timebell, engine: Engine, begin: Begin) -> None:
    job, other = app.sync.schedule_at("t", key="k"), app.sync.schedule_at("t", "2199-01-01T00:00Z")
    schedule = app.sync.schedule_repeat("t", Every("PT1H"), name="s", payload=1)
    for commits in (False, True):
        try:
            with begin(engine) as connection:
                app.sync.schedule_repeat("t", Every("PT1H"), name="s", payload=2, replace=True, connection=connection)
                app.sync.schedules.pause(schedule.id, connection=connection)
                assert app.sync.cancel(job.id, connection=connection).outcome == "prevented"
                moved = app.sync.reschedule(other.id, "2199-02-01T00:00Z", connection=connection)
                if not commits:
                    raise Rollback
        except Rollback:
            pass
        seen = app.sync.schedules.get(schedule.id)
        states = app.sync.get(job.id).state, app.sync.get(other.id).state, exists(app, moved.id)
        found = (seen.action.payload, seen.enabled, *states)
        assert found == (
            (2, False, "cancelled", "cancelled", True) if commits else (1, True, "pending", "pending", False)
        )


@both
def test_a_key_created_in_the_same_transaction_is_found(app: Timebell, engine: Engine, begin: Begin) -> None:
    with begin(engine) as connection:
        made = app.sync.schedule_at("t", key="k", connection=connection)
        again = app.sync.schedule_at("t", key="k", on_conflict="keep", connection=connection)
    assert again.id == made.id == app.sync.list().items[0].id


def test_a_connection_is_used_only_in_the_thread_of_the_caller(app: Timebell, engine: Engine) -> None:
    users: set[int] = set()

    @event.listens_for(engine, "before_cursor_execute")
    def note(*_: Any) -> None:
        users.add(threading.get_ident())

    with engine.begin() as connection:
        app.sync.schedule_at("t", connection=connection)
        app.sync.schedule_repeat("t", Every("PT1H"), name="s", replace=True, connection=connection)
    assert users == {threading.get_ident()}


def test_a_caller_waiting_for_a_lock_does_not_block_others(postgres_url: str) -> None:
    app = Timebell(postgres_url, timezone="UTC")
    engine = create_engine(make_url(postgres_url).set(drivername="postgresql+psycopg"))

    def second() -> str:
        with pytest.raises(Conflict) as refused, engine.begin() as connection:
            started.set()
            app.sync.schedule_at("t", key="k", connection=connection)
        return str(refused.value.existing)

    started = threading.Event()
    app.sync.open()
    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as connection:
            first = app.sync.schedule_at("t", key="k", connection=connection)
            waits = threads.submit(second)
            assert started.wait(TIMEOUT_SECONDS)
            while not _waiting(engine):
                pass
            assert app.sync.list().items == []
        assert waits.result(TIMEOUT_SECONDS) == first.id
    engine.dispose()
    app.sync.close()


def _waiting(engine: Engine) -> int:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))
        return int(found.scalar_one())


def test_only_synchronous_connections_are_accepted(app: Timebell, store_url: str) -> None:
    app.sync.open()
    given: list[Any] = [7, "connection", object()]
    if "postgres" in store_url:
        given.append(create_async_engine(make_url(store_url).set(drivername="postgresql+asyncpg")).connect())
    for connection in given:
        with pytest.raises(InvalidInput) as refused:
            app.sync.schedule_at("t", connection=connection)
        assert refused.value.code == "INVALID_CONNECTION"
        assert "Connection" in refused.value.fix
    assert app.sync.list().items == []


# Several event loops, without app.sync.


def test_an_app_can_be_used_in_successive_event_loops(store_url: str, tmp_path: Path) -> None:
    script = """
import asyncio
async def one(): return (await app.schedule_at("t")).state
async def all(): return len((await app.list()).items)
print(asyncio.run(one()), asyncio.run(one()), asyncio.run(all()))
"""
    command = [sys.executable, "-c", SCRIPT + script, store_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS * 2)
    assert (done.stdout.split(), done.stderr) == (["pending", "pending", "2"], "")


def test_simultaneous_use_in_two_event_loops_is_refused_with_a_pointer_to_app_sync(postgres_url: str) -> None:
    app = Timebell(postgres_url, timezone="UTC")

    async def body() -> None:
        await app.schedule_at("t")
        with pytest.raises(StoreError) as refused:
            await asyncio.to_thread(asyncio.run, app.schedule_at("t"))
        assert (refused.value.code, "app.sync" in refused.value.fix) == ("OTHER_EVENT_LOOP", True)
        await app.close()

    asyncio.run(body())


# On virtual time.


def test_sync_calls_reach_the_simulated_world_from_tests_and_plain_handlers(timebell: Kit) -> None:
    app = Timebell("sqlite:///never-touched.db", timezone="UTC")
    ran: list[str] = []

    @app.on("mail.send")
    def send(event: Arrived) -> None:
        ran.append(app.sync.schedule_at("mail.sent", payload=event.payload).id)

    timebell.use(app)
    made = app.sync.schedule_at("mail.send", timebell.now + timedelta(days=3), payload="ana")
    timebell.advance(days=3)
    assert app.sync.get(made.id).state == "completed"
    assert [app.sync.get(job_id).payload for job_id in ran] == ["ana"]
    assert not Path("never-touched.db").exists()


def test_a_driver_connection_is_accepted_and_used_in_its_own_thread(app: Timebell) -> None:
    url = app.settings.database_url
    app.sync.open()
    for commits in (True, False):
        place = make_url(url)
        if url.startswith("sqlite"):
            connection: Any = sqlite3.connect(place.database or "")  # for this thread only
        elif url.startswith("mariadb"):
            connection = pymysql.connect(
                host=place.host, port=place.port or 3306, user=place.username, database=place.database
            )
        else:
            connection = pytest.importorskip("psycopg").connect(url)
        job = app.sync.schedule_at("t", connection=connection)
        (connection.commit if commits else connection.rollback)()
        connection.close()
        assert exists(app, job.id) is commits
