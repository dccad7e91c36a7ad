"""What `timebell doctor` sees in the database: how it is set up, and what waits in it."""

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
from timebell.model.tzdata_change import many
from timebell.settings import Settings
from timebell.store.cluster import gauges, nodes
from timebell.store.dialects.base import Store
from timebell.store.jobs import queues
from timebell.store.schema import data_keys
from timebell.store.tenancy import targets
from timebell.store.transaction import Transaction
from timebell.tenancy.secrets import keyring

RECENT = timedelta(minutes=2)  # a node that was not seen for so long is gone
OLDEST = 130_000  # PostgreSQL 13
CONNECTIONS = 20  # of a node
SHORTEST = 10_000  # ms that the longest ordinary statements may take
FREE, SHARE = 500 * 2**20, 0.05  # of a disk: bytes, and the part


@dataclass(frozen=True, slots=True)
class Server:
    """What a PostgreSQL server says of itself and of this connection."""

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


ASK = """SELECT current_setting('server_version_num')::int, current_setting('server_encoding'), pg_is_in_recovery(),
 current_setting('default_transaction_read_only') = 'on', (SELECT rolsuper FROM pg_roles WHERE rolname = current_user),
 inet_server_addr() IS NOT NULL AND NOT inet_server_addr() <<= '127.0.0.0/8' AND inet_server_addr() <> '::1',
 coalesce((SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()), false),
 current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
 - (SELECT count(*)::int FROM pg_stat_activity WHERE backend_type = 'client backend'),
 current_setting('autovacuum') = 'on',
 (SELECT setting::int FROM pg_settings WHERE name = 'statement_timeout'),
 (SELECT setting::int FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout')"""


def ask(tx: Transaction) -> Server:
    """The server as it is."""
    return Server(*tuple(tx.execute(text(ASK)).one()))


def judge(server: Server) -> Iterator[Check]:
    """What is wrong with it."""
    if server.version < OLDEST:
        yield fail("server", "DATABASE_OLD", f"PostgreSQL {server.version // 10_000}", "Upgrade it to 13 or newer.")
    if server.standby or server.read_only:
        how = "is a standby" if server.standby else "has default_transaction_read_only on"
        yield fail("server", "DATABASE_READ_ONLY", f"it {how}",
                   "Connect to the primary (target_session_attrs=read-write), as a role that may write.")  # fmt: skip
    if server.encoding != "UTF8":
        yield fail("server", "DATABASE_NOT_UTF8", f"its encoding is {server.encoding}",
                   "Make the database anew: CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0")  # fmt: skip
    if server.superuser:
        yield warn("role", "ROLE_TOO_STRONG", "this role is a superuser",
                   "Make one for the nodes: timebell db roles prints the statements.")  # fmt: skip
    if server.remote and not server.encrypted:
        yield warn("connection", "CONNECTION_UNENCRYPTED", "it goes over a network without TLS",
                   "Add ?sslmode=verify-full to TIMEBELL_DATABASE_URL, and ssl = on to the server.")  # fmt: skip
    if server.free_connections < CONNECTIONS:
        yield warn("connection", "CONNECTIONS_SCARCE", f"{max(0, server.free_connections)} are free",
                   "Raise max_connections, or put PgBouncer between.")  # fmt: skip
    if not server.autovacuum:
        yield warn("server", "AUTOVACUUM_OFF", "autovacuum is off", "Set autovacuum = on.")
    if 0 < server.statement_timeout < SHORTEST:
        yield warn("role", "STATEMENT_TIMEOUT_SHORT", f"statement_timeout is {server.statement_timeout} ms",
                   "ALTER ROLE ... SET statement_timeout = '60s', for this role alone.")  # fmt: skip
    if server.pooled and not server.idle_timeout:
        yield warn("role", "POOLER_WITHOUT_IDLE_LIMIT", "a pooler is between, and idle transactions have no limit",
                   "ALTER ROLE ... SET idle_in_transaction_session_timeout = '10s'")  # fmt: skip


