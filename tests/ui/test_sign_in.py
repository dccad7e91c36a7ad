"""Signing in: S08 of the security list, and what guards every form (S62) and every way back (S64)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from timebell.api import authentication
from timebell.clock import VirtualClock
from timebell.store.audit import audit_log
from timebell.store.tenancy import users
from timebell.tenancy import passwords
from timebell.tenancy.roles import Role
from timebell.tenancy.users import lock_after

from .browsing import COOKIE, PASSWORD, Browser

START = datetime(2027, 3, 1, 12, tzinfo=UTC)
Make = Callable[..., Any]


async def test_s08_passwords_sessions_and_cookies(make: Make) -> None:
    clock = VirtualClock(START)
    async with make(clock=clock) as browser:
        await browser.user()
        sent = await browser.look("/ui/runs?q=x")
        assert (sent.status_code, sent.headers["location"]) == (303, "/ui/sign-in?next=%2Fui%2Fruns%3Fq%3Dx")
        done = await browser.sign_in(next="/ui/runs?q=x")
        assert (done.status_code, done.headers["location"]) == (303, "/ui/runs?q=x")
        cookie = done.headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}=")
        for flag in ("Secure", "HttpOnly", "SameSite=lax", "Path=/"):
            assert flag in cookie
        assert "Domain" not in cookie
        page = await browser.look("/ui/")
        assert page.status_code == 200
        assert "dana, admin" in page.text
        # The id changes with each sign-in, and the one before opens nothing any more.
        first = browser.client.cookies[COOKIE]
        await browser.sign_in()
        assert browser.client.cookies[COOKIE] != first
        browser.client.cookies.clear()
        browser.client.cookies.set(COOKIE, first, domain="127.0.0.1")
        assert (await browser.look("/ui/")).status_code == 303
        # What is stored neither is the cookie, nor the password.
        [row] = (await browser.app.store.run(users.page, 10, None)).items
        assert PASSWORD not in repr(row)


async def test_s08_a_session_ends_when_idle_and_after_half_a_day(make: Make) -> None:
    clock = VirtualClock(START)
    async with make(clock=clock) as browser:
        await browser.user()
        await browser.sign_in()
        clock.step(29 * 60)
        assert (await browser.look("/ui/")).status_code == 200
        clock.step(31 * 60)
        assert (await browser.look("/ui/")).status_code == 303
        await browser.sign_in()
        for _ in range(25):
            clock.step(28 * 60)
            last = await browser.look("/ui/")
        assert last.status_code == 200  # 11 h 40 min, never idle for long
        clock.step(21 * 60)
        assert (await browser.look("/ui/")).status_code == 303


async def test_s08_wrong_passwords_lock_with_back_off(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "WRONG_A_MINUTE", 100)  # of the address; here it is about the name
    clock = VirtualClock(START)
    async with make(clock=clock) as browser:
        await browser.user()
        wrong = [await browser.sign_in(password="not the right one") for _ in range(5)]
        unknown = await browser.sign_in(name="nobody")
        assert {one.status_code for one in (*wrong, unknown)} == {401}
        right = await browser.sign_in()
        assert right.status_code == 401
        assert [one.text for one in (right, unknown)] == [wrong[0].text] * 2  # nobody learns why
        clock.step(31)
        assert (await browser.sign_in(password="not the right one")).status_code == 401
        clock.step(31)
        assert (await browser.sign_in()).status_code == 401  # twice as long
        clock.step(30)
        assert (await browser.sign_in()).status_code == 303
        assert (await browser.sign_in(password="not the right one")).status_code == 401  # it counts anew
        assert (await browser.sign_in()).status_code == 303


async def test_s08_guesses_are_limited_by_address_whatever_the_names(
    make_light: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock(START)
    async with make_light(clock=clock) as browser:
        await browser.user()
        for _ in range(12):
            assert (await browser.sign_in()).status_code == 303  # who is right may come back as often as they like
        wrong = await asyncio.gather(*(browser.sign_in(name=f"user-{n}", password="guess") for n in range(15)))
        assert sorted(one.status_code for one in wrong) == [401] * 10 + [429] * 5  # at once counts too
        for refused in (await browser.sign_in(), await browser.send("/ui/sign-in", {"key": "tb_live_guess"})):
            assert refused.status_code == 429
            assert "TOO_MANY_WRONG_KEYS" in refused.text
        later = clock.monotonic() + 61
        monkeypatch.setattr(VirtualClock, "monotonic", lambda _: later)
        assert (await browser.sign_in()).status_code == 303


async def test_a_session_cannot_be_fixed_beforehand(make_light: Make) -> None:
    async with make_light() as browser:
        await browser.user()
        await browser.user("mallory")
        await browser.sign_in("mallory")
        planted = [browser.client.cookies[COOKIE], "x" * 43]
        for token in planted:  # one that is good, and one that is made up, in the browser of somebody else
            browser.client.cookies.clear()
            browser.client.cookies.set(COOKIE, token, domain="127.0.0.1")
            assert (await browser.sign_in()).status_code == 303
            (mine,) = [one for one in browser.client.cookies.jar if one.value != token]
            assert mine.value not in planted
            browser.client.cookies.clear()
            browser.client.cookies.set(COOKIE, token, domain="127.0.0.1")
            assert (await browser.look("/ui/")).status_code == 303  # what was planted opens nothing


def test_locks_double_up_to_an_hour() -> None:
    locks = [lock_after(failures) for failures in (1, 4, 5, 6, 7, 30)]
    assert [lock and lock.total_seconds() for lock in locks] == [None, None, 30, 60, 120, 3600]


def test_s08_passwords_are_kept_as_scrypt_with_a_salt_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    first, second = passwords.stored(PASSWORD), passwords.stored(PASSWORD)
    assert first != second
    assert first.startswith("scrypt$32768$8$3$")
    assert passwords.matches(first, PASSWORD)
    assert not passwords.matches(first, PASSWORD + "x")
    assert not passwords.matches(None, PASSWORD)


async def test_signing_out_and_another_password_end_sessions(make: Make) -> None:
    async with make() as browser:
        await browser.user()
        await browser.sign_in()
        kept = browser.client.cookies[COOKIE]
        assert (await browser.press("/ui/", "/ui/sign-out")).status_code == 303
        browser.client.cookies.set(COOKIE, kept, domain="127.0.0.1")
        assert (await browser.look("/ui/")).status_code == 303
        await browser.sign_in()
        user = await browser.app.store.run(users.find, "dana")
        await browser.app.store.run(users.set_password, user.id, passwords.stored("another one, longer"))
        assert (await browser.look("/ui/")).status_code == 303
        await browser.sign_in(password="another one, longer")
        await browser.app.store.run(users.disable, user.id, browser.app.clock.now())
        assert (await browser.look("/ui/")).status_code == 303
        assert (await browser.sign_in(password="another one, longer")).status_code == 401


async def test_a_key_signs_in_too_until_it_is_revoked(make: Make) -> None:
    async with make() as browser:
        key = await browser.web.key("operator", "acme")
        assert (await browser.send("/ui/sign-in", {"key": "tb_live_wrong"})).status_code == 401
        narrow = await browser.web.key("operator", "acme", scopes=("jobs",))
        assert "SCOPE_MISSING" in (await browser.send("/ui/sign-in", {"key": narrow})).text
        assert (await browser.send("/ui/sign-in", {"key": key})).status_code == 303
        page = await browser.look("/ui/")
        assert "Tenant acme" in page.text
        found = await browser.app.store.run(audit_log.page, "acme", 5, None)
        assert [one.action for one in found] == ["session.begin"]
        admin = await browser.web.key("admin", "acme")
        await browser.web.ask("DELETE", f"/api/v1/keys/{key.split('_')[2]}", key=admin)
        assert (await browser.look("/ui/")).status_code == 303


FROM_ELSEWHERE: tuple[dict[str, str], ...] = (
    {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}, {"sec_fetch_site": "none"},
    {"sec_fetch_site": "", "origin": "https://evil.example"}, {"sec_fetch_site": "", "origin": "null"},
    {"sec_fetch_site": ""},
)  # fmt: skip


async def test_s62_a_form_needs_our_page(make_light: Make) -> None:
    async with make_light() as browser:
        await browser.user()
        for sent in FROM_ELSEWHERE:
            assert (
                await browser.send("/ui/sign-in", {"name": "dana", "password": PASSWORD}, **sent)
            ).status_code == 403
        assert (await browser.sign_in()).status_code == 303
        for sent in FROM_ELSEWHERE:
            refused = await browser.send("/ui/sign-out", {}, **sent)
            assert refused.status_code == 403
            assert "NOT_OUR_PAGE" in refused.text


async def test_what_no_browser_sends_is_refused_without_a_fault(make_light: Make) -> None:
    async with make_light() as browser:
        many = {f"field-{number}": "x" for number in range(501)}
        assert "FORM_TOO_LARGE" in (await browser.send("/ui/sign-in", many)).text
        odd = await browser.send("/ui/sign-in", {"name": "dana"}, sec_fetch_site="", origin="https://[")
        assert (odd.status_code, "NOT_OUR_PAGE" in odd.text) == (403, True)


async def test_s62_a_form_needs_the_token_of_its_session(make_light: Make) -> None:
    async with make_light() as browser:
        await browser.user()
        await browser.sign_in()
        for token in ("", "0" * 40):
            refused = await browser.send("/ui/sign-out", {"_token": token})
            assert refused.status_code == 403
            assert "FORM_EXPIRED" in refused.text
        ours = await browser.send("/ui/sign-out", {"_token": ""}, sec_fetch_site="", origin="https://127.0.0.1:8700")
        assert "FORM_EXPIRED" in ours.text  # a browser that only says where from is fine, without the token it is not
        assert (await browser.press("/ui/", "/ui/sign-out")).status_code == 303


async def test_s63_headers_of_every_page(make_light: Make) -> None:
    async with make_light() as browser:
        await browser.user()
        pages = [await browser.look("/ui/sign-in"), await browser.look("/ui/"), await browser.sign_in()]
        pages += [await browser.look("/ui/"), await browser.send("/ui/sign-out", {})]
        assert [page.status_code for page in pages] == [200, 303, 303, 200, 403]
        for page in pages:
            assert page.headers["x-content-type-options"] == "nosniff"
            assert page.headers["referrer-policy"] == "no-referrer"
            assert page.headers["cache-control"] == "no-store"
            assert page.headers["strict-transport-security"].startswith("max-age=")


OUTSIDE = (
    "https://evil.example/", "//evil.example", "/\\evil.example", "/ui/\\evil", "javascript:alert(1)", "/api/v1/keys",
    "/ui/\r\nset-cookie: x=y", "", "ui/", "/ui",
)  # fmt: skip


async def test_s64_no_way_leads_outside(make_light: Make) -> None:
    async with make_light() as browser:
        await browser.user()
        for ahead in OUTSIDE:
            assert (await browser.sign_in(next=ahead)).headers["location"] == "/ui/"
            went = await browser.press("/ui/runs", "/ui/shown", back=ahead, zone="utc")
            assert went.headers["location"] == "/ui/"


async def test_who_may_what_is_asked_of_the_api(make_light: Make) -> None:
    async with make_light() as browser:
        await browser.user("vera", "viewer")
        await browser.user("ada", "admin", "acme")
        await browser.sign_in("vera")
        page = await browser.look("/ui/")
        assert "New schedule" not in page.text
        assert "/ui/tenants" not in page.text
        await browser.sign_in("ada")
        assert "New schedule" in (await browser.look("/ui/")).text
        assert "Tenant acme" in (await browser.look("/ui/?tenant=default")).text


async def test_dev_lets_this_machine_in_and_no_other(make_light: Make) -> None:
    async with make_light(open_here=True) as browser:
        assert "local, platform" in (await browser.look("/ui/")).text
        for headers in ({"host": "evil.example"}, {"sec_fetch_site": "cross-site"}):
            refused = await browser.look("/ui/", **headers)
            assert refused.status_code == 403
            assert "NOT_LOCAL" in refused.text


async def test_users_are_of_the_role_they_were_given(make_light: Make) -> None:
    async with make_light() as browser:
        await _all_roles(browser)


async def _all_roles(browser: Browser) -> None:
    for role in Role:
        await browser.user(f"of-{role}", role.value, None if role is Role.PLATFORM else "default")
        await browser.sign_in(f"of-{role}")
        assert f"of-{role}, {role}" in (await browser.look("/ui/")).text
