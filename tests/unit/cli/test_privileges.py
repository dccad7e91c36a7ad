"""`timebell db roles`: the printed privileges are sufficient for each kind of process, and no wider."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from tests.servers import Postgres
from timebell import Arrived, Every, Timebell
from timebell.cli.privileges import grant_statements
from timebell.clock import system_now
from timebell.features import FEATURES
from timebell.store.jobs import retention

from .conftest import Cli

PREFIX = f"tb{os.getpid()}"


def as_role(url: str, role: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{PREFIX}_{role}@{parts.netloc.rpartition('@')[2]}"))


async def _execute(url: str, *sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for each in sql:
            await connection.execute(each)
    finally:
        await connection.close()


@pytest.fixture
def granted(postgres: Postgres, postgres_url: str, cli: Cli) -> Iterator[str]:
    printed = cli("db", "roles", "--prefix", PREFIX)
    assert printed.code == 0
    asyncio.run(_execute(postgres_url, printed.out, printed.out))  # safe to repeat
    yield postgres_url
    owned = [f"DROP OWNED BY {PREFIX}_{role}" for role in ("node", "client", "reader")]
    asyncio.run(_execute(postgres_url, f"REASSIGN OWNED BY {PREFIX}_node TO CURRENT_USER", *owned,
                         *(f"DROP ROLE {PREFIX}_{role}" for role in ("node", "client", "reader"))))  # fmt: skip


def test_node_without_the_privilege_to_end_sessions_warns_once_and_continues(
    granted: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        await _execute(granted, "REVOKE EXECUTE ON FUNCTION pg_terminate_backend FROM PUBLIC")
        node = Timebell(as_role(granted, "node"), timezone="UTC")
        async with node.running(heartbeat=0.05) as service, asyncio.timeout(60):
            while service.heartbeat.node_record.heartbeat < 5 or service.leader.fence is None:
                await asyncio.sleep(0.02)
        await node.close()

    asyncio.run(work())
    assert [one.levelname for one in caplog.records if "pg_terminate_backend" in one.getMessage()] == ["WARNING"]


def test_each_role_has_the_privileges_for_its_work(granted: str, cli: Cli) -> None:
    ran = asyncio.Event()

    async def work() -> None:
        node = Timebell(as_role(granted, "node"), timezone="UTC")

        @node.on("mail.*")
        async def send(event: Arrived) -> None:
            ran.set()

        client = Timebell(as_role(granted, "client"), timezone="UTC")
        async with node.running(heartbeat=0.3):
            now, later = (
                await client.schedule_at("mail.now"),
                await client.schedule_at("mail.x", system_now() + timedelta(1)),
            )
            await client.schedule_repeat("mail.often", Every("PT1S"), name="often", replace=True)
            assert (await client.cancel(later.id)).outcome == "prevented"
            async with asyncio.timeout(60):
                await ran.wait()
                while (await client.get(now.id)).state != "completed":
                    await asyncio.sleep(0.05)
            await client.schedules.pause((await client.schedules.get(name="often")).id)
        await node.store.open()
        await node.store.run(retention.create_partitions, system_now() + timedelta(weeks=9))  # nodes create partitions
        await node.close()
        await client.close()

    asyncio.run(work())
    reader = ("--database", as_role(granted, "reader"))
    end = (system_now() - timedelta(minutes=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    start = (system_now() - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert cli("audit", "--from", start, "--to", end, *reader).code == 0
    assert cli("why", "often", end, *reader).code == 0


REFUSED = [
    ("node", "UPDATE timebell_audit_log SET actor = 'other'"),
    ("node", "DELETE FROM timebell_audit_log"),
    ("node", "DROP TABLE timebell_jobs"),
    ("node", "ALTER TABLE timebell_jobs ADD x int"),
    ("client", "SELECT * FROM timebell_keys"),
    ("client", "SELECT * FROM timebell_secrets"),
    ("client", "SELECT * FROM timebell_users"),
    ("client", "UPDATE timebell_connections SET token_url = 'http://elsewhere'"),
    ("client", "INSERT INTO timebell_audit_log DEFAULT VALUES"),
    ("client", "UPDATE timebell_leases SET fence = fence + 1"),
    ("client", "DELETE FROM timebell_nodes"),
    ("client", "CREATE TABLE x (y int)"),
    ("reader", "SELECT * FROM timebell_data_keys"),
    ("reader", "SELECT sealed FROM timebell_connections"),
    ("reader", "SET default_transaction_read_only = off; DELETE FROM timebell_jobs"),
    ("reader", "SET default_transaction_read_only = off; UPDATE timebell_schedules SET enabled = false"),
]


def test_statements_beyond_a_role_are_refused(granted: str) -> None:
    for role, sql in REFUSED:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            asyncio.run(_execute(as_role(granted, role), *sql.split(";")))


def test_invalid_prefix_is_refused(cli: Cli) -> None:
    done = cli("db", "roles", "--prefix", "x; DROP TABLE y")
    assert (done.code, "INVALID_NAME" in done.err) == (2, True)
    assert list(grant_statements("timebell", FEATURES, "public"))[-1] == "COMMIT;"


def test_a_role_that_may_not_change_tables_is_refused(granted: str, cli: Cli) -> None:
    refused = cli("db", "upgrade", "--database", as_role(granted, "node"))
    assert refused.code == 4
    assert "DATABASE_PRIVILEGE_MISSING" in refused.err
    assert "Use the URL of the role that owns Timebell's tables." in refused.err
