"""Read an audience from a customer's own database, page by page in key order, in read-only transactions.

Each page is stored with its last key, so an interrupted refresh resumes there.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import UUID

from sqlalchemy import URL, Connection, NullPool, create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError

from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.features.campaigns.model.audience_source import AudienceSource
from timebell.features.campaigns.model.device import validate_device
from timebell.features.campaigns.model.device_import import FIELD_NAMES, resolve_column
from timebell.features.campaigns.push import message
from timebell.features.campaigns.store import audiences
from timebell.features.campaigns.store.audiences import Audience
from timebell.store.dialects.base import Store
from timebell.store.tenancy import secrets
from timebell.tenancy.secrets import Keyring

R = TypeVar("R")
log = logging.getLogger("timebell.campaigns")

PAGE_SIZE = 1000
CHECK_TIMEOUT_SECONDS = 20.0  # of a query that is only checked, while its caller waits
CONNECT_TIMEOUT_SECONDS = 10.0
QUERY_TIMEOUT_SECONDS = 600.0  # without any data from MySQL or MariaDB; that of the job does not end the thread
_READ_ONLY = {
    "postgresql": "SET TRANSACTION READ ONLY", "sqlite": "PRAGMA query_only = 1",
    "mysql": "SET TRANSACTION READ ONLY", "mariadb": "SET TRANSACTION READ ONLY",
}  # fmt: skip


class AudienceReader:
    """Reads audiences. `keyring` provides the keys for secrets; `now` returns an aware datetime."""

    def __init__(self, store: Store, keyring: Callable[[], Keyring], now: Callable[[], datetime]) -> None:
        self._store, self._keyring, self._now = store, keyring, now

    async def check_query(self, tenant_id: str, source: AudienceSource) -> None:
        """Run the query of an audience once, and check its columns.

        Raises InvalidInput (AUDIENCE_UNREADABLE, AUDIENCE_KEY_MISSING, INVALID_AUDIENCE), Refused, NotFound.
        """
        list_columns = partial(_list_columns, source=source)
        columns = await self._query(tenant_id, source, list_columns, timeout=CHECK_TIMEOUT_SECONDS)
        if source.key not in columns:
            raise InvalidInput(
                f"The query has no column {source.key!r}, the specified key.", code="AUDIENCE_KEY_MISSING",
                fix=f"Its columns are: {', '.join(columns)}.",
            )  # fmt: skip
        if "token" not in columns:
            raise InvalidInput(
                f"The query has no column token, only: {', '.join(columns)}.", code="INVALID_AUDIENCE",
                fix="Select the registration token AS token.",
            )  # fmt: skip
        _resolve_columns(columns, source.key)

    async def refresh(self, tenant_id: str, name: str) -> Audience:
        """Refresh an audience, or continue an interrupted refresh.

        Raises NotFound (AUDIENCE_NOT_FOUND), InvalidInput (AUDIENCE_UNREADABLE, DUPLICATE_AUDIENCE_KEY), Refused.
        """
        audience = await self._store.run(audiences.find_audience, tenant_id, name)
        if audience is None:
            raise audiences.no_such_audience(name)
        source, until = audience.source, audience.until
        if audience.loading is None:
            until = await self._query(tenant_id, source, lambda connection: _find_last_key(connection, source))
        audience = await self._store.run(audiences.start_refresh, tenant_id, name, until, self._now())
        while audience is not None and audience.until is not None:
            current = audience
            rows = await self._query(
                tenant_id, source, partial(_fetch_page, source=source, audience=current, limit=PAGE_SIZE)
            )
            keys = [_to_plain_value(row[source.key]) for row in rows]
            if len(set(keys)) < len(keys) or current.cursor in keys:
                raise InvalidInput(
                    f"The query returns two rows with the same {source.key}.", code="DUPLICATE_AUDIENCE_KEY",
                    fix="Choose a key that is unique in the result.",
                )  # fmt: skip
            if not rows:
                break
            with_token = [row for row in rows if row["token"] not in (None, "")]
            columns = _resolve_columns(rows[0], source.key)
            registrations, invalid = await asyncio.to_thread(_devices_from_rows, with_token, columns)
            without_token = len(rows) - len(with_token)
            audience = await self._store.run(
                audiences.store_page, current, registrations, invalid, without_token, keys[-1], self._now()
            )
            if audience is None:  # another job stored this page
                audience = await self._store.run(audiences.find_audience, tenant_id, name)
            elif len(rows) < PAGE_SIZE:
                break
        if audience is not None:
            audience = await self._store.run(audiences.finish_refresh, audience, self._now())
        if audience is None:
            raise audiences.no_such_audience(name)
        log.info("audience %s refreshed: %d members, %d rows refused", name, audience.members, audience.refused)
        return audience

    async def _query(
        self, tenant_id: str, source: AudienceSource, call: Callable[[Connection], R], timeout: float | None = None
    ) -> R:  # fmt: skip
        """Call a function with a read-only connection to the customer's database."""
        url = source.url
        if source.secret is not None:
            values = await self._store.run(secrets.decrypt_values, self._keyring(), tenant_id, [source.secret])
            url = values[source.secret]
        assert url is not None
        try:
            async with asyncio.timeout(timeout):
                return await _run_read_only(url, call)
        except ImportError as missing:
            raise Refused(
                f"Reading this audience requires the package {missing.name}, which is not installed.",
                code="EXTRA_MISSING", fix='Run: pip install "timebell[mysql]".',
            ) from missing  # fmt: skip
        except (SQLAlchemyError, OSError) as error:
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0] or "no response"
            raise InvalidInput(
                f"The audience cannot be read: {type(error).__name__}: {reason:.200}", code="AUDIENCE_UNREADABLE",
                fix="Run the query in that database to find the cause.",
            ) from None  # fmt: skip


