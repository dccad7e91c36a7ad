"""`timebell doctor`: each finding is provoked, and is reported with its code, reason and fix."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import resource
import shutil
import socket
import sqlite3
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text

from tests.docs.pages import DOCS, code_words, rows
from tests.identity_provider import OWN_URL, identity_provider
from tests.servers import Postgres, free_port
from timebell import Cron, Timebell
from timebell.cli.doctor import database, galera, ports, report, settings
from timebell.cli.doctor.database import ServerFacts
from timebell.cli.doctor.findings import REASONS
from timebell.clock import system_now
from timebell.features import FEATURES
from timebell.store.dialects.postgres.store import PostgresStore
from timebell.store.open import open_store, upgrade

from .conftest import Cli, Start
from .process import until

HEALTHY_SERVER = ServerFacts(
    version=160_004, encoding="UTF8", standby=False, read_only=False, superuser=False, remote=False, encrypted=False,
    free_connections=50, autovacuum=True, statement_timeout=0, idle_timeout=10_000,
)  # fmt: skip
PROVOKED_CODES: set[str] = set()


def findings(cli: Cli, *args: object) -> dict[str, dict[str, Any]]:
    """Return the findings by code; each has a detail, a reason and a fix."""
    done = cli("doctor", *args, "-o", "json")
    found = {each["code"]: each for each in json.loads(done.out) if each["verdict"] != "ok"}
    assert all(each["detail"] and each["why"] == REASONS[code] and each["fix"] for code, each in found.items())
    assert done.code == int(any(each["verdict"] == "fail" for each in found.values()))
    PROVOKED_CODES.update(found)
    return found


@pytest.fixture(scope="module")
def file_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A migrated file to which no test of this module writes."""
    url = f"sqlite:///{tmp_path_factory.mktemp('doctor')}/timebell.db"
    asyncio.run(upgrade(url, FEATURES))
    return url


Provoke = Callable[[pytest.MonkeyPatch, Path], object]


def without_package(package: str) -> Provoke:
    real = importlib.util.find_spec

    def provoke(patch: pytest.MonkeyPatch, _: Path) -> None:
        patch.setenv("TIMEBELL_ALERT_URLS", "json://localhost")
        patch.setattr(settings, "find_spec", lambda name: None if name == package else real(name))

    return provoke


def with_settings(**values: str) -> Provoke:
    def provoke(patch: pytest.MonkeyPatch, _: Path) -> None:
        for name, value in values.items():
            patch.setenv(f"TIMEBELL_{name.upper()}", value)

    return provoke


def readable_config_file(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "timebell.toml").write_text('secret_key = "hunter2"\n')
    (folder / "timebell.toml").chmod(0o644)


def exposed_metrics(patch: pytest.MonkeyPatch, folder: Path) -> None:
    with_settings(metrics_host="0.0.0.0", metrics_port=str(free_port()))(patch, folder)


def mounted_as(kind: str) -> Provoke:
    def provoke(patch: pytest.MonkeyPatch, folder: Path) -> None:
        (folder / "mounts").write_text(f"/dev/sda / {kind} rw 0 0\nx {folder}/elsewhere proc rw 0 0\n")
        patch.setattr(settings, "MOUNTS_FILE", folder / "mounts")

    return provoke


def full_disk(patch: pytest.MonkeyPatch, _: Path) -> None:
    usage = namedtuple("usage", "total used free")
    patch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - 1000, 1000))


def low_file_limit(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(resource, "getrlimit", lambda _: (256, 256))


def old_sqlite(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))


def lax_durability(patch: pytest.MonkeyPatch, _: Path) -> None:
    lax_settings = {"journal_mode": "wal", "synchronous": "0"}
    patch.setattr("timebell.cli.doctor.report._durability_settings", lambda tx: lax_settings)


