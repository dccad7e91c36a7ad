"""Checks of `timebell doctor` on the database: server configuration, disk, and stuck work."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy import make_url, select, text

from timebell.cli.doctor.findings import Check, fail, warn
from timebell.errors import Refused
from timebell.formatting import format_count
from timebell.settings import Settings
from timebell.store.cluster import gauges, nodes, rewinds
from timebell.store.dialects.base import Store
from timebell.store.jobs import queues
from timebell.store.schema import data_keys
from timebell.store.tenancy import targets
from timebell.store.transaction import Transaction
from timebell.tenancy.secrets import keyring

REWIND_WINDOW = timedelta(days=7)  # for which lost writes are reported
NODE_ALIVE_WINDOW = timedelta(minutes=2)  # a node with a heartbeat within this time is live
MIN_SERVER_VERSION = 130_000  # PostgreSQL 13
CONNECTIONS_PER_NODE = 20
MIN_STATEMENT_TIMEOUT_MS = 10_000  # the longest regular statements take several seconds
MIN_FREE_BYTES, MIN_FREE_SHARE = 500 * 2**20, 0.05  # of the disk of a SQLite file


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Settings and state of a PostgreSQL server and of this connection. Timeouts are in milliseconds."""

    version: int
    encoding: str
    standby: bool
    read_only: bool
    superuser: bool
    remote: bool
    encrypted: bool
    free_connections: int
    autovacuum: bool
    statement_timeout: int
    idle_timeout: int
    pooled: bool = False


SERVER_QUERY = """SELECT
 current_setting('server_version_num')::int, current_setting('server_encoding'), pg_is_in_recovery(),
 current_setting('default_transaction_read_only') = 'on', (SELECT rolsuper FROM pg_roles WHERE rolname = current_user),
 inet_server_addr() IS NOT NULL AND NOT inet_server_addr() <<= '127.0.0.0/8' AND inet_server_addr() <> '::1',
 coalesce((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false),
 current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
 - (SELECT count(*)::int FROM pg_stat_activity WHERE backend_type = 'client backend'),
 current_setting('autovacuum') = 'on',
 (SELECT setting::int FROM pg_settings WHERE name = 'statement_timeout'),
 (SELECT setting::int FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout')"""


def inspect_server(tx: Transaction) -> ServerFacts:
    """Read the facts of the connected PostgreSQL server."""
    return ServerFacts(*tuple(tx.execute(text(SERVER_QUERY)).one()))


def check_server(server: ServerFacts) -> Iterator[Check]:
    """Yield the problems of a PostgreSQL server."""
    if server.version < MIN_SERVER_VERSION:
        yield fail("server", "DATABASE_TOO_OLD", f"PostgreSQL {server.version // 10_000}", "Upgrade it to 13 or newer.")
    if server.standby or server.read_only:
        state = "the server is a standby" if server.standby else "default_transaction_read_only is on"
        yield fail("server", "DATABASE_READ_ONLY", state,
                   "Connect to the primary (target_session_attrs=read-write) with a role that can write.")  # fmt: skip
    if server.encoding != "UTF8":
        yield fail("server", "DATABASE_NOT_UTF8", f"the encoding is {server.encoding}",
                   "Recreate the database: CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0")  # fmt: skip
    if server.superuser:
        yield warn("role", "ROLE_TOO_STRONG", "this role is a superuser",
                   "Create a role for the nodes: timebell db roles prints the statements.")  # fmt: skip
    if server.remote and not server.encrypted:
        yield warn("connection", "CONNECTION_UNENCRYPTED", "the connection crosses a network without TLS",
                   "Add ?sslmode=verify-full to TIMEBELL_DATABASE_URL, and set ssl = on on the server.")  # fmt: skip
    if server.free_connections < CONNECTIONS_PER_NODE:
        yield warn("connection", "CONNECTIONS_LOW", f"{max(0, server.free_connections)} connections are free",
                   "Raise max_connections, or use PgBouncer.")  # fmt: skip
    if not server.autovacuum:
        yield warn("server", "AUTOVACUUM_OFF", "autovacuum is off", "Set autovacuum = on.")
    if 0 < server.statement_timeout < MIN_STATEMENT_TIMEOUT_MS:
        yield warn("role", "STATEMENT_TIMEOUT_TOO_SHORT", f"statement_timeout is {server.statement_timeout} ms",
                   "For this role only: ALTER ROLE ... SET statement_timeout = '60s'")  # fmt: skip
    if server.pooled and not server.idle_timeout:
        yield warn("role", "POOLER_WITHOUT_IDLE_LIMIT", "a pooler is used, and idle transactions have no limit",
                   "ALTER ROLE ... SET idle_in_transaction_session_timeout = '10s'")  # fmt: skip


