"""`python -m tests.ui.screens [folder]`: take screenshots of every page, light and dark, desktop and phone."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page

from . import chromium as browsers
from .chromium import SCREENS, open_window
from .showcase import fill_showcase

EXPECTED_PROBLEMS = ("not-there",)
SIZES = {"": {"width": 1360, "height": 900}, "-phone": {"width": 390, "height": 844}}


def take_screenshots(page: Page, folder: Path, name: str) -> int:
    """Save the open page in both themes and sizes; return the number of pictures."""
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        for suffix, size in SIZES.items():
            page.set_viewport_size(size)
            page.screenshot(path=str(folder / f"{name}-{theme}{suffix}.png"), full_page=True)
    return 2 * len(SIZES)


def main(folder: Path) -> None:
    """Fill a store, serve its pages, and take pictures of each."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with (
        tempfile.TemporaryDirectory() as directory,
        browsers.serve_in_thread(f"sqlite:///{directory}/timebell.db", fill_showcase, run_engine=False) as served,
        browsers.chromium() as browser,
        open_window(browser, served.url) as window,
    ):
        for name, path in served.pages.items():
            page = window.open(path, status=None if name in EXPECTED_PROBLEMS else 200)
            page.wait_for_load_state("load")
            if name == "overview":
                page.locator("#runs svg").wait_for()
                page.locator("[data-live]", has_text="Live").wait_for()
            if name.startswith("campaign") and page.locator("#timetable").count():
                page.locator("#timetable .hint").first.wait_for()
            count += take_screenshots(page, folder, name)
        page = window.open("/ui/jobs")
        page.keyboard.press("Control+k")
        page.keyboard.type("re")
        page.locator("#hits a").first.wait_for()
        count += take_screenshots(page, folder, "palette")
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        count += take_screenshots(page, folder, "keys")
    print(f"{count} pictures are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SCREENS / "pages")
