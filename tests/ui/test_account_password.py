"""Users change their own password on the page "Your account"."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from timebell.clock import VirtualClock
from timebell.store.audit import audit_log

from .browser import COOKIE, PASSWORD, Browser

Serve = Callable[..., Any]
NEW_PASSWORD = "seven green umbrellas"


async def _change(browser: Browser, current: str = PASSWORD, new: str = NEW_PASSWORD, again: str | None = None) -> Any:
    fields = {"password": current, "new_password": new, "repeated_password": new if again is None else again}
    return await browser.submit("/ui/account", "/ui/account/password", **fields)


async def test_a_user_changes_the_password_and_all_other_sessions_end(serve: Serve) -> None:
    async with serve() as browser:
        await browser.create_user("dana", "viewer", "acme")
        await browser.sign_in("acme/dana")
        other_browser = browser.client.cookies[COOKIE]
        browser.client.cookies.clear()
        await browser.sign_in("acme/dana")
        own = browser.client.cookies[COOKIE]
        changed = await _change(browser)
        assert (changed.status_code, changed.headers["location"]) == (303, "/ui/account?did=password-changed")
        assert "Password changed." in (await browser.get(changed.headers["location"])).text
        assert browser.client.cookies[COOKIE] != own
        for ended in (own, other_browser):
            browser.client.cookies.clear()
            browser.client.cookies.set(COOKIE, ended, domain="127.0.0.1")
            assert (await browser.get("/ui/jobs")).status_code == 303
        browser.client.cookies.clear()
        assert (await browser.sign_in("acme/dana")).status_code == 401
        assert (await browser.sign_in("acme/dana", NEW_PASSWORD)).status_code == 303
        records = (await browser.app.store.run(audit_log.list_records, "acme", 50, None)).items
        [record] = [each for each in records if each.action == "user.change_password"]
        assert (record.actor, record.subject, record.outcome, record.address) == ("dana", "dana", "done", "127.0.0.1")
        assert not any(password in repr(records) for password in (PASSWORD, NEW_PASSWORD))


async def test_unusable_new_passwords_and_a_wrong_current_one_change_nothing(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        await browser.create_user()
        await browser.sign_in()
        for fields, code in (
            ({"new": "short"}, "INVALID_PASSWORD"),
            ({"new": "x" * 201}, "INVALID_PASSWORD"),
            ({"again": "seven green umbrela"}, "PASSWORDS_DIFFER"),
            ({"current": "not the right one"}, "WRONG_PASSWORD"),
        ):
            refused = await _change(browser, **fields)
            assert (refused.status_code, code in refused.text) == (422, True), code
            assert NEW_PASSWORD not in refused.text
        assert (await browser.get("/ui/jobs")).status_code == 200  # the session goes on
        records = (await browser.app.store.run(audit_log.list_records, "default", 50, None)).items
        [failure] = [(each.action, each.code) for each in records if each.outcome == "refused"]
        assert failure == ("user.confirm", "WRONG_PASSWORD")
        assert (await browser.sign_in()).status_code == 303


async def test_guesses_of_the_current_password_are_throttled_like_a_sign_in(serve_sqlite: Serve) -> None:
    clock = VirtualClock(datetime(2027, 3, 1, 12, tzinfo=UTC))
    async with serve_sqlite(clock=clock) as browser:
        await browser.create_user()
        await browser.sign_in()
        for _ in range(5):
            assert (await _change(browser, current="not the right one")).status_code == 422
        assert (await _change(browser)).status_code == 422  # locked for 30 seconds, for the correct one too
        clock.step(30)
        assert (await _change(browser)).status_code == 303
        statuses = [(await _change(browser, current="not the right one")).status_code for _ in range(11)]
        assert statuses == [422] * 4 + [429] * 7  # six failures of the same minute count, too


async def test_a_server_without_passwords_offers_and_accepts_no_change(serve_sqlite: Serve) -> None:
    async with serve_sqlite() as browser:
        await browser.create_user()
        await browser.sign_in()
        [token] = set(re.findall(r'name="_token" value="(\w+)"', (await browser.get("/ui/account")).text))
        browser.app.settings = replace(browser.app.settings, password_sign_in=False)
        assert "/ui/account/password" not in (await browser.get("/ui/account")).text
        form = {"_token": token, "password": PASSWORD, "new_password": NEW_PASSWORD, "repeated_password": NEW_PASSWORD}
        refused = await browser.post_form("/ui/account/password", form)
        assert (refused.status_code, "PASSWORDS_DISABLED" in refused.text) == (422, True)
