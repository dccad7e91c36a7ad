"""INSERT .. ON CONFLICT, which PostgreSQL and SQLite have in common."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy import Insert, Table

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite


class OnConflict:
    """Inserts of rows that may exist already."""

    @staticmethod
    @abstractmethod
    def insert(table: Table) -> postgresql.Insert | sqlite.Insert:
        """Return an INSERT of the dialect in SQLAlchemy."""

    @classmethod
    @cache
    def insert_ignoring_duplicates(cls, table: Table) -> Insert:
        """Return an INSERT that ignores rows whose key exists already."""
        return cls.insert(table).on_conflict_do_nothing()

    @classmethod
    @cache
    def upsert(
        cls, table: Table, *, replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = ()
    ) -> Insert:  # fmt: skip
        """Return an INSERT that updates the rows whose key exists already; see `Operations.upsert`."""
        statement = cls.insert(table)
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
