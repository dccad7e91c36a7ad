"""What an operation of the store is handed: one transaction, and the dialect's words.

Operations (`store/sql/*.py`) are plain functions of a Transaction, written once. The dialects decide how one
runs: in SQLite's own thread, on a PostgreSQL connection, or on a connection of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Protocol

import orjson
from sqlalchemy import Connection, Executable, Insert, Table, text
from sqlalchemy.dialects.postgresql import insert as insert_or
from sqlalchemy.engine import CursorResult

from timebell.store.statement import Statement, Words

Row = Mapping[str, Any]

JOBS, SCHEDULES = "jobs", "schedules"
"""What other nodes are told of: something is due sooner than they know. Of schedules means of both."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

# Called with "<operation>.<n>" before the n-th statement, "<operation>.commit" and "<operation>.done". Tests aim
# crashes with it; nothing else sets it.
probe: Callable[[str], None] | None = None


class Dialect(Words, Protocol):
    """What operations may ask of the database they run on."""

    delete_in_cte: bool
    partitioned: bool

    def to_db(self, instant: datetime | None) -> Any:
        """An instant as a parameter or JSON value of a Statement."""

    def from_db(self, value: Any) -> Any:
        """The inverse: a datetime, or None."""


def insert_unless(dialect: Dialect, table: Table) -> Insert:
    """INSERT that passes over what is there already."""
    if dialect.name.startswith("mysql"):
        from sqlalchemy.dialects.mysql import insert as insert_and

        key = table.primary_key.columns[0]
        return insert_and(table).on_duplicate_key_update({key.name: key})
    return insert_or(table).on_conflict_do_nothing()  # SQLite says it the same way


class Transaction(Protocol):
    """The surface operations write against."""

    dialect: Dialect

    def fetch(self, statement: Statement, rows: Sequence[Mapping[str, Any]] = (), **params: Any) -> list[Row]:
        """Run a hot statement; a list of what it returns."""

    def execute(self, statement: Executable, rows: Any = None) -> CursorResult[Any]:
        """Run a SQLAlchemy Core statement."""

    def load(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        fixed: Mapping[str, Any] = NOTHING,
    ) -> None:  # fmt: skip
        """Insert many records the fastest way there is; values as `to_db` gives them. `fixed` are further columns, in
        which all have the same."""

    def notify(self, of: str = JOBS) -> None:
        """After the commit, tell other nodes to look again, for jobs or also for SCHEDULES (a hint; may be lost)."""


class Steps:
    """Names the statements of an operation for `probe`."""

    __slots__ = ("count", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def __call__(self) -> None:
        """Before each statement."""
        self.count += 1
        if probe is not None:
            probe(f"{self.name}.{self.count}")

    def at(self, point: str) -> None:
        """Before (`commit`) and after (`done`) the commit."""
        if probe is not None:
            probe(f"{self.name}.{point}")


class SqlTransaction:
    """A transaction on any SQLAlchemy connection, also one of the caller's."""

    def __init__(self, connection: Connection, dialect: Dialect, steps: Steps) -> None:
        self.connection = connection
        self.dialect = dialect
        self.steps = steps
        self.wants_notify = ""

    def fetch(self, statement: Statement, rows: Sequence[Mapping[str, Any]] = (), **params: Any) -> list[Row]:
        """As in Transaction."""
        self.steps()
        if statement.columns:
            params["rows"] = orjson.dumps(rows).decode()
        result = self.connection.execute(statement.clause(self.dialect), params)
        return [dict(row._mapping) for row in result] if result.returns_rows else []

    def execute(self, statement: Executable, rows: Any = None) -> CursorResult[Any]:
        """As in Transaction."""
        self.steps()
        return self.connection.execute(statement, rows)

    def load(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        fixed: Mapping[str, Any] = NOTHING,
    ) -> None:  # fmt: skip
        """As in Transaction."""
        self.steps()
        names = ", ".join((*columns, *fixed))
        values = ", ".join(f":{column}" for column in (*columns, *fixed))
        filled = [{**dict(zip(columns, record, strict=True)), **fixed} for record in records]
        self.connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({values})"), filled)  # noqa: S608

    def notify(self, of: str = JOBS) -> None:
        """As in Transaction."""
        if self.wants_notify != SCHEDULES:
            self.wants_notify = of
