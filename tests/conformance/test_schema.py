"""The migrations build what schema.py says, on every store."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect

from timebell.errors import SchemaOutdated
from timebell.store import open as opening
from timebell.store.open import HEAD, open_store, upgrade, version
from timebell.store.schema import metadata

from .helpers import T0


def _ours(name: str | None, kind: str, *_: Any) -> bool:
    """What the comparison looks at: not Alembic's own table, and not the partitions of `finished`."""
    return not (kind == "table" and name is not None and (name == "timebell_version" or "finished_" in name))


def _differences(connection: Connection) -> list[Any]:
    options = {"compare_type": True, "compare_server_default": False, "include_name": _ours}
    return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)


def _indexes(connection: Connection) -> dict[str, str]:
    """Every index of our tables, by name, as the database writes it, partial conditions included."""
    if connection.dialect.name == "sqlite":
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    else:
        query = (
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema()"
            " AND tablename NOT LIKE 'timebell_finished_%' AND tablename <> 'timebell_version'"
        )
    rows = connection.exec_driver_sql(query).all()
    return {name: re.sub(r"\bONLY |\w+\.(?=timebell)", "", definition) for name, definition in rows}


def _columns(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Every column of our tables: name, type, whether it may be null, and its default."""
    found = inspect(connection)
    return {
        table: sorted(
            (column["name"], str(column["type"]), column["nullable"], re.sub(r"::.*", "", str(column["default"])))
            for column in found.get_columns(table)
        )
        for table in metadata.tables
    }


def test_migrations_and_schema_agree(store_url: str) -> None:
    assert asyncio.run(opening._on_connection(store_url, _differences)) == []


def test_migrations_build_the_very_indexes_and_columns_of_the_schema(store_url: str, tmp_path: Any) -> None:
    def migrated(connection: Connection) -> Any:
        return _indexes(connection), _columns(connection)

    def from_schema(connection: Connection) -> Any:
        if connection.dialect.name != "sqlite":
            connection.exec_driver_sql("CREATE SCHEMA from_schema; ")
            connection.exec_driver_sql("SET LOCAL search_path TO from_schema")
        metadata.create_all(connection)
        try:
            return _indexes(connection), _columns(connection)
        finally:
            if connection.dialect.name != "sqlite":
                connection.exec_driver_sql("DROP SCHEMA from_schema CASCADE")

    built = asyncio.run(opening._on_connection(store_url, migrated))
    fresh = f"sqlite:///{tmp_path}/fresh.db" if "sqlite" in store_url else store_url
    meant = asyncio.run(opening._on_connection(fresh, from_schema))
    assert built == meant
    assert len(built[0]) >= 10


def test_upgrading_again_changes_nothing(store_url: str) -> None:
    assert asyncio.run(upgrade(store_url)) == (HEAD, HEAD)
    assert asyncio.run(version(store_url)) == HEAD


def test_many_can_upgrade_at_once(postgres: Any) -> None:
    url = postgres.create_database()

    async def body() -> None:
        answers = await asyncio.gather(*(upgrade(url) for _ in range(4)))
        assert sorted(answers, key=str) == sorted([(None, HEAD), *[(HEAD, HEAD)] * 3], key=str)

    try:
        asyncio.run(body())
    finally:
        postgres.drop_database(url)


def test_an_empty_database_has_no_version_and_says_what_to_do(postgres: Any, tmp_path: Any) -> None:
    for url in (postgres.create_database(), f"sqlite:///{tmp_path}/empty.db"):
        assert asyncio.run(version(url)) is None

        async def use(url: str = url) -> None:
            from timebell.store.sql import ledger

            store = open_store(url, lambda: T0)
            await store.open()
            try:
                await store.run(ledger.counts)
            finally:
                await store.close()

        with pytest.raises(SchemaOutdated, match="timebell db upgrade"):
            asyncio.run(use())
        if url.startswith("postgres"):
            postgres.drop_database(url)
