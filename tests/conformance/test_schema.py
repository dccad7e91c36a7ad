"""The migrations create the schema of schema.py on every store."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, event, inspect

from timebell.errors import SchemaOutdated
from timebell.features import FEATURES
from timebell.store import open as opening
from timebell.store.metadata import load_tables
from timebell.store.open import open_store, schema_version, upgrade
from timebell.store.version import HEAD

from .helpers import T0


def _ours(name: str | None, kind: str, *_: Any) -> bool:
    """Return whether a table is compared: not Alembic's table and not the partitions of `finished`."""
    return not (kind == "table" and name is not None and (name == "timebell_version" or "finished_" in name))


def _differences(connection: Connection) -> list[Any]:
    options = {"compare_type": True, "compare_server_default": False, "include_name": _ours}
    return compare_metadata(MigrationContext.configure(connection, opts=options), load_tables(FEATURES))


def _indexes(connection: Connection) -> dict[str, str]:
    """Return the DDL of every index of our tables by name, with partial conditions."""
    if connection.dialect.name == "mysql":
        query = (
            "SELECT CONCAT(table_name, ' ', index_name), GROUP_CONCAT(CONCAT(column_name, non_unique) ORDER BY"
            " seq_in_index) FROM information_schema.statistics WHERE table_schema = DATABASE()"
            " AND table_name <> 'timebell_version' GROUP BY table_name, index_name"
        )
    elif connection.dialect.name == "sqlite":
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    else:
        query = (
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema()"
            " AND tablename NOT LIKE 'timebell_finished_%' AND tablename <> 'timebell_version'"
        )
    rows = connection.exec_driver_sql(query).all()
    return {name: re.sub(r"\bONLY |\w+\.(?=timebell)", "", definition) for name, definition in rows}


def _columns(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return every column of our tables: name, type, nullability and default."""
    found = inspect(connection)
    return {
        table: sorted(
            (column["name"], str(column["type"]), column["nullable"], re.sub(r"::.*", "", str(column["default"])))
            for column in found.get_columns(table)
        )
        for table in load_tables(FEATURES).tables
    }


@pytest.mark.parametrize("store_url", ["sqlite", "postgres"], indirect=True)  # MariaDB's own types are compared below
def test_migrations_and_schema_agree(store_url: str) -> None:
    assert asyncio.run(opening._run_on_connection(store_url, _differences)) == []


def test_migrations_create_the_indexes_and_columns_of_the_schema(
    store_url: str, tmp_path: Any, request: pytest.FixtureRequest
) -> None:
    def migrated(connection: Connection) -> Any:
        return _indexes(connection), _columns(connection)

    def from_schema(connection: Connection) -> Any:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("CREATE SCHEMA from_schema; ")
            connection.exec_driver_sql("SET LOCAL search_path TO from_schema")
        load_tables(FEATURES).create_all(connection)
        try:
            return _indexes(connection), _columns(connection)
        finally:
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("DROP SCHEMA from_schema CASCADE")

    built = asyncio.run(opening._run_on_connection(store_url, migrated))
    fresh = f"sqlite:///{tmp_path}/fresh.db" if "sqlite" in store_url else store_url
    if "mariadb" in store_url:
        fresh = request.getfixturevalue("mariadb").create_database()
    meant = asyncio.run(opening._run_on_connection(fresh, from_schema))
    assert built == meant
    assert len(built[0]) >= 10


def test_upgrading_again_changes_nothing(store_url: str) -> None:
    assert asyncio.run(upgrade(store_url, FEATURES)) == (HEAD, HEAD)
    assert asyncio.run(schema_version(store_url)) == HEAD


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_simultaneous_upgrades_succeed(kind: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(kind)
    url = server.create_database()

    async def body() -> None:
        answers = await asyncio.gather(*(upgrade(url, FEATURES) for _ in range(4)))
        assert sorted(answers, key=str) == sorted([(None, HEAD), *[(HEAD, HEAD)] * 3], key=str)

    try:
        asyncio.run(body())
    finally:
        server.drop_database(url)


def test_an_empty_database_is_refused_with_instructions(postgres: Any, mariadb: Any, tmp_path: Any) -> None:
    for url in (postgres.create_database(), mariadb.create_database(), f"sqlite:///{tmp_path}/empty.db"):
        assert asyncio.run(schema_version(url)) is None

        async def use(url: str = url) -> None:
            from timebell.store.schedules import schedules

            store = open_store(url, lambda: T0)
            await store.open()
            try:
                await store.run(schedules.find_next_fire_at)
            finally:
                await store.close()

        with pytest.raises(SchemaOutdated, match="timebell db upgrade"):
            asyncio.run(use())
        if url.startswith("postgres"):
            postgres.drop_database(url)


@pytest.mark.parametrize(
    "after", [3, pytest.param(20, marks=pytest.mark.slow), 41, pytest.param(60, marks=pytest.mark.slow)]
)
def test_a_killed_upgrade_of_mariadb_can_be_continued(after: int, mariadb: Any) -> None:
    """MariaDB's DDL is not transactional: completed steps remain, and the next upgrade skips them."""
    url = mariadb.create_database()

    def broken(connection: Connection) -> Any:
        statements = 0

        @event.listens_for(connection, "after_cursor_execute")
        def count(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            nonlocal statements
            statements += not statement.startswith("SELECT")
            if statements == after:
                raise KeyboardInterrupt

        return opening.migrate(connection, FEATURES)

    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(opening._run_on_connection(url, broken))
        assert asyncio.run(upgrade(url, FEATURES))[1] == HEAD
        fresh = mariadb.create_database()
        asyncio.run(upgrade(fresh, FEATURES))
        for look in (_indexes, _columns):
            assert asyncio.run(opening._run_on_connection(url, look)) == asyncio.run(
                opening._run_on_connection(fresh, look)
            )
    finally:
        mariadb.drop_database(url)
