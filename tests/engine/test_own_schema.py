"""`TIMEBELL_DATABASE_SCHEMA`: Timebell's tables in a schema of their own, beside those of the application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import Connection, create_engine, inspect, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.servers import Postgres
from timebell import Arrived, Timebell
from timebell.cli.privileges import grant_statements
from timebell.errors import Conflict, NotFound, Refused
from timebell.features import FEATURES
from timebell.store.dialects.postgres import pooler
from timebell.store.dialects.postgres.server import PostgresServer

NEW = "INSERT INTO orders VALUES ({})"


@pytest.fixture
def host_url(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The database of an application, with a table in `public`; the setting is `bell`."""
    monkeypatch.setenv("TIMEBELL_DATABASE_SCHEMA", "bell")
    url = postgres.create_database()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE orders (id int)")
    yield url
    postgres.drop_database(url)


def tables(url: str, schema: str) -> list[str]:
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    try:
        return inspect(engine).get_table_names(schema)
    finally:
        engine.dispose()


def orders(url: str) -> list[int]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM public.orders ORDER BY id")]


def search_path(connection: psycopg.Connection[Any]) -> Any:
    row = connection.execute("SHOW search_path").fetchone()
    assert row is not None
    return row[0]


def test_upgrade_creates_the_schema_and_nothing_elsewhere(host_url: str) -> None:
    app = Timebell(host_url, timezone="UTC")
    version = app.sync.upgrade()
    assert app.sync.upgrade() == version
    app.sync.close()
    assert {"timebell_jobs", "timebell_version", "timebell_finished"} <= set(tables(host_url, "bell"))
    assert tables(host_url, "public") == ["orders"]


def test_jobs_run_and_handlers_find_the_tables_of_the_application(host_url: str) -> None:
    app = Timebell(host_url, timezone="UTC")

    @app.on("async")
    async def insert(event: Arrived) -> None:
        async with event.transaction() as connection:
            await connection.execute(text(NEW.format(1)))
            await app.schedule_at("followed", connection=connection)
            await connection.execute(text(NEW.format(2)))

    @app.on("plain")
    def insert_in_thread(event: Arrived) -> None:
        with event.transaction() as connection:
            connection.execute(text(NEW.format(3)))

    followed = asyncio.Event()

    @app.on("followed")
    async def follow(event: Arrived) -> None:
        followed.set()

    async def body() -> None:
        await app.upgrade()
        client = Timebell(host_url, timezone="UTC")
        async with app.running(poll=3600, heartbeat=3600, lease=10_800):
            # The node does not poll, so it runs the jobs of another app only because NOTIFY reaches it.
            created = [await client.schedule_at(topic) for topic in ("async", "plain")]
            for job in created:
                await app.wait(job.id, timeout=60)
            await asyncio.wait_for(followed.wait(), 60)
        await client.close()
        await app.close()

    asyncio.run(body())
    assert orders(host_url) == [1, 2, 3]


def test_jobs_are_created_in_the_callers_transaction_and_leave_its_search_path(host_url: str) -> None:
    app = Timebell(host_url, timezone="UTC")
    app.sync.upgrade()
    with psycopg.connect(host_url) as connection:
        before = search_path(connection)
        kept = app.sync.schedule_at("x", key="one", connection=connection)
        assert search_path(connection) == before
        with pytest.raises(Conflict):
            app.sync.schedule_at("x", key="one", connection=connection)
        assert search_path(connection) == before
        connection.execute(NEW.format(1))
    with pytest.raises(ZeroDivisionError), psycopg.connect(host_url) as connection:
        gone = app.sync.schedule_at("x", connection=connection)
        raise ZeroDivisionError
    assert app.sync.get(kept.id).state == "pending"
    with pytest.raises(NotFound):
        app.sync.get(gone.id)
    assert orders(host_url) == [1]
    app.sync.close()


def test_async_sessions_and_asyncpg_connections_join(host_url: str) -> None:
    app = Timebell(host_url, timezone="UTC")

    async def body() -> list[str]:
        await app.upgrade()
        engine = create_async_engine(make_url(host_url).set(drivername="postgresql+asyncpg"))
        async with AsyncSession(engine) as session, session.begin():
            await app.schedule_at("x", payload=1, connection=session)
            await session.execute(text(NEW.format(1)))
        await engine.dispose()
        driver = await asyncpg.connect(host_url)
        async with driver.transaction():
            await app.schedule_at("x", payload=2, connection=driver)
            await driver.execute(NEW.format(2))
        await driver.close()
        created = await app.list(topic="x")
        await app.close()
        return [job.payload for job in created]

    assert sorted(asyncio.run(body())) == [1, 2]
    assert orders(host_url) == [1, 2]


