"""Open the store of a database URL, and upgrade its tables to this release with Alembic.

Functions import the module of a database when they need it: its drivers take a third of the time of an import.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL, Connection, Table, inspect, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from timebell.errors import InvalidInput, Refused, StoreUnreachable
from timebell.feature import Feature
from timebell.store.dialects.base import Store
from timebell.store.metadata import tables_of
from timebell.store.subscribers import Subscribers
from timebell.store.urls import SCHEMA_NAME, SUPPORTED_OPTIONS, parse_database_url
from timebell.store.version import HEAD, VERSION_TABLE, WORKS_SINCE, schema_outdated

log = logging.getLogger("timebell.store")

R = TypeVar("R")

MIGRATIONS = Path(__file__).parent / "migrations"
LOCK_NOT_AVAILABLE = "55P03"  # SQLSTATE: the lock was not acquired before lock_timeout
INSUFFICIENT_PRIVILEGE = "42501"  # SQLSTATE
TABLE_ACCESS_DENIED = 1142  # of MariaDB
MAX_UPGRADE_ATTEMPTS = 60
BACKEND_BY_SCHEME = {
    "sqlite": "sqlite", "postgresql": "postgresql", "postgres": "postgresql", "mysql": "mysql", "mariadb": "mysql",
}  # fmt: skip
"""The SQLAlchemy backend name by URL scheme."""


def open_store(
    url: str, wall_clock: Callable[[], datetime], *, server_clock: bool = True, read_only: bool = False,
    subscribers: Subscribers | None = None,
) -> Store:  # fmt: skip
    """Create the store of a database URL; call its `open` before use.

    `url` is like `sqlite:///file`, `postgresql://user@host/name` or `mariadb://user@host/name`. `wall_clock` reads this
    machine's clock, which serves as the database clock of SQLite. With `server_clock=False` (virtual time) only the
    times passed to operations decide which jobs are due, and SQLite does not wait for the disk. With `read_only` writes
    are refused, no write privilege is needed, and only operations for `run_autocommit` work. `subscribers` are those of
    another store of this process, to share them. Raises InvalidInput (INVALID_DATABASE_URL).
    """
    kind = _backend(url)
    if kind == "sqlite":
        from timebell.store.dialects.sqlite.store import SqliteStore

        return SqliteStore(url, wall_clock, durable=server_clock, read_only=read_only, subscribers=subscribers)
    if kind == "mysql":
        from timebell.store.dialects.mariadb.store import MariaStore

        return MariaStore(url, server_clock=server_clock, read_only=read_only, subscribers=subscribers)
    from timebell.store.dialects.postgres.store import PostgresStore

    return PostgresStore(url, server_clock=server_clock, read_only=read_only, subscribers=subscribers)


def parse_url(url: str) -> URL:
    """Parse a database URL. Raises InvalidInput (INVALID_DATABASE_URL)."""
    try:
        parsed = parse_database_url(url)
    except ArgumentError as error:
        raise _unsupported_url(url) from error
    except ValueError:
        raise _invalid_port(url) from None
    if (backend := BACKEND_BY_SCHEME.get(parsed.get_backend_name())) is None:
        raise _unsupported_url(url)
    if unsupported := sorted(parsed.query.keys() - SUPPORTED_OPTIONS[backend]):
        raise _unsupported_option(backend, unsupported[0])
    if not SCHEMA_NAME.fullmatch(str(parsed.query.get("schema", "timebell"))):
        raise InvalidInput(
            f"{parsed.query['schema']!r:.60} is not a valid name of a schema.", code="INVALID_DATABASE_URL",
            fix="Use up to 40 lower-case letters, digits and _, beginning with a letter, but not with pg_.",
        )  # fmt: skip
    if not str(parsed.query.get("connect_timeout", "5")).isdecimal():
        raise InvalidInput(
            "connect_timeout in the database URL is not a number.", code="INVALID_DATABASE_URL",
            fix="Use a number of seconds, such as connect_timeout=5.",
        )  # fmt: skip
    try:
        ports = [port for _, port in _addresses(backend, url)]
    except (ArgumentError, ValueError):  # the query string may specify hosts and ports, too
        raise _invalid_port(url) from None
    if parsed.port == 0 or not all(0 < port < 65_536 for port in ports):
        raise _invalid_port(url)
    return parsed


def _backend(url: str) -> str:
    return BACKEND_BY_SCHEME[parse_url(url).get_backend_name()]


def server_addresses(url: str) -> list[tuple[str, int]]:
    """Return the (host, port) pairs of the database server; [] for a file or a Unix socket."""
    return _addresses(_backend(url), url)


def _addresses(backend: str, url: str) -> list[tuple[str, int]]:
    if backend == "sqlite":
        return []
    if backend == "mysql":
        from timebell.store.dialects.mariadb import server as mariadb

        return mariadb.server_addresses(url)
    from timebell.store.dialects.postgres import server as postgres

    return postgres.server_addresses(url)


def _invalid_port(url: str) -> InvalidInput:
    """Create the error for an invalid port. It omits the URL: if the host is missing, the "port" may be a password."""
    return InvalidInput(
        f"{url.partition('://')[0]}://... has an invalid port.", code="INVALID_DATABASE_URL",
        fix="Use postgresql://user@host:5432/name; in a password / is %2F, @ is %40 and : is %3A.",
    )  # fmt: skip


def _unsupported_url(url: str) -> InvalidInput:
    return InvalidInput(
        f"{url.split('@')[-1]!r} is not a database supported by Timebell.",
        code="INVALID_DATABASE_URL",
        fix="Use sqlite:///timebell.db, postgresql://user@host/name or mariadb://user@host/name.",
    )


def _unsupported_option(backend: str, name: str) -> InvalidInput:
    fix = f"Remove it. Supported are: {', '.join(sorted(SUPPORTED_OPTIONS[backend]))}."
    if backend == "sqlite":
        fix = "Remove it: a URL of SQLite has no options."
    if backend == "postgresql":
        fix += f" A setting of the server is written options=-c%20{name}%3Dvalue."
    return InvalidInput(
        f"The database URL has the option {name!r:.60}, which is not supported.", code="INVALID_DATABASE_URL", fix=fix
    )


async def read_schema(url: str, features: Iterable[Feature] = ()) -> tuple[str | None, list[str]]:
    """Return the schema version of a database, and the tables of `features` that it does not have.

    The version is None if there are no Timebell tables. Raises StoreUnreachable.
    """

    def read(connection: Connection) -> tuple[str | None, list[str]]:
        present = set(inspect(connection).get_table_names())
        if VERSION_TABLE not in present:
            return None, []
        version = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar()  # noqa: S608
        missing = [table.name for table in tables_of(features) if table.name not in present]
        return None if version is None else str(version), missing

    return await _run_on_connection(url, read, begin="BEGIN")


async def is_compatible(url: str, found_version: str | None) -> bool:
    """Return whether this release works on tables of version `found_version`, the current version of the database.

    It works on its own version, and on newer ones whose `works_since` includes it. Raises StoreUnreachable.
    """
    if found_version is None or found_version <= HEAD:
        return found_version == HEAD
    return await _run_on_connection(url, _supports_this_release, begin="BEGIN")


def _supports_this_release(connection: Connection) -> bool:
    since = connection.exec_driver_sql(f"SELECT works_since FROM {VERSION_TABLE}").scalar()  # noqa: S608
    return since is not None and since <= HEAD


async def schema_version(url: str) -> str | None:
    """Return the schema version of a database; None if it has no Timebell tables. Raises StoreUnreachable."""
    return (await read_schema(url))[0]


async def upgrade(url: str, features: Iterable[Feature]) -> tuple[str | None, str]:
    """Upgrade the tables of the core and of `features` to this release; return the versions before and after.

    Safe to run at any time, from any host: nodes keep running, and if their transactions block the migration for more
    than a second it is rolled back and tried again. Tables of a newer release on which this one works are not changed.
    Raises StoreUnreachable, SchemaOutdated, Refused (DATABASE_PRIVILEGE_MISSING).
    """
    upgrade_tables = partial(migrate, features=tuple(features))
    for _ in range(MAX_UPGRADE_ATTEMPTS):
        try:
            return await _run_on_connection(url, upgrade_tables, may_be_long=True)
        except (StoreUnreachable, DBAPIError) as error:
            busy = getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) == LOCK_NOT_AVAILABLE
            if not busy and not (_backend(url) == "mysql" and _is_lock_timeout_of_mariadb(error)):
                raise
            await _run_on_connection(url, _sleep_briefly)
    return await _run_on_connection(url, upgrade_tables, may_be_long=True)


def _is_lock_timeout_of_mariadb(error: BaseException) -> bool:
    from timebell.store.dialects.mariadb.errors import is_lock_timeout

    return is_lock_timeout(error)


@contextmanager
def _alembic_log_reduced() -> Iterator[None]:
    """Omit Alembic's information from the log of the host application, which is about its own migrations."""
    alembic_log = logging.getLogger("alembic")
    level = alembic_log.level
    alembic_log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        alembic_log.setLevel(level)


