"""A real browser, a real server on a free port, and axe: what the tests of `test_browser.py` stand on.

Chromium is Debian's; axe-core and what the pages need come from npm by the exact versions of package-lock.json, into
ignored folders.
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
from tests.queue_servers import install
from timebell import Timebell
from timebell.api import health, server, v1
from timebell.dashboard import site

from .browsing import Browser
from .stock import app_of, stock

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"
SCREENS = CACHE / "screens"
PATIENCE = 60.0  # seconds for what a page shows: the machine is busy
expect.set_options(timeout=1000 * PATIENCE)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]  # fmt: skip
Fill = Callable[[Timebell, Browser], Awaitable[dict[str, str]]]
STANDARDS = "['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']"
AXE = f"""async () => (await axe.run(document, {{runOnly: {STANDARDS}}})).violations.map((found) =>
  [found.id, found.impact, found.nodes.length, found.nodes[0].html.slice(0, 200),
   (found.nodes[0].any[0] || {{}}).message || ""])"""


@dataclass
class Served:
    """A server that runs in a thread of its own."""

    app: Timebell
    url: str
    pages: dict[str, str]
    browser: Browser
    loop: asyncio.AbstractEventLoop
    over: asyncio.Event

    def stop(self) -> None:
        """End it, as a restart or a crash would."""
        self.loop.call_soon_threadsafe(self.over.set)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Something in its loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(3 * PATIENCE)


@contextmanager
def serving(database: str, fill: Fill = stock, *, works: bool = True) -> Iterator[Served]:
    """A filled app behind its pages, open to this machine; with an engine, or as it was filled."""
    bring()
    ready: list[Served] = []
    begun = threading.Event()
    failed: list[BaseException] = []

    async def main() -> None:
        app = app_of(database)
        lease = app.settings.scheduler_lease if works else 86_400.0  # nodes that nobody runs stay
        app.settings = replace(
            app.settings, secret_key=SECRET, database_auto_upgrade=True, scheduler_lease=lease
        )  # fmt: skip
        web = server.Site(app, [health.router(app), v1.routes, site.routes], open_here=True)
        listening = server.bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        over = asyncio.Event()
        async with (
            app.running() if works else nullcontext(),
            server.serving(web, listening),
            httpx2.AsyncClient(base_url=url, timeout=PATIENCE) as client,
        ):
            browser = Browser(app, client, web)
            ready.append(Served(app, url, await fill(app, browser), browser, asyncio.get_running_loop(), over))
            begun.set()
            await over.wait()
        await app.close()

    def whole() -> None:
        try:
            asyncio.run(main())
        except BaseException as broken:
            failed.append(broken)
            begun.set()

    thread = threading.Thread(target=whole)
    thread.start()
    assert begun.wait(3 * PATIENCE), "it does not begin"
    if failed:
        raise failed[0]
    try:
        yield ready[0]
    finally:
        if thread.is_alive():
            ready[0].stop()
        thread.join(PATIENCE)


def bring() -> None:
    """The files of the pages; skips loudly where npm gives nothing."""
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "web-assets.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        why_not = hatch_build.bring(ROOT)
    if why_not is not None:
        pytest.skip(f"SKIPPED: the files of the dashboard are missing: {why_not}")


def axe() -> str:
    """The script of axe-core, in the version that package-lock.json pins."""
    folder = CACHE / "axe"
    with open(CACHE / "web-assets.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = folder / "node_modules" / "axe-core" / "axe.min.js"
        pinned = (ROOT / "package-lock.json").read_bytes()
        kept = folder / "package-lock.json"
        if not script.exists() or kept.read_bytes() != pinned:
            folder.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / "package.json", folder / "package.json")
            kept.write_bytes(pinned)
            npm = hatch_build._npm()
            assert npm is not None
            command = [*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return script.read_text()


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Debian's Chromium."""
    if shutil.which("chromium") is None:
        install("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=FLAGS, timeout=3000 * PATIENCE
        )
        yield browser
        browser.close()


@dataclass
class Window:
    """A page of the browser that notes what its console said."""

    page: Page
    url: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda broken: self.said.append(f"error: {broken}"))

    def go(self, path: str) -> Page:
        """Open one of our pages."""
        self.page.goto(self.url + path)
        return self.page

    def shoot(self, name: str) -> None:
        """Keep how it looks."""
        SCREENS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(SCREENS / f"{name}.png"), full_page=True)


@contextmanager
def window(browser: Chromium, url: str, **options: Any) -> Iterator[Window]:
    """A fresh browser, without cookies."""
    context = browser.new_context(**{"viewport": {"width": 1360, "height": 900}, "timezone_id": "Asia/Seoul"} | options)
    context.set_default_timeout(1000 * PATIENCE)
    try:
        yield Window(context.new_page(), url)
    finally:
        context.close()