def test_an_error_of_the_database_is_reported_as_such(host_url: str) -> None:
    app = Timebell(host_url, timezone="UTC")
    app.sync.upgrade()
    engine = create_engine(make_url(host_url).set(drivername="postgresql+psycopg"))

    def break_transaction(connection: Connection) -> None:
        with contextlib.suppress(DBAPIError):
            connection.execute(text("SELECT 1 / 0"))

    with engine.connect() as connection:
        break_transaction(connection)
        with pytest.raises(DBAPIError, match="aborted"):
            app.sync.schedule_at("x", connection=connection)
    engine.dispose()
    app.sync.close()


def test_installations_in_two_schemas_are_independent(host_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Timebell(host_url, timezone="UTC")
    second = Timebell(f"{host_url}?schema=other", timezone="UTC")  # the URL takes precedence
    monkeypatch.delenv("TIMEBELL_DATABASE_SCHEMA")
    third = Timebell(host_url, timezone="UTC")
    for app in (first, second, third):
        app.sync.upgrade()
    first.sync.schedule_at("x")
    assert [len(app.sync.list()) for app in (first, second, third)] == [1, 0, 0]
    for app in (first, second, third):
        app.sync.close()
    assert "timebell_jobs" in tables(host_url, "public")


def test_behind_a_pooler_the_role_must_have_the_schema(host_url: str) -> None:
    server = PostgresServer(f"{host_url}?schema=bell")

    async def check() -> None:
        connection = await server.connect()
        try:
            await pooler.check_schema(connection, "bell")
        finally:
            await connection.close()

    with pytest.raises(Refused, match="timebell does not use the schema bell") as refused:
        asyncio.run(check())
    assert refused.value.code == "DATABASE_SCHEMA_POOLED"
    with psycopg.connect(host_url, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f'ALTER ROLE timebell IN DATABASE "{name}" SET search_path = bell, public')
    asyncio.run(check())


def test_options_of_the_url_apply_to_async_and_plain_transactions(host_url: str) -> None:
    app = Timebell(f"{host_url}?application_name=shop&options=-c%20work_mem%3D16MB&connect_timeout=10", timezone="UTC")
    query = "SELECT current_setting('work_mem') || ' ' || current_setting('application_name')"

    @app.on("async")
    async def show(event: Arrived) -> None:
        async with event.transaction() as connection:
            event.result = (await connection.execute(text(query))).scalar_one()

    @app.on("plain")
    def show_in_thread(event: Arrived) -> None:
        with event.transaction() as connection:
            event.result = connection.execute(text(query)).scalar_one()

    async def body() -> list[Any]:
        await app.upgrade()
        created = [await app.schedule_at(topic) for topic in ("async", "plain")]
        async with app.running():
            results = [(await app.wait(job.id, timeout=60)).result for job in created]
        await app.close()
        return results

    assert asyncio.run(body()) == ["16MB shop", "16MB shop"]


def test_roles_get_their_privileges_in_the_schema(host_url: str) -> None:
    app = Timebell(host_url, timezone="UTC")
    app.sync.upgrade()
    app.sync.close()
    with psycopg.connect(host_url, autocommit=True) as connection:
        connection.execute("\n".join(grant_statements("schematest", FEATURES, "bell")))
    client = Timebell(host_url.replace("timebell@", "schematest_client@"), timezone="UTC")
    job = client.sync.schedule_at("x")
    assert client.sync.get(job.id).state == "pending"
    client.sync.close()
    with psycopg.connect(host_url, autocommit=True) as connection:
        connection.execute("DROP OWNED BY schematest_client, schematest_reader CASCADE")
        connection.execute("REASSIGN OWNED BY schematest_node TO CURRENT_USER; DROP OWNED BY schematest_node CASCADE")
        for role in ("node", "client", "reader"):
            connection.execute(f"DROP ROLE schematest_{role}")
