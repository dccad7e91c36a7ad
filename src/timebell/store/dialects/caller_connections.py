"""Use a caller's connection of psycopg, asyncpg, PyMySQL, sqlite3 or Django with SQLAlchemy, for one operation.

The transaction belongs to the caller: nothing here begins, commits or rolls back, and nothing closes the connection.
"""

from __future__ import annotations

import functools
import sqlite3
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, NullPool, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import greenlet_spawn

from timebell.errors import InvalidInput

R = TypeVar("R")
_STATUS_IN_TRANSACTION = 1  # flag of the server status in each MariaDB response
ASYNC_DRIVERS = ("postgresql+asyncpg", "postgresql+psycopg_async")


def driver_of(connection: Any) -> str | None:
    """Return the SQLAlchemy driver name of a driver connection; None for any other object."""
    if isinstance(connection, sqlite3.Connection):
        return "sqlite"
    asyncpg = sys.modules.get("asyncpg")  # if it is not imported, no connection of it exists
    if asyncpg is not None and isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        return "postgresql+asyncpg"
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        return "postgresql+psycopg"
    if psycopg is not None and isinstance(connection, psycopg.AsyncConnection):
        return "postgresql+psycopg_async"
    pymysql = sys.modules.get("pymysql")
    if pymysql is not None and isinstance(connection, pymysql.connections.Connection):
        return "mysql+pymysql"
    return None


def is_django(connection: Any) -> bool:
    """Return whether this is Django's `connection`, or one of its `connections`."""
    base = sys.modules.get("django.db.backends.base.base")  # if it is not imported, no connection exists
    if base is None:
        return False
    return isinstance(connection, base.BaseDatabaseWrapper | sys.modules["django.utils.connection"].ConnectionProxy)


def django_driver_connection(connection: Any) -> Any:
    """Return the driver connection inside Django's connection of the calling thread.

    Raises InvalidInput (INVALID_CONNECTION), and the errors of Django for a broken transaction.
    """
    connection.validate_no_broken_transaction()
    connection.ensure_connection()
    inner = connection.connection
    if driver_of(inner) is None:
        raise InvalidInput(
            f"Django's connection {connection.alias!r} uses {type(inner).__module__}, which is not supported.",
            code="INVALID_CONNECTION", fix="Use SQLite, or PostgreSQL with psycopg 3 (pip install psycopg).",
        )  # fmt: skip
    return inner


def check_transaction(driver: str, connection: Any) -> None:
    """Check that a transaction is open, or will be opened by the driver. Raises InvalidInput (TRANSACTION_MISSING)."""
    if driver == "sqlite":
        autocommit = connection.isolation_level is None or getattr(connection, "autocommit", None) is True
        missing = autocommit and not connection.in_transaction
    elif driver == "postgresql+asyncpg":
        missing = not connection.is_in_transaction()
    elif driver == "mysql+pymysql":
        missing = connection.get_autocommit() and not connection.server_status & _STATUS_IN_TRANSACTION
    else:
        missing = connection.autocommit and not connection.info.transaction_status
    if missing:
        raise InvalidInput(
            "The connection has no open transaction, so the operation cannot be atomic with other changes.",
            code="TRANSACTION_MISSING", fix="Begin a transaction first, or omit connection=.",
        )  # fmt: skip


async def run_in_greenlet(function: Callable[[], R]) -> R:
    """Run a function that uses the connection of an async driver through SQLAlchemy."""
    return await greenlet_spawn(function)


def run_with_sqlalchemy(driver: str, connection: Any, function: Callable[[Connection], R]) -> R:
    """Call `function` with a SQLAlchemy connection on a driver connection; raise errors as the driver's own.

    With an async driver, call it within `run_in_greenlet`.
    """
    dialect, cache = _dialect(driver)
    pool = NullPool(lambda: _adapt(driver, dialect, connection), dialect=dialect)
    try:
        with Engine(pool, dialect, make_url(f"{driver}://")).connect() as sqlalchemy_connection:
            return function(sqlalchemy_connection.execution_options(compiled_cache=cache))
    except DBAPIError as error:
        raise (getattr(error.orig, "__cause__", None) or error.orig or error) from error


class _CallerOwnedDialect:
    """Mixin for a SQLAlchemy dialect that does not own the transaction and the connection."""

    supports_statement_cache = True

    def do_begin(self, dbapi_connection: Any) -> None:
        """Do nothing: the caller controls the transaction."""

    do_commit = do_rollback = do_close = do_terminate = do_begin


@functools.cache
def _dialect(driver: str) -> tuple[Any, dict[Any, Any]]:
    """Return the dialect for a driver, and its cache of compiled statements."""
    base = make_url(f"{driver}://").get_dialect()
    subclass = type(f"CallerOwned{base.__name__}", (_CallerOwnedDialect, base), {"supports_statement_cache": True})
    return subclass(dbapi=base.import_dbapi()), {}


def _adapt(driver: str, dialect: Any, connection: Any) -> Any:
    """Wrap a driver connection as SQLAlchemy expects it."""
    if driver not in ASYNC_DRIVERS:
        return _TupleRowConnection(connection)

    async def existing_connection() -> Any:
        return connection if driver == "postgresql+asyncpg" else _TupleRowConnection(connection)

    adapted = dialect.dbapi.connect(async_creator_fn=existing_connection)
    if driver == "postgresql+asyncpg":
        adapted.isolation_level = "autocommit"  # begins no transactions itself
    return adapted


class _TupleRowConnection:
    """A driver connection whose rows are tuples, whatever row factory the caller has set."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def cursor(self) -> Any:
        """Create a cursor that returns tuples."""
        if isinstance(self._connection, sqlite3.Connection):
            cursor = self._connection.cursor()
            cursor.row_factory = None
            return cursor
        if hasattr(self._connection, "server_status"):
            from pymysql.cursors import Cursor

            return self._connection.cursor(Cursor)
        from psycopg.rows import tuple_row

        return self._connection.cursor(row_factory=tuple_row)
