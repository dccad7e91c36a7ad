"""`timebell doctor`: is everything that Timebell stands on as it should be?"""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import sys
from collections.abc import AsyncIterator
from datetime import datetime

from sqlalchemy import text

from timebell import settings as configuration
from timebell.cli.database import found_version, missing, shown
from timebell.cli.doctor import database as doctor_database
from timebell.cli.doctor import settings
from timebell.cli.doctor.findings import Check, fail, warn
from timebell.cli.output import FAILED, OK, emit, paint, show
from timebell.clock import SystemClock, wall
from timebell.engine.heartbeat import FAR
from timebell.errors import StoreError, StoreInUse, TimebellError
from timebell.formatting import milliseconds
from timebell.model.tzdata_change import many
from timebell.recurrence import tzdata_version
from timebell.settings import Settings
from timebell.store.cluster import nodes
from timebell.store.dialects.base import Store
from timebell.store.dialects.postgres.pooler import pooled
from timebell.store.dialects.postgres.store import plain
from timebell.store.open import HEAD, open_store, works
from timebell.store.schedules import tzdata_replan
from timebell.store.transaction import Transaction

WAL_BUG = ((3, 7, 0), (3, 51, 2))
PATIENCE = 2.0
OLDEST = (3, 35)


def examine(database: str | None, form: str | None) -> int:
    """Check everything and print it; the exit code."""
    chosen = configuration.load(database_url=database, output=form)
    checks = asyncio.run(_all(chosen))
    if chosen.output == "table":
        for check in checks:
            colour = {"ok": "green", "warn": "yellow", "fail": "red"}[check.verdict]
            code = f" ({check.code})" if check.code else ""
            show(f"{paint(f'{check.verdict:<4}', colour, sys.stdout)}  {check.name:<10}  {check.detail}{code}")
            for more in filter(None, (check.why, check.fix)):
                show(f"{'':<18}{more}")
    else:
        emit([dataclasses.asdict(check) for check in checks], chosen.output)
    return FAILED if any(check.verdict == "fail" for check in checks) else OK


async def _all(chosen: Settings) -> list[Check]:
    checks = [check async for check in _database(chosen)]
    if all(check.name != "zone data" for check in checks):
        checks.append(Check("ok", "zone data", f"{tzdata_version()} (package tzdata)"))
    return [*checks, *settings.look(chosen), _port(chosen)]


async def _database(chosen: Settings) -> AsyncIterator[Check]:
    """Reachable, current, durable, in time, awake, free; and what waits there."""
    url = chosen.database_url
    try:
        if missing(url):
            it_is = f"{shown(url)} does not exist yet"
            yield warn("database", "DATABASE_MISSING", it_is, "It is made by the first start.")
            yield _sqlite_library()
            return
        found = await found_version(url)
        store = open_store(url, wall)
        await store.open()
    except TimebellError as failed:
        yield fail("database", "DATABASE_UNREACHABLE", failed.message, failed.fix)
        return
    try:
        async for check in _opened(store, found, chosen):
            yield check
    except StoreError as failed:
        yield fail("database", "DATABASE_UNREACHABLE", failed.message, failed.fix)
    finally:
        await store.close()


async def _opened(store: Store, found: str | None, chosen: Settings) -> AsyncIterator[Check]:
    yield await _reached(store)
    if store.many_nodes and store.dialect.name != "mysql":
        server = dataclasses.replace(await store.run(doctor_database.ask), pooled=pooled(plain(store.url)))
        for check in doctor_database.judge(server):
            yield check
        if server.standby or server.read_only:
            return
    fits = await works(store.url, found)
    if fits:
        newer = "" if found == HEAD else f", of a newer release; this one is {HEAD}"
        yield Check("ok", "schema", f"current ({found}{newer})")
    else:
        detail = f"{found or 'no tables'}; needed {HEAD}"
        yield fail("schema", "DATABASE_NOT_UPGRADED", detail, "Run: timebell db upgrade")
    yield await _durable(store)
    yield await _clock(store)
    if store.many_nodes:
        yield await _listen(store)
    else:
        yield _sqlite_library()
        for check in doctor_database.disk(store.url):
            yield check
    if fits:
        yield await _engine(store)
        yield await _zone_data(store)
        for check in await doctor_database.waiting(store, chosen):
            yield check


async def _reached(store: Store) -> Check:
    clock = SystemClock()
    version = await store.run(_server_version)
    began = clock.monotonic()
    await store.reading()
    took = (clock.monotonic() - began) * 1000
    return Check("ok", "database", f"{version}, {shown(store.url)}, answers in {took:.1f} ms")


def _server_version(tx: Transaction) -> str:
    if tx.dialect.name == "sqlite":
        return f"SQLite {sqlite3.sqlite_version}"
    if tx.dialect.name == "mysql":
        return f"MariaDB {tx.execute(text('SELECT VERSION()')).scalar_one()}"
    return f"PostgreSQL {tx.execute(text('SHOW server_version')).scalar_one()}"


