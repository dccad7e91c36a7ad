"""Two-factor authentication: set-up, the second step of the sign-in, recovery codes, reset by an admin."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from timebell.api import authentication_failures
from timebell.clock import VirtualClock
from timebell.store.audit import audit_log
from timebell.tenancy import totp

from .browser import COOKIE, PASSWORD, Browser

START = datetime(2027, 3, 1, 12, tzinfo=UTC)
CODE_COOKIE = "__Host-timebell-code"
Serve = Callable[..., Any]


async def _form_token(browser: Browser) -> str:
    [token, *_] = re.findall(r'name="_token" value="(\w+)"', (await browser.get("/ui/account")).text)
    return str(token)


async def _enroll(browser: Browser, clock: VirtualClock, name: str = "dana") -> tuple[str, list[str]]:
    """Set up the second step of a signed-in user; return the secret and the recovery codes."""
    page = (await browser.submit("/ui/account", "/ui/account/totp", password=PASSWORD)).text
    secret = "".join(re.findall(r'<dd class="mono">([A-Z2-7 ]+)</dd>', page)).replace(" ", "")
    assert f"otpauth://totp/Timebell%3A{name}?secret={secret}" in page
    assert "<svg" in page
    assert "style=" not in page  # the policy of pages forbids it
    code = totp.generate_code(secret, totp.step_at(clock.now()))
    form = {"_token": await _form_token(browser), "code": code}
    wrong = await browser.post_form("/ui/account/totp/confirm", form | {"code": "000000"})
    assert (wrong.status_code, "WRONG_CODE" in wrong.text, secret[:4] in wrong.text) == (422, True, True)
    confirmed = await browser.post_form("/ui/account/totp/confirm", form)
    assert confirmed.status_code == 200, confirmed.text
    return secret, re.findall(r"\b\w{4}-\w{4}-\w{4}-\w{4}\b", confirmed.text)


def _code(secret: str, clock: VirtualClock) -> str:
    return totp.generate_code(secret, totp.step_at(clock.now()))


async def test_a_user_sets_up_a_second_step_and_signs_in_with_codes(serve: Serve) -> None:
    clock = VirtualClock(START)
    async with serve(clock=clock) as browser:
        await browser.create_user("dana", "viewer", "acme")
        await browser.sign_in("acme/dana")
        other_browser = browser.client.cookies[COOKIE]
        browser.client.cookies.clear()
        await browser.sign_in("acme/dana")
        refused = await browser.submit("/ui/account", "/ui/account/totp", password="not the right one")
        assert (refused.status_code, "WRONG_PASSWORD" in refused.text) == (422, True)
        secret, recovery_codes = await _enroll(browser, clock, "acme%2Fdana")
        assert len(recovery_codes) == totp.RECOVERY_CODE_COUNT
        account = await browser.get("/ui/account")  # this session goes on, all others have ended
        assert "10 recovery codes are left" in account.text
        assert not any(code in account.text for code in (*recovery_codes, secret))
        browser.client.cookies.clear()
        browser.client.cookies.set(COOKIE, other_browser, domain="127.0.0.1")
        assert (await browser.get("/ui/")).status_code == 303

        browser.client.cookies.clear()
        first_step = await browser.sign_in("acme/dana", next="/ui/runs?q=x")
        assert first_step.headers["location"] == "/ui/sign-in/code?next=%2Fui%2Fruns%3Fq%3Dx"
        assert COOKIE not in browser.client.cookies
        cookie = first_step.headers["set-cookie"]
        for flag in ("Secure", "HttpOnly", "SameSite=lax", "Path=/", "Max-Age=600"):
            assert flag in cookie
        # The cookie of the first step opens nothing, also under the name of the session cookie.
        browser.client.cookies.set(COOKIE, browser.client.cookies[CODE_COOKIE], domain="127.0.0.1")
        assert (await browser.get("/ui/jobs")).status_code == 303
        form = {"code": "000000", "next": "/ui/runs?q=x"}
        wrong = await browser.post_form("/ui/sign-in/code", form)
        assert (wrong.status_code, "WRONG_CODE" in wrong.text) == (401, True)
        clock.step(30)
        used = _code(secret, clock)
        signed_in = await browser.post_form("/ui/sign-in/code", form | {"code": used})
        assert (signed_in.status_code, signed_in.headers["location"]) == (303, "/ui/runs?q=x")
        assert (await browser.get("/ui/account")).status_code == 200
        assert (await browser.post_form("/ui/sign-in/code", form)).status_code == 401  # the first step is used up

        browser.client.cookies.clear()
        await browser.sign_in("acme/dana")
        assert (await browser.post_form("/ui/sign-in/code", {"code": used})).status_code == 401  # replay
        recovered = await browser.post_form("/ui/sign-in/code", {"code": recovery_codes[0].upper()})
        assert recovered.headers["location"] == "/ui/?did=recovery-code"
        assert "cannot be used again" in (await browser.get("/ui/?did=recovery-code")).text
        records = await browser.app.store.run(audit_log.list_records, "acme", 50, None)
        actions = [(record.action, record.outcome, record.code) for record in records.items[::-1]]
        assert actions == [
            ("session.begin", "done", None), ("session.begin", "done", None),
            ("user.confirm", "refused", "WRONG_PASSWORD"), ("user.enable_totp", "done", None),
            ("session.begin", "done", None), ("session.begin", "refused", "WRONG_CODE"),
            ("session.begin", "done", None), ("session.begin", "done", None),
        ]  # fmt: skip
        assert [record.after for record in records.items[:2]] == [{"code": "recovery"}, {"code": "app"}]


async def test_new_recovery_codes_and_turning_off_take_password_and_code(serve_sqlite: Serve) -> None:
    clock = VirtualClock(START)
    async with serve_sqlite(clock=clock) as browser:
        await browser.create_user()
        await browser.sign_in()
        secret, first_codes = await _enroll(browser, clock)
        token = await _form_token(browser)

        async def act(action: str, **fields: str) -> Any:
            return await browser.post_form(
                f"/ui/account/totp{action}", {"_token": token, "password": PASSWORD} | fields
            )

        assert "TOTP_ENABLED" in (await act("")).text  # a stolen session cannot replace the secret
        for action in ("/recovery-codes", "/disable"):
            clock.step(30)
            wrong_password = await act(action, password="not the right one", code=_code(secret, clock))
            assert "WRONG_PASSWORD" in wrong_password.text
            assert "WRONG_CODE" in (await act(action, code="123456")).text
        renewed = await act("/recovery-codes", code=first_codes[0])
        new_codes = re.findall(r"\b\w{4}-\w{4}-\w{4}-\w{4}\b", renewed.text)
        assert len(new_codes) == totp.RECOVERY_CODE_COUNT
        assert "WRONG_CODE" in (await act("/disable", code=first_codes[1])).text
        assert (await act("/disable", code=new_codes[0])).status_code == 303
        page = (await browser.get("/ui/account")).text
        assert 'action="/ui/account/totp"' in page
        token = await _form_token(browser)
        assert "TOTP_DISABLED" in (await act("/disable", code=new_codes[1])).text
        assert (await browser.sign_in()).headers["location"] == "/ui/"


async def test_an_admin_resets_the_second_step_of_a_user(serve_sqlite: Serve) -> None:
    clock = VirtualClock(START)
    async with serve_sqlite(clock=clock) as browser:
        await browser.create_user()
        await browser.create_user("ben", "viewer")
        await browser.sign_in("ben")
        await _enroll(browser, clock, "ben")
        session = browser.client.cookies[COOKIE]
        browser.client.cookies.clear()
        await browser.sign_in()
        key = await browser.web.key("admin", "default")
        assert (await browser.web.get("/api/v1/users/ben", key=key)).json()["totpEnabledAt"] is not None
        assert (await browser.submit("/ui/users/ben", "/ui/users/ben/totp/reset")).status_code == 303
        assert (await browser.web.get("/api/v1/users/ben", key=key)).json()["totpEnabledAt"] is None
        browser.client.cookies.clear()
        browser.client.cookies.set(COOKIE, session, domain="127.0.0.1")
        assert (await browser.get("/ui/")).status_code == 303
        browser.client.cookies.clear()
        assert (await browser.sign_in("ben")).headers["location"] == "/ui/"


async def test_wrong_codes_lock_the_user_for_that_address(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication_failures, "MAX_SIGN_INS_PER_MINUTE", 100)
    clock = VirtualClock(START)
    async with serve(clock=clock, proxies="127.0.0.1") as browser:
        await browser.create_user()
        await browser.sign_in()
        secret, recovery_codes = await _enroll(browser, clock)
        headers = browser.client.headers
        headers["x-forwarded-for"] = "203.0.113.9"
        await browser.sign_in()
        for _ in range(5):
            assert (await browser.post_form("/ui/sign-in/code", {"code": "123456"})).status_code == 401
        await browser.sign_in()  # the password does not forgive wrong codes
        assert (await browser.post_form("/ui/sign-in/code", {"code": recovery_codes[0]})).status_code == 401
        headers["x-forwarded-for"] = "198.51.100.7"
        clock.step(1)
        clock.step(29)
        assert (await browser.post_form("/ui/sign-in/code", {"code": _code(secret, clock)})).status_code == 303


async def test_wrong_codes_are_limited_by_address(serve_sqlite: Serve) -> None:
    clock = VirtualClock(START)
    async with serve_sqlite(clock=clock) as browser:
        await browser.create_user()
        await browser.sign_in()
        await _enroll(browser, clock)
        await browser.sign_in()
        statuses = [(await browser.post_form("/ui/sign-in/code", {"code": "1"})).status_code for _ in range(12)]
        assert statuses == [401] * 10 + [429] * 2


async def test_keys_and_users_of_a_provider_have_no_second_step_here(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        key = await browser.web.key("admin", "acme")
        await browser.post_form("/ui/sign-in", {"key": key})
        page = await browser.get("/ui/account")
        assert (page.status_code, "ACCOUNT_MISSING" in page.text) == (403, True)
        assert 'href="/ui/account"' not in (await browser.get("/ui/")).text
