"""`timebell user`: accounts of the dashboard."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest

from timebell import Timebell
from timebell.cli.main import main
from timebell.features import FEATURES
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.open import upgrade
from timebell.store.tenancy import users
from timebell.tenancy import passwords
from timebell.tenancy.users import Session, session_id


@pytest.fixture(autouse=True)
def _database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/users.db"
    asyncio.run(upgrade(url, FEATURES))
    monkeypatch.setenv("TIMEBELL_DATABASE_URL", url)
    monkeypatch.setattr(passwords, "SCRYPT_N", 16)


def run_user_command(monkeypatch: pytest.MonkeyPatch, *words: str, typed: str = "") -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    monkeypatch.setattr("sys.argv", ["timebell", "user", *words])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_users_are_created_listed_and_disabled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_user_command(monkeypatch, "create", "dana", "--role", "operator", typed="correct horse battery\n") == 0
    assert run_user_command(monkeypatch, "create", "root", "--role", "platform", typed="correct horse battery\n") == 0
    assert "dana can sign in to the dashboard as operator of default" in capsys.readouterr().err
    assert run_user_command(monkeypatch, "create", "dana", typed="correct horse battery\n") == 5
    assert "USER_EXISTS" in capsys.readouterr().err
    assert run_user_command(monkeypatch, "create", "short", typed="short\n") == 2
    assert "INVALID_PASSWORD" in capsys.readouterr().err
    assert run_user_command(monkeypatch, "create", "king", "--role", "king", typed="correct horse battery\n") == 2
    capsys.readouterr()
    assert run_user_command(monkeypatch, "password", "dana", typed="another horse battery\n") == 0
    assert run_user_command(monkeypatch, "disable", "dana") == 0
    assert run_user_command(monkeypatch, "disable", "missing") == 3
    assert "USER_NOT_FOUND" in capsys.readouterr().err
    assert run_user_command(monkeypatch, "list", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["tenantId"], one["role"], one["state"]) for one in found] == [
        ("dana", "default", "operator", "disabled"), ("root", None, "platform", "usable"),
    ]  # fmt: skip
    assert "battery" not in repr(found)


def test_users_are_enabled_changed_and_deleted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_user_command(monkeypatch, "create", "dana", typed="correct horse battery\n")
    run_user_command(monkeypatch, "disable", "dana")
    assert run_user_command(monkeypatch, "enable", "dana") == 0
    assert run_user_command(monkeypatch, "role", "dana", "editor") == 0
    assert run_user_command(monkeypatch, "role", "dana", "king") == 2
    assert run_user_command(monkeypatch, "role", "dana", "platform") == 4
    capsys.readouterr()
    assert run_user_command(monkeypatch, "list", "-o", "json") == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["role"], found["state"]) == ("editor", "usable")
    assert run_user_command(monkeypatch, "delete", "dana", "--yes") == 0
    assert run_user_command(monkeypatch, "delete", "dana", "--yes") == 3

    async def read_records() -> list[AuditRecord]:
        app = Timebell()
        await app.open()
        records = list(await app.store.run(audit_log.list_records, "default", 50, None))
        await app.close()
        return records

    deleted, changed, *_ = asyncio.run(read_records())
    assert (changed.action, changed.before, changed.after) == ("user.update", {"role": "viewer"}, {"role": "editor"})
    assert (deleted.action, (deleted.before or {})["role"], deleted.after) == ("user.delete", "editor", None)


def test_sessions_are_listed_and_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_user_command(monkeypatch, "create", "dana", typed="correct horse battery\n")

    async def sign_in() -> None:
        app = Timebell()
        await app.open()
        user = await app.store.run(users.find_user, "dana")
        assert user is not None
        now = app.clock.now()
        session = Session(id=session_id("cookie"), user_id=user.id, key_id=None, created_at=now, seen_at=now)
        await app.store.run(users.create_session, session, None)
        await app.close()

    asyncio.run(sign_in())
    for count in (1, 0):
        capsys.readouterr()
        assert run_user_command(monkeypatch, "sessions", "dana", "-o", "json") == 0
        assert len(json.loads(capsys.readouterr().out)) == count
        assert run_user_command(monkeypatch, "sessions", "dana", "--end") == 0
    assert run_user_command(monkeypatch, "sessions", "missing") == 3
