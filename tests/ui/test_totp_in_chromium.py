"""Two-factor authentication in a real browser, from the set-up until it is turned off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Page, expect

from tests.rotation import rotated
from timebell.tenancy import totp
from timebell_fcm_emulator import FakeFcm

from . import chromium as browsers
from .browser import PASSWORD
from .chromium import AXE, Served, Window, open_window
from .screens import SIZES

OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
Look = Callable[[str], None]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, phones: FakeFcm) -> Iterator[Served]:
    path: Path = tmp_path_factory.mktemp("totp")
    with browsers.serve_in_thread(f"sqlite:///{path}/timebell.db") as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browsers.chromium() as browser:
        yield browser


@pytest.mark.parametrize("theme", rotated(["light", "dark"], ["dark"]))
def test_pages_have_no_console_messages_and_fit_on_a_phone(chromium: Chromium, served: Served, theme: str) -> None:
    overflows: dict[str, int] = {}
    with open_window(chromium, served.url, color_scheme=theme) as window:

        def look(name: str) -> None:
            for suffix, size in SIZES.items():
                window.page.set_viewport_size(size)
                window.save_screenshot(f"totp-{name}-{theme}{suffix}")
                if overflow := window.page.evaluate(OVERFLOW):
                    overflows[name + suffix] = overflow
            window.page.set_viewport_size(SIZES[""])

        _use_second_step(window, served, f"dana-{theme}", look)
        # The browser reports the status of the pages that refuse a wrong code.
        assert [line for line in window.messages if "status of 401" not in line and "status of 422" not in line] == []
    assert not overflows


@pytest.mark.parametrize("theme", rotated(["light", "dark"], ["light"]))
def test_pages_have_no_accessibility_violations(chromium: Chromium, served: Served, theme: str) -> None:
    script, violations = browsers.load_axe(), dict[str, Any]()
    with open_window(chromium, served.url, color_scheme=theme, bypass_csp=True) as window:

        def look(name: str) -> None:
            window.page.evaluate(script)
            if found := window.page.evaluate(AXE):
                violations[name] = found

        _use_second_step(window, served, f"erik-{theme}", look)
    assert not violations


def _use_second_step(window: Window, served: Served, user: str, look: Look) -> None:
    """Set up the second step, sign in with a code and with a recovery code, and turn it off; look at each page."""
    served.run(served.browser.create_user(user, "viewer"))
    page = window.page
    _sign_in(window, user)
    window.open("/ui/account")
    look("off")
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_role("button", name="Set up").click()
    expect(page.get_by_role("img", name="QR code of the secret below")).to_be_visible()
    look("set-up")
    secret = page.locator("dd.mono").inner_text().replace(" ", "")
    page.get_by_label("Code", exact=True).fill("000000")
    page.get_by_role("button", name="Turn on").click()
    expect(page.get_by_role("alert")).to_contain_text("Wrong code")
    look("set-up-wrong-code")
    page.get_by_label("Code", exact=True).fill(_code(secret, 0))
    page.get_by_role("button", name="Turn on").click()
    recovery_codes = page.get_by_label("Recovery codes").inner_text().split()
    assert len(recovery_codes) == totp.RECOVERY_CODE_COUNT
    look("recovery-codes")
    page.get_by_role("link", name="Done").click()
    expect(page.locator("main")).to_contain_text("10 recovery codes are left")
    look("on")

    _sign_out(page)
    window.open(f"/ui/users/{user}")  # a local request acts as an admin
    expect(page.get_by_role("button", name="Reset")).to_be_visible()
    look("user")
    _sign_in(window, user)
    expect(page.get_by_role("heading", name="Enter a code")).to_be_visible()
    assert page.evaluate("() => document.activeElement.id") == "code"
    look("sign-in")
    page.keyboard.type("000000\n")
    expect(page.get_by_role("alert")).to_be_visible()
    look("sign-in-wrong-code")
    page.get_by_label("Code of your authenticator app").fill(_code(secret, 1))  # each code is valid once
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.wait_for_url("**/ui/jobs")

    _sign_out(page)
    _sign_in(window, user)
    page.get_by_label("Code of your authenticator app").fill(recovery_codes[0])
    page.get_by_role("button", name="Sign in", exact=True).click()
    expect(page.get_by_role("status")).to_contain_text("cannot be used again")
    look("recovered")
    window.open("/ui/account")
    expect(page.locator("main")).to_contain_text("9 recovery codes are left")
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_label("Code", exact=True).fill(recovery_codes[1])
    page.get_by_role("button", name="Turn off").click()
    expect(page.get_by_role("button", name="Set up")).to_be_visible()
    look("turned-off")

    _sign_out(page)
    _sign_in(window, user)
    page.wait_for_url("**/ui/jobs")


def _sign_in(window: Window, user: str) -> None:
    """Enter name and password."""
    page = window.open("/ui/sign-in?next=/ui/jobs")
    page.get_by_label("Name").fill(user)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.wait_for_url(lambda url: not url.endswith("/ui/sign-in?next=/ui/jobs"))


def _sign_out(page: Page) -> None:
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/ui/sign-in")


def _code(secret: str, steps: int) -> str:
    """Return the code of the app, this number of steps of 30 seconds ahead."""
    return totp.generate_code(secret, totp.step_at(datetime.now(UTC)) + steps)
