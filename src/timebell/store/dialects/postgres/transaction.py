"""The transaction of a PostgreSQL store."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import add
from typing import Any

import asyncpg
from sqlalchemy import Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.util import await_only

from timebell.store.sql import SQL
from timebell.store.transaction import NO_VALUES, Row, SqlTransaction


class PostgresTransaction(SqlTransaction):
    """A transaction that executes hot statements directly on the asyncpg connection."""

    @property
    def driver(self) -> asyncpg.Connection[Any]:
        """The connection of asyncpg."""
        return self.connection.connection.driver_connection

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        self.steps()
        text, names = statement.numbered
        return await_only(self.driver.fetch(text, *[params[name] for name in names]))

    def bulk_insert(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        constants: Mapping[str, Any] = NO_VALUES,
    ) -> None:  # fmt: skip
        """Insert records by COPY."""
        self.steps()
        rows = map(add, records, repeat(tuple(constants.values())))
        copied = self.driver.copy_records_to_table(table, columns=[*columns, *constants], records=rows)
        await_only(copied)

    def bulk_upsert(
        self, table: Table, columns: Sequence[str], records: Sequence[tuple[Any, ...]], *,
        replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Insert or update records by one statement, with an array for each column whose values differ.

        A column with a single value needs no array, whose elements asyncpg checks and encodes one by one.
        """
        self.steps()
        values = list(zip(*records, strict=True))
        is_array = tuple(len(records) == 1 or column.count(column[0]) < len(records) for column in values)
        insert = _insert_from_arrays(table, tuple(columns), is_array)
        update = self.dialect.on_conflict(table, replace=replace, add=add, key=key)
        params = [column if many else column[0] for column, many in zip(values, is_array, strict=True)]
        await_only(self.driver.execute(f"{insert} {update}", *params))


@functools.lru_cache(maxsize=256)
def _insert_from_arrays(table: Table, columns: tuple[str, ...], is_array: tuple[bool, ...]) -> str:
    """Return an INSERT with a parameter for each column: an array of its values, or a single value for all rows."""
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    types = [table.c[column].type.compile(dialect) for column in columns]
    arrays, names, selected = [], [], []
    for number, (name, sql_type, many) in enumerate(zip(columns, types, is_array, strict=True), 1):
        if many:
            arrays.append(f"${number}::{sql_type}[]")
            names.append(name)
        selected.append(f"u.{name}" if many else f"${number}::{sql_type}")
    source = f"unnest({', '.join(arrays)}) AS u ({', '.join(names)})"
    return f"INSERT INTO {table.name} ({', '.join(columns)}) SELECT {', '.join(selected)} FROM {source}"  # noqa: S608
