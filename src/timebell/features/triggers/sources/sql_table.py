"""Adapter for a table or query of a PostgreSQL, MySQL, MariaDB or SQLite database, accessed read-only.

Rows are read in key order, a few hundred at a time. Changes are found by comparing all rows, by a column that increases
with each change, or, on PostgreSQL, by a trigger on the table that sends notifications (`install_sql`).
"""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from math import isfinite
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import UUID

import asyncpg
from sqlalchemy import Engine, make_url, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from timebell.errors import InvalidInput, SourceFailed
from timebell.features.triggers.sources import mysql_source
from timebell.features.triggers.sources.base import RowPage
from timebell.model.policy import parse_seconds
from timebell.store.dialects.postgres import store as postgres
from timebell.store.dialects.postgres.server import PostgresServer
from timebell.store.open import BACKEND_BY_SCHEME

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)
QUALIFIED_IDENTIFIER = re.compile(rf"{IDENTIFIER.pattern}(\.{IDENTIFIER.pattern})?", re.ASCII)
OPTIONS = ("url", "table", "query", "key", "changes", "cursor", "channel", "everySeconds", "sweepEverySeconds")
CHANGE_MODES = ("compare", "cursor", "notify")
DEFAULT_POLL_SECONDS, DEFAULT_FULL_SCAN_SECONDS = 5.0, 600.0
CURSOR_OVERLAP = timedelta(seconds=10)
"""Changes up to this long before the cursor are read again, to find transactions that committed late."""
STATEMENT_TIMEOUT_SECONDS = 20.0