def _sleep_briefly(connection: Connection) -> None:
    sleep = "SLEEP" if connection.dialect.name == "mysql" else "pg_sleep"
    connection.exec_driver_sql(f"SELECT {sleep}(0.5)").close()


def migrate(connection: Connection, features: Iterable[Feature]) -> tuple[str | None, str]:
    """Upgrade the tables in the transaction of an open connection; return the versions before and after.

    Migrations create the tables of the core. Those of a feature are created once it is enabled, from their definition.
    """
    with _alembic_log_reduced():  # its modules log when they are loaded
        from alembic import command
        from alembic.config import Config
        from alembic.migration import MigrationContext

    options = {"version_table": VERSION_TABLE}
    if connection.dialect.name == "postgresql":  # one migrator at a time
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7463210012)")
        _create_schema(connection)
        # A lock request that waits for a long transaction blocks all later ones on the same table, and so every node.
        # Therefore the migration gives up after a second; `upgrade` tries again.
        connection.exec_driver_sql("SET LOCAL lock_timeout = '1s'")
    elif connection.dialect.name == "mysql":  # released when the connection closes
        connection.exec_driver_sql("SELECT GET_LOCK(CONCAT('timebell ', DATABASE()), 3600)")
    with _alembic_log_reduced():
        before = MigrationContext.configure(connection, opts=options).get_current_revision()
    if before is not None and before > HEAD:
        if not _supports_this_release(connection):
            raise schema_outdated(str(connection.engine.url), before)
        return before, before
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    with _alembic_log_reduced():
        command.upgrade(config, "head")
    for table in tables_of(features):
        if not _is_complete(connection, table):
            table.create(connection, checkfirst=False)
    done = "created the tables" if before is None else f"upgraded the tables from {before}"
    log.info("%s database=%s version=%s", done, connection.engine.url.render_as_string(), HEAD)
    connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET works_since = '{WORKS_SINCE}'")  # noqa: S608
    return before, HEAD


