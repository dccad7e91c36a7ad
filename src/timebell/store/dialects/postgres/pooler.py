"""What is different behind a pooler that lends the server's connections for a transaction each, such as PgBouncer.

Nothing of a session lasts there: prepared statements are of another connection, LISTEN hears nothing, and settings of a
session would be a stranger's next. Whether there is one is seen, not configured: a pooler hands out process ids of its
own making.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import await_only

# What poolers take or ignore of the settings that a connection asks for; the others they refuse.
_TAKEN = ("application_name", "timezone")
_UNNAMED = {
    "statement_cache_size": 0, "prepared_statement_cache_size": 0, "prepared_statement_name_func": lambda: "",
}  # fmt: skip

_pooled: dict[str, bool] = {}


def pooled(url: str) -> bool:
    """Whether a pooler was seen at this address (as libpq writes it)."""
    return _pooled.get(url, False)


def heed(engine: AsyncEngine, url: str) -> None:
    """Have each connection of an asyncpg engine be one that works behind a pooler, if there is one."""

    @event.listens_for(engine.sync_engine, "do_connect")
    def connecting(dialect: Any, record: Any, args: Any, params: dict[str, Any]) -> None:
        if url not in _pooled:
            _pooled[url] = await_only(_look(url))
        if _pooled[url]:
            asked: Mapping[str, str] = params["server_settings"]
            params |= _UNNAMED | {"server_settings": {name: asked[name] for name in _TAKEN}}


async def _look(url: str) -> bool:
    connection = await asyncpg.connect(url, timeout=5, statement_cache_size=0)
    try:
        process = await connection.fetchval("SELECT pg_backend_pid()", timeout=5)
        return bool(process != connection.get_server_pid())
    finally:
        await connection.close(timeout=5)
