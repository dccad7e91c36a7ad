"""Reads an audience from a database of the customer's own: page by page, in the order of its key, in a transaction
that may not write. What was read is written here, and a reading that broke off goes on where it was."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import UUID

from sqlalchemy import URL, Connection, NullPool, create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError

from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.model.audience import KNOWN, checked
from timebell.model.audience_source import Source
from timebell.store.campaigns import audiences
from timebell.store.campaigns.audiences import Audience
from timebell.store.dialects.base import Store
from timebell.store.tenancy import secrets
from timebell.targets.push import message
from timebell.tenancy.secrets import Keyring

R = TypeVar("R")
log = logging.getLogger("timebell.campaigns")

PAGE = 1000
TRIED = 20.0  # seconds for a look that a transaction of the caller waits for
WORDS = {"userid": "user_id", "push_onoff": "push_on", "marketing_onoff": "marketing_on", "pushonoff": "push_on",
         "marketingonoff": "marketing_on"}  # fmt: skip
_READ_ONLY = {
    "postgresql": "SET TRANSACTION READ ONLY", "sqlite": "PRAGMA query_only = 1",
    "mysql": "SET TRANSACTION READ ONLY", "mariadb": "SET TRANSACTION READ ONLY",
}  # fmt: skip


class Outside:
    """Reads audiences. `ring` opens secrets; `now` is aware."""

    def __init__(self, store: Store, ring: Callable[[], Keyring], now: Callable[[], datetime]) -> None:
        self._store, self._ring, self._now = store, ring, now

    async def check(self, tenant_id: str, source: Source, connection: Any = None) -> list[str]:
        """The columns of the query, once it has run; its secret is read over `connection`, the caller's transaction, if
        there is one, which has to wait for it. Raises InvalidInput (AUDIENCE_UNREADABLE, AUDIENCE_KEY_MISSING,
        AUDIENCE_INVALID), Refused, NotFound."""
        columns = await self._ask(tenant_id, source, partial(_columns, source=source), connection)
        if source.key not in columns:
            raise InvalidInput(
                f"The query has no column {source.key!r}, which is to be its key.", code="AUDIENCE_KEY_MISSING",
                fix=f"Its columns are: {', '.join(columns)}.",
            )  # fmt: skip
        if "token" not in columns:
            raise InvalidInput(
                f"The query has no column token, only: {', '.join(columns)}.", code="AUDIENCE_INVALID",
                fix="Select the registration token AS token.",
            )  # fmt: skip
        return columns

    async def refresh(self, tenant_id: str, name: str) -> Audience:
        """Read it, or go on with it. Raises NotFound (AUDIENCE_NOT_FOUND), InvalidInput (AUDIENCE_UNREADABLE,
        AUDIENCE_KEY_REPEATS), Refused."""
        found = await self._store.run(audiences.find, tenant_id, name)
        if found is None:
            raise audiences.no_such(name)
        source, until = found.source, found.until
        if found.loading is None:
            until = await self._ask(tenant_id, source, lambda on: _last(on, source))
        found = await self._store.run(audiences.begin, tenant_id, name, until, self._now())
        while found is not None and found.until is not None:
            at = found
            rows = await self._ask(tenant_id, source, partial(_page, source=source, at=at, most=PAGE))
            keys = [_plain(row[source.key]) for row in rows]
            if len(set(keys)) < len(keys) or at.cursor in keys:
                raise InvalidInput(
                    f"The query gives two rows with one {source.key}.", code="AUDIENCE_KEY_REPEATS",
                    fix="Choose a key that no two rows share.",
                )  # fmt: skip
            if not rows:
                break
            some = [row for row in rows if row["token"] not in (None, "")]
            good, bad = await asyncio.to_thread(_devices, some, source.key)
            bare = len(rows) - len(some)
            found = await self._store.run(audiences.take_in, at, good, bad, bare, keys[-1], self._now())
            if found is None:  # somebody else reads it, too
                found = await self._store.run(audiences.find, tenant_id, name)
            elif len(rows) < PAGE:
                break
        if found is not None:
            found = await self._store.run(audiences.finish, found, self._now())
        if found is None:
            raise audiences.no_such(name)
        log.info("audience %s: %d members, %d rows refused", name, found.members, found.refused)
        return found

    async def _ask(
        self, tenant_id: str, source: Source, call: Callable[[Connection], R], connection: Any = None
    ) -> R:  # fmt: skip
        """Ask that database something, in a transaction that may not write."""
        url = source.url
        if source.secret is not None:
            asked = self._ring(), tenant_id, [source.secret]
            if connection is None:
                found = await self._store.run(secrets.values, *asked)
            else:
                found = await self._store.join(connection, secrets.values, *asked)
            url = found[source.secret]
        assert url is not None
        try:
            async with asyncio.timeout(None if connection is None else TRIED):
                return await _connected(url, call)
        except ImportError as missing:
            raise Refused(
                f"To read an audience from there takes a package that is not installed ({missing.name}).",
                code="EXTRA_MISSING", fix='Run: pip install "timebell[mysql]".',
            ) from missing  # fmt: skip
        except (SQLAlchemyError, OSError) as failed:
            why = str(getattr(failed, "orig", None) or failed).partition("\n")[0] or "no answer"
            raise InvalidInput(
                f"The audience cannot be read: {type(failed).__name__}: {why:.200}", code="AUDIENCE_UNREADABLE",
                fix="Try the query in that database.",
            ) from None  # fmt: skip


async def _connected(url: str, call: Callable[[Connection], R]) -> R:
    place = make_url(url)
    kind = "postgresql" if place.get_backend_name() == "postgres" else place.get_backend_name()

    def reading(connection: Connection) -> R:
        connection.exec_driver_sql(_READ_ONLY[kind])
        return call(connection)

    if kind == "postgresql":
        from sqlalchemy.ext.asyncio import create_async_engine

        server = create_async_engine(place.set(drivername="postgresql+asyncpg"))
        try:
            async with server.connect() as connection:
                return await connection.run_sync(reading)
        finally:
            await server.dispose()
    if kind in ("mysql", "mariadb"):
        place = place.set(drivername="mysql+pymysql")
    return await asyncio.to_thread(_blocking, place, reading)


def _blocking(place: URL, reading: Callable[[Connection], R]) -> R:
    if place.get_backend_name() == "sqlite":
        path = f"file:{quote(place.database or '')}?mode=ro"  # else a file that is not there would be made
        engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(path, uri=True), poolclass=NullPool)
    else:
        engine = create_engine(place, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            return reading(connection)
    finally:
        engine.dispose()


def _last(on: Connection, source: Source) -> Any:
    key = on.dialect.identifier_preparer.quote(source.key)
    return _plain(on.execute(text(f"SELECT max({key}) FROM ({_escaped(source)}) AS audience")).scalar())  # noqa: S608 - the customer's own query, read only


def _columns(on: Connection, source: Source) -> list[str]:
    return list(on.execute(text(f"SELECT * FROM ({_escaped(source)}) AS audience LIMIT 1")).keys())  # noqa: S608 - the customer's own query, read only


def _page(on: Connection, source: Source, at: Audience, most: int) -> list[Mapping[str, Any]]:
    """The rows after the last that was read, up to the last that there was when that began."""
    key = on.dialect.identifier_preparer.quote(source.key)
    after = "" if at.cursor is None else f"{key} > :after AND "
    query = f"SELECT * FROM ({_escaped(source)}) AS audience WHERE {after}{key} <= :until ORDER BY {key} LIMIT {most}"  # noqa: S608 - the customer's own query, read only
    bounds = {"until": at.until} | ({} if at.cursor is None else {"after": at.cursor})
    return [dict(row) for row in on.execute(text(query), bounds).mappings()]


def _escaped(source: Source) -> str:
    """A query in which no colon is a parameter."""
    return source.query.replace(":", "\\:")


def _devices(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Devices of rows, and how many rows are none."""
    good, bad = [], 0
    for row in rows:
        about: dict[str, Any] = {}
        attributes: dict[str, Any] = {}
        for name, value in row.items():
            field = WORDS.get(str(name).lower(), str(name))
            if name == "token" or value is None or (name == key and field not in KNOWN):
                continue
            if field in ("push_on", "marketing_on") and value in (0, 1):
                about[field] = bool(value)
            elif field == "topics" and isinstance(value, str):
                about[field] = value.split()
            elif field == "user_id":
                about[field] = str(value)
            elif field in KNOWN and field != "attributes":
                about[field] = _plain(value)
            else:
                attributes[field] = _plain(value)
        try:
            about |= {"attributes": attributes} if attributes else {}
            good.append((message.check_to("token", row["token"]), checked(about)))
        except TimebellError:
            bad += 1
    return good, bad


def _plain(value: Any) -> Any:
    """As JSON can have it, and as the database takes it back for a key."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime | date | UUID):
        return str(value)
    return value
