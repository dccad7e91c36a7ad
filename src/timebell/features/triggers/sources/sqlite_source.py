"""Read-only access to SQLite sources. The driver blocks, so it is called in a thread."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote

from sqlalchemy import make_url


class SqliteDatabase:
    """A SQLite file, opened for each query."""

    def __init__(self, url: str) -> None:
        self._file = make_url(url).database or ""

    async def fetch(self, query: str, parameters: Mapping[str, Any], *, first: bool = False) -> list[dict[str, Any]]:
        """Return the rows of a query with `:name` parameters, or only the first one."""
        return await asyncio.to_thread(self._fetch, query, dict(parameters), first)

    def _fetch(self, query: str, parameters: dict[str, Any], first: bool) -> list[dict[str, Any]]:
        uri = f"file:{quote(self._file)}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=5)) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = lambda data: data.decode(errors="replace")  # other encodings are no error
            cursor = connection.execute(query, parameters)
            return [dict(row) for row in (cursor.fetchmany(1) if first else cursor)]

    async def close(self) -> None:
        """Do nothing: connections are not kept open."""
