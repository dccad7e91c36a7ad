"""Read-only access to SQLite sources. The driver blocks, so it is called in a thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote

from sqlalchemy import make_url

from timebell.features.triggers.sources.driver_threads import DriverThreads
from timebell.features.triggers.sources.sql_values import InvalidText


class SqliteDatabase:
    """A SQLite file, opened for each query."""

    def __init__(self, url: str) -> None:
        self._file = make_url(url).database or ""
        self._threads = DriverThreads()

    async def fetch(self, query: str, parameters: Mapping[str, Any], *, first: bool = False) -> list[dict[str, Any]]:
        """Return the rows of a query with `:name` parameters, or only the first one."""
        return await self._threads.run(self._fetch, query, dict(parameters), first)

    async def list_columns(self, query: str) -> list[str]:
        """Return the columns of a query without parameters."""
        return await self._threads.run(self._list_columns, query)

    def _list_columns(self, query: str) -> list[str]:
        with closing(self._connect()) as connection:
            return [column[0] for column in connection.execute(query).description]

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{quote(self._file)}?mode=ro", uri=True, timeout=5)

    def _fetch(self, query: str, parameters: dict[str, Any], first: bool) -> list[dict[str, Any]]:
        with closing(self._connect()) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = _decode_text
            cursor = connection.execute(query, parameters)
            return [dict(row) for row in (cursor.fetchmany(1) if first else cursor)]

    async def close(self) -> None:
        """End the threads; connections are not kept open."""
        self._threads.close()


def _decode_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return InvalidText(data.decode(errors="replace"))
