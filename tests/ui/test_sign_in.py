"""Sign-in, sessions and passwords; protection of forms against other sites; redirects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from timebell.api import authentication_failures
from timebell.clock import VirtualClock
from timebell.dashboard import overview
from timebell.store.audit import audit_log
from timebell.store.tenancy import users
from timebell.tenancy import passwords
from timebell.tenancy.roles import Role
from timebell.tenancy.users import lock_duration

from .browser import COOKIE, PASSWORD

START = datetime(2027, 3, 1, 12, tzinfo=UTC)
Serve = Callable[..., Any]


async def test_sign_in_sets_a_secure_cookie_and_renews_the_session(serve: Serve) -> None:
    clock = VirtualClock(START)
    async with serve(clock=clock) as browser:
        await browser.create_user()
        redirect = await browser.get("/ui/runs?q=x")
        assert (redirect.status_code, redirect.headers["location"]) == (303, "/ui/sign-in?next=%2Fui%2Fruns%3Fq%3Dx")
        signed_in = await browser.sign_in(next="/ui/runs?q=x")
        assert (signed_in.status_code, signed_in.headers["location"]) == (303, "/ui/runs?q=x")
        cookie = signed_in.headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}=")
        for flag in ("Secure", "HttpOnly", "SameSite=lax", "Path=/"):
            assert flag in cookie
        assert "Domain" not in cookie
        page = await browser.get("/ui/")
        assert page.status_code == 200
        assert "dana, admin" in page.text
        # Each sign-in creates a new session id and invalidates the previous one.
        first = browser.client.cookies[COOKIE]
        await browser.sign_in()
        assert browser.client.cookies[COOKIE] != first
        browser.client.cookies.clear()
        browser.client.cookies.set(COOKIE, first, domain="127.0.0.1")
        assert (await browser.get("/ui/")).status_code == 303
        # The store contains neither the cookie nor the password.
        [row] = (await browser.app.store.run(users.list_users, 10, None)).items
        assert PASSWORD not in repr(row)


async def test_the_path_without_a_slash_leads_to_the_dashboard_of_the_same_site(serve: Serve) -> None:
    async with serve() as browser:
        await browser.create_user()
        assert (await browser.get("/ui")).headers["location"] == "/ui/sign-in?next=%2Fui"
        signed_in = await browser.sign_in(next="/ui")
        assert signed_in.headers["location"] == "/ui/"
        assert (await browser.get("/ui", host="evil.example")).headers["location"] == "/ui/"


async def test_a_session_ends_when_idle_and_after_half_a_day(serve: Serve) -> None:
    clock = VirtualClock(START)
    async with serve(clock=clock) as browser:
        await browser.create_user()
        await browser.sign_in()
        clock.step(29 * 60)
        assert (await browser.get("/ui/")).status_code == 200
        clock.step(31 * 60)
        assert (await browser.get("/ui/")).status_code == 303
        await browser.sign_in()
        for _ in range(25):
            clock.step(28 * 60)
            last = await browser.get("/ui/")
        assert last.status_code == 200  # 11 h 40 min, never idle for long
        clock.step(21 * 60)
        assert (await browser.get("/ui/")).status_code == 303


async def test_wrong_passwords_lock_the_user_with_exponential_backoff(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of one address; this test is about the user.
    monkeypatch.setattr(authentication_failures, "MAX_SIGN_INS_PER_MINUTE", 100)
    clock = VirtualClock(START)
    async with serve(clock=clock) as browser:
        await browser.create_user()
        wrong = [await browser.sign_in(password="not the right one") for _ in range(5)]
        unknown = await browser.sign_in(name="unknown")
        assert {response.status_code for response in (*wrong, unknown)} == {401}
        right = await browser.sign_in()
        assert right.status_code == 401
        assert [response.text for response in (right, unknown)] == [wrong[0].text] * 2  # the reason is not revealed
        clock.step(31)
        assert (await browser.sign_in(password="not the right one")).status_code == 401
        clock.step(31)
        assert (await browser.sign_in()).status_code == 401  # locked twice as long
        clock.step(30)
        assert (await browser.sign_in()).status_code == 303
        assert (await browser.sign_in(password="not the right one")).status_code == 401  # the counter starts again
        assert (await browser.sign_in()).status_code == 303


async def test_failed_sign_ins_are_limited_by_address(serve_sqlite: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock(START)
    async with serve_sqlite(clock=clock) as browser:
        await browser.create_user()
        for _ in range(12):
            assert (await browser.sign_in()).status_code == 303  # successful sign-ins are not limited
        wrong = await asyncio.gather(*(browser.sign_in(name=f"user-{n}", password="guess") for n in range(15)))
        assert sorted(response.status_code for response in wrong) == [401] * 10 + [429] * 5  # concurrent ones count too
        refused = await browser.sign_in()
        assert refused.status_code == 429
        assert "TOO_MANY_SIGN_INS" in refused.text
        assert (await browser.post_form("/ui/sign-in", {"key": "tb_live_guess"})).status_code == 401
        later = clock.monotonic() + 61
        monkeypatch.setattr(VirtualClock, "monotonic", lambda _: later)
        assert (await browser.sign_in()).status_code == 303


async def test_guesses_from_elsewhere_never_lock_a_user_out(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication_failures, "MAX_SIGN_INS_PER_MINUTE", 100)
    async with serve(clock=VirtualClock(START), proxies="127.0.0.1") as browser:
        await browser.create_user()
        headers = browser.client.headers
        for address in ("203.0.113.9", "2001:db8::1", "2001:db8::2"):  # the last two are one client
            headers["x-forwarded-for"] = address
            for _ in range(5):
                assert (await browser.sign_in(password="not the right one")).status_code == 401
            assert (await browser.sign_in()).status_code == 401
        headers["x-forwarded-for"] = "198.51.100.7"
        assert (await browser.sign_in()).status_code == 303


async def test_session_fixation_is_impossible(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        await browser.create_user()
        await browser.create_user("mallory")
        await browser.sign_in("mallory")
        planted = [browser.client.cookies[COOKIE], "x" * 43]
        for token in planted:  # a valid and an invented session id in the browser of the victim
            browser.client.cookies.clear()
            browser.client.cookies.set(COOKIE, token, domain="127.0.0.1")
            assert (await browser.sign_in()).status_code == 303
            (new_cookie,) = [cookie for cookie in browser.client.cookies.jar if cookie.value != token]
            assert new_cookie.value not in planted
            browser.client.cookies.clear()
            browser.client.cookies.set(COOKIE, token, domain="127.0.0.1")
            assert (await browser.get("/ui/")).status_code == 303  # the planted session id is not signed in


def test_locks_double_up_to_an_hour() -> None:
    locks = [lock_duration(failures) for failures in (1, 4, 5, 6, 7, 30)]
    assert [lock and lock.total_seconds() for lock in locks] == [None, None, 30, 60, 120, 3600]


def test_passwords_are_stored_as_scrypt_hashes_with_a_random_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    first, second = passwords.hash_password(PASSWORD), passwords.hash_password(PASSWORD)
    assert first != second
    assert first.startswith("scrypt$32768$8$3$")
    assert passwords.verify(first, PASSWORD)
    assert not passwords.verify(first, PASSWORD + "x")
    assert not passwords.verify(None, PASSWORD)


async def test_signing_out_and_changing_the_password_end_sessions(serve: Serve) -> None:
    async with serve() as browser:
        await browser.create_user()
        await browser.sign_in()
        old_session = browser.client.cookies[COOKIE]
        assert (await browser.submit("/ui/", "/ui/sign-out")).status_code == 303
        browser.client.cookies.set(COOKIE, old_session, domain="127.0.0.1")
        assert (await browser.get("/ui/")).status_code == 303
        await browser.sign_in()
        user = await browser.app.store.run(users.find_user, "dana")
        await browser.app.store.run(users.set_password, user.id, passwords.hash_password("another one, longer"))
        assert (await browser.get("/ui/")).status_code == 303
        await browser.sign_in(password="another one, longer")
        await browser.app.store.run(users.disable_user, user.id, browser.app.clock.now())
        assert (await browser.get("/ui/")).status_code == 303
        assert (await browser.sign_in(password="another one, longer")).status_code == 401


async def test_an_api_key_signs_in_until_it_is_revoked(serve: Serve) -> None:
    async with serve() as browser:
        key = await browser.web.key("operator", "acme")
        assert (await browser.post_form("/ui/sign-in", {"key": "tb_live_wrong"})).status_code == 401
        narrow = await browser.web.key("operator", "acme", scopes=("jobs",))
        assert "SCOPE_MISSING" in (await browser.post_form("/ui/sign-in", {"key": narrow})).text
        assert (await browser.post_form("/ui/sign-in", {"key": key})).status_code == 303
        page = await browser.get("/ui/")
        assert "Tenant acme" in page.text
        records = await browser.app.store.run(audit_log.list_records, "acme", 5, None)
        assert [record.action for record in records] == ["session.begin"]
        admin = await browser.web.key("admin", "acme")
        await browser.web.ask("DELETE", f"/api/v1/keys/{key.split('_')[2]}", key=admin)
        assert (await browser.get("/ui/")).status_code == 303


OTHER_ORIGINS: tuple[dict[str, str], ...] = (
    {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}, {"sec_fetch_site": "none"},
    {"sec_fetch_site": "", "origin": "https://evil.example"}, {"sec_fetch_site": "", "origin": "null"},
    {"sec_fetch_site": ""},
)  # fmt: skip


async def test_forms_from_other_sites_are_rejected(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        await browser.create_user()
        for sent in OTHER_ORIGINS:
            assert (
                await browser.post_form("/ui/sign-in", {"name": "dana", "password": PASSWORD}, **sent)
            ).status_code == 403
        assert (await browser.sign_in()).status_code == 303
        for sent in OTHER_ORIGINS:
            refused = await browser.post_form("/ui/sign-out", {}, **sent)
            assert refused.status_code == 403
            assert "CROSS_SITE_REQUEST" in refused.text


async def test_malformed_form_requests_are_rejected(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        too_many_fields = {f"field-{number}": "x" for number in range(501)}
        assert "FORM_TOO_LARGE" in (await browser.post_form("/ui/sign-in", too_many_fields)).text
        malformed = await browser.post_form("/ui/sign-in", {"name": "dana"}, sec_fetch_site="", origin="https://[")
        assert (malformed.status_code, "CROSS_SITE_REQUEST" in malformed.text) == (403, True)


async def test_a_form_needs_the_token_of_its_session(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        await browser.create_user()
        await browser.sign_in()
        for token in ("", "0" * 40):
            refused = await browser.post_form("/ui/sign-out", {"_token": token})
            assert refused.status_code == 403
            assert "FORM_EXPIRED" in refused.text
        without_token = await browser.post_form(
            "/ui/sign-out", {"_token": ""}, sec_fetch_site="", origin="https://127.0.0.1:8700"
        )
        assert "FORM_EXPIRED" in without_token.text  # an Origin header is accepted, a missing token is not
        assert (await browser.submit("/ui/", "/ui/sign-out")).status_code == 303


async def test_every_page_has_security_headers(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        await browser.create_user()
        pages = [await browser.get("/ui/sign-in"), await browser.get("/ui/"), await browser.sign_in()]
        pages += [await browser.get("/ui/"), await browser.post_form("/ui/sign-out", {})]
        assert [page.status_code for page in pages] == [200, 303, 303, 200, 403]
        for page in pages:
            assert page.headers["x-content-type-options"] == "nosniff"
            assert page.headers["referrer-policy"] == "no-referrer"
            assert page.headers["cache-control"] == "no-store"
            assert page.headers["strict-transport-security"].startswith("max-age=")


OUTSIDE_PATHS = (
    "https://evil.example/", "//evil.example", "/\\evil.example", "/ui/\\evil", "javascript:alert(1)", "/api/v1/keys",
    "/ui/\r\nset-cookie: x=y", "", "ui/", "/ui",
)  # fmt: skip


async def test_redirects_never_leave_the_site(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        await browser.create_user()
        for path in OUTSIDE_PATHS:
            assert (await browser.sign_in(next=path)).headers["location"] == "/ui/"
            redirect = await browser.submit("/ui/runs", "/ui/shown", back=path, zone="utc")
            assert redirect.headers["location"] == "/ui/"


async def test_pages_follow_the_permissions_of_the_user(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        await browser.create_user("vera", "viewer")
        await browser.create_user("ada", "admin", "acme")
        await browser.sign_in("vera")
        page = await browser.get("/ui/")
        assert "New schedule" not in page.text
        assert "/ui/tenants" not in page.text
        assert (await browser.sign_in("ada")).status_code == 401  # of another tenant
        await browser.sign_in("acme/ada")
        assert "New schedule" in (await browser.get("/ui/")).text
        assert "Tenant acme" in (await browser.get("/ui/?tenant=default")).text


async def test_dev_mode_allows_only_local_requests(serve_sqlite: Serve) -> None:
    async with serve_sqlite(allow_local=True) as browser:
        assert "local, platform" in (await browser.get("/ui/")).text
        for headers in ({"host": "evil.example"}, {"sec_fetch_site": "cross-site"}):
            refused = await browser.get("/ui/", **headers)
            assert refused.status_code == 403
            assert "NOT_LOCAL" in refused.text


async def test_users_are_of_the_role_they_were_given(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        for role in Role:
            await browser.create_user(f"of-{role}", role.value, None if role is Role.PLATFORM else "default")
            await browser.sign_in(f"of-{role}")
            assert f"of-{role}, {role}" in (await browser.get("/ui/")).text


async def test_live_figures_end_when_the_api_key_is_revoked(
    serve_sqlite: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for interval in ("SESSION_CHECK_INTERVAL", "TILES_INTERVAL"):
        monkeypatch.setattr(overview, interval, timedelta(seconds=0.02))
    async with serve_sqlite() as browser:
        key = await browser.web.key("operator", "acme")
        assert (await browser.post_form("/ui/sign-in", {"key": key})).status_code == 303
        stream = asyncio.create_task(browser.get("/ui/live"))
        done, _ = await asyncio.wait([stream], timeout=0.3)
        assert not done
        admin = await browser.web.key("admin", "acme")
        await browser.web.ask("DELETE", f"/api/v1/keys/{key.split('_')[2]}", key=admin)
        async with asyncio.timeout(20):
            assert (await stream).status_code == 200


async def test_codes_of_unknown_sessions_are_looked_up_two_at_a_time_for_each_client(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        lookups = browser.site.authenticator.capacity.lookups
        browser.client.cookies.set("__Host-timebell-code", "invented", domain="127.0.0.1")
        async with lookups.hold("127.0.0.1"), lookups.hold("127.0.0.1"):
            request = asyncio.create_task(browser.post_form("/ui/sign-in/code", {"code": "123456"}))
            done, _ = await asyncio.wait([request], timeout=0.3)
            assert not done
        assert (await request).status_code == 401
