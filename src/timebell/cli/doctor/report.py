"""`timebell doctor`: check database, settings and machine, and print the findings."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime

from sqlalchemy import text

from timebell import settings as configuration
from timebell.cli.database import find_schema, is_missing, redact_url
from timebell.cli.doctor import database as doctor_database
from timebell.cli.doctor.findings import Check, fail, warn
from timebell.cli.doctor.galera import check_galera
from timebell.cli.doctor.identity_provider import check_identity_provider
from timebell.cli.doctor.ports import check_answering_node, check_ports
from timebell.cli.doctor.settings import check_settings
from timebell.cli.output import FAILED, OK, colorize, print_data, print_records
from timebell.clock import SystemClock, system_now
from timebell.engine.heartbeat import CLOCK_OFFSET_WARNING_SECONDS
from timebell.errors import StoreError, StoreInUse, TimebellError
from timebell.feature import Feature
from timebell.formatting import format_count, format_milliseconds
from timebell.recurrence import tzdata_version
from timebell.settings import Settings
from timebell.store.cluster import nodes
from timebell.store.dialects.base import Store
from timebell.store.dialects.postgres.pooler import is_pooled
from timebell.store.dialects.postgres.store import PostgresStore
from timebell.store.open import is_compatible, open_store
from timebell.store.schedules import deployments, tzdata_replan
from timebell.store.transaction import Transaction
from timebell.store.version import HEAD

WAL_RESET_BUG_VERSIONS = ((3, 7, 0), (3, 51, 2))
NOTIFY_TIMEOUT_SECONDS = 2.0
MIN_SQLITE_VERSION = (3, 35)
MAX_LISTED_SCHEDULES = 5


def examine(
    database: str | None, output_format: str | None, enabled_features: Callable[[Settings], Iterable[Feature]]
) -> int:
    """Run all checks and print them; return exit code 1 if one fails."""
    chosen = configuration.load(database_url=database, output=output_format)
    checks = asyncio.run(_collect_checks(chosen, enabled_features(chosen)))
    if chosen.output == "table":
        for check in checks:
            color = {"ok": "green", "warn": "yellow", "fail": "red"}[check.verdict]
            code = f" ({check.code})" if check.code else ""
            print_data(f"{colorize(f'{check.verdict:<4}', color, sys.stdout)}  {check.name:<10}  {check.detail}{code}")
            for line in filter(None, (check.why, check.fix)):
                print_data(f"{'':<18}{line}")
    else:
        print_records([dataclasses.asdict(check) for check in checks], chosen.output)
    return FAILED if any(check.verdict == "fail" for check in checks) else OK


async def _collect_checks(settings: Settings, features: Iterable[Feature]) -> list[Check]:
    checks = [check async for check in _check_database(settings, features)]
    if all(check.name != "zone data" for check in checks):
        checks.append(Check("ok", "zone data", f"{tzdata_version()} (package tzdata)"))
    sign_on = [check async for check in check_identity_provider(settings)]
    return [*checks, *check_settings(settings), *sign_on, *check_ports(settings)]


async def _check_database(settings: Settings, features: Iterable[Feature]) -> AsyncIterator[Check]:
    """Yield the checks of the database: reachable, current, durable, clock, notifications, nodes, stored work."""
    url = settings.database_url
    try:
        if is_missing(url):
            detail = f"{redact_url(url)} does not exist yet"
            yield warn("database", "DATABASE_MISSING", detail, "The first start creates it.")
            yield _check_sqlite_library()
            return
        version, missing = await find_schema(url, features)
        store = open_store(url, system_now)
        await store.open()
    except TimebellError as error:
        yield fail("database", "DATABASE_UNREACHABLE", error.message, error.fix)
        return
    try:
        async for check in _check_open_database(store, version, missing, settings):
            yield check
    except StoreError as error:
        yield fail("database", "DATABASE_UNREACHABLE", error.message, error.fix)
    finally:
        await store.close()


async def _check_open_database(
    store: Store, stored_version: str | None, missing: Sequence[str], settings: Settings
) -> AsyncIterator[Check]:
    yield await _check_connection(store)
    if store.dialect.notifies:
        server = dataclasses.replace(await store.run(doctor_database.inspect_server), pooled=is_pooled(store.url))
        for check in doctor_database.check_server(server):
            yield check
        if server.standby or server.read_only:
            return
    elif store.multi_node:
        for check in await check_galera(store):
            yield check
    is_current = await is_compatible(store.url, stored_version)
    if missing:
        yield fail("schema", "DATABASE_NOT_UPGRADED", f"lacks {', '.join(missing)}", "Run: timebell db upgrade")
    elif is_current:
        newer = "" if stored_version == HEAD else f", of a newer release; this release has {HEAD}"
        yield Check("ok", "schema", f"current ({stored_version}{newer})")
    else:
        detail = f"{stored_version or 'no tables'}; this release needs {HEAD}"
        yield fail("schema", "DATABASE_NOT_UPGRADED", detail, "Run: timebell db upgrade")
    yield await _check_durability(store)
    yield await _check_clock(store)
    if store.multi_node:
        yield await _check_notifications(store)
    else:
        yield _check_sqlite_library()
        for check in doctor_database.check_disk(store.url):
            yield check
    if is_current:
        yield await _check_engine(store)
        yield await _check_tzdata(store)
        stored_work = await doctor_database.check_stored_work(store, settings)
        for check in [*stored_work, *await check_answering_node(store, settings)]:
            yield check


async def _check_connection(store: Store) -> Check:
    clock = SystemClock()
    version = await store.run(_server_version)
    started = clock.monotonic()
    await store.read_clock()
    milliseconds = (clock.monotonic() - started) * 1000
    return Check("ok", "database", f"{version}, {redact_url(store.url)}, answers in {milliseconds:.1f} ms")


def _server_version(tx: Transaction) -> str:
    return f"{tx.dialect.product} {tx.execute(text(tx.dialect.version_query)).scalar_one()}"


async def _check_durability(store: Store) -> Check:
    """Check whether acknowledged writes survive a power failure."""
    values = await store.run(_durability_settings)
    detail = ", ".join(f"{name} {value}" for name, value in values.items())
    durable_values = {"synchronous": "2", "innodb_flush_log_at_trx_commit": "1"}
    weakened = [
        name
        for name, value in values.items()
        if value.lower() in ("off", "0") or durable_values.get(name, value) != value
    ]
    if weakened:
        return warn("durability", "DATABASE_NOT_DURABLE", detail, f"Set {' and '.join(weakened)} to on.")
    return Check("ok", "durability", detail)


def _durability_settings(tx: Transaction) -> dict[str, str]:
    queries = tx.dialect.durability_queries
    return {name: str(tx.execute(text(query)).scalar_one()) for name, query in queries.items()}


async def _check_clock(store: Store) -> Check:
    started = system_now()
    reading = await store.read_clock()
    offset = reading - started - (system_now() - started) / 2
    detail = f"{format_milliseconds(offset)} from the database clock ({_format_utc(reading)})"
    if abs(offset.total_seconds()) < CLOCK_OFFSET_WARNING_SECONDS:
        return Check("ok", "clock", detail)
    return warn("clock", "CLOCK_SKEWED", detail, "Check NTP on this machine and on the database server.")


async def _check_notifications(store: Store) -> Check:
    """Check whether NOTIFY messages arrive; a pooler in transaction mode prevents them."""
    if not isinstance(store, PostgresStore):
        return Check(
            "ok", "listen", f"{store.dialect.product} has no notifications: nodes notice new jobs up to 1 s later"
        )
    received = asyncio.Event()
    with store.subscribers.subscribed(lambda _: received.set()):
        if await store.listen():
            await store.run(store.notify, frozenset())
            try:
                await asyncio.wait_for(received.wait(), NOTIFY_TIMEOUT_SECONDS)
            except TimeoutError:
                pass
            else:
                return Check("ok", "listen", "NOTIFY arrives")
    fix = "Behind a pooler in transaction mode, connect directly, or accept the delay."
    return warn("listen", "NOTIFY_NOT_DELIVERED", "NOTIFY does not arrive", fix)


def _describe_deployment(node: nodes.Node, defined: Mapping[str, Sequence[str]]) -> str:
    if node.deployment is None:
        return ""
    names = defined.get(node.deployment, ())
    more = f" and {len(names) - MAX_LISTED_SCHEDULES} more" if len(names) > MAX_LISTED_SCHEDULES else ""
    listed = ", ".join(names[:MAX_LISTED_SCHEDULES]) or "no schedules"
    return f", deployment {node.deployment} defines {listed}{more}"


async def _check_engine(store: Store) -> Check:
    """List the nodes of this database, or report whether a SQLite file is in use."""
    known_nodes = await store.run(nodes.list_nodes)
    defined = await store.run(deployments.list_definitions)
    now = await store.read_clock()
    lines = [
        f"{node.name} (seen {max(0.0, (now - node.seen_at).total_seconds()):.0f} s ago"
        f"{_describe_deployment(node, defined)})"
        for node in sorted(known_nodes, key=lambda node: node.seen_at)
    ]
    if store.multi_node:
        return Check("ok", "nodes", ", ".join(lines) or "none is running")
    try:
        await store.lock_engine()
    except StoreInUse as error:  # earlier rows are the remains of crashed engines
        return Check("ok", "engine", ": ".join([error.message.split(";")[0], *lines[-1:]]))
    return Check("ok", "engine", "none is running on this file; its lock is free")


async def _check_tzdata(store: Store) -> Check:
    """Check whether all live nodes have the same zone data, and report what its last change moved."""
    version = tzdata_version()
    now = await store.read_clock()
    live = [
        node for node in await store.run(nodes.list_nodes) if now - node.seen_at < doctor_database.NODE_ALIVE_WINDOW
    ]
    others = [f"{node.name} has {node.tzdata}" for node in live if node.tzdata != version]
    if others:
        fix = "Install the newest zone data on every node: pip install --upgrade tzdata"
        return warn("zone data", "ZONE_DATA_DIFFERS", f"{version} here; {', '.join(others)}", fix)
    changes = await store.run(tzdata_replan.list_changes, version)
    moved = [sum(counts) for counts in zip(*((change.schedules, change.jobs) for change in changes), strict=True)] or [
        0,
        0,
    ]
    effect = (
        f"; its introduction moved {format_count(moved[0], 'schedule')} and {format_count(moved[1], 'job')}"
        if any(moved)
        else ""
    )
    return Check("ok", "zone data", f"{version} (package tzdata){effect}")


def _check_sqlite_library() -> Check:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < MIN_SQLITE_VERSION:
        return fail("sqlite", "DATABASE_TOO_OLD", f"SQLite {version}", "Use a Python with SQLite 3.35 or newer.")
    low, high = WAL_RESET_BUG_VERSIONS
    if low <= sqlite3.sqlite_version_info <= high:
        return Check(
            "ok", "sqlite", f"{version} has the WAL-reset bug (3.7.0 to 3.51.2), which needs two writing connections:"
            " the engine uses one",
        )  # fmt: skip
    return Check("ok", "sqlite", f"{version}, without the WAL-reset bug")


def _format_utc(instant: datetime) -> str:
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")
