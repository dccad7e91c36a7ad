"""Single sign-on in a real browser, with a certified provider and a node as separate processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Page, expect

from tests.brokers.node import binaries
from tests.servers import free_port
from tests.unit.cli.process import Process, until

from . import chromium as browsers
from .browser import PASSWORD
from .chromium import AXE, open_window

AUDIENCE = "https://timebell.example.com"
GROUPS = {"dana": ["timebell-admins"], "erik": ["people"], "timebell": ["acme-ops"]}
ROLE_MAP = "timebell-admins=admin, acme-ops=operator@acme"


@dataclass
class Installation:
    """A node and its provider."""

    url: str
    issuer: str
    provider: subprocess.Popen[str]
    folder: Path
    environment: dict[str, str]


@contextmanager
def running_provider(folder: Path, issuer: str, port: int, url: str, secret: str) -> Iterator[subprocess.Popen[str]]:
    """Run the certified provider with a client for a node at this URL."""
    (folder / "node_modules").symlink_to(browsers.install_node_modules())
    script = shutil.copy(Path(__file__).with_name("oidc_provider.mjs"), folder)
    client = {
        "client_id": "timebell", "client_secret": secret, "grant_types": ["authorization_code", "client_credentials"],
        "redirect_uris": [f"{url}/ui/sign-in/callback"], "post_logout_redirect_uris": [f"{url}/ui/sign-in"],
    }  # fmt: skip
    given = json.dumps({"client": client, "groups": GROUPS, "audience": AUDIENCE})
    with open(folder / "provider.log", "w") as log:
        process = subprocess.Popen(
            [binaries()[0], script, issuer, str(port), given], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline(), (folder / "provider.log").read_text()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    browsers.install_assets()
    node_port, provider_port = free_port(), free_port()
    # Two names of this machine: to the browser they are two sites, like those of a real installation.
    url, issuer = f"http://127.0.0.1:{node_port}", f"http://localhost:{provider_port}"
    environment = {
        "TIMEBELL_URL": url, "TIMEBELL_HTTP_PORT": str(node_port), "TIMEBELL_SECRET_KEY": "a secret key of the tests",
        "TIMEBELL_OIDC_ISSUER": issuer, "TIMEBELL_OIDC_CLIENT_ID": "timebell", "TIMEBELL_OIDC_CLIENT_SECRET": "s3cret",
        "TIMEBELL_OIDC_ROLE_MAP": ROLE_MAP, "TIMEBELL_OIDC_AUDIENCE": AUDIENCE,
    }  # fmt: skip
    with running_provider(tmp_path, issuer, provider_port, url, "s3cret") as provider:
        node = Process(tmp_path, ["run"], environment)
        try:
            until(lambda: _is_ready(url) or None, node.err.read_text)
            yield Installation(url, issuer, provider, tmp_path, environment)
        finally:
            node.kill()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browsers.chromium() as browser:
        yield browser


def test_single_sign_on_from_link_to_sign_out(chromium: Chromium, installation: Installation) -> None:
    with open_window(chromium, installation.url) as window:
        page = window.open("/ui/jobs?q=status%3Afailed")  # leads to the sign-in page, and back here in the end
        page.get_by_role("link", name="Sign in at localhost").click()
        sign_in_at_provider(page, "dana")
        page.wait_for_url(f"{installation.url}/ui/jobs?q=status%3Afailed")
        expect(page.get_by_role("link", name="dana@example.com, admin")).to_be_visible()
        names = {cookie["name"] for cookie in page.context.cookies(installation.url)}
        assert "__Host-timebell" in names
        assert "__Host-timebell-sign-in" not in names
        history = page.evaluate("performance.getEntriesByType('navigation').map((each) => each.name)")
        assert not [url for url in history if "code=" in url]
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("button", name="Yes, sign me out").click()
        page.wait_for_url(f"{installation.url}/ui/sign-in*")
        page.get_by_role("link", name="Sign in at localhost").click()
        expect(page.get_by_placeholder("Enter any login")).to_be_visible()  # the provider's session has ended, too
        page.go_back()
        page.goto(f"{installation.url}/ui/jobs")
        page.wait_for_url(f"{installation.url}/ui/sign-in?*")
        assert not [line for line in window.messages if "Content Security Policy" in line]


@pytest.mark.slow
def test_a_user_without_a_role_gets_an_explanation(chromium: Chromium, installation: Installation) -> None:
    with open_window(chromium, installation.url, bypass_csp=True) as window:
        page = window.open("/ui/sign-in")
        page.evaluate(browsers.load_axe())
        assert page.evaluate(AXE) == []
        page.get_by_role("link", name="Sign in at localhost").click()
        sign_in_at_provider(page, "erik")
        expect(page.get_by_role("alert")).to_contain_text("erik@example.com has no role here")
        expect(page.get_by_role("alert")).to_contain_text("people")
        window.save_screenshot("sign-in-without-role")
        assert "__Host-timebell" not in {cookie["name"] for cookie in page.context.cookies(installation.url)}


@pytest.mark.slow
def test_a_user_who_cancels_returns_to_the_sign_in_page(chromium: Chromium, installation: Installation) -> None:
    with open_window(chromium, installation.url) as window:
        page = window.open("/ui/sign-in")
        page.get_by_role("link", name="Sign in at localhost").click()
        page.get_by_role("link", name="Cancel").click()
        expect(page.get_by_role("alert")).to_contain_text("did not confirm this sign-in")
        expect(page.get_by_role("link", name="Sign in at localhost")).to_be_visible()


@pytest.mark.slow
def test_while_the_provider_is_down_the_page_says_so_and_accepts_passwords(
    chromium: Chromium, installation: Installation
) -> None:
    installation.provider.kill()
    installation.provider.wait()
    command = [sys.executable, "-m", "timebell.cli.main", "user", "create", "root", "--role", "admin"]
    environment = {**os.environ, **installation.environment}
    subprocess.run(command, input=PASSWORD, text=True, check=True, cwd=installation.folder, env=environment)
    with open_window(chromium, installation.url) as window:
        page = window.open("/ui/sign-in?next=%2Fui%2Fjobs")
        page.get_by_role("link", name="Sign in at localhost").click()
        expect(page.get_by_role("alert")).to_contain_text("The identity provider does not answer")
        page.get_by_label("Name").fill("root")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Sign in", exact=True).click()
        page.wait_for_url(f"{installation.url}/ui/jobs")


def test_an_access_token_of_the_provider_calls_the_api(installation: Installation) -> None:
    form = f"grant_type=client_credentials&resource={AUDIENCE}"
    token = json.loads(_fetch(f"{installation.issuer}/token", "Basic dGltZWJlbGw6czNjcmV0", form.encode())[1])
    status, body = _fetch(f"{installation.url}/api/v1/jobs", f"Bearer {token['access_token']}")
    assert (status, json.loads(body)["items"]) == (200, [])
    assert _fetch(f"{installation.url}/api/v1/tenants", f"Bearer {token['access_token']}")[0] == 403
    assert _fetch(f"{installation.url}/api/v1/jobs", f"Bearer {token['access_token'][:-4]}AAAA")[0] == 401


def sign_in_at_provider(page: Page, login: str) -> None:
    """Sign in on the provider's page, and consent."""
    fill_in(page, login)
    page.get_by_role("button", name="Continue").click()


def fill_in(page: Page, login: str) -> None:
    """Sign in on the provider's page, up to its question for consent."""
    page.get_by_placeholder("Enter any login").fill(login)
    page.get_by_placeholder("and password").fill("any")
    page.get_by_role("button", name="Sign-in").click()


def _is_ready(url: str) -> bool:
    try:
        return _fetch(f"{url}/readyz", "")[0] == 200
    except OSError:
        return False


def _fetch(url: str, authorization: str, body: bytes | None = None) -> tuple[int, bytes]:
    request = urllib.request.Request(url, body, {"Authorization": authorization})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