async def _run_read_only(url: str, call: Callable[[Connection], R]) -> R:
    database_url = make_url(url)
    backend = database_url.get_backend_name()
    kind = "postgresql" if backend == "postgres" else backend

    def call_read_only(connection: Connection) -> R:
        connection.exec_driver_sql(_READ_ONLY[kind])
        return call(connection)

    if kind == "postgresql":
        return await _run_postgres(database_url, call_read_only)
    if kind in ("mysql", "mariadb"):
        database_url = database_url.set(drivername="mysql+pymysql")
    # A thread of its own: the shared ones must remain free while a server does not answer.
    executor = ThreadPoolExecutor(1, thread_name_prefix="timebell-audience")
    try:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(executor, _run_blocking, database_url, call_read_only)
    finally:
        executor.shutdown(wait=False)


async def _run_postgres(url: URL, operation: Callable[[Connection], R]) -> R:
    from sqlalchemy.ext.asyncio import create_async_engine

    from timebell.store.dialects.postgres import text_dates

    engine = create_async_engine(
        url.set(drivername="postgresql+asyncpg"), connect_args={"server_settings": text_dates.SESSION_SETTINGS}
    )
    try:
        async with engine.connect() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            await text_dates.read_dates_as_text(driver)
            return await connection.run_sync(operation)
    finally:
        await engine.dispose()


def _run_blocking(url: URL, operation: Callable[[Connection], R]) -> R:
    if url.get_backend_name() == "sqlite":
        path = f"file:{quote(url.database or '')}?mode=ro"  # otherwise SQLite would create a missing file
        engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(path, uri=True), poolclass=NullPool)
    else:
        timeouts = {"connect_timeout": CONNECT_TIMEOUT_SECONDS, "read_timeout": QUERY_TIMEOUT_SECONDS}
        engine = create_engine(url, poolclass=NullPool, connect_args=timeouts)
    try:
        with engine.connect() as connection:
            return operation(connection)
    finally:
        engine.dispose()


def _find_last_key(connection: Connection, source: AudienceSource) -> Any:
    key = connection.dialect.identifier_preparer.quote(source.key)
    return _to_plain_value(
        connection.execute(text(f"SELECT max({key}) FROM ({_escape_colons(source)}) AS audience")).scalar()  # noqa: S608 - the customer's own query, read only
    )


def _list_columns(connection: Connection, source: AudienceSource) -> list[str]:
    return list(connection.execute(text(f"SELECT * FROM ({_escape_colons(source)}) AS audience LIMIT 1")).keys())  # noqa: S608 - the customer's own query, read only


def _fetch_page(
    connection: Connection, source: AudienceSource, audience: Audience, limit: int
) -> list[Mapping[str, Any]]:
    """Return the rows after the last one read, up to the last key that existed when the refresh started."""
    key = connection.dialect.identifier_preparer.quote(source.key)
    after = "" if audience.cursor is None else f"{key} > :after AND "
    query = (
        f"SELECT * FROM ({_escape_colons(source)}) AS audience WHERE {after}{key} <= :until"  # noqa: S608 - the customer's own query, read only
        f" ORDER BY {key} LIMIT {limit}"
    )
    bounds = {"until": audience.until} | ({} if audience.cursor is None else {"after": audience.cursor})
    return [dict(row) for row in connection.execute(text(query), bounds).mappings()]


def _escape_colons(source: AudienceSource) -> str:
    """Return the query with escaped colons, so that SQLAlchemy finds no parameters in it."""
    return source.query.replace(":", "\\:")


def _resolve_columns(names: Iterable[str], key: str) -> dict[str, tuple[str, bool]]:
    """Return the field or the attribute of each column but the token and a mere key, and whether it is an attribute.

    Raises InvalidInput (INVALID_AUDIENCE) for a name that resembles a field, and for two columns of one field.
    """
    columns = {"token": ("token", False)}
    for name in names:
        if name == "token":
            continue
        try:
            found, is_attribute = resolve_column(name)
        except InvalidInput as error:
            if name == key:
                continue
            raise InvalidInput(error.message, code="INVALID_AUDIENCE", fix=error.fix) from None
        if is_attribute and name == key:
            continue
        column = found if is_attribute else FIELD_NAMES.get(found, found), is_attribute
        if column in columns.values():
            raise InvalidInput(
                f"The query has two columns for {found}.", code="INVALID_AUDIENCE", fix="Select one of them."
            )
        columns[name] = column
    del columns["token"]
    return columns


def _devices_from_rows(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, bool]]
) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Return the device registrations of rows, and the number of invalid rows."""
    registrations, invalid = [], 0
    for row in rows:
        fields: dict[str, Any] = {}
        attributes: dict[str, Any] = {}
        for name, (field, is_attribute) in columns.items():
            value = row[name]
            if is_attribute:
                attributes[field] = _to_plain_value(value)
            elif value is not None:
                fields[field] = _to_field_value(field, value)
        try:
            fields |= {"attributes": attributes} if attributes else {}
            registrations.append((message.check_recipient("token", row["token"]), validate_device(fields)))
        except TimebellError:
            invalid += 1
    return registrations, invalid


def _to_field_value(field: str, value: Any) -> Any:
    if field in ("push_on", "marketing_on") and value in (0, 1):
        return bool(value)
    if field == "topics" and isinstance(value, str):
        return value.split()
    return str(value) if field == "user_id" else _to_plain_value(value)


def _to_plain_value(value: Any) -> Any:
    """Return a value that is valid in JSON, and that the database accepts as a key parameter."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime | date | UUID):
        return str(value)
    return value