def _is_complete(connection: Connection, table: Table) -> bool:
    """Return whether a table exists, on MariaDB with all indexes: there an interrupted upgrade may have left some out.

    The statements that create them are idempotent there, but should not wait for the locks of nodes without a need.
    """
    inspector = inspect(connection)
    if not inspector.has_table(table.name):
        return False
    if connection.dialect.name != "mysql":
        return True
    return {index.name for index in table.indexes} <= {index["name"] for index in inspector.get_indexes(table.name)}


def _create_schema(connection: Connection) -> None:
    """Create the schema of the tables if it is missing; creating it with IF NOT EXISTS would need a privilege."""
    if connection.exec_driver_sql("SELECT current_schema()").scalar() is None:
        schema = connection.exec_driver_sql("SELECT current_setting('search_path')").scalar_one()
        if SCHEMA_NAME.fullmatch(schema):
            connection.exec_driver_sql(f"CREATE SCHEMA {schema}")


async def _run_on_connection(
    url: str, function: Callable[[Connection], R], begin: str = "BEGIN IMMEDIATE", *, may_be_long: bool = False
) -> R:
    if _backend(url) == "sqlite":
        return await asyncio.to_thread(_run_on_sqlite, url, function, begin)
    if _backend(url) == "mysql":
        return await asyncio.to_thread(_run_on_mariadb, url, function)
    import asyncpg  # only programs that use PostgreSQL load it

    from timebell.store.dialects.postgres import connections
    from timebell.store.dialects.postgres.errors import CONNECTION_ERRORS, unreachable
    from timebell.store.dialects.postgres.server import PostgresServer

    timeout = connections.MIGRATION_TIMEOUT_SECONDS if may_be_long else connections.STATEMENT_TIMEOUT_SECONDS
    engine = connections.engine_for(PostgresServer(url), statement_timeout=timeout)
    engine = engine.execution_options(isolation_level="READ COMMITTED")
    try:
        async with engine.begin() as connection:
            return await connection.run_sync(function)
    except (*CONNECTION_ERRORS, DBAPIError, asyncpg.PostgresError) as error:
        raise _privilege_missing(url, error) or unreachable(url, error) from error
    finally:
        await engine.dispose()


def _run_on_mariadb(url: str, function: Callable[[Connection], R]) -> R:
    from timebell.store.dialects.mariadb.connections import migration_engine
    from timebell.store.dialects.mariadb.errors import translate_error

    engine = migration_engine(url)
    try:
        with engine.begin() as connection:
            return function(connection)
    except DBAPIError as error:
        raise _privilege_missing(url, error) or translate_error(url, error) from error
    finally:
        engine.dispose()


def _privilege_missing(url: str, error: BaseException) -> Refused | None:
    """Return the error to raise if the role lacks a privilege on the tables or their schema; None otherwise."""
    cause = getattr(error, "orig", None) or error
    number = cause.args[0] if cause.args else None
    if getattr(cause, "sqlstate", None) != INSUFFICIENT_PRIVILEGE and number != TABLE_ACCESS_DENIED:
        return None
    safe_url = parse_database_url(url).render_as_string(hide_password=True)
    return Refused(
        f"The role of {safe_url} may not do this: {cause}.", code="DATABASE_PRIVILEGE_MISSING",
        fix="Use the URL of the role that owns Timebell's tables.",
    )  # fmt: skip


def _run_on_sqlite(url: str, function: Callable[[Connection], R], begin: str) -> R:
    from timebell.store.dialects.sqlite import store as sqlite

    path = make_url(url).database or ":memory:"
    try:
        engine = sqlite.engine_for(url, begin=begin)
        with engine.begin() as connection:
            return function(connection)
    except DBAPIError as error:
        raise sqlite.translate_error(error, path) from error