def skewed_clock(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(
        "timebell.cli.doctor.report.open_store",
        lambda url, _: open_store(url, lambda: system_now() + timedelta(seconds=3)),
    )


@pytest.mark.parametrize(
    ("code", "provoke"),
    [("UNKNOWN_TIMEZONE", with_settings(default_timezone="Europe/Pariss")),
     ("APP_NOT_LOADABLE", with_settings(app="nowhere.py")),
     ("EXTRA_MISSING", without_package("apprise")),
     ("SECRET_KEY_MISSING", with_settings(http_host="0.0.0.0")),
     ("HTTP_WITHOUT_TLS", with_settings(http_host="0.0.0.0", secret_key="x" * 32)),
     ("METRICS_EXPOSED", exposed_metrics),
     ("WEBHOOKS_TO_PRIVATE_ADDRESSES", with_settings(webhook_allow_private="true")),
     ("SECRETS_FILE_READABLE", readable_config_file),
     ("RETENTION_TOO_SHORT", with_settings(retention_done="1h")),
     ("LEASE_TOO_SHORT", with_settings(scheduler_lease="10s")),
     ("OPEN_FILES_LIMIT_LOW", low_file_limit),
     ("SQLITE_ON_NETWORK", mounted_as("nfs4")),
     ("SQLITE_NOT_PERSISTENT", mounted_as("tmpfs")),
     ("DISK_ALMOST_FULL", full_disk),
     ("DATABASE_TOO_OLD", old_sqlite),
     ("DATABASE_NOT_DURABLE", lax_durability),
     ("CLOCK_SKEWED", skewed_clock)],
    ids=lambda given: given if isinstance(given, str) else "",
)  # fmt: skip
def test_problems_of_settings_and_machine_are_found(
    code: str, provoke: Provoke, file_url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIMEBELL_HTTP_PORT", str(free_port()))
    mounted_as("ext4")(monkeypatch, Path(file_url.removeprefix("sqlite:///")).parent)
    provoke(monkeypatch, tmp_path)
    found = set(findings(cli, "--database", file_url))
    assert code in found
    assert found - {code} <= {"OPEN_FILES_LIMIT_LOW", "DISK_ALMOST_FULL", "HTTP_WITHOUT_TLS"}


def test_problems_of_the_identity_provider_are_found(file_url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def sign_on() -> list[tuple[str, str]]:
        checks = json.loads(cli("doctor", "--database", file_url, "-o", "json").out)
        return [(each["code"], each["detail"]) for each in checks if each["name"] == "sign-on"]

    def found() -> set[str]:
        return {code for code in findings(cli, "--database", file_url) if "SIGN_ON" in code or "PROVIDER" in code
                or "REDIRECT" in code}  # fmt: skip

    monkeypatch.setenv("TIMEBELL_HTTP_PORT", str(free_port()))
    assert sign_on() == []
    with identity_provider(monkeypatch) as provider:
        redirect_uri = f"{OWN_URL}/ui/sign-in/callback"
        assert sign_on() == [("", f"{provider.issuer} answers; register {redirect_uri} there as redirect URI")]
        monkeypatch.setenv("TIMEBELL_URL", "http://timebell.example.com")
        assert found() == {"REDIRECT_URI_WITHOUT_TLS"}
        monkeypatch.setenv("TIMEBELL_URL", OWN_URL)
        for offset in (-40, 40):
            provider.clock_offset_seconds = offset
            assert found() == {"IDENTITY_PROVIDER_CLOCK_DIFFERS"}
        provider.clock_offset_seconds = 0
        provider.keys = {}
        assert found() == {"IDENTITY_PROVIDER_UNAVAILABLE"}
        monkeypatch.setenv("TIMEBELL_OIDC_ISSUER", provider.issuer + "/")
        assert f"its issuer is '{provider.issuer}'" in sign_on()[0][1]
        monkeypatch.setenv("TIMEBELL_OIDC_ISSUER", f"http://127.0.0.1:{free_port()}")
        assert found() == {"IDENTITY_PROVIDER_UNAVAILABLE"}
        monkeypatch.setenv("TIMEBELL_OIDC_ROLE_MAP", "admins=root")
        assert found() == {"SIGN_ON_MISCONFIGURED"}


def test_missing_unreachable_or_empty_database_is_found(cli: Cli, tmp_path: Path) -> None:
    assert "DATABASE_MISSING" in findings(cli)
    assert "DATABASE_UNREACHABLE" in findings(cli, "--database", "postgresql://me:hunter2@127.0.0.1:1/db")
    (tmp_path / "empty.db").touch()
    assert "DATABASE_NOT_UPGRADED" in findings(cli, "--database", f"sqlite:///{tmp_path}/empty.db")


@pytest.mark.parametrize(("setting", "name"), [("TIMEBELL_HTTP_PORT", "port"), ("TIMEBELL_METRICS_PORT", "metrics")])
def test_port_in_use_is_found(
    setting: str, name: str, file_url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("TIMEBELL_HTTP_PORT", str(free_port()))
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts no connection, so no probe is answered
        monkeypatch.setattr(ports, "PROBE_TIMEOUT_SECONDS", 0.1)
        monkeypatch.setenv(setting, str(listening.getsockname()[1]))
        assert findings(cli, "--database", file_url)["PORT_IN_USE"]["name"] == name


def test_http_and_metrics_on_the_same_port_are_found(
    file_url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    port = str(free_port())
    with_settings(http_port=port, metrics_port=port)(monkeypatch, Path())
    monkeypatch.setattr(ports, "PROBE_TIMEOUT_SECONDS", 0.1)
    assert findings(cli, "--database", file_url)["PORT_IN_USE"]["name"] == "metrics"


def test_a_node_that_answers_here_with_another_database_is_found(
    file_url: str, cli: Cli, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, metrics_port = str(free_port()), str(free_port())
    with_settings(http_port=port, metrics_port=metrics_port)(monkeypatch, Path())
    monkeypatch.setattr(ports, "PROBE_TIMEOUT_SECONDS", 60.0)
    start("run", "--port", port, TIMEBELL_METRICS_PORT=metrics_port).wait_for("Ready in", err=True)
    found = until(
        lambda: findings(cli, "--database", file_url).get("OTHER_DATABASE"), lambda: "a node that is ready"
    )  # fmt: skip
    assert found["detail"] == f"the node that answers at 127.0.0.1:{port} uses another database"
    checks = json.loads(cli("doctor", "-o", "json").out)
    assert "OTHER_DATABASE" not in {check["code"] for check in checks}
    answering = {check["name"]: check["detail"] for check in checks if check["detail"].startswith("Timebell answers")}
    assert answering == {
        "port": f"Timebell answers at 127.0.0.1:{port}", "metrics": f"Timebell answers at 127.0.0.1:{metrics_port}"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "problem"),
    [("DATABASE_TOO_OLD", {"version": 120_018}),
     ("DATABASE_READ_ONLY", {"standby": True}),
     ("DATABASE_NOT_UTF8", {"encoding": "SQL_ASCII"}),
     ("ROLE_TOO_STRONG", {"superuser": True}),
     ("CONNECTION_UNENCRYPTED", {"remote": True}),
     ("CONNECTIONS_LOW", {"free_connections": 3}),
     ("AUTOVACUUM_OFF", {"autovacuum": False}),
     ("STATEMENT_TIMEOUT_TOO_SHORT", {"statement_timeout": 3000}),
     ("POOLER_WITHOUT_IDLE_LIMIT", {"pooled": True, "idle_timeout": 0})],
)  # fmt: skip
def test_server_configuration_problems_are_found(code: str, problem: dict[str, Any]) -> None:
    assert list(database.check_server(HEALTHY_SERVER)) == []
    (found,) = database.check_server(replace(HEALTHY_SERVER, **problem))
    assert (found.code, found.why) == (code, REASONS[code])
    PROVOKED_CODES.add(code)


def test_several_writers_of_a_galera_cluster_are_found() -> None:
    assert galera.check_writers(3, ["db1:3306"]).verdict == "ok"
    found = galera.check_writers(3, ["db1:3306", "db2:3306"])
    assert (found.code, found.detail) == ("GALERA_SEVERAL_WRITERS", "3 members; sessions on db1:3306, db2:3306")
    PROVOKED_CODES.add(found.code)


def test_configuration_problems_of_a_real_server_are_found(
    postgres: Postgres, postgres_url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("timebell.cli.doctor.report.NOTIFY_TIMEOUT_SECONDS", 60.0)
    name = postgres_url.rpartition("/")[2]

    async def alter(*statements: str) -> None:
        connection = await asyncpg.connect(postgres.url)
        for statement in statements:
            await connection.execute(statement)
        await connection.close()

    baseline = set(findings(cli, "--database", postgres_url))
    assert "DATABASE_READ_ONLY" not in baseline
    asyncio.run(alter(f"ALTER DATABASE \"{name}\" SET statement_timeout = '2s'"))
    assert set(findings(cli, "--database", postgres_url)) - baseline == {"STATEMENT_TIMEOUT_TOO_SHORT"}
    asyncio.run(alter(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'))
    found = findings(cli, "--database", postgres_url)
    assert found["DATABASE_READ_ONLY"]["verdict"] == "fail"

    asyncio.run(alter("CREATE DATABASE ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"))
    url = postgres.named("ascii")
    asyncio.run(upgrade(url, FEATURES))
    assert "DATABASE_NOT_UTF8" in findings(cli, "--database", url)
    postgres.drop_database(url)


def test_undelivered_notify_is_found(postgres_url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostgresStore, "notify", lambda self, tx, subjects: None)
    monkeypatch.setattr("timebell.cli.doctor.report.NOTIFY_TIMEOUT_SECONDS", 0.05)
    assert "NOTIFY_NOT_DELIVERED" in findings(cli, "--database", postgres_url)


async def _provoke_findings(url: str) -> None:
    app = Timebell(url, timezone="UTC")
    await app.schedule_repeat("unhandled.topic", Cron("0 9 * * *"), name="daily")
    held = [await app.schedule_at(topic) for topic in ("unhandled.topic", "other")]
    await app.pause_all("a bad release")
    await app.close()
    store = open_store(url, system_now)
    await store.open()
    at = store.dialect.to_db(system_now())
    node = (
        "INSERT INTO timebell_nodes (id, name, version, tzdata, routes, heartbeat, started_at, seen_at, secret_keys)"
        " VALUES (:id, :name, :version, :tzdata, :routes, 1, :at, :at, :name)"
    )
    routes = '{"exact": [], "prefixes": [], "allTopics": false}'
    for statement, values in (
        ("UPDATE timebell_schedules SET error = 'broken'", {}),
        ("UPDATE timebell_jobs SET hold = 'unhandled' WHERE id = :id", {"id": held[0].id}),
        ("UPDATE timebell_jobs SET hold = 'backlog' WHERE id = :id", {"id": held[1].id}),
        ("INSERT INTO timebell_data_keys (tenant_id, wrapped_by, wrapped, created_at, updated_at)"
         " VALUES ('default', 'strange', 'x', :at, :at)", {"at": at}),
        ("INSERT INTO timebell_rewinds (id, node, detected_at, lost_from, lost_until, jobs, results, cancels,"
         " schedules, examples, reapplied) VALUES (:id, 'n1', :at, :at, :at, 3, 0, 0, 0, '{}', '{}')",
         {"id": "r" * 36, "at": at}),
        ("INSERT INTO timebell_targets (tenant_id, name, kind, options, revision, created_at, updated_at, disabled_at)"
         " VALUES ('default', 'crm', 'http', '{}', 1, :at, :at, :at)", {"at": at}),
        *((node, {"id": name * 32, "name": name, "version": version, "tzdata": "2020a", "routes": routes, "at": at})
          for name, version in (("a", "1.0"), ("b", "1.1"))),
    ):  # fmt: skip
        await store.run(lambda tx, s=statement, v=values: tx.execute(text(s).bindparams(**v)))
    await store.close()


def test_stalled_work_is_found(sqlite_url: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def one() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        await app.schedule_at("mail.send")
        await app.close()

    asyncio.run(one())
    assert "NO_LIVE_NODE" in findings(cli, "--database", sqlite_url)
    asyncio.run(_provoke_findings(sqlite_url))
    found = findings(cli, "--database", sqlite_url)
    assert set(found) >= {
        "ALL_PAUSED", "JOBS_UNHANDLED", "BACKLOG_HELD", "SCHEDULES_ERRORED", "SECRETS_UNREADABLE", "TARGETS_DISABLED",
        "VERSIONS_DIFFER", "ZONE_DATA_DIFFERS", "HISTORY_REWOUND", "SECRET_KEYS_DIFFER",
    }  # fmt: skip
    assert "crm" in found["TARGETS_DISABLED"]["detail"]
    assert "lost 3 created jobs" in found["HISTORY_REWOUND"]["detail"]
    assert "EXTRA_MISSING" not in found
    monkeypatch.setattr(database, "find_spec", lambda _: None)
    assert "timebell[secrets]" in findings(cli, "--database", sqlite_url)["EXTRA_MISSING"]["fix"]


def test_nodes_are_listed_with_the_schedules_that_they_define(sqlite_url: str, cli: Cli) -> None:
    async def run() -> str:
        app = Timebell(sqlite_url, timezone="UTC")
        for number in range(7):
            app.schedule(f"digest-{number}", cron="0 9 * * *")(lambda event: None)
        async with app.running() as service:
            await service.wait_until_idle()
            checks = [check async for check in report._check_database(app.settings, app.features)]
            assert service.node.deployment is not None
            deployment = service.node.deployment.id
        await app.close()
        (engine,) = [check for check in checks if check.name == "engine"]
        return engine.detail.replace(deployment, "X")

    listed = "digest-0, digest-1, digest-2, digest-3, digest-4 and 2 more"
    assert f"deployment X defines {listed}" in asyncio.run(run())


def test_every_finding_is_provoked_and_documented() -> None:
    assert set(REASONS) <= PROVOKED_CODES, "run all tests of this file together"
    explained = {code_words(row[0])[0]: row[1] for row in rows(DOCS / "reference" / "doctor.md")}
    assert explained == REASONS
