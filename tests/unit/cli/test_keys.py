"""`timebell key` and `timebell tenant` work on the database, without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from timebell.api.tenants import render_limits
from timebell.clock import system_now
from timebell.store.audit import audit_log
from timebell.store.open import open_store
from timebell.store.tenancy import api_keys
from timebell.tenancy.keys import digest
from timebell.tenancy.limits import Limits

from .conftest import Cli

SECRET = "a secret of the tests, long enough"


@pytest.fixture
def cli_on_store(cli: Cli, store_url: str, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `timebell ...` on a fresh database."""
    monkeypatch.setenv("TIMEBELL_DATABASE_URL", store_url)
    monkeypatch.setenv("TIMEBELL_SECRET_KEY", SECRET)
    return cli


def _run_in_store(url: str, operation: Any, *args: Any) -> Any:
    async def main() -> Any:
        store = open_store(url, system_now)
        await store.open()
        try:
            return await store.run(operation, *args)
        finally:
            await store.close()

    return asyncio.run(main())


def test_first_admin_key_is_created_here_and_none_exists_by_default(cli_on_store: Cli, store_url: str) -> None:
    assert cli_on_store("key", "list", "-o", "json").out == "[]\n"
    done = cli_on_store("key", "create", "ops", "--role", "admin")
    assert (done.code, "shown only once" in done.err) == (0, True)
    text = done.out.strip()
    assert text.startswith("tb_live_")
    key, stored_digest = _run_in_store(store_url, api_keys.find_key, text.split("_")[2])
    assert stored_digest == digest(SECRET, text)
    assert (key.role, key.tenant_id, key.name, key.created_by) == ("admin", "default", "ops", "command line")
    (listed,) = json.loads(cli_on_store("key", "list", "-o", "json").out)
    assert (listed["id"], listed["state"]) == (key.id, "usable")
    assert "key" not in listed
    assert cli_on_store("key", "revoke", key.id).code == 0
    assert json.loads(cli_on_store("key", "list", "-o", "json").out)[0]["state"] == "revoked"
    records = list(_run_in_store(store_url, audit_log.list_records, "default", 50, None))
    revoked, created = records
    assert (created.action, created.before, revoked.action) == ("key.create", None, "key.revoke")
    assert created.after is not None
    assert created.after.items() >= {"id": key.id, "name": "ops", "role": "admin", "tenantId": "default"}.items()
    assert (list(revoked.before or {}), list(revoked.after or {})) == (["revokedAt"], ["revokedAt"])
    assert text not in str(records)
    assert cli_on_store("key", "revoke", "nothing").code == 3


def test_missing_secret_key_is_refused_with_a_command_to_create_one(
    cli_on_store: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIMEBELL_SECRET_KEY")
    done = cli_on_store("key", "create", "ops")
    assert (done.code, done.out) == (4, "")
    assert "SECRET_KEY_MISSING" in done.err
    assert "secrets.token_hex(32)" in done.err


def test_key_with_scope_network_and_expiry(cli_on_store: Cli) -> None:
    done = cli_on_store("key", "create", "ci", "--tenant", "acme", "--scope", "jobs", "--network", "192.0.2.0/24",
               "--expires-in", "90d", "-o", "json")  # fmt: skip
    created = json.loads(done.out)
    assert (created["tenantId"], created["scopes"], created["networks"]) == ("acme", ["jobs"], ["192.0.2.0/24"])
    assert created["expiresAt"] > created["createdAt"]
    assert json.loads(cli_on_store("key", "create", "p", "--role", "platform", "-o", "json").out)["tenantId"] is None
    assert len(json.loads(cli_on_store("key", "list", "--tenant", "acme", "-o", "json").out)) == 1
    for wrong in (("--role", "god"), ("--scope", "all"), ("--network", "x"), ("--expires-in", "soon")):
        assert cli_on_store("key", "create", "x", *wrong).code == 2, wrong


def test_tenant_quotas_are_set_listed_and_audited(cli_on_store: Cli, store_url: str) -> None:
    assert cli_on_store("tenant", "quota", "acme", "--schedules", "5").code == 3
    assert cli_on_store("tenant", "create", "acme").code == 0
    created = json.loads(
        cli_on_store("tenant", "quota", "acme", "--schedules", "5", "--pending-jobs", "9", "-o", "json").out
    )
    assert (created["schedules"], created["pendingJobs"]) == (5, 9)
    created = json.loads(cli_on_store("tenant", "quota", "acme", "--schedules", "0", "-o", "json").out)
    assert (created["schedules"], created["pendingJobs"]) == (None, 9)
    monthly = ("--jobs-per-month", "500", "--timezone", "Asia/Seoul")
    created = json.loads(cli_on_store("tenant", "quota", "acme", *monthly, "-o", "json").out)
    assert (created["jobsPerMonth"], created["timezone"]) == (500, "Asia/Seoul")
    assert cli_on_store("tenant", "quota", "acme", "--timezone", "Mars/Base").code == 2
    assert "Asia/Seoul" in cli_on_store("tenant", "list").out
    newest, *_, oldest = _run_in_store(store_url, audit_log.list_records, "default", 50, None)
    no_limits = render_limits(Limits())
    assert (newest.action, newest.before, newest.after) == (
        "tenant.update", {"limits": {**no_limits, "pendingJobs": 9}, "timezone": None},
        {"limits": {**no_limits, "pendingJobs": 9, "jobsPerMonth": 500}, "timezone": "Asia/Seoul"},
    )  # fmt: skip
    assert (oldest.action, oldest.before) == ("tenant.create", None)
