"""Take the screenshots of the documentation: `python -m scripts.pictures`.

Those of the README show the sample data of `make screens`, those of the tutorial the real shop after its steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from scripts.recording import free_port
from tests.ui.chromium import chromium, open_window, serve_in_thread
from tests.ui.showcase import fill_showcase

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "img"
SIZE, TIMEOUT_SECONDS = {"width": 1360, "height": 850}, 180


def main() -> None:
    """Take all pictures."""
    with chromium() as browser:
        take_overview(browser)
        take_tutorial(browser)


def take_overview(browser: Browser) -> None:
    """Save the overview of the sample data in the light and the dark theme."""
    with (
        tempfile.TemporaryDirectory() as directory,
        serve_in_thread(f"sqlite:///{directory}/timebell.db", fill_showcase, run_engine=False) as served,
        open_window(browser, served.url, viewport=SIZE) as window,
    ):
        page = window.open(served.pages["overview"])
        page.locator("#runs svg").wait_for()
        page.locator("[data-live]", has_text="Live").wait_for()
        for theme, name in (("light", "dashboard"), ("dark", "dashboard-dark")):
            page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            page.screenshot(path=FOLDER / f"{name}.png")


def take_tutorial(browser: Browser) -> None:
    """Run the steps of the tutorial, and save the pages of the dashboard that it shows."""
    shop, warehouse, node = (f"http://127.0.0.1:{free_port()}" for _ in range(3))
    variables = {
        "TIMEBELL_DATABASE_URL": "sqlite:///shop.db", "TIMEBELL_HTTP_PORT": node.rpartition(":")[2],
        "TIMEBELL_WEBHOOK_SIGNING_SECRET": "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz",
        "TIMEBELL_WEBHOOK_ALLOW_PRIVATE": "true", "WAREHOUSE_URL": f"{warehouse}/parcels",
    }  # fmt: skip
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        subprocess.run(["cp", "-r", ROOT / "examples" / "shop", folder], check=True)

        def start(*command: str) -> None:
            stack.enter_context(running(Path(folder, "shop"), variables, *command))

        start("uvicorn", "shop.web:web", "--port", shop.rpartition(":")[2])
        until(lambda: request("GET", f"{shop}/openapi.json"))
        start("timebell.cli.main", "dev", "dev.py")
        until(lambda: request("GET", f"{node}/readyz"))
        for number, customer in enumerate(("ana", "bo", "cem"), 1):
            request("POST", f"{shop}/orders", {"customer": customer, "deliver_at": f"2040-03-0{number}T16:00"})
            phone = {"token": f"phone-of-{customer}", "customer": customer, "marketing": True}
            request("PUT", f"{shop}/phones", phone)
        (report,) = request("GET", f"{node}/api/v1/schedules")["items"]
        run = request("POST", f"{node}/api/v1/schedules/{report['id']}/trigger")
        until(lambda: request("GET", f"{node}/api/v1/jobs/{run['id']}")["status"] == "completed")
        window = stack.enter_context(open_window(browser, node, viewport=SIZE, timezone_id="Europe/Berlin"))

        def save(path: str, name: str) -> None:
            page = window.open(path)
            page.wait_for_load_state("load")
            if name == "overview":
                page.locator("#runs svg").wait_for()
            page.emulate_media(color_scheme="light", reduced_motion="reduce")
            page.screenshot(path=FOLDER / f"tutorial-{name}.png")

        save("/ui/", "overview")
        parcel = request("POST", f"{shop}/orders/1/pay")["parcel"]
        until(lambda: request("GET", f"{node}/api/v1/jobs/{parcel}")["attempts"])
        start("uvicorn", "shop.warehouse:web", "--port", warehouse.rpartition(":")[2])
        until(lambda: request("GET", f"{node}/api/v1/jobs/{parcel}")["status"] == "completed")
        save(f"/ui/jobs/{parcel}", "job")
        campaign = request("POST", f"{shop}/sales", {"title": "Spring sale", "body": "Cups are cheap"})["campaign"]
        until(lambda: request("GET", f"{node}/api/v1/campaigns/{campaign}")["state"] == "completed")
        save(f"/ui/campaigns/{campaign}", "campaign")


@contextmanager
def running(folder: Path, variables: dict[str, str], *command: str) -> Iterator[None]:
    """Run a module in a folder for the length of the block."""
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, env={**os.environ, **variables})  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)


def request(method: str, url: str, body: Any = None) -> Any:
    """Send a JSON request and return the response, or None if there is none."""
    data = None if body is None else json.dumps(body).encode()
    message = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(message, timeout=TIMEOUT_SECONDS) as response:
        text = response.read()
    return json.loads(text) if text.startswith((b"{", b"[")) else text


def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds; a server that does not answer yet does not fulfil it."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while True:
        try:
            if condition():
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)


if __name__ == "__main__":
    main()
