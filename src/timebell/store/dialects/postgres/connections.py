"""Pools of connections to PostgreSQL, with their session settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import asyncpg
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, Pool, QueuePool
from sqlalchemy.util import greenlet_spawn

from timebell.errors import TimebellError
from timebell.store.dialects.postgres import pooler
from timebell.store.dialects.postgres.server import PostgresServer

STATEMENT_TIMEOUT_SECONDS = 30.0  # wait for the response to a statement
MIGRATION_TIMEOUT_SECONDS = 86_400.0  # the same in a migration, which may create an index on many rows

# JIT compiles statements with a high cost estimate at every execution: 20 ms for a scan that takes 1 ms.
SESSION_SETTINGS = {
    "idle_in_transaction_session_timeout": "10000", "jit": "off", "timezone": "UTC",
}  # fmt: skip
# Hot statements look up a few rows by an index. By default the server would plan every claim again while there is a
# backlog, which takes three times as long as the claim. So each connection plans a statement once, and the planner is
# restricted to index look-ups, because statistics may be missing at that time.
HOT_SETTINGS = SESSION_SETTINGS | {
    "plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_sort": "off", "enable_mergejoin": "off",
}  # fmt: skip


def engine_for(
    server: PostgresServer, *, pool_size: int = 5, pool_timeout: float = 30.0,
    statement_timeout: float = STATEMENT_TIMEOUT_SECONDS, read_only: bool = False,
    settings: Mapping[str, str] = SESSION_SETTINGS, own_search_path: bool = True,
) -> AsyncEngine:  # fmt: skip
    """Create an asyncpg engine in autocommit mode. The server terminates transactions left idle by a frozen client.

    `pool_timeout` is the maximum wait for a connection if all are in use, `statement_timeout` the maximum wait for the
    response to a statement, in seconds. With `own_search_path=False` statements find the tables of the application
    instead of Timebell's, if these have a schema of their own.
    """
    server_settings = {**settings, "application_name": server.application_name}
    if read_only:
        server_settings["default_transaction_read_only"] = "on"
    if own_search_path and server.schema is not None:
        server_settings["search_path"] = server.schema
    engine = create_async_engine(
        "postgresql+asyncpg://",
        isolation_level="AUTOCOMMIT",
        pool_size=2 * pool_size,
        max_overflow=0,  # connections of an overflow would be closed after each use
        pool_timeout=pool_timeout,
        pool_use_lifo=True,  # plans are cached per connection: prefer the one used last
        connect_args={
            "async_creator_fn": server.connect, "server_settings": server_settings,
            "command_timeout": statement_timeout,
        },
    )  # fmt: skip
    pooler.configure_engine(engine, server)
    _close_stray_connections(engine)
    return engine


async def close_connections(connections: Iterable[Connection], pool: Pool) -> None:
    """Close connections, gracefully if the server responds within 2 s."""
    assert isinstance(pool, QueuePool)
    checked_out = [greenlet_spawn(connection.close) for connection in connections]
    idle = [greenlet_spawn(lambda: pool.connect().invalidate()) for _ in range(pool.checkedin())]
    await asyncio.gather(*checked_out, *idle, return_exceptions=True)


def _close_stray_connections(engine: AsyncEngine) -> None:
    """Close a connection when it returns after its pool was replaced; otherwise it would stay open."""

    @event.listens_for(engine.sync_engine, "connect")
    def remember_pool(_: Any, record: ConnectionPoolEntry) -> None:
        record.info["pool"] = engine.sync_engine.pool

    @event.listens_for(engine.sync_engine, "checkin")
    def close_if_stray(_: Any, record: ConnectionPoolEntry) -> None:
        if record.info.get("pool") is not engine.sync_engine.pool:
            record.invalidate()


def create_thread_engine(
    server: PostgresServer, *, pool_size: int, pool_timeout: float, is_pooled: bool
) -> Engine:  # fmt: skip
    """Create a psycopg engine, for blocking code. Raises TimebellError (PSYCOPG_MISSING)."""
    arguments: dict[str, Any] = {**server.libpq_arguments(), "application_name": server.application_name}
    if is_pooled:
        arguments["prepare_threshold"] = None
    else:
        options = [arguments.get("options", ""), *(f"-c {name}={value}" for name, value in SESSION_SETTINGS.items())]
        arguments["options"] = " ".join(options).strip()
    try:
        engine = create_engine(
            "postgresql+psycopg://",
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_timeout=pool_timeout,
            connect_args=arguments,
        )
    except ImportError as error:
        raise TimebellError(
            "Transactions of synchronous handlers on PostgreSQL require psycopg, which is not installed.",
            code="PSYCOPG_MISSING", fix="Run: pip install psycopg[binary], or make the handler async.",
        ) from error  # fmt: skip
    event.listen(engine, "connect", lambda driver, _: server.add_thread_connection(driver))
    return engine


def connect_alive(engine: Engine) -> Connection:
    """Check out a connection that the server has not closed while it was idle. Call it in a greenlet."""
    while True:
        if (connection := discard_closed(engine.connect())) is not None:
            return connection


def discard_closed(connection: Connection) -> Connection | None:
    """Return a connection; close it and return None if the server has closed it. Call it in a greenlet."""
    if not driver_of(connection).is_closed():
        return connection
    connection.invalidate()
    connection.close()
    return None


def driver_of(connection: Connection) -> asyncpg.Connection[Any]:
    """Return the asyncpg connection."""
    driver: asyncpg.Connection[Any] = connection.connection.driver_connection
    return driver