def disk(url: str) -> Iterator[Check]:
    """Whether a SQLite file has room to grow."""
    path = Path(make_url(url).database or ".").resolve()
    usage = shutil.disk_usage(path.parent)
    if usage.free < FREE or usage.free < SHARE * usage.total:
        yield warn("disk", "DISK_ALMOST_FULL", f"{usage.free // 2**20:,} MB are free beside {path}",
                   "Make room, move the file, or keep less: TIMEBELL_RETENTION_DONE.")  # fmt: skip


async def waiting(store: Store, chosen: Settings) -> list[Check]:
    """What stands still in a database whose tables are current."""
    now = await store.reading()
    live = [node for node in await store.run(nodes.listed) if now - node.seen_at < RECENT]
    found = await store.run(gauges.read, now, 10.0)
    return list(_stands(found, live, await store.run(queues.stopped))) + await _inside(store, chosen)


def _stands(found: gauges.Gauges, live: list[nodes.Node], stopped: bool) -> Iterator[Check]:
    work = found.schedules["active"] + found.jobs["pending"]
    if work and not live:
        yield warn("nodes", "NO_LIVE_NODE", f"{work:,} schedules and jobs, and no node runs",
                   "Start one: timebell run")  # fmt: skip
    if len(versions := sorted({node.version for node in live})) > 1:
        yield warn("nodes", "VERSIONS_DIFFER", f"nodes are of {', '.join(versions)}",
                   "Finish the deploy: timebell node list says which are which.")  # fmt: skip
    if stopped:
        yield warn("firing", "ALL_PAUSED", "all firing is paused", "When it may go on: await app.resume_all()")
    if found.unheard:
        yield warn("jobs", "JOBS_UNHEARD", f"{many(found.unheard, 'due job')} that no live node listens to",
                   "Start a node with a handler for the topic: timebell job list says which.")  # fmt: skip
    if found.schedules["fault"]:
        yield warn("schedules", "SCHEDULES_SET_ASIDE", f"{many(found.schedules['fault'], 'schedule')} cannot be fired",
                   "timebell schedule list says why; edit them.")  # fmt: skip


async def _inside(store: Store, chosen: Settings) -> list[Check]:
    disabled, names = await store.run(targets.disabled, 3)
    waits = await store.run(_held_back)
    checks = []
    if disabled:
        checks.append(warn("targets", "TARGETS_DISABLED", f"{many(disabled, 'target')}: {', '.join(names)}",
                           "Mend the receiver, then: timebell target enable NAME"))  # fmt: skip
    if waits:
        checks.append(warn("backlog", "BACKLOG_WAITS", f"{many(waits, 'job')}",
                           "timebell recover shows them; --release or --discard them."))  # fmt: skip
    if closed := await store.run(_closed, chosen.secret_key):
        checks.append(fail("secrets", "SECRETS_UNREADABLE", f"this node has no key to those of {', '.join(closed)}",
                           "Give it the TIMEBELL_SECRET_KEY that the other nodes have."))  # fmt: skip
    if find_spec("cryptography") is None and await store.run(_secrets):
        checks.append(fail("extra", "EXTRA_MISSING", "there are secrets, and the extra secrets is not installed",
                           'Run: pip install "timebell[secrets]"'))  # fmt: skip
    return checks


def _held_back(tx: Transaction) -> int:
    count = "SELECT count(*) FROM timebell_jobs WHERE hold IS NOT NULL AND hold = 'recover'"
    return int(tx.execute(text(count)).scalar_one())


def _secrets(tx: Transaction) -> bool:
    return tx.execute(select(data_keys.c.tenant_id).limit(1)).first() is not None


def _closed(tx: Transaction, secret_key: str | None) -> list[str]:
    """The first few tenants whose secrets this secret key does not open."""
    try:
        known = keyring(secret_key).known
    except Refused:
        known = []
    strange = select(data_keys.c.tenant_id).where(data_keys.c.wrapped_by.not_in(known)).order_by("tenant_id")
    return list(tx.execute(strange.limit(3)).scalars())
