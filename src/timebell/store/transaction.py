"""The transaction interface of store operations.

Operations (the functions in `store/jobs`, `store/schedules` and so on) are plain functions of a Transaction, written
once for all databases. The dialects decide where one runs: in the SQLite thread, on a PostgreSQL connection, in a
thread with a MariaDB connection, or on a connection of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Executable, Table, text
from sqlalchemy.engine import CursorResult

from timebell.store.dialects.operations import Operations
from timebell.store.recent_writes import Written
from timebell.store.sql import SQL
from timebell.store.sql import Row as Row

# Subjects of notifications: what a transaction changed that a node may be waiting for. Features add theirs.
JOBS = "jobs"  # a job is due earlier, or may start now
SCHEDULES = "schedules"  # a schedule is due earlier
STOPS = "stops"  # a running attempt was requested to stop
OPERATIONS = "operations"  # an operation was started
NO_SUBJECTS: frozenset[str] = frozenset()
NOTIFY_HORIZON = timedelta(seconds=10)
"""New jobs due later than this are not notified, because nodes look for them at each heartbeat, twice in this time."""


def is_soon(job_due_at: datetime, now: datetime) -> bool:
    """Return whether a new job is to be notified."""
    return job_due_at <= now + NOTIFY_HORIZON


NO_VALUES: Mapping[str, Any] = MappingProxyType({})
ROWS_BY_NAME: Mapping[str, Any] = MappingProxyType({"_result_disable_adapt_to_context": True})
"""Read the columns of a row by name only. SQLAlchemy's ORM sets this option too.

Otherwise SQLAlchemy prepares each result to be read by the column objects of its statement, which takes a third of the
processor time of a list of jobs.
"""

_Operation = TypeVar("_Operation", bound=Callable[..., Any])
READ_ONLY_OPERATIONS: set[Callable[..., Any]] = set()


def read_only(operation: _Operation) -> _Operation:
    """Mark an operation that writes and locks nothing, and does not rely on two statements seeing the same data.

    On PostgreSQL, `Store.run` executes it without BEGIN and COMMIT, which cost as much as a short statement.
    """
    READ_ONLY_OPERATIONS.add(operation)
    return operation


WHOLE_TRANSACTIONS: set[Callable[..., Any]] = set()


def whole_transaction(operation: _Operation) -> _Operation:
    """Mark an operation that is a single statement on PostgreSQL, and makes all changes of its transaction.

    If no other operation has changed anything in a transaction of `Store.begin`, PostgreSQL executes it without BEGIN
    and COMMIT, so its changes are committed at once.
    """
    WHOLE_TRANSACTIONS.add(operation)
    return operation


# Called with "<operation>.<n>" before the n-th statement, and with "<operation>.commit" and "<operation>.done". Set
# only by tests, to crash at a chosen statement.
probe: Callable[[str], None] | None = None


class Dialect(Operations, Protocol):
    """The database-specific parts that operations may use."""


class Transaction(Protocol):
    """The interface by which operations access the database."""

    dialect: Dialect
    subjects: frozenset[str]
    """Subjects to notify after the commit."""
    written: list[tuple[str, Written]]
    """Rows to remember after the commit, by kind."""

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        """Execute a literal statement; return its rows."""

    def atomic(self) -> AbstractContextManager[object]:
        """Return a context whose statements are one transaction, also on a connection in autocommit mode."""

    def execute(self, statement: Executable, rows: Any = None) -> CursorResult[Any]:
        """Execute a SQLAlchemy Core statement."""

    def bulk_insert(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        constants: Mapping[str, Any] = NO_VALUES,
    ) -> None:  # fmt: skip
        """Insert many records in the fastest way of the database; instants are converted by `Dialect.to_db`.

        `constants` are additional columns with the same value in all rows.
        """

    def bulk_upsert(
        self, table: Table, columns: Sequence[str], records: Sequence[tuple[Any, ...]], *,
        replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Insert many records with different keys, or update the rows that have these keys; see `Operations.upsert`.

        Instants are converted by `Dialect.to_db`.
        """

    def notify(self, subject: str) -> None:
        """After the commit, notify this process and other nodes of a change. A hint, which may be lost."""

    def record(self, kind: str, rows: Written) -> None:
        """After the commit, remember written rows; see `store/recent_writes.py`."""


class Steps:
    """Number the statements of an operation for `probe`."""

    __slots__ = ("count", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0

    def __call__(self) -> None:
        """Report a statement that is about to be executed."""
        self.count += 1
        if probe is not None:
            probe(f"{self.name}.{self.count}")

    def at(self, point: str) -> None:
        """Report `commit` before the commit, or `done` after it."""
        if probe is not None:
            probe(f"{self.name}.{point}")


class SqlTransaction:
    """A transaction on any SQLAlchemy connection, possibly one of the caller."""

    def __init__(self, connection: Connection, dialect: Dialect, steps: Steps) -> None:
        self.connection = connection
        self.dialect = dialect
        self.steps = steps
        self.subjects = NO_SUBJECTS
        self.written: list[tuple[str, Written]] = []

    def run_sql(self, statement: SQL, /, **params: Any) -> list[Row]:
        self.steps()
        result = self.connection.execute(statement.clause, params)
        return [dict(row._mapping) for row in result] if result.returns_rows else []

    def atomic(self) -> AbstractContextManager[object]:
        return nullcontext()

    def execute(self, statement: Executable, rows: Any = None) -> CursorResult[Any]:
        self.steps()
        return self.connection.execute(statement, rows, execution_options=ROWS_BY_NAME)

    def bulk_insert(
        self, table: str, columns: Sequence[str], records: Iterable[tuple[Any, ...]],
        constants: Mapping[str, Any] = NO_VALUES,
    ) -> None:  # fmt: skip
        self.steps()
        names = ", ".join((*columns, *constants))
        values = ", ".join(f":{column}" for column in (*columns, *constants))
        rows = [{**dict(zip(columns, record, strict=True)), **constants} for record in records]
        self.connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({values})"), rows)  # noqa: S608

    def bulk_upsert(
        self, table: Table, columns: Sequence[str], records: Sequence[tuple[Any, ...]], *,
        replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.steps()
        values = ", ".join(f":{column}" for column in columns)
        update = self.dialect.on_conflict(table, replace=replace, add=add, key=key)
        statement = f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({values}) {update}"  # noqa: S608
        self.connection.execute(text(statement), [dict(zip(columns, record, strict=True)) for record in records])

    def notify(self, subject: str) -> None:
        self.subjects |= {subject}

    def record(self, kind: str, rows: Written) -> None:
        if rows:
            self.written.append((kind, rows))
