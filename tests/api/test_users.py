"""Users over HTTP: roles, tenants, passwords and sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditFilter
from timebell.store.tenancy import users
from timebell.tenancy import passwords
from timebell.tenancy.users import Session, session_id

from .web import Web, is_problem

Make = Callable[..., Any]
DANA = {"name": "dana", "role": "operator", "password": "correct horse battery"}


@pytest.fixture(autouse=True)
def _fast_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "SCRYPT_N", 16)


async def _sign_in(web: Web, name: str) -> str:
    user = await web.app.store.run(users.find_user, name)
    assert user is not None
    now = web.app.clock.now()
    count = len(await web.app.store.run(users.list_sessions, user.id, now))
    session = Session(id=session_id(f"{name}-{count}"), user_id=user.id, key_id=None, created_at=now, seen_at=now)
    await web.app.store.run(users.create_session, session, None)
    return session.id


async def test_a_user_is_created_changed_disabled_enabled_and_deleted(make: Make) -> None:
    async with make(open_here=False) as web:
        admin = await web.key("admin", "acme")
        created = await web.post("/users", DANA, key=admin)
        assert created.status_code == 201, created.text
        assert "password" not in created.text
        body = created.json()
        assert (body["name"], body["role"], body["tenantId"], body["enabled"]) == ("dana", "operator", "acme", True)
        assert created.headers["location"] == "/api/v1/users/dana"
        elsewhere = await web.post("/users", {**DANA, "name": "김 철수"}, key=await web.key("admin", "other"))
        assert elsewhere.headers["location"] == "/api/v1/users/%EA%B9%80%20%EC%B2%A0%EC%88%98"
        is_problem(await web.post("/users", DANA, key=admin), 409, "USER_EXISTS")
        stored = await web.app.store.run(users.record_sign_in_attempt, "acme/dana", "192.0.2.1", web.app.clock.now())
        assert passwords.verify(stored[1], DANA["password"])
        changed = await web.ask("PATCH", "/users/dana", {"role": "editor", "enabled": False}, key=admin)
        assert (changed.json()["role"], changed.json()["enabled"]) == ("editor", False)
        again = await web.ask("PATCH", "/users/dana", {"enabled": True}, key=admin)
        assert again.json()["enabled"]
        assert [one["name"] for one in (await web.get("/users", key=admin)).json()["items"]] == ["dana"]
        assert (await web.ask("DELETE", "/users/dana", key=admin)).status_code == 200
        is_problem(await web.get("/users/dana", key=admin), 404, "USER_NOT_FOUND")
        records = await web.app.store.run(audit_log.list_records, "acme", 50, None, AuditFilter(outcome="done"))
        actions = [one.action for one in records]
        assert actions == ["user.delete", "user.update", "user.update", "user.create"]


async def test_passwords_and_disabling_end_sessions(make: Make) -> None:
    async with make() as web:
        await web.post("/users", DANA)
        for patch in ({"password": "another good password"}, {"enabled": False}):
            await _sign_in(web, "dana")
            assert (await web.ask("PATCH", "/users/dana", patch)).status_code == 200
            assert (await web.get("/users/dana/sessions")).json()["items"] == []
        is_problem(await web.ask("PATCH", "/users/dana", {"password": "short"}), 422, "INVALID_FIELDS")


async def test_sessions_are_listed_and_ended(make: Make) -> None:
    async with make() as web:
        await web.post("/users", DANA)
        cookies = [await _sign_in(web, "dana") for _ in range(3)]
        listed = (await web.get("/users/dana/sessions")).json()["items"]
        assert len(listed) == 3
        assert not any(cookie in str(listed) for cookie in cookies)  # the digest in the store is not revealed
        ended = await web.ask("DELETE", f"/users/dana/sessions/{listed[0]['id']}")
        assert ended.json() == {"ended": 1}
        is_problem(await web.ask("DELETE", f"/users/dana/sessions/{listed[0]['id']}"), 404, "SESSION_NOT_FOUND")
        assert len((await web.get("/users/dana/sessions")).json()["items"]) == 2
        assert (await web.ask("DELETE", "/users/dana/sessions")).json() == {"ended": 2}


async def test_a_caller_manages_only_users_of_its_tenant_up_to_its_role(make: Make) -> None:
    async with make(open_here=False) as web:
        ours, theirs = await web.key("admin", "ours"), await web.key("admin", "theirs")
        platform = await web.key("platform", None)
        await web.post("/users", DANA, key=ours)
        for method, path in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("GET", "/sessions"), ("DELETE", "/sessions")):
            body = {"role": "viewer"} if method == "PATCH" else None
            is_problem(await web.ask(method, f"/users/dana{path}", body, key=theirs), 404, "USER_NOT_FOUND")
        assert (await web.get("/users", key=theirs)).json()["items"] == []
        is_problem(await web.post("/users", {**DANA, "role": "platform"}, key=ours), 403, "ROLE_TOO_LOW")
        root = await web.post("/users", {**DANA, "name": "root", "role": "platform"}, key=platform)
        assert (root.status_code, root.json()["tenantId"]) == (201, None)
        is_problem(await web.get("/users/root", key=ours), 404, "USER_NOT_FOUND")
        is_problem(await web.ask("PATCH", "/users/dana", {"role": "platform"}, key=platform), 404, "USER_NOT_FOUND")
        is_problem(
            await web.ask("PATCH", "/users/dana?tenant=ours", {"role": "platform"}, key=platform), 403, "ROLE_FIXED"
        )
        assert [one["name"] for one in (await web.get("/users", key=platform)).json()["items"]] == ["dana", "root"]
        restricted = await web.key("admin", "ours", scopes=("users",))
        assert (await web.get("/users", key=restricted)).status_code == 200
        is_problem(await web.post("/users", {**DANA, "name": "eve"}, key=restricted), 403, "KEY_EXCEEDS_CALLER")


async def test_names_are_unique_within_a_tenant_and_reveal_nothing_of_others(make: Make) -> None:
    async with make(open_here=False) as web:
        ours, theirs = await web.key("admin", "ours"), await web.key("admin", "theirs")
        platform = await web.key("platform", None)
        assert (await web.post("/users", DANA, key=ours)).status_code == 201
        assert (await web.post("/users", DANA, key=theirs)).status_code == 201
        is_problem(await web.post("/users", DANA, key=ours), 409, "USER_EXISTS")
        is_problem(await web.post("/users", {**DANA, "name": "theirs/eve"}, key=ours), 422, "INVALID_NAME")
        assert (await web.ask("DELETE", "/users/dana", key=theirs)).json()["tenantId"] == "theirs"
        assert (await web.get("/users/dana", key=ours)).json()["tenantId"] == "ours"
        assert (await web.get("/users/dana?tenant=ours", key=platform)).status_code == 200
        is_problem(await web.get("/users/dana?tenant=theirs", key=platform), 404, "USER_NOT_FOUND")
        await web.post("/users", {**DANA, "role": "platform"}, key=platform)
        default = await web.key("admin", "default")
        is_problem(await web.post("/users", DANA, key=default), 409, "USER_EXISTS")  # one list of sign-in names


async def test_equal_names_of_several_tenants_are_listed_page_by_page(make: Make) -> None:
    async with make(open_here=False) as web:
        platform = await web.key("platform", None)
        for tenant in ("a", "b", "c"):
            await web.post("/users", DANA, key=await web.key("admin", tenant))
        found, cursor = [], ""
        while cursor is not None:
            page = (await web.get(f"/users?limit=1{cursor and '&cursor=' + cursor}", key=platform)).json()
            found += [one["tenantId"] for one in page["items"]]
            cursor = page["nextCursor"]
        assert sorted(found) == ["a", "b", "c"]
