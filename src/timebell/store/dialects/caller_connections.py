"""A caller's own connection of psycopg, asyncpg, PyMySQL, sqlite3 or Django, made one of SQLAlchemy's for one
operation.

Its transaction is the caller's: nothing here begins, commits or rolls back, and nothing closes the connection.
"""

from __future__ import annotations

import functools
import sqlite3
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import asyncpg
from sqlalchemy import Connection, Engine, NullPool, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import greenlet_spawn

from timebell.errors import InvalidInput

R = TypeVar("R")
_IN_TRANSACTION = 1  # of the status that MariaDB gives with each answer
ASYNC = ("postgresql+asyncpg", "postgresql+psycopg_async")


def driver_of(connection: Any) -> str | None:
    """What SQLAlchemy calls the driver that this connection is of; None for anything else."""
    if isinstance(connection, sqlite3.Connection):
        return "sqlite"
    if isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        return "postgresql+asyncpg"
    psycopg = sys.modules.get("psycopg")  # not imported: then nobody holds one of its connections
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        return "postgresql+psycopg"
    if psycopg is not None and isinstance(connection, psycopg.AsyncConnection):
        return "postgresql+psycopg_async"
    pymysql = sys.modules.get("pymysql")
    if pymysql is not None and isinstance(connection, pymysql.connections.Connection):
        return "mysql+pymysql"
    return None


def is_django(connection: Any) -> bool:
    """Whether it is Django's `connection`, or one of its `connections`."""
    base = sys.modules.get("django.db.backends.base.base")  # not imported: then nobody holds one
    if base is None:
        return False
    return isinstance(connection, base.BaseDatabaseWrapper | sys.modules["django.utils.connection"].ConnectionProxy)


def of_django(connection: Any) -> Any:
    """The driver's connection within Django's, which is the calling thread's own.

    Raises InvalidInput (CONNECTION_INVALID), and what Django raises in a transaction that is already broken.
    """
    connection.validate_no_broken_transaction()
    connection.ensure_connection()
    inner = connection.connection
    if driver_of(inner) is None:
        raise InvalidInput(
            f"Django's connection {connection.alias!r} is one of {type(inner).__module__}.", code="CONNECTION_INVALID",
            fix="Use SQLite, or PostgreSQL with psycopg 3 (pip install psycopg).",
        )  # fmt: skip
    return inner


def check_transaction(driver: str, connection: Any) -> None:
    """Raises InvalidInput (TRANSACTION_MISSING) where what is done now would stand at once, whatever comes after."""
    if driver == "sqlite":
        at_once = connection.isolation_level is None or getattr(connection, "autocommit", None) is True
        missing = at_once and not connection.in_transaction
    elif driver == "postgresql+asyncpg":
        missing = not connection.is_in_transaction()
    elif driver == "mysql+pymysql":
        missing = connection.get_autocommit() and not connection.server_status & _IN_TRANSACTION
    else:
        missing = connection.autocommit and not connection.info.transaction_status
    if missing:
        raise InvalidInput(
            "The connection has no transaction open, so there is nothing to be atomic with.",
            code="TRANSACTION_MISSING", fix="Begin one first, or leave out connection=.",
        )  # fmt: skip


async def awaited(call: Callable[[], R]) -> R:
    """Run a function that uses the connection of an async driver."""
    return await greenlet_spawn(call)


def lent(driver: str, connection: Any, use: Callable[[Connection], R]) -> R:
    """What `use` answers of the connection; of an async driver, within `awaited`. Errors are the driver's own."""
    dialect, cache = _dialect(driver)
    pool = NullPool(lambda: _adapted(driver, dialect, connection), dialect=dialect)
    try:
        with Engine(pool, dialect, make_url(f"{driver}://")).connect() as made:
            return use(made.execution_options(compiled_cache=cache))
    except DBAPIError as failed:
        raise (getattr(failed.orig, "__cause__", None) or failed.orig or failed) from failed


class _Lent:
    """Of a dialect: whose the transaction and the connection are not."""

    supports_statement_cache = True

    def do_begin(self, dbapi_connection: Any) -> None:
        """The owner did."""

    do_commit = do_rollback = do_close = do_terminate = do_begin


@functools.cache
def _dialect(driver: str) -> tuple[Any, dict[Any, Any]]:
    """The driver's dialect, and a cache of what it compiled."""
    of_driver = make_url(f"{driver}://").get_dialect()
    made = type(f"Lent{of_driver.__name__}", (_Lent, of_driver), {"supports_statement_cache": True})
    return made(dbapi=of_driver.import_dbapi()), {}


def _adapted(driver: str, dialect: Any, connection: Any) -> Any:
    """The connection as SQLAlchemy expects one of this driver."""
    if driver not in ASYNC:
        return _Plain(connection)

    async def given() -> Any:
        return connection if driver == "postgresql+asyncpg" else _Plain(connection)

    adapted = dialect.dbapi.connect(async_creator_fn=given)
    if driver == "postgresql+asyncpg":
        adapted.isolation_level = "autocommit"  # it begins none of its own
    return adapted


class _Plain:
    """A connection whose rows are tuples, whatever its owner had them be."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def cursor(self) -> Any:
        """A new one."""
        if isinstance(self._connection, sqlite3.Connection):
            cursor = self._connection.cursor()
            cursor.row_factory = None
            return cursor
        if hasattr(self._connection, "server_status"):
            from pymysql.cursors import Cursor

            return self._connection.cursor(Cursor)
        from psycopg.rows import tuple_row

        return self._connection.cursor(row_factory=tuple_row)
