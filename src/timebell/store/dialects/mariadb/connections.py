"""Pools of connections to MariaDB, with their session settings."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event

from timebell.errors import Refused
from timebell.store.dialects.liveness import LivenessMonitor
from timebell.store.dialects.mariadb import ddl
from timebell.store.dialects.mariadb.server import MariaServer

MIN_SERVER_VERSION = (10, 6)
"""The first version with SKIP LOCKED."""
LOCK_TIMEOUT_SECONDS = 10  # wait for a row lock, and maximum idle time in a transaction
STATEMENT_TIMEOUT_SECONDS = 30  # wait for the response to a statement
MIGRATION_TIMEOUT_SECONDS = 86_400  # the same in a migration, which may create an index on many rows
_SESSION_SETTINGS = (
    f"SET NAMES utf8mb4 COLLATE {ddl.COLLATION}",
    "SET SESSION time_zone = '+00:00',"
    " sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION',"
    f" innodb_lock_wait_timeout = {LOCK_TIMEOUT_SECONDS}, idle_transaction_timeout = {LOCK_TIMEOUT_SECONDS},"
    " join_cache_level = 0",
)


def engine_for(
    server: MariaServer, *, pool_size: int = 5, pool_timeout: float = 30.0, statement_timeout: float | None = None,
    read_only: bool = False,
) -> Engine:  # fmt: skip
    """Create a PyMySQL engine with the session settings of Timebell. Raises Refused (EXTRA_MISSING).

    `pool_timeout` is the maximum wait for a connection if all are in use, `statement_timeout` the maximum wait for the
    response to a statement, in seconds.
    """
    try:
        from pymysql.constants import FIELD_TYPE
        from pymysql.converters import conversions
        from pymysql.err import MySQLError
    except ImportError as error:
        raise Refused(
            "MariaDB requires the package PyMySQL, which is not installed.", code="EXTRA_MISSING",
            fix='Run: pip install "timebell[mysql]".',
        ) from error  # fmt: skip

    engine = create_engine(
        server.driver_url,
        isolation_level="READ COMMITTED",
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_timeout,
        pool_reset_on_return=None,  # see `_roll_back`
        connect_args={
            "connect_timeout": 5, "read_timeout": statement_timeout or STATEMENT_TIMEOUT_SECONDS,
            "write_timeout": STATEMENT_TIMEOUT_SECONDS,
            "conv": {**conversions, FIELD_TYPE.NEWDECIMAL: _parse_number, FIELD_TYPE.DECIMAL: _parse_number},
        },
    )  # fmt: skip

    @event.listens_for(engine, "do_connect")
    def _connect(dialect: Any, _record: Any, _args: Any, arguments: dict[str, Any]) -> Any:
        return server.connect(dialect.loaded_dbapi, **arguments)

    @event.listens_for(engine, "connect")
    def _configure_session(driver: Any, _: Any) -> None:
        with driver.cursor() as cursor:
            cursor.execute("SELECT VERSION()")
            check_server_version(cursor.fetchone()[0])
            for statement in _SESSION_SETTINGS:
                cursor.execute(statement)
            if read_only:
                cursor.execute("SET SESSION TRANSACTION READ ONLY")
        driver.commit()

    @event.listens_for(engine, "reset")
    def _roll_back(driver: Any, record: Any, _: Any) -> None:
        try:
            driver.rollback()
        except (OSError, MySQLError) as error:  # it is lost; SQLAlchemy would log a traceback of each
            record.invalidate(error)

    return engine


def observe_statements(engine: Engine, liveness: LivenessMonitor[Any]) -> None:
    """Let `liveness` watch single statements: between them, an operation computes and does not wait for the server."""

    @event.listens_for(engine, "before_cursor_execute")
    def _begin(_: Connection, cursor: Any, *_arguments: Any) -> None:
        liveness.begin(cursor.connection)

    @event.listens_for(engine, "after_cursor_execute")
    def _end(_: Connection, cursor: Any, *_arguments: Any) -> None:
        liveness.end(cursor.connection)


def migration_engine(url: str) -> Engine:
    """Create an engine for migrations: it rewrites DDL for MariaDB, and allows long statements.

    A lock request that waits for a long transaction blocks all later ones on the table. So it gives up after a second.
    """
    engine = engine_for(MariaServer(url), statement_timeout=MIGRATION_TIMEOUT_SECONDS)

    @event.listens_for(engine, "begin")
    def _limit_lock_wait(connection: Connection) -> None:
        connection.exec_driver_sql("SET SESSION lock_wait_timeout = 1").close()

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def _rewrite_statement(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        return ddl.rewrite_ddl(statement), parameters

    return engine


def _parse_number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def check_server_version(version: str) -> None:
    name = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    numbers = tuple(int(part) for part in version.removeprefix("5.5.5-").split("-")[0].split(".")[:2])
    if name == "MySQL" or numbers < MIN_SERVER_VERSION:
        raise Refused(
            f"The server is {name} {version}, which is not supported by Timebell.", code="DATABASE_UNSUPPORTED",
            fix="Use MariaDB 10.6 or newer, PostgreSQL or SQLite.",
        )  # fmt: skip
