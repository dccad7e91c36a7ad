"""Take the screenshots of the README: `python -m scripts.pictures`. They show the sample data of `make screens`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.ui.chromium import chromium, open_window, serve_in_thread
from tests.ui.showcase import fill_showcase

FOLDER = Path(__file__).parents[1] / "docs" / "img"
SIZE = {"width": 1360, "height": 850}


def main() -> None:
    """Save the overview in the light and the dark theme."""
    with (
        tempfile.TemporaryDirectory() as directory,
        serve_in_thread(f"sqlite:///{directory}/timebell.db", fill_showcase, run_engine=False) as served,
        chromium() as browser,
        open_window(browser, served.url, viewport=SIZE) as window,
    ):
        page = window.open(served.pages["overview"])
        page.locator("#runs svg").wait_for()
        page.locator("[data-live]", has_text="Live").wait_for()
        for theme, name in (("light", "dashboard"), ("dark", "dashboard-dark")):
            page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            page.screenshot(path=FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
