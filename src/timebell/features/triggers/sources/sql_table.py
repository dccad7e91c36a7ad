"""Adapter for a table or query of a PostgreSQL, MySQL, MariaDB or SQLite database, accessed read-only.

Rows are read in key order, a page at a time. Changes are found by comparing all rows, by a column that increases with
each change (`change_cursor.py`), or, on PostgreSQL, by an outbox (`outbox.py`).
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import asyncpg
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from timebell.errors import InvalidInput, SourceFailed
from timebell.features.triggers.sources import outbox
from timebell.features.triggers.sources.base import InvalidSourceQuery, InvalidSourceValue, RowPage
from timebell.features.triggers.sources.change_cursor import ChangeCursor
from timebell.features.triggers.sources.identifiers import is_valid_name, quote_name, quote_table, split_table
from timebell.features.triggers.sources.mysql_source import MysqlDatabase
from timebell.features.triggers.sources.outbox import WatchedTable
from timebell.features.triggers.sources.postgres_source import READ_ERRORS, Listener, PostgresDatabase
from timebell.features.triggers.sources.sql_values import (
    InvalidText,
    decode_key,
    encode_key,
    key_text,
    parse_key,
    to_json_rows,
)
from timebell.features.triggers.sources.sqlite_source import SqliteDatabase
from timebell.model.policy import parse_seconds
from timebell.store.open import BACKEND_BY_SCHEME

CHANNEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)
OPTIONS = (
    "url", "table", "query", "key", "changes", "cursor", "channel", "everySeconds", "sweepEverySeconds", "joined",
)  # fmt: skip
INSTALL_FIX = "Create the outbox: timebell trigger install SOURCE --database-url URL."
CHANGE_MODES = ("compare", "cursor", "outbox")
DEFAULT_POLL_SECONDS, DEFAULT_FULL_SCAN_SECONDS = 5.0, 240.0
STATEMENT_TIMEOUT_SECONDS = 20.0
MAX_JOINED_TABLES = 20
UNFIT_PARAMETER = re.compile("invalid input for query argument|int too large to convert")  # of asyncpg, and of sqlite3
MISSING_TABLE = re.compile(r"relation .* does not exist|no such table|Table .* doesn't exist")
WRONG_SQLITE_QUERY = re.compile(r"no such|syntax error|ambiguous|incomplete input|unrecognized token|misuse")
WRONG_MYSQL_QUERY = (1052, 1054, 1064, 1142, 1143, 1146, 1305)
"""Errors of the server: an ambiguous or unknown column, the syntax, no privilege, no such table or function."""
TABLE_NAMES_QUERIES = {
    "postgresql": "SELECT table_name AS name FROM information_schema.tables"
    " WHERE table_schema NOT IN ('pg_catalog', 'information_schema') ORDER BY table_name",
    "mysql": "SELECT table_name AS name FROM information_schema.tables"
    " WHERE table_schema = database() ORDER BY table_name",
    "sqlite": "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name",
}


R = TypeVar("R")
Row = dict[str, Any]
Items = dict[str, dict[str, Any]]
"""Fields by key."""


class Database(Protocol):
    """A database of one kind."""

    async def fetch(self, query: str, parameters: Mapping[str, Any], *, first: bool = False) -> list[dict[str, Any]]:
        """Return the rows of a query with `:name` parameters, or only the first one."""

    async def list_columns(self, query: str) -> list[str]:
        """Return the columns of a query without parameters."""

    async def close(self) -> None:
        """Close all connections."""


class SqlTable:
    """Adapter for a table or query. Raises InvalidInput (INVALID_SOURCE_OPTIONS)."""

    page_size = 1000
    daily_calls: int | None = None

    def __init__(self, options: Mapping[str, Any]) -> None:
        if unknown := options.keys() - set(OPTIONS):
            nearest = difflib.get_close_matches(min(unknown), OPTIONS, 1)
            raise _invalid_options(
                f"A source of kind sql has no option {min(unknown)!r:.60}.",
                f"Did you mean {nearest[0]}?" if nearest else f"The options are {', '.join(OPTIONS)}.",
            )
        self._url = options.get("url")
        self._kind = _database_kind(self._url)
        query, table = options.get("query"), options.get("table")
        if (query is None and table is None) or not isinstance(query or "", str):
            raise _invalid_options("A source of kind sql requires a table or a query.", "Specify table or query.")
        self.table: str | None = None if table is None else _check_table(table)
        quoted_table = None if table is None else quote_table(self._kind, table)
        self._from_clause = f"({query.strip().rstrip(';')}) AS items" if query is not None else quoted_table
        self.key = _check_name(options.get("key", "id"), "key")
        self._key_column = quote_name(self._kind, self.key)
        self.change_mode = options.get("changes", "compare")
        if self.change_mode not in CHANGE_MODES:
            raise _invalid_options(f"changes is {self.change_mode!r:.40}.", f"Use {', '.join(CHANGE_MODES)}.")
        self._cursor_column = _check_name(options.get("cursor"), "cursor") if self.change_mode == "cursor" else None
        self._watched = _parse_watched(self.table, self.key, options.get("joined"))
        if self.change_mode == "outbox":
            self._check_outbox()
        self.channel = options.get("channel", "timebell_items")
        if not isinstance(self.channel, str) or not CHANNEL.fullmatch(self.channel):
            raise _invalid_options(f"channel is {self.channel!r:.60}.", "Use letters, digits and underscores.")
        self.poll_interval, self.full_scan_interval = intervals(options)
        self._database = _open_database(self._kind, str(self._url))
        self._listener = Listener(str(self._url), self.channel) if self.change_mode == "outbox" else None
        self._key_type: type | None = None
        self._read_ahead: set[int] = set()
        """Ids of changes that were read ahead of commit order, because an earlier transaction was still running."""

    async def list_columns(self) -> Collection[str]:
        """Return the columns of the rows. Raises SourceFailed, InvalidSourceQuery."""
        columns = await self._run(self._database.list_columns(f"SELECT * FROM {self._from_clause} WHERE 1 = 0"))  # noqa: S608
        for name in (self.key, self._cursor_column):
            if name is not None and name not in columns:
                raise _no_column(name, columns)
        return columns

    async def read_page(self, after: str | None, limit: int) -> RowPage:
        where = f"{self._key_column} IS NOT NULL"
        parameters: dict[str, Any] = {}
        if after is not None:
            where, parameters = f"{self._key_column} > :after", {"after": decode_key(json.loads(after))}
        rows, problems = await self._fetch_page(where, self._key_column, parameters, limit)
        cursor = json.dumps(encode_key(self._last_key(rows))) if len(rows) == limit else None
        page = RowPage(self._items_by_key(rows, problems), cursor, problems)
        if cursor is None and (unkeyed := await self._count_rows_without_key()):
            page.problems[""] = f"{unkeyed:,} rows have no {self.key}."
        return page

    async def read_changes(self, since: str | None, limit: int) -> RowPage | None:
        if self.change_mode == "outbox":
            return await self._read_outbox(since, limit)
        return None if self._cursor_column is None else await self._read_above_cursor(since, limit)

    async def read_rows(self, keys: Sequence[str]) -> RowPage:
        key_type = await self._find_key_type() if keys else None
        if key_type is None:
            return RowPage({}, None)
        values = []
        for key in keys:
            try:
                values.append(parse_key(key, key_type))
            except ValueError:
                continue  # no row has such a key
        rows, problems = await self._fetch_rows(values)
        return RowPage(self._items_by_key(rows, problems), None, problems)

    async def matches(self, query: str, parameters: Mapping[str, Any]) -> bool:
        return bool(await self._fetch(query, dict(parameters), first=True))

    async def listen(self, on_change: Callable[[str | None], None]) -> bool:
        if self._listener is None:
            return False
        try:
            return await self._listener.ensure_listening(
                lambda key: on_change(key and _from_json_text(key, self._key_type))
            )
        except READ_ERRORS as error:
            raise _source_failed(error) from error

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._database.close()

    def install_sql(self) -> str:
        """Return SQL that creates the outbox, for the owner of the table to review and run. Raises InvalidInput."""
        self._check_outbox()
        return outbox.install_sql(self.channel, self._watched)

    def uninstall_sql(self) -> str:
        """Return SQL that removes what `install_sql` created. Raises InvalidInput."""
        self._check_outbox()
        return outbox.uninstall_sql(self.channel, self._watched)

    def _check_outbox(self) -> None:
        if self.table is None or self._kind != "postgresql":
            raise _invalid_options(
                "Only tables of PostgreSQL can have an outbox.",
                'Specify a PostgreSQL table in addition to the query, or use "changes": "compare" or "cursor".',
            )

    async def _read_outbox(self, since: str | None, limit: int) -> RowPage:
        if since is None:
            (position,) = await self._fetch(outbox.POSITION_QUERY, {})
            return RowPage({}, json.dumps([position["tx"], 2**62]))
        tx, id_ = json.loads(since)
        parameters = {"channel": self.channel, "limit": limit}
        changes = await self._fetch(outbox.READ_QUERY, {**parameters, "tx": tx, "id": id_})
        has_more = len(changes) == limit
        cursor = json.dumps([changes[-1]["tx"], changes[-1]["id"]]) if changes else since
        if not has_more and len(self._read_ahead) < outbox.MAX_READ_AHEAD:
            if changes:
                self._read_ahead -= {change["id"] for change in changes}
            ahead = await self._fetch(outbox.READ_AHEAD_QUERY, {**parameters, "known": list(self._read_ahead)})
            self._read_ahead |= {change["id"] for change in ahead}
            changes, has_more = [*changes, *ahead], len(ahead) == limit
        if not changes:
            return RowPage({}, since)
        key_type = await self._find_key_type()
        keys = sorted({_from_json_text(change["key"], key_type) for change in changes})
        found = await self.read_rows(keys)
        deleted = tuple(key for key in keys if key not in found.rows and key not in found.problems)
        return RowPage(found.rows, cursor, found.problems, deleted, has_more)

    async def _read_above_cursor(self, since: str | None, limit: int) -> RowPage:
        column, now = quote_name(self._kind, str(self._cursor_column)), time.time()  # noqa: TID251 - age of the cursor
        oldest_running, horizon = await self._running_transactions()
        cursor = ChangeCursor() if since is None else ChangeCursor.parse(since)
        if since is None:
            (highest,) = await self._fetch(f"SELECT max({column}) AS value FROM {self._from_clause}", {})  # noqa: S608
            if highest["value"] is not None:
                cursor.add_mark(now, horizon, highest["value"])
            return RowPage({}, cursor.to_json())
        where, parameters = f"{column} IS NOT NULL", dict[str, Any]()
        if cursor.page_end is not None:
            value, key = map(decode_key, cursor.page_end)
            where, parameters = (
                f"({column} > :since OR ({column} = :since AND {self._key_column} > :after))",
                {"since": value, "after": key},
            )
        elif cursor.start is not None:
            where, parameters = f"{column} >= :since", {"since": cursor.start_value}
        rows, problems = await self._fetch_page(where, f"{column}, {self._key_column}", parameters, limit)
        if rows:
            cursor.add_mark(now, horizon, rows[-1][str(self._cursor_column)])
        has_more = len(rows) == limit
        last = rows[-1] if has_more else {}
        cursor.page_end = [encode_key(last[str(self._cursor_column)]), encode_key(last[self.key])] if has_more else None
        if not has_more:
            cursor.advance(now, oldest_running)
        return RowPage(self._items_by_key(rows, problems), cursor.to_json(), problems, has_more=has_more)

    async def _running_transactions(self) -> tuple[int | None, int]:
        """Return the oldest running transaction and the next one; None where they are not known."""
        if self._kind != "postgresql":
            return None, 0
        snapshot = "txid_current_snapshot()"
        (row,) = await self._fetch(
            f"SELECT txid_snapshot_xmin({snapshot}) AS oldest, txid_snapshot_xmax({snapshot}) AS next", {}
        )  # fmt: skip
        return row["oldest"], row["next"]

    async def _fetch_page(
        self, where: str, order: str, parameters: Mapping[str, Any], limit: int
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return a page of rows, and the reasons for rows that the driver cannot decode; those have only their key."""
        tail = f"FROM {self._from_clause} WHERE {where} ORDER BY {order} LIMIT {limit:d}"
        try:
            return await self._fetch_values(f"SELECT * {tail}", parameters), {}
        except (ValueError, OverflowError):
            columns = {
                self._key_column,
                *([quote_name(self._kind, self._cursor_column)] if self._cursor_column else []),
            }
            keys = await self._fetch(f"SELECT {', '.join(sorted(columns))} {tail}", parameters)
        rows, problems = [], dict[str, str]()
        for row in keys:
            query = f"SELECT * FROM {self._from_clause} WHERE {self._key_column} = :key"  # noqa: S608
            try:
                rows += await self._fetch_values(query, {"key": row[self.key]})
            except (ValueError, OverflowError) as error:
                rows.append(row)
                problems[key_text(row[self.key])] = f"A value cannot be read: {error}"[:300]
        return rows, problems

    async def _fetch_rows(self, keys: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return the rows with these keys; see `_fetch_page`.

        A key of a joined table may be too large for the column. The database then refuses the query for all keys.
        """
        if not keys:
            return [], {}
        parameters = {f"k{number}": key for number, key in enumerate(keys)}
        where = f"{self._key_column} IN ({', '.join(f':{name}' for name in parameters)})"
        try:
            return await self._fetch_page(where, self._key_column, parameters, self.page_size)
        except SourceFailed as error:
            if UNFIT_PARAMETER.search(error.message) is None:
                raise
        if len(keys) == 1:
            return [], {}  # no row has such a key
        middle = len(keys) // 2
        first, second = await self._fetch_rows(keys[:middle]), await self._fetch_rows(keys[middle:])
        return [*first[0], *second[0]], first[1] | second[1]

    async def _find_key_type(self) -> type | None:
        """Return the type of the keys; None if there are no rows."""
        if self._key_type is None:
            query = f"SELECT {self._key_column} AS k FROM {self._from_clause} WHERE {self._key_column} IS NOT NULL"  # noqa: S608
            sample = await self._fetch(query, {}, first=True)
            if sample:
                self._key_type = type(sample[0]["k"])
        return self._key_type

    async def _count_rows_without_key(self) -> int:
        query = f"SELECT count(*) AS n FROM {self._from_clause} WHERE {self._key_column} IS NULL"  # noqa: S608
        return int((await self._fetch(query, {}))[0]["n"])

    def _last_key(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Return the last key that the database can compare as it was read."""
        return next(
            (row[self.key] for row in reversed(rows) if type(row[self.key]) is not InvalidText), rows[-1][self.key]
        )

    def _items_by_key(self, rows: Sequence[Row], problems: dict[str, str]) -> Items:
        """Return the readable rows by key, and add the others to `problems`. Rows already in `problems` are omitted."""
        rows_by_key: dict[str, Row] = {}
        for row in rows:
            if self.key not in row:
                raise _no_column(self.key, list(row))
            if (value := row[self.key]) is None:
                continue
            if type(value) is not InvalidText:
                self._key_type = type(value)
            key = key_text(value)
            if key in rows_by_key:
                problems[key] = f"Several rows have the {self.key} {key!r:.60}, so it does not identify a row."
            elif InvalidText in map(type, row.values()):
                invalid = next(name for name in row if type(row[name]) is InvalidText)
                problems.setdefault(key, f"A value cannot be read: {invalid} is {row[invalid]!r:.200} in UTF-8.")
            rows_by_key[key] = row
        for key in problems.keys() & rows_by_key.keys():
            del rows_by_key[key]
        return dict(zip(rows_by_key, to_json_rows(list(rows_by_key.values())), strict=True))

    async def _fetch(self, query: str, parameters: Mapping[str, Any], *, first: bool = False) -> list[dict[str, Any]]:
        """Run a query. Raises SourceFailed."""
        try:
            return await self._fetch_values(query, parameters, first=first)
        except (ValueError, OverflowError) as error:
            raise InvalidSourceValue(f"A value cannot be read: {error}"[:300]) from error

    async def _fetch_values(self, query: str, parameters: Mapping[str, Any], *, first: bool = False) -> list[Row]:
        """Run a query. Raises SourceFailed, and ValueError or OverflowError for a row with an invalid value."""
        return await self._run(self._database.fetch(query, parameters, first=first))

    async def _run(self, reading: Awaitable[R]) -> R:
        """Await an access to the database, and translate its errors, as `_fetch_values`."""
        try:
            async with asyncio.timeout(STATEMENT_TIMEOUT_SECONDS):
                return await reading
        except asyncpg.DataError as error:
            raise ValueError(str(error)) from error
        except (SQLAlchemyError, sqlite3.Error, *READ_ERRORS) as error:
            failed = _source_failed(error)
            if self.table is not None and MISSING_TABLE.search(failed.message) is not None:
                is_outbox = outbox.OUTBOX_TABLE in failed.message
                failed.fix = INSTALL_FIX if is_outbox else await self._suggest_table(self.table)
            raise failed from error

    async def _suggest_table(self, table: str) -> str:
        """Return the nearest name of a table that exists."""
        try:
            async with asyncio.timeout(STATEMENT_TIMEOUT_SECONDS):
                rows = await self._database.fetch(TABLE_NAMES_QUERIES[self._kind], {})
        except (SQLAlchemyError, sqlite3.Error, *READ_ERRORS):
            return "Specify a table that exists."
        return _nearest(split_table(table)[-1], [str(row["name"]) for row in rows], "tables")


def intervals(options: Mapping[str, Any]) -> tuple[float, float]:
    """Return the seconds between polls for changes (0: there are none) and between full scans. Raises InvalidInput."""
    poll = parse_seconds(options.get("everySeconds", DEFAULT_POLL_SECONDS), "everySeconds", minimum=0.1)
    sweep = parse_seconds(options.get("sweepEverySeconds", DEFAULT_FULL_SCAN_SECONDS), "sweepEverySeconds", minimum=0.1)
    return (0.0, poll) if options.get("changes", "compare") == "compare" else (poll, sweep)


def _open_database(kind: str, url: str) -> Database:
    match kind:
        case "postgresql":
            return PostgresDatabase(url)
        case "mysql":
            return MysqlDatabase(url)
    return SqliteDatabase(url)


def _parse_watched(table: str | None, key: str, joined: Any) -> list[WatchedTable]:
    """Return the tables whose changes are recorded: the table itself and the joined ones. Raises InvalidInput."""
    if joined is not None and (not isinstance(joined, list) or len(joined) > MAX_JOINED_TABLES or table is None):
        raise _invalid_options(
            f"joined is {joined!r:.60}.", 'Use table, and joined: [{"table": "participants", "key": "shift_id"}].'
        )
    watched = [] if table is None else [WatchedTable(table, key)]
    for entry in joined or ():
        if not isinstance(entry, Mapping) or entry.keys() != {"table", "key"}:
            raise _invalid_options(f"joined has {entry!r:.60}.", 'Use {"table": "participants", "key": "shift_id"}.')
        watched.append(WatchedTable(_check_table(entry["table"]), _check_name(entry["key"], "key")))
    return watched


def _from_json_text(key: str, key_type: type | None) -> str:
    """Return the key of an item from its text in the outbox: there, a binary key begins with `\\x`."""
    return key.removeprefix("\\x") if key_type is bytes else key


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


def _check_name(value: Any, option: str) -> str:
    if not isinstance(value, str) or not is_valid_name(value):
        raise _invalid_options(f"{option} is {value!r:.60}.", "Use the name of a column, exactly as it is.")
    return value


def _check_table(value: Any) -> str:
    try:
        split_table(value if isinstance(value, str) else "")
    except ValueError:
        raise _invalid_options(
            f"table is {value!r:.60}.", "Use the name of a table, exactly as it is, or schema.table."
        ) from None
    return str(value)


def _nearest(name: str, names: Sequence[str], kind: str = "columns") -> str:
    if not names:
        return f"The database has no {kind} that its user may read."
    close = difflib.get_close_matches(name.lower(), names, 1, 0.5)
    return f"Did you mean {close[0]}?" if close else f"The {kind} are {', '.join(names[:20])}."


def _invalid_options(message: str, fix: str) -> InvalidInput:
    return InvalidInput(message, code="INVALID_SOURCE_OPTIONS", fix=fix)


def _source_failed(error: BaseException) -> SourceFailed:
    original = getattr(error, "orig", None) or error
    reason = str(original) or ("no answer in time." if isinstance(original, TimeoutError) else type(error).__name__)
    failure = SourceFailed
    if _is_wrong_query(original):
        failure = InvalidSourceQuery
    elif isinstance(original, ValueError):  # the driver cannot send a value
        failure = InvalidSourceValue
    return failure(f"The source cannot be read: {reason[:300]}", fix="Check its options, and that it is running.")


def _is_wrong_query(error: BaseException) -> bool:
    if isinstance(error, sqlite3.OperationalError):
        return WRONG_SQLITE_QUERY.search(str(error)) is not None
    return isinstance(error, asyncpg.SyntaxOrAccessError) or next(iter(error.args), None) in WRONG_MYSQL_QUERY


def _no_column(name: str, columns: Sequence[str]) -> SourceFailed:
    return InvalidSourceQuery(f"The rows have no column {name}.", fix=_nearest(name, columns))