async def _durable(store: Store) -> Check:
    """Whether what was acknowledged survives a power cut."""
    values = await store.run(_durability)
    said = ", ".join(f"{name} {value}" for name, value in values.items())
    full = {"synchronous": "2", "innodb_flush_log_at_trx_commit": "1"}
    lax = [name for name, value in values.items() if value.lower() in ("off", "0") or full.get(name, value) != value]
    if lax:
        return warn("durability", "DATABASE_NOT_DURABLE", said, f"Set {' and '.join(lax)} to on.")
    return Check("ok", "durability", said)


def _durability(tx: Transaction) -> dict[str, str]:
    ask = "PRAGMA journal_mode; PRAGMA synchronous"
    if tx.dialect.name == "mysql":
        names = ("innodb_flush_log_at_trx_commit", "innodb_doublewrite")
        asked = ((name, text(f"SELECT @@GLOBAL.{name}")) for name in names)
        return {name: str(tx.execute(query).scalar_one()) for name, query in asked}
    if tx.dialect.name != "sqlite":
        ask = "SHOW fsync; SHOW synchronous_commit; SHOW full_page_writes"
    return {each.split()[1]: str(tx.execute(text(each)).scalar_one()) for each in ask.split("; ")}


async def _clock(store: Store) -> Check:
    before = wall()
    reading = await store.reading()
    offset = reading - before - (wall() - before) / 2
    detail = f"{milliseconds(offset)} from the database, which says {_z(reading)}"
    if abs(offset.total_seconds()) < FAR:
        return Check("ok", "clock", detail)
    return warn("clock", "CLOCK_SKEWED", detail, "Check NTP here and there.")


async def _listen(store: Store) -> Check:
    """Whether a NOTIFY arrives, which a pooler in transaction mode keeps from doing."""
    if store.dialect.name == "mysql":
        return Check("ok", "listen", "MariaDB tells nobody: new jobs are noticed up to 1 s later")
    heard = asyncio.Event()
    if await store.listen(lambda _: heard.set()):
        await store.run(_notify)
        try:
            await asyncio.wait_for(heard.wait(), PATIENCE)
        except TimeoutError:
            pass
        else:
            return Check("ok", "listen", "NOTIFY arrives")
    fix = "Behind a pooler in transaction mode? Connect directly, or leave it so."
    return warn("listen", "NOTIFY_UNHEARD", "NOTIFY does not arrive", fix)


def _notify(tx: Transaction) -> None:
    tx.execute(text("SELECT pg_notify('timebell', '')"))


async def _engine(store: Store) -> Check:
    """Who runs on this database."""
    seen = await store.run(nodes.listed)
    now = await store.reading()
    names = ", ".join(f"{node.name} (seen {max(0.0, (now - node.seen_at).total_seconds()):.0f} s ago)" for node in seen)
    if store.many_nodes:
        return Check("ok", "nodes", names or "none runs")
    try:
        await store.lock_engine()
    except StoreInUse as taken:
        return Check("ok", "engine", f"{taken.message.split(';')[0]}")
    return Check("ok", "engine", "none runs on this file; its lock is free")


async def _zone_data(store: Store) -> Check:
    """Whether all nodes have the same, and what it moved when it came."""
    version = tzdata_version()
    now = await store.reading()
    live = [node for node in await store.run(nodes.listed) if now - node.seen_at < doctor_database.RECENT]
    others = [f"{node.name} has {node.tzdata}" for node in live if node.tzdata != version]
    if others:
        fix = "Give every node the newest: pip install --upgrade tzdata"
        return warn("zone data", "ZONE_DATA_DIFFERS", f"{version} here; {', '.join(others)}", fix)
    changes = await store.run(tzdata_replan.recorded, version)
    moved = [sum(counts) for counts in zip(*((one.schedules, one.jobs) for one in changes), strict=True)] or [0, 0]
    what = f"; it moved {many(moved[0], 'schedule')} and {many(moved[1], 'job')} when it came" if any(moved) else ""
    return Check("ok", "zone data", f"{version} (package tzdata){what}")


def _sqlite_library() -> Check:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < OLDEST:
        return fail("sqlite", "DATABASE_OLD", f"SQLite {version}", "Use a Python that brings 3.35 or newer.")
    low, high = WAL_BUG
    if low <= sqlite3.sqlite_version_info <= high:
        return Check(
            "ok", "sqlite", f"{version} has the WAL-reset bug (3.7.0 to 3.51.2), which needs two writing connections:"
            " the engine uses one",
        )  # fmt: skip
    return Check("ok", "sqlite", f"{version}, without the WAL-reset bug")


def _port(chosen: Settings) -> Check:
    from timebell.api.server import bind

    where = f"{chosen.http_host}:{chosen.http_port}"
    try:
        bind(chosen.http_host, chosen.http_port).close()
    except TimebellError as failed:
        return warn("port", "PORT_TAKEN", failed.message, failed.fix)
    return Check("ok", "port", f"{where} is free")


def _z(instant: datetime) -> str:
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")
