"""`timebell key` and `timebell tenant`: the first admin of an installation, without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from timebell.clock import wall
from timebell.store.audit import audit_log
from timebell.store.open import open_store
from timebell.store.tenancy import api_keys
from timebell.tenancy.keys import digest

from .conftest import Cli

SECRET = "of this test, and long enough for it"


@pytest.fixture
def ask(cli: Cli, store_url: str, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run `timebell ...` on a database of its own."""
    monkeypatch.setenv("TIMEBELL_DATABASE_URL", store_url)
    monkeypatch.setenv("TIMEBELL_SECRET_KEY", SECRET)
    return cli


def _stored(url: str, operation: Any, *args: Any) -> Any:
    async def look() -> Any:
        store = open_store(url, wall)
        await store.open()
        try:
            return await store.run(operation, *args)
        finally:
            await store.close()

    return asyncio.run(look())


def test_s09_the_first_admin_is_made_here_and_there_is_no_default(ask: Cli, store_url: str) -> None:
    assert ask("key", "list", "-o", "json").out == "[]\n"
    done = ask("key", "create", "ops", "--role", "admin")
    assert (done.code, "not shown again" in done.err) == (0, True)
    text = done.out.strip()
    assert text.startswith("tb_live_")
    key, kept = _stored(store_url, api_keys.find, text.split("_")[2])
    assert kept == digest(SECRET, text)
    assert (key.role, key.tenant_id, key.name, key.created_by) == ("admin", "default", "ops", "command line")
    (listed,) = json.loads(ask("key", "list", "-o", "json").out)
    assert (listed["id"], listed["state"]) == (key.id, "usable")
    assert "key" not in listed
    assert ask("key", "revoke", key.id).code == 0
    assert json.loads(ask("key", "list", "-o", "json").out)[0]["state"] == "revoked"
    records = list(_stored(store_url, audit_log.page, "default", 50, None))
    assert [one.action for one in records] == ["key.revoke", "key.create"]
    assert ask("key", "revoke", "nothing").code == 3


def test_without_a_secret_key_it_says_how_to_make_one(ask: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIMEBELL_SECRET_KEY")
    done = ask("key", "create", "ops")
    assert (done.code, done.out) == (4, "")
    assert "SECRET_KEY_MISSING" in done.err
    assert "secrets.token_hex(32)" in done.err


def test_a_key_with_limits(ask: Cli) -> None:
    done = ask("key", "create", "ci", "--tenant", "acme", "--scope", "jobs", "--network", "192.0.2.0/24",
               "--expires-in", "90d", "-o", "json")  # fmt: skip
    made = json.loads(done.out)
    assert (made["tenantId"], made["scopes"], made["networks"]) == ("acme", ["jobs"], ["192.0.2.0/24"])
    assert made["expiresAt"] > made["createdAt"]
    assert json.loads(ask("key", "create", "p", "--role", "platform", "-o", "json").out)["tenantId"] is None
    assert len(json.loads(ask("key", "list", "--tenant", "acme", "-o", "json").out)) == 1
    for wrong in (("--role", "god"), ("--scope", "all"), ("--network", "x"), ("--expires-in", "soon")):
        assert ask("key", "create", "x", *wrong).code == 2, wrong


def test_tenants_and_their_quotas(ask: Cli) -> None:
    assert ask("tenant", "quota", "acme", "--schedules", "5").code == 3
    assert ask("tenant", "create", "acme").code == 0
    made = json.loads(ask("tenant", "quota", "acme", "--schedules", "5", "--pending-jobs", "9", "-o", "json").out)
    assert (made["schedules"], made["pendingJobs"]) == (5, 9)
    made = json.loads(ask("tenant", "quota", "acme", "--schedules", "0", "-o", "json").out)
    assert (made["schedules"], made["pendingJobs"]) == (None, 9)
    zone = ("--jobs-per-month", "500", "--timezone", "Asia/Seoul")
    made = json.loads(ask("tenant", "quota", "acme", *zone, "-o", "json").out)
    assert (made["jobsPerMonth"], made["timezone"]) == (500, "Asia/Seoul")
    assert ask("tenant", "quota", "acme", "--timezone", "Mars/Base").code == 2
    assert "Asia/Seoul" in ask("tenant", "list").out
