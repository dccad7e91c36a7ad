"""Pages of users and keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .browser import COOKIE, PASSWORD

Serve = Callable[..., Any]


async def test_admins_manage_users_and_their_sessions(serve: Serve) -> None:
    async with serve() as browser:
        await browser.create_user()
        await browser.sign_in()
        admin = browser.client.cookies[COOKIE]
        form = {"name": "ben", "role": "viewer", "password": PASSWORD}
        assert "INVALID" in (await browser.submit("/ui/users", "/ui/users", **form | {"password": "short"})).text
        assert (await browser.submit("/ui/users", "/ui/users", **form)).status_code == 303
        assert "USER_EXISTS" in (await browser.submit("/ui/users", "/ui/users", **form)).text
        assert 'href="/ui/users/ben"' in (await browser.get("/ui/users")).text
        sessions = []
        for _ in range(2):
            browser.client.cookies.clear()
            assert (await browser.sign_in("ben")).status_code == 303
            sessions.append(browser.client.cookies[COOKIE])

        async def is_signed_in(token: str) -> bool:
            browser.client.cookies.clear()
            browser.client.cookies.set(COOKIE, token, domain="127.0.0.1")
            return bool((await browser.get("/ui/jobs")).status_code == 200)

        async def act(action: str, **fields: str) -> Any:
            assert await is_signed_in(admin)
            return await browser.submit("/ui/users/ben", f"/ui/users/ben/{action}", **fields)

        assert await is_signed_in(sessions[0])
        assert (await browser.get("/ui/users")).status_code == 403
        assert await is_signed_in(admin)
        newest = re.findall(r'name="session" value="(\w+)"', (await browser.get("/ui/users/ben")).text)[0]
        assert (await act("sessions/end", session=newest)).status_code == 303
        assert [await is_signed_in(token) for token in sessions] == [True, False]
        assert (await act("role", role="operator")).status_code == 303
        assert "operator of default" in (await browser.get("/ui/users/ben")).text
        assert (await act("disable")).status_code == 303
        assert not await is_signed_in(sessions[0])
        assert (await act("enable")).status_code == 303
        assert (await act("password", password="another one, longer")).status_code == 303
        browser.client.cookies.clear()
        assert (await browser.sign_in("ben", "another one, longer")).status_code == 303
        assert (await act("delete")).status_code == 303
        assert (await browser.get("/ui/users/ben")).status_code == 404


async def test_admins_create_and_revoke_keys(serve: Serve) -> None:
    async with serve() as browser:
        await browser.create_user()
        await browser.sign_in()
        form = {"name": "billing", "role": "editor", "networks": "127.0.0.0/8, 10.0.0.0/8", "days": "30"}
        page = (await browser.submit("/ui/keys", "/ui/keys", **form, **{"scope-jobs": "on"})).text
        [key] = re.findall(r"tb_live_\w+", page)
        assert (await browser.web.get("/api/v1/jobs", key=key)).status_code == 200
        assert (await browser.web.get("/api/v1/schedules", key=key)).status_code == 403
        page = (await browser.get("/ui/keys")).text
        assert key not in page
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
        for words in ("billing", "127.0.0.0/8, 10.0.0.0/8", "jobs", "by dana", "Valid"):
            assert words in text, words
        assert "platform" not in re.findall(r"<option>(\w+)</option>", page)
        wrong = await browser.submit("/ui/keys", "/ui/keys", **form | {"networks": "everywhere"})
        assert (wrong.status_code, "INVALID_NETWORKS" in wrong.text) == (422, True)
        revoke = re.findall(r'action="(/ui/keys/\w+/revoke)"', page)[0]
        assert (await browser.submit("/ui/keys", revoke)).status_code == 303
        assert "Revoked" in (await browser.get("/ui/keys")).text


async def test_platform_users_manage_users_of_equal_names_in_all_tenants(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        await browser.create_user("root", "platform", None)
        for tenant in ("acme", "globex"):
            await browser.create_user("dana", "viewer", tenant)
        await browser.sign_in("root")
        links = re.findall(r'href="(/ui/users/dana[^"]*)"', (await browser.get("/ui/users")).text)
        assert sorted(links) == ["/ui/users/dana?tenant=acme", "/ui/users/dana?tenant=globex"]
        page = "/ui/users/dana?tenant=globex"
        changed = await browser.submit(page, "/ui/users/dana/role?tenant=globex", role="editor")
        assert changed.headers["location"] == f"{page}&did=saved"
        roles = [(await browser.get(link)).text for link in sorted(links)]
        assert ["viewer of acme" in roles[0], "editor of globex" in roles[1]] == [True, True]