def check_disk(url: str) -> Iterator[Check]:
    """Yield a warning if the disk of a SQLite file is almost full."""
    path = Path(make_url(url).database or ".").resolve()
    usage = shutil.disk_usage(path.parent)
    if usage.free < MIN_FREE_BYTES or usage.free < MIN_FREE_SHARE * usage.total:
        yield warn("disk", "DISK_ALMOST_FULL", f"{usage.free // 2**20:,} MB are free on the disk of {path}",
                   "Free disk space, move the file, or reduce TIMEBELL_RETENTION_DONE.")  # fmt: skip


async def check_stored_work(store: Store, settings: Settings) -> list[Check]:
    """Return the problems of stored work and configuration. The schema must be current."""
    now = await store.read_clock()
    live = [node for node in await store.run(nodes.list_nodes) if now - node.seen_at < NODE_ALIVE_WINDOW]
    gauge_values = await store.run(gauges.read_gauges, now, 10.0)
    lost = await store.run(rewinds.list_rewinds, now - REWIND_WINDOW)
    return (
        [
            warn(
                "history",
                "HISTORY_REWOUND",
                rewind.describe(),
                "Create the lost jobs again; repeat lost cancels, pauses and edits.",
            )
            for rewind in lost
        ]
        + list(_check_work(gauge_values, live, await store.run(queues.is_everything_paused)))
        + await _check_configuration(store, settings)
    )


def _check_work(gauge_values: gauges.Gauges, live: list[nodes.Node], all_paused: bool) -> Iterator[Check]:
    work = gauge_values.schedules["active"] + gauge_values.jobs["pending"]
    if work and not live:
        yield warn("nodes", "NO_LIVE_NODE", f"{work:,} schedules and jobs, but no node is running",
                   "Start one: timebell run")  # fmt: skip
    if len(versions := sorted({node.version for node in live})) > 1:
        yield warn("nodes", "VERSIONS_DIFFER", f"nodes run {', '.join(versions)}",
                   "Finish the deploy: timebell node list shows the version of each node.")  # fmt: skip
    if others := [node.name for node in live[1:] if not node.shares_secret_key(live[0])]:
        yield warn("nodes", "SECRET_KEYS_DIFFER", f"{', '.join(others)} and {live[0].name} have different secret keys",
                   "Set the same TIMEBELL_SECRET_KEY on every node.")  # fmt: skip
    if all_paused:
        yield warn("firing", "ALL_PAUSED", "all firing is paused", "To resume: await app.resume_all()")
    if gauge_values.unhandled:
        detail = f"{format_count(gauge_values.unhandled, 'due job')} that no live node handles"
        yield warn("jobs", "JOBS_UNHANDLED", detail,
                   "Start a node with a handler for the topic; timebell job list shows the topics.")  # fmt: skip
    if gauge_values.schedules["errored"]:
        detail = f"{format_count(gauge_values.schedules['errored'], 'schedule')} in state errored"
        yield warn("schedules", "SCHEDULES_ERRORED", detail,
                   "List them: timebell schedule list; timebell schedule show NAME shows the error.")  # fmt: skip


async def _check_configuration(store: Store, settings: Settings) -> list[Check]:
    disabled, names = await store.run(targets.summarize_disabled, 3)
    backlog = await store.run(_count_backlog)
    checks = []
    if disabled:
        checks.append(warn("targets", "TARGETS_DISABLED", f"{format_count(disabled, 'target')}: {', '.join(names)}",
                           "Repair the receiver, then: timebell target enable NAME"))  # fmt: skip
    if backlog:
        checks.append(warn("backlog", "BACKLOG_HELD", f"{format_count(backlog, 'job')}",
                           "List it: timebell release. Run it: timebell release --all."))  # fmt: skip
    if unreadable := await store.run(_tenants_with_unreadable_secrets, settings.secret_key):
        checks.append(fail("secrets", "SECRETS_UNREADABLE", f"this node cannot read those of {', '.join(unreadable)}",
                           "Set the same TIMEBELL_SECRET_KEY as on the other nodes."))  # fmt: skip
    if find_spec("cryptography") is None and await store.run(_has_secrets):
        checks.append(fail("extra", "EXTRA_MISSING", "secrets are stored, but the extra \"secrets\" is not installed",
                           'Run: pip install "timebell[secrets]"'))  # fmt: skip
    return checks


def _count_backlog(tx: Transaction) -> int:
    count = "SELECT count(*) FROM timebell_jobs WHERE hold IS NOT NULL AND hold = 'backlog'"
    return int(tx.execute(text(count)).scalar_one())


def _has_secrets(tx: Transaction) -> bool:
    return tx.execute(select(data_keys.c.tenant_id).limit(1)).first() is not None


def _tenants_with_unreadable_secrets(tx: Transaction, secret_key: str | None) -> list[str]:
    """Return up to three tenants whose data keys this secret key cannot unwrap."""
    try:
        known = keyring(secret_key).key_ids
    except Refused:
        known = []
    query = select(data_keys.c.tenant_id).where(data_keys.c.wrapped_by.not_in(known)).order_by("tenant_id")
    return list(tx.execute(query.limit(3)).scalars())