class SqlTable:
    """Adapter for a table or query. Raises InvalidInput (INVALID_SOURCE_OPTIONS)."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if unknown := options.keys() - set(OPTIONS):
            raise _invalid_options(
                f"A source of kind sql has no option {min(unknown)!r:.60}.", f"The options are {', '.join(OPTIONS)}."
            )
        self._url = options.get("url")
        self._kind = _database_kind(self._url)
        query, table = options.get("query"), options.get("table")
        if (query is None and table is None) or not isinstance(query or "", str):
            raise _invalid_options("A source of kind sql requires a table or a query.", "Specify table or query.")
        self.table: str | None = None if table is None else _check_identifier(table, "table", QUALIFIED_IDENTIFIER)
        self._from_clause = f"({query.strip().rstrip(';')}) AS items" if query is not None else self.table
        self.key = _check_identifier(options.get("key", "id"), "key")
        self.change_mode = options.get("changes", "compare")
        if self.change_mode not in CHANGE_MODES:
            raise _invalid_options(f"changes is {self.change_mode!r:.40}.", f"Use {', '.join(CHANGE_MODES)}.")
        self._cursor_column = (
            _check_identifier(options.get("cursor"), "cursor") if self.change_mode == "cursor" else None
        )
        if self.change_mode == "notify" and self._kind != "postgresql":
            product = "SQLite" if self._kind == "sqlite" else "MySQL"
            raise _invalid_options(
                f"{product} has no notifications of changes.", 'Use "changes": "compare" or "cursor".'
            )
        self.channel = _check_identifier(options.get("channel", "timebell_items"), "channel")
        self.poll_interval = (
            0.0
            if self.change_mode == "notify"
            else parse_seconds(options.get("everySeconds", DEFAULT_POLL_SECONDS), "everySeconds", minimum=0.1)
        )
        self.full_scan_interval = parse_seconds(
            options.get("sweepEverySeconds", DEFAULT_FULL_SCAN_SECONDS), "sweepEverySeconds", minimum=0.1
        )
        self._engine: AsyncEngine | None = None
        self._mysql_engine: Engine | None = None
        self._listener: asyncpg.Connection[Any] | None = None
        self._key_type: type = str

    async def read_page(self, after: str | None, limit: int) -> RowPage:
        start = None if after is None else _decode_key(after)
        where = "" if after is None else f"WHERE {self.key} > :after "
        parameters = {} if after is None else {"after": start}
        query = f"SELECT * FROM {self._from_clause} {where}ORDER BY {self.key} LIMIT {limit:d}"  # noqa: S608 - checked names
        rows = await self._fetch_rows(query, parameters)
        cursor = _encode_key(rows[-1][self.key]) if len(rows) == limit else None
        return RowPage(self._items_by_key(rows), cursor)

    async def read_changes(self, since: str | None, limit: int) -> RowPage | None:
        if self._cursor_column is None:
            return None
        position = None if since is None else json.loads(since)
        parameters: dict[str, Any] = {}
        where = f"WHERE {self._cursor_column} IS NOT NULL "
        if position is not None:
            parameters["since"] = _decode_key(json.dumps(position["at"]))
            if "key" in position:
                parameters["after"] = _decode_key(json.dumps(position["key"]))
                where = (
                    f"WHERE {self._cursor_column} > :since OR ({self._cursor_column} = :since AND {self.key} > :after) "
                )
            else:
                if isinstance(parameters["since"], datetime):
                    parameters["since"] -= CURSOR_OVERLAP
                where = f"WHERE {self._cursor_column} >= :since "
        query = f"SELECT * FROM {self._from_clause} {where}ORDER BY {self._cursor_column}, {self.key} LIMIT {limit:d}"  # noqa: S608
        rows = await self._fetch_rows(query, parameters)
        if not rows:
            return RowPage({}, None if position is None else json.dumps({"at": position["at"]}))
        last = {"at": json.loads(_encode_key(rows[-1][self._cursor_column]))}
        if len(rows) == limit:
            last["key"] = json.loads(_encode_key(rows[-1][self.key]))
        return RowPage(self._items_by_key(rows), json.dumps(last))

    async def read_rows(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        if not keys:
            return {}
        if self._key_type is str:  # text, or not known yet
            sample = await self._fetch_rows(f"SELECT {self.key} FROM {self._from_clause} LIMIT 1", {})  # noqa: S608
            if not sample:
                return {}
            self._key_type = type(sample[0][self.key])
        parameters = {}
        for number, key in enumerate(keys):
            try:
                parameters[f"k{number}"] = key if self._key_type is str else self._key_type(key)
            except (TypeError, ValueError):
                continue  # no row has such a key
        if not parameters:
            return {}
        placeholders = ", ".join(f":{name}" for name in parameters)
        query = f"SELECT * FROM {self._from_clause} WHERE {self.key} IN ({placeholders})"  # noqa: S608
        return self._items_by_key(await self._fetch_rows(query, parameters))

    async def matches(self, query: str, parameters: Mapping[str, Any]) -> bool:
        return bool(await self._fetch_rows(query, dict(parameters), limit=1))

    async def listen(self, on_change: Callable[[str | None], None]) -> bool:
        if self.change_mode != "notify" or (self._listener is not None and not self._listener.is_closed()):
            return False
        url = make_url(str(self._url)).set(drivername="postgresql").render_as_string(hide_password=False)
        try:
            listener = await asyncpg.connect(url, timeout=5)
            try:
                await listener.add_listener(self.channel, lambda *args: on_change(str(args[-1])))
            except BaseException:  # the connection is open, but does not listen
                listener.terminate()
                raise
        except (OSError, TimeoutError, asyncpg.PostgresError) as error:
            raise _source_failed(error) from error
        listener.add_termination_listener(lambda _: on_change(None))
        self._listener = listener
        return True

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close(timeout=1)
            self._listener = None
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None
        if self._mysql_engine is not None:
            self._mysql_engine.dispose()
            self._mysql_engine = None

    def install_sql(self) -> str:
        """Return SQL that creates the notification trigger, for the user to review and run. Raises InvalidInput."""
        if self.table is None or self._kind != "postgresql":
            raise _invalid_options(
                "Only PostgreSQL tables support change notifications.",
                'Specify a table instead of a query, or use "changes": "compare".',
            )
        name = f"{self.channel}_{self.table.replace('.', '_')}"[:63]
        return INSTALL_TEMPLATE.format(name=name, table=self.table, key=self.key, channel=self.channel)

    def _items_by_key(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        items = {}
        for row in rows:
            if self.key not in row:
                raise SourceFailed(f"The rows have no column {self.key}.", fix="Set the option key to the key column.")
            if row[self.key] is not None:
                self._key_type = type(row[self.key])
                items[str(row[self.key])] = {name: _to_json_value(value) for name, value in row.items()}
        return items

    async def _fetch_rows(self, query: str, parameters: Mapping[str, Any], limit: int = 10_000) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(STATEMENT_TIMEOUT_SECONDS):
                if self._kind == "sqlite":
                    return await asyncio.to_thread(_fetch_sqlite, str(self._url), query, dict(parameters), limit)
                if self._kind == "mysql":
                    self._mysql_engine = self._mysql_engine or mysql_source.create_read_only_engine(str(self._url))
                    return await asyncio.to_thread(
                        mysql_source.fetch_rows, self._mysql_engine, query, dict(parameters), limit
                    )
                if self._engine is None:
                    self._engine = postgres.engine_for(PostgresServer(str(self._url)), pool_size=2, read_only=True)
                async with self._engine.connect() as connection:
                    result = await connection.execute(text(query), dict(parameters))
                    return [dict(row._mapping) for row in result.fetchmany(limit)]
        except (SQLAlchemyError, sqlite3.Error, OSError, asyncpg.PostgresError) as error:
            raise _source_failed(error) from error


INSTALL_TEMPLATE = """-- Notifies channel {channel} of changed rows of {table}. Review it, then run it as the owner.
CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        PERFORM pg_notify('{channel}', OLD.{key}::text);
    END IF;
    IF TG_OP <> 'DELETE' AND (TG_OP = 'INSERT' OR NEW.{key} IS DISTINCT FROM OLD.{key}) THEN
        PERFORM pg_notify('{channel}', NEW.{key}::text);
    END IF;
    RETURN NULL;
