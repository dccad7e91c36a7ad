"""From a database URL to a store; and the tables brought up to this version by Alembic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL, Connection, inspect, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from timebell.errors import InvalidInput, SchemaOutdated, StoreUnreachable
from timebell.store.dialects.base import Store
from timebell.store.dialects.mariadb import store as mariadb
from timebell.store.dialects.postgres import store as postgres
from timebell.store.dialects.sqlite import store as sqlite

R = TypeVar("R")

VERSION_TABLE = "timebell_version"
HEAD = "0023"
WORKS_SINCE = "0021"
"""The oldest release, by its HEAD, that works on the tables of HEAD. A migration that only adds what older releases
need not know (a nullable column or one with a default, a table, an index) leaves it; one that takes away, or gives
another meaning, sets it to the first release that got along without."""
MIGRATIONS = Path(__file__).parent / "migrations"
BUSY = "55P03"  # a lock was not to be had in time
TRIES = 60
KINDS = {
    "sqlite": "sqlite", "postgresql": "postgresql", "postgres": "postgresql", "mysql": "mysql", "mariadb": "mysql",
}  # fmt: skip
"""What the scheme of a URL stands for."""


def open_store(url: str, wall: Callable[[], datetime], *, server_clock: bool = True, read_only: bool = False) -> Store:
    """The store behind `sqlite:///file`, `postgresql://user@host/name` or `mariadb://user@host/name`; call its `open`
    before use.

    `wall` reads this machine's clock, which is SQLite's; with `server_clock=False` only the times passed in
    decide what is due and nothing waits for the disk (virtual time). `read_only` refuses writes, and needs no right to;
    then only `hot` operations are possible. Raises InvalidInput (DATABASE_URL_INVALID).
    """
    kind = _kind(url)
    if kind == "sqlite":
        return sqlite.SqliteStore(url, wall, durable=server_clock, read_only=read_only)
    if kind == "mysql":
        return mariadb.MariaStore(url, server_clock=server_clock, read_only=read_only)
    return postgres.PostgresStore(url, server_clock=server_clock, read_only=read_only)


def address(url: str) -> URL:
    """A database URL in its parts. Raises InvalidInput (DATABASE_URL_INVALID)."""
    try:
        made = make_url(url)
    except ArgumentError as bad:
        raise _invalid(url) from bad
    except ValueError:
        raise _no_port(url) from None
    if (kind := made.get_backend_name()) not in KINDS:
        raise _invalid(url)
    try:
        ports = [port for _, port in _servers(KINDS[kind], url)]
    except (ArgumentError, ValueError):  # what stands behind the ? names hosts and ports, too
        raise _no_port(url) from None
    if made.port == 0 or not all(0 < port < 65_536 for port in ports):
        raise _no_port(url)
    return made


def _kind(url: str) -> str:
    return KINDS[address(url).get_backend_name()]


def listening(url: str) -> list[tuple[str, int]]:
    """(host, port) where the database takes connections; none for a file or a Unix socket."""
    return _servers(_kind(url), url)


def _servers(kind: str, url: str) -> list[tuple[str, int]]:
    if kind == "mysql":
        return mariadb.listening(url)
    return [] if kind == "sqlite" else postgres.listening(url)


def _no_port(url: str) -> InvalidInput:
    """Without the URL, as it may be a password that stands there, where a host was forgotten."""
    return InvalidInput(
        f"{url.partition('://')[0]}://... has a port that is none.", code="DATABASE_URL_INVALID",
        fix="Use postgresql://user@host:5432/name; in a password / is %2F, @ is %40 and : is %3A.",
    )  # fmt: skip


def _invalid(url: str) -> InvalidInput:
    return InvalidInput(
        f"{url.split('@')[-1]!r} is not a database that Timebell knows.",
        code="DATABASE_URL_INVALID",
        fix="Use sqlite:///timebell.db, postgresql://user@host/name or mariadb://user@host/name.",
    )


def outdated(url: str, found: str | None) -> SchemaOutdated:
    """The error for a database whose tables are not those of this version."""
    if found is not None and found > HEAD:
        return SchemaOutdated(
            f"The database {url.split('@')[-1]} has the tables of a newer release ({found}); this one knows {HEAD}.",
            fix="Upgrade this program.",
        )
    state = f"has the tables of version {found}" if found else "has no Timebell tables yet"
    return SchemaOutdated(
        f"The database {url.split('@')[-1]} {state}; this release needs {HEAD}.", fix="Run: timebell db upgrade"
    )


async def version(url: str) -> str | None:
    """The schema version found there; None for a database without our tables. Raises StoreUnreachable."""

    def look(connection: Connection) -> str | None:
        if not inspect(connection).has_table(VERSION_TABLE):
            return None
        found = connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar()  # noqa: S608
        return None if found is None else str(found)

    return await _on_connection(url, look, begin="BEGIN")


async def works(url: str, found: str | None) -> bool:
    """Whether this release works on the tables of version `found`, which is there: its own, or those of a newer release
    that says so. Raises StoreUnreachable."""
    if found is None or found <= HEAD:
        return found == HEAD
    return await _on_connection(url, _works_here, begin="BEGIN")


def _works_here(connection: Connection) -> bool:
    since = connection.exec_driver_sql(f"SELECT works_since FROM {VERSION_TABLE}").scalar()  # noqa: S608
    return since is not None and since <= HEAD


async def upgrade(url: str) -> tuple[str | None, str]:
    """Bring the tables up to this version; the versions before and after. Safe to run anywhere, any time: nodes go on,
    and where they are in the way for over a second it tries again. Tables of a newer release on which this one works
    are left as they are. Raises StoreUnreachable, SchemaOutdated."""
    for _ in range(TRIES):
        try:
            return await _on_connection(url, migrate)
        except (StoreUnreachable, DBAPIError) as failed:
            busy = getattr(getattr(failed.__cause__, "orig", None), "sqlstate", None) == BUSY
            if not busy and not mariadb.busy(failed):
                raise
            await _on_connection(url, _pause)
    return await _on_connection(url, migrate)


def _pause(connection: Connection) -> None:
    sleep = "SLEEP" if connection.dialect.name == "mysql" else "pg_sleep"
    connection.exec_driver_sql(f"SELECT {sleep}(0.5)").close()


def migrate(connection: Connection) -> tuple[str | None, str]:
    """As `upgrade`, on a connection that is open, in its transaction."""
    from alembic import command
    from alembic.config import Config
    from alembic.migration import MigrationContext

    options = {"version_table": VERSION_TABLE}
    if connection.dialect.name == "postgresql":  # one migrator at a time
        connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7463210012)")
        # Nobody waits behind a migration that itself waits for a long transaction: it gives up, and comes again.
        connection.exec_driver_sql("SET LOCAL lock_timeout = '1s'")
    elif connection.dialect.name == "mysql":  # it is let go with the connection
        connection.exec_driver_sql("SELECT GET_LOCK(CONCAT('timebell ', DATABASE()), 3600)")
    before = MigrationContext.configure(connection, opts=options).get_current_revision()
    if before is not None and before > HEAD:
        if not _works_here(connection):
            raise outdated(str(connection.engine.url), before)
        return before, before
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET works_since = '{WORKS_SINCE}'")  # noqa: S608
    return before, HEAD


async def _on_connection(url: str, call: Callable[[Connection], R], begin: str = "BEGIN IMMEDIATE") -> R:
    if _kind(url) == "sqlite":
        return await asyncio.to_thread(_on_sqlite, url, call, begin)
    if _kind(url) == "mysql":
        return await asyncio.to_thread(_on_mariadb, url, call)
    answer = postgres.LONG if call is migrate else postgres.ANSWER
    engine = postgres.engine_for(url, answer=answer).execution_options(isolation_level="READ COMMITTED")
    try:
        async with engine.begin() as connection:
            return await connection.run_sync(call)
    except (OSError, DBAPIError) as failed:
        raise postgres.unreachable(url, failed) from failed
    finally:
        await engine.dispose()


def _on_mariadb(url: str, call: Callable[[Connection], R]) -> R:
    engine = mariadb.migrating(url)
    try:
        with engine.begin() as connection:
            return call(connection)
    except DBAPIError as failed:
        raise mariadb.translated(url, failed) from failed
    finally:
        engine.dispose()


def _on_sqlite(url: str, call: Callable[[Connection], R], begin: str) -> R:
    path = make_url(url).database or ":memory:"
    try:
        engine = sqlite.engine_for(url, begin=begin)
        with engine.begin() as connection:
            return call(connection)
    except DBAPIError as failed:
        raise sqlite.translate(failed, path) from failed
