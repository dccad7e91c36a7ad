"""A table or query of a PostgreSQL, MySQL, MariaDB or SQLite database, which is only ever read.

Its rows are read in the order of their key, a few hundred at a time. What changes is found by comparing everything, by
a column that rises with each change, or, on PostgreSQL, by a trigger of the table that says so (`install`).
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
from timebell.model.policy import seconds
from timebell.store.dialects.postgres import store as postgres
from timebell.store.open import KINDS
from timebell.triggers import mysql_source
from timebell.triggers.base import Read

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)
TABLE = re.compile(rf"{NAME.pattern}(\.{NAME.pattern})?", re.ASCII)
OPTIONS = ("url", "table", "query", "key", "changes", "cursor", "channel", "everySeconds", "sweepEverySeconds")
CHANGES = ("compare", "cursor", "notify")
EVERY, SWEEP = 5.0, 600.0  # seconds
OVERLAP = timedelta(seconds=10)
"""A transaction that took so long to commit is still found by a column that rises."""
WITHIN = 20.0  # seconds for a statement


class SqlTable:
    """The adapter. Raises InvalidInput (SOURCE_OPTIONS_INVALID)."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if unknown := options.keys() - set(OPTIONS):
            raise _unfit(
                f"A source of kind sql has no option {min(unknown)!r:.60}.", f"There are {', '.join(OPTIONS)}."
            )
        self._url = options.get("url")
        self._kind = _kind(self._url)
        query, table = options.get("query"), options.get("table")
        if (query is None and table is None) or not isinstance(query or "", str):
            raise _unfit("A source of kind sql reads a table or a query.", "Give table, or query.")
        self.table: str | None = None if table is None else _named(table, "table", TABLE)
        self._from = f"({query.strip().rstrip(';')}) AS items" if query is not None else self.table
        self.key = _named(options.get("key", "id"), "key")
        self.changes = options.get("changes", "compare")
        if self.changes not in CHANGES:
            raise _unfit(f"changes is {self.changes!r:.40}.", f"Use {', '.join(CHANGES)}.")
        self._rising = _named(options.get("cursor"), "cursor") if self.changes == "cursor" else None
        if self.changes == "notify" and self._kind != "postgresql":
            named = "SQLite" if self._kind == "sqlite" else "MySQL"
            raise _unfit(f"{named} tells nobody of changes.", 'Use "changes": "compare" or "cursor".')
        self.channel = _named(options.get("channel", "timebell_items"), "channel")
        self.every = (
            0.0 if self.changes == "notify" else seconds(options.get("everySeconds", EVERY), "everySeconds", least=0.1)
        )
        self.sweep = seconds(options.get("sweepEverySeconds", SWEEP), "sweepEverySeconds", least=0.1)
        self._engine: AsyncEngine | None = None
        self._blocking: Engine | None = None
        self._listener: asyncpg.Connection[Any] | None = None
        self._key_type: type = str

    async def page(self, after: str | None, most: int) -> Read:
        """As in Adapter."""
        start = None if after is None else _native(after)
        where = "" if after is None else f"WHERE {self.key} > :after "
        given = {} if after is None else {"after": start}
        query = f"SELECT * FROM {self._from} {where}ORDER BY {self.key} LIMIT {most:d}"  # noqa: S608 - checked names
        rows = await self._rows(query, given)
        cursor = _written(rows[-1][self.key]) if len(rows) == most else None
        return Read(self._items(rows), cursor)

    async def changed(self, since: str | None, most: int) -> Read | None:
        """As in Adapter."""
        if self._rising is None:
            return None
        began = None if since is None else json.loads(since)
        given: dict[str, Any] = {}
        where = f"WHERE {self._rising} IS NOT NULL "
        if began is not None:
            given["since"] = _native(json.dumps(began["at"]))
            if "key" in began:
                given["after"] = _native(json.dumps(began["key"]))
                where = f"WHERE {self._rising} > :since OR ({self._rising} = :since AND {self.key} > :after) "
            else:
                if isinstance(given["since"], datetime):
                    given["since"] -= OVERLAP
                where = f"WHERE {self._rising} >= :since "
        query = f"SELECT * FROM {self._from} {where}ORDER BY {self._rising}, {self.key} LIMIT {most:d}"  # noqa: S608
        rows = await self._rows(query, given)
        if not rows:
            return Read({}, None if began is None else json.dumps({"at": began["at"]}))
        last = {"at": json.loads(_written(rows[-1][self._rising]))}
        if len(rows) == most:
            last["key"] = json.loads(_written(rows[-1][self.key]))
        return Read(self._items(rows), json.dumps(last))

    async def read(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """As in Adapter."""
        if not keys:
            return {}
        if self._key_type is str:  # not known yet, or text
            first = await self._rows(f"SELECT {self.key} FROM {self._from} LIMIT 1", {})  # noqa: S608
            if not first:
                return {}
            self._key_type = type(first[0][self.key])
        given = {}
        for number, key in enumerate(keys):
            try:
                given[f"k{number}"] = key if self._key_type is str else self._key_type(key)
            except (TypeError, ValueError):
                continue  # no row has such a key
        if not given:
            return {}
        marks = ", ".join(f":{name}" for name in given)
        return self._items(
            await self._rows(f"SELECT * FROM {self._from} WHERE {self.key} IN ({marks})", given)  # noqa: S608
        )

    async def any(self, query: str, parameters: Mapping[str, Any]) -> bool:
        """As in Adapter."""
        return bool(await self._rows(query, dict(parameters), most=1))

    async def listen(self, heard: Callable[[str | None], None]) -> bool:
        """As in Adapter."""
        if self.changes != "notify" or (self._listener is not None and not self._listener.is_closed()):
            return False
        url = make_url(str(self._url)).set(drivername="postgresql").render_as_string(hide_password=False)
        try:
            listener = await asyncpg.connect(url, timeout=5)
            try:
                await listener.add_listener(self.channel, lambda *said: heard(str(said[-1])))
            except BaseException:  # else it would pass for one that listens
                listener.terminate()
                raise
        except (OSError, TimeoutError, asyncpg.PostgresError) as failed:
            raise _failed(failed) from failed
        listener.add_termination_listener(lambda _: heard(None))
        self._listener = listener
        return True

    async def close(self) -> None:
        """As in Adapter."""
        if self._listener is not None:
            await self._listener.close(timeout=1)
            self._listener = None
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None
        if self._blocking is not None:
            self._blocking.dispose()
            self._blocking = None

    def install(self) -> str:
        """SQL that makes the table say what changes, for somebody to review and run. Raises InvalidInput."""
        if self.table is None or self._kind != "postgresql":
            raise _unfit("Only a table of PostgreSQL can say what changes.", "Give the source a table, or compare.")
        name = f"{self.channel}_{self.table.replace('.', '_')}"[:63]
        return INSTALL.format(name=name, table=self.table, key=self.key, channel=self.channel)

    def _items(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        found = {}
        for row in rows:
            if self.key not in row:
                raise SourceFailed(f"The rows have no column {self.key}.", fix="Name the key column.")
            if row[self.key] is not None:
                self._key_type = type(row[self.key])
                found[str(row[self.key])] = {name: _json(value) for name, value in row.items()}
        return found

    async def _rows(self, query: str, given: Mapping[str, Any], most: int = 10_000) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(WITHIN):
                if self._kind == "sqlite":
                    return await asyncio.to_thread(_sqlite, str(self._url), query, dict(given), most)
                if self._kind == "mysql":
                    self._blocking = self._blocking or mysql_source.engine_for(str(self._url))
                    return await asyncio.to_thread(mysql_source.rows, self._blocking, query, dict(given), most)
                if self._engine is None:
                    self._engine = postgres.engine_for(str(self._url), pool_size=2, read_only=True)
                async with self._engine.connect() as connection:
                    result = await connection.execute(text(query), dict(given))
                    return [dict(row._mapping) for row in result.fetchmany(most)]
        except (SQLAlchemyError, sqlite3.Error, OSError, asyncpg.PostgresError) as failed:
            raise _failed(failed) from failed


INSTALL = """-- Says on the channel {channel} which rows of {table} change. Review it, then run it as the owner.
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
-- To take it back: DROP TRIGGER {name} ON {table}; DROP FUNCTION {name}();
"""


def _sqlite(url: str, query: str, given: dict[str, Any], most: int) -> list[dict[str, Any]]:
    file = make_url(url).database
    with closing(sqlite3.connect(f"file:{quote(file or '')}?mode=ro", uri=True, timeout=5)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(query, given).fetchmany(most)]


def _kind(url: Any) -> str:
    try:
        kind = make_url(url).get_backend_name() if isinstance(url, str) and urlsplit(url).port != 0 else ""
    except (ArgumentError, ValueError):
        kind = ""
    if kind not in KINDS:
        raise _unfit(
            "url is no database that a source can read.",
            "postgresql:// or mysql://user@host/name, or sqlite:///file.db.",
        )
    return KINDS[kind]


def _named(value: Any, option: str, form: re.Pattern[str] = NAME) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        raise _unfit(f"{option} is {value!r:.60}.", "Give a plain name: letters, digits and underscores.")
    return value


def _json(value: Any) -> Any:
    """A value of a column as JSON that can be kept; what JSON has not, such as NaN, is null. Lists that SQLite can only
    write as text are lists."""
    match value:
        case datetime() | date() | time():
            return value.isoformat()
        case None | bool():
            return value
        case int() | float() | Decimal():
            return _number(value)
        case list() | tuple():
            return [_json(one) for one in value]
        case dict():
            return {_text(str(name)): _json(one) for name, one in value.items()}
        case str() if value.startswith("[") and value.endswith("]"):
            try:
                return _json(json.loads(value))
            except (ValueError, RecursionError):
                return _text(value)
        case str():
            return _text(value)
        case bytes() | memoryview():
            return None
    return str(value)


def _number(value: float | Decimal) -> float | str | None:
    if isinstance(value, Decimal):
        if not value.is_finite() or value.adjusted() > 20:
            return str(value) if value.is_finite() else None
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if -(2**63) <= value < 2**64 else str(value)


def _text(value: str) -> str:
    """Without NUL, which no store takes."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _written(value: Any) -> str:
    """A key or cursor, so that `_native` gives it back as the database's driver takes it."""
    if isinstance(value, datetime):
        return json.dumps({"datetime": value.isoformat()})
    if isinstance(value, UUID):
        return json.dumps({"uuid": str(value)})
    return json.dumps(value if isinstance(value, int | float) else str(value))


def _native(written: str) -> Any:
    value = json.loads(written)
    if isinstance(value, dict):
        return datetime.fromisoformat(value["datetime"]) if "datetime" in value else UUID(value["uuid"])
    return value


def _unfit(message: str, fix: str) -> InvalidInput:
    return InvalidInput(message, code="SOURCE_OPTIONS_INVALID", fix=fix)


def _failed(failed: BaseException) -> SourceFailed:
    said = str(getattr(failed, "orig", None) or failed) or type(failed).__name__
    return SourceFailed(f"The source does not answer: {said[:300]}", fix="Check that it runs, and its options.")