END
$$;
DROP TRIGGER IF EXISTS {name} ON {table};
CREATE TRIGGER {name} AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {name}();
-- To remove it: DROP TRIGGER {name} ON {table}; DROP FUNCTION {name}();
"""


def _fetch_sqlite(url: str, query: str, parameters: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    file = make_url(url).database
    with closing(sqlite3.connect(f"file:{quote(file or '')}?mode=ro", uri=True, timeout=5)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(query, parameters).fetchmany(limit)]


def _database_kind(url: Any) -> str:
    try:
        kind = make_url(url).get_backend_name() if isinstance(url, str) and urlsplit(url).port != 0 else ""
    except (ArgumentError, ValueError):
        kind = ""
    if kind not in BACKEND_BY_SCHEME:
        raise _invalid_options(
            "url is not a supported database.",
            "Use postgresql:// or mysql://user@host/name, or sqlite:///file.db.",
        )
    return BACKEND_BY_SCHEME[kind]


def _check_identifier(value: Any, option: str, pattern: re.Pattern[str] = IDENTIFIER) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _invalid_options(f"{option} is {value!r:.60}.", "Use a plain name: letters, digits and underscores.")
    return value


def _to_json_value(value: Any) -> Any:
    """Return a column value as JSON that the store accepts.

    Values that JSON cannot represent, such as NaN, are null. Text that is a JSON list is a list, because SQLite has no
    list type.
    """
    match value:
        case datetime() | date() | time():
            return value.isoformat()
        case None | bool():
            return value
        case int() | float() | Decimal():
            return _to_json_number(value)
        case list() | tuple():
            return [_to_json_value(element) for element in value]
        case dict():
            return {_replace_nul(str(name)): _to_json_value(element) for name, element in value.items()}
        case str() if value.startswith("[") and value.endswith("]"):
            try:
                return _to_json_value(json.loads(value))
            except (ValueError, RecursionError):
                return _replace_nul(value)
        case str():
            return _replace_nul(value)
        case bytes() | memoryview():
            return None
    return str(value)


def _to_json_number(value: float | Decimal) -> float | str | None:
    if isinstance(value, Decimal):
        if not value.is_finite() or value.adjusted() > 20:
            return str(value) if value.is_finite() else None
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if -(2**63) <= value < 2**64 else str(value)


def _replace_nul(value: str) -> str:
    """Replace NUL characters, which no store accepts."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _encode_key(value: Any) -> str:
    """Encode a key or cursor value as JSON; `_decode_key` restores the type that the driver expects."""
    if isinstance(value, datetime):
        return json.dumps({"datetime": value.isoformat()})
    if isinstance(value, UUID):
        return json.dumps({"uuid": str(value)})
    return json.dumps(value if isinstance(value, int | float) else str(value))


def _decode_key(encoded: str) -> Any:
    value = json.loads(encoded)
    if isinstance(value, dict):
        return datetime.fromisoformat(value["datetime"]) if "datetime" in value else UUID(value["uuid"])
    return value


def _invalid_options(message: str, fix: str) -> InvalidInput:
    return InvalidInput(message, code="INVALID_SOURCE_OPTIONS", fix=fix)


def _source_failed(error: BaseException) -> SourceFailed:
    reason = str(getattr(error, "orig", None) or error) or type(error).__name__
    return SourceFailed(f"The source cannot be read: {reason[:300]}", fix="Check its options, and that it is running.")
