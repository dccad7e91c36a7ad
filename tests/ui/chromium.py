"""A real browser, a real server on a free port, and packages of npm, for the tests in Chromium.

Chromium comes from Debian; axe-core, oidc-provider and the assets of the pages come from npm in the exact versions of
package-lock.json, and are stored in ignored folders.
"""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import subprocess
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Page, expect, sync_playwright

import hatch_build
from tests.api.web import SECRET
from tests.debian_packages import install
from timebell import Timebell
from timebell.api import health, server, v1
from timebell.dashboard import site

from .browser import Browser
from .hostile_data import fill_store, hostile_app

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"
SCREENS = CACHE / "screens"
TIMEOUT_SECONDS = 60.0  # for content to appear on a page; the machine may be busy
expect.set_options(timeout=1000 * TIMEOUT_SECONDS)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]  # fmt: skip
Fill = Callable[[Timebell, Browser], Awaitable[dict[str, str]]]
STANDARDS = "['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']"
AXE = f"""async () => (await axe.run(document, {{runOnly: {STANDARDS}}})).violations.map((violation) =>
  [violation.id, violation.impact, violation.nodes.length, violation.nodes[0].html.slice(0, 200),
   (violation.nodes[0].any[0] || {{}}).message || ""])"""


@dataclass
class Served:
    """Server that runs in its own thread."""

    app: Timebell
    url: str
    pages: dict[str, str]
    browser: Browser
    loop: asyncio.AbstractEventLoop
    stopping: asyncio.Event

    def stop(self) -> None:
        """Stop the server, like a restart or a crash."""
        self.loop.call_soon_threadsafe(self.stopping.set)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the event loop of the server."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(3 * TIMEOUT_SECONDS)


@contextmanager
def serve_in_thread(
    database: str,
    fill: Fill = fill_store,
    *,
    run_engine: bool = True,
    create_app: Callable[[str], Timebell] = hostile_app,
) -> Iterator[Served]:
    """Fill an app and serve its pages to local requests; without `run_engine` the data stays as it was filled."""
    install_assets()
    ready: list[Served] = []
    started = threading.Event()
    errors: list[BaseException] = []

    async def main() -> None:
        app = create_app(database)
        # Without an engine, the nodes of the sample data must not expire.
        lease = app.settings.scheduler_lease if run_engine else 86_400.0
        app.settings = replace(
            app.settings, secret_key=SECRET, database_auto_upgrade=True, scheduler_lease=lease
        )  # fmt: skip
        web = server.HttpApp(
            app, [health.router(app), v1.build_routes(app.features), site.build_routes(app.features)], allow_local=True
        )
        listening = server.bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        stopping = asyncio.Event()
        async with (
            app.running() if run_engine else nullcontext(),
            server.serving(web, listening),
            httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS) as client,
        ):
            browser = Browser(app, client, web)
            ready.append(Served(app, url, await fill(app, browser), browser, asyncio.get_running_loop(), stopping))
            started.set()
            await stopping.wait()
        await app.close()

    def run_server() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(error)
            started.set()

    thread = threading.Thread(target=run_server)
    thread.start()
    assert started.wait(3 * TIMEOUT_SECONDS), "the server did not start"
    if errors:
        raise errors[0]
    try:
        yield ready[0]
    finally:
        if thread.is_alive():
            ready[0].stop()
        thread.join(TIMEOUT_SECONDS)


def install_assets() -> None:
    """Install the assets of the pages; skip the test if npm cannot provide them."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "web-assets.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reason = hatch_build.install_assets(ROOT)
    if reason is not None:
        pytest.skip(f"SKIPPED: the files of the dashboard are missing: {reason}")


def load_axe() -> str:
    """Return the script of axe-core."""
    return (install_node_modules() / "axe-core" / "axe.min.js").read_text()


def install_node_modules() -> Path:
    """Return the folder with all npm packages in the versions that package-lock.json pins."""
    folder, complete = CACHE / "npm", CACHE / "npm" / "complete"
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "web-assets.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pinned = (ROOT / "package-lock.json").read_bytes()
        installed_lock = folder / "package-lock.json"
        if not complete.exists() or installed_lock.read_bytes() != pinned:
            folder.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / "package.json", folder / "package.json")
            installed_lock.write_bytes(pinned)
            npm = hatch_build.npm_command()
            assert npm is not None
            command = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            complete.unlink(missing_ok=True)
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            complete.touch()
    return folder / "node_modules"


@contextmanager
def chromium(*flags: str) -> Iterator[Chromium]:
    """Start the Chromium of Debian."""
    if shutil.which("chromium") is None:
        install("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=[*FLAGS, *flags], timeout=3000 * TIMEOUT_SECONDS
        )
        yield browser
        browser.close()


@dataclass
class Window:
    """Page of the browser that records its console messages and requests."""

    page: Page
    url: str
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))

    def open(self, path: str, status: int | None = None) -> Page:
        """Open a page of the dashboard; with `status`, assert that of its response."""
        response = self.page.goto(self.url + path)
        assert response is not None
        assert status in (None, response.status), f"{path} answers {response.status}"
        return self.page

    def save_screenshot(self, name: str) -> None:
        """Save a picture of the whole page."""
        SCREENS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(SCREENS / f"{name}.png"), full_page=True)


@contextmanager
def open_window(browser: Chromium, url: str, **options: Any) -> Iterator[Window]:
    """Open a page in a new browser context without cookies."""
    context = browser.new_context(**{"viewport": {"width": 1360, "height": 900}, "timezone_id": "Asia/Seoul"} | options)
    context.set_default_timeout(1000 * TIMEOUT_SECONDS)
    try:
        yield Window(context.new_page(), url)
    finally:
        context.close()
