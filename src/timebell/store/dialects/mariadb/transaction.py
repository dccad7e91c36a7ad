"""The transaction of a MariaDB store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Table

from timebell.store.dialects.base import R
from timebell.store.sql import SQL
from timebell.store.transaction import NO_VALUES, Row, SqlTransaction


class MariaTransaction(SqlTransaction):
    """A transaction that executes hot statements directly on the driver connection."""

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        self.steps()
        text, names = statement.formatted
        result = self.connection.exec_driver_sql(text, tuple([params[name] for name in names]))
        return [dict(row._mapping) for row in result] if result.returns_rows else []

    def bulk_insert(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        constants: Mapping[str, Any] = NO_VALUES,
    ) -> None:  # fmt: skip
        """Insert by executemany; the driver sends as many rows at a time as fit into one packet."""
        constant = tuple(constants.values())
        self._insert(table, (*columns, *constants), [record + constant for record in records])

    def bulk_upsert(
        self, table: Table, columns: Sequence[str], records: Sequence[tuple[Any, ...]], *,
        replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        update = self.dialect.on_conflict(table, replace=replace, add=add, key=key)
        self._insert(table.name, columns, list(records), update)

    def _insert(
        self, table: str, columns: Sequence[str], records: list[tuple[Any, ...]], suffix: str = ""
    ) -> None:  # fmt: skip
        self.steps()
        names = ", ".join(f"`{column}`" for column in columns)
        placeholders = ", ".join(["%s"] * len(columns))
        statement = f"INSERT INTO {table} ({names}) VALUES ({placeholders}) {suffix}"  # noqa: S608
        self.connection.exec_driver_sql(statement, records)


def with_rewriting(operation: Callable[..., R]) -> Callable[..., R]:
    """Wrap an operation to rewrite its statements for MariaDB, on a connection of the caller."""

    def run(tx: SqlTransaction, *args: Any, **kwargs: Any) -> R:
        inner = MariaTransaction(tx.connection, tx.dialect, tx.steps)
        result = operation(inner, *args, **kwargs)
        tx.subjects, tx.written = inner.subjects, inner.written
        return result

    run.__name__ = getattr(operation, "__name__", "operation")
    return run
