"""Support for poolers in transaction mode, such as PgBouncer, which assign a server connection per transaction.

No session state persists there: prepared statements exist on another connection, LISTEN receives nothing, and session
settings would affect other clients. A pooler is detected, not configured: it reports process ids that differ from those
of the server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import asyncpg
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_only

from timebell.errors import Refused
from timebell.store.dialects.postgres.server import PostgresServer

log = logging.getLogger("timebell.store")

# The connection settings that poolers accept or ignore; they reject others.
_ACCEPTED_SETTINGS = ("application_name", "timezone")
_UNNAMED_STATEMENTS = {
    "statement_cache_size": 0, "prepared_statement_cache_size": 0, "prepared_statement_name_func": lambda: "",
}  # fmt: skip

_pooled_urls: dict[str, bool] = {}


def is_pooled(url: str) -> bool:
    """Return whether a pooler was detected at this URL."""
    return _pooled_urls.get(url, False)


def configure_engine(engine: AsyncEngine, server: PostgresServer) -> None:
    """Adapt the new connections of an asyncpg engine to a pooler, if the server is behind one."""
    url = server.url

    @event.listens_for(engine.sync_engine, "do_connect")
    def adapt_connection(dialect: Any, record: Any, args: Any, params: dict[str, Any]) -> None:
        if url not in _pooled_urls:
            _pooled_urls[url] = await_only(_detect_pooler(server))
        if _pooled_urls[url]:
            settings: Mapping[str, str] = params["server_settings"]
            params |= _UNNAMED_STATEMENTS | {"server_settings": {name: settings[name] for name in _ACCEPTED_SETTINGS}}


async def _detect_pooler(server: PostgresServer) -> bool:
    connection = await server.connect(statement_cache_size=0)
    try:
        process = await connection.fetchval("SELECT pg_backend_pid()", timeout=5)
        pooled = bool(process != connection.get_server_pid())
        if pooled:
            await _warn_without_idle_limit(connection)
            if server.schema is not None:
                await check_schema(connection, server.schema)
        return pooled
    finally:
        await connection.close(timeout=5)


async def _warn_without_idle_limit(connection: asyncpg.Connection[Any]) -> None:
    limit = await connection.fetchval(
        "SELECT setting FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'", timeout=5
    )
    if limit == "0":
        log.warning(
            "the database is behind a pooler, and idle transactions have no limit, so a frozen node keeps its locks:"
            " ALTER ROLE ... SET idle_in_transaction_session_timeout = '10s'"
        )


async def check_schema(connection: asyncpg.Connection[Any], schema: str) -> None:
    """Check that the role's own `search_path` begins with the schema, as sessions cannot set it behind a pooler.

    Raises Refused (DATABASE_SCHEMA_POOLED).
    """
    row = await connection.fetchrow(
        "SELECT split_part(current_setting('search_path'), ',', 1), current_user", timeout=5
    )
    assert row is not None
    found, role = row
    if found.strip(' "') != schema:
        raise Refused(
            f"The database is behind a pooler, and its role {role} does not use the schema {schema}.",
            code="DATABASE_SCHEMA_POOLED",
            fix=f"Run: ALTER ROLE {role} SET search_path = {schema}, public; then let the pooler reconnect.",
        )
