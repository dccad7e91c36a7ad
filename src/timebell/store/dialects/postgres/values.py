"""Conversions of values, and the clock that decides which jobs are due."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from sqlalchemy import ARRAY, JSON, ColumnElement, Insert, Select, Table, Text, cast, func
from sqlalchemy.dialects.postgresql import insert

from timebell.store.types import to_utc


class Values:
    """Base of the operations."""

    virtual_time = False
    """True in simulations: the node's own clock decides which jobs are due, and not also the server's."""

    def to_db(self, instant: datetime | None) -> Any:
        """Convert an instant to a parameter or JSON value."""
        return instant

    def from_db(self, value: Any) -> Any:
        """Convert a value from the database to an instant, or None."""
        return value if value is None or value.tzinfo is UTC else to_utc(value)

    @staticmethod
    @cache
    def insert_ignoring_duplicates(table: Table) -> Insert:
        """Return an INSERT that ignores rows whose key exists already."""
        return insert(table).on_conflict_do_nothing()

    @staticmethod
    @cache
    def upsert(
        table: Table, *, replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = ()
    ) -> Insert:  # fmt: skip
        """Return an INSERT that updates the rows whose key exists already; see `Operations.upsert`."""
        statement = insert(table)
        new = statement.excluded
        changes = {name: new[name] for name in replace} | {name: table.c[name] + new[name] for name in add}
        return statement.on_conflict_do_update(index_elements=key or table.primary_key.columns, set_=changes)

    @staticmethod
    @cache
    def on_conflict(
        table: Table, *, replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = ()
    ) -> str:  # fmt: skip
        """Return the clause of an INSERT that does the same as `upsert`, as SQL."""
        names = ", ".join(key or table.primary_key.columns.keys())
        changes = [f"{name} = excluded.{name}" for name in replace]
        changes += [f"{name} = {table.name}.{name} + excluded.{name}" for name in add]
        return f"ON CONFLICT ({names}) DO UPDATE SET {', '.join(changes)}"

    def match_keys(self, query: Select[Any], column: ColumnElement[str], keys: Collection[str]) -> Select[Any]:
        """Restrict a query to rows whose text column has one of many values, found by an index of the column.

        The join with `unnest` is planned for about ten values, so it uses the index also while the table is growing and
        its statistics are old. The plan of `IN (...)` compares each row of the table with each value then.
        """
        values = func.unnest(cast(sorted(keys), ARRAY(Text))).table_valued("key").render_derived()
        return query.where(column == values.c.key)

    def json_text(self, column: ColumnElement[str], names: Sequence[str]) -> ColumnElement[str]:
        """Return an expression for the text at a path of names in a JSON text."""
        return func.json_extract_path_text(cast(column, JSON), *names)
