"""`python -m tests.ui.screens [folder]`: pictures of every page, light and dark, desktop and phone."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page

from . import chromium as browsers
from .chromium import SCREENS, window
from .showcase import furnish

SIZES = {"": {"width": 1360, "height": 900}, "-phone": {"width": 390, "height": 844}}


def shoot(page: Page, folder: Path, name: str) -> int:
    """Four pictures of what is open; how many."""
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        for suffix, size in SIZES.items():
            page.set_viewport_size(size)
            page.screenshot(path=str(folder / f"{name}-{theme}{suffix}.png"), full_page=True)
    return 2 * len(SIZES)


def main(folder: Path) -> None:
    """Fill a store, serve its pages, and look at each."""
    folder.mkdir(parents=True, exist_ok=True)
    done = 0
    with (
        tempfile.TemporaryDirectory() as place,
        browsers.serving(f"sqlite:///{place}/timebell.db", furnish, works=False) as served,
        browsers.chromium() as browser,
        window(browser, served.url) as seen,
    ):
        for name, path in served.pages.items():
            page = seen.go(path)
            page.wait_for_load_state("load")
            if name == "overview":
                page.locator("#runs svg").wait_for()
                page.locator("[data-live]", has_text="Live").wait_for()
            if name.startswith("campaign") and page.locator("#timetable").count():
                page.locator("#timetable .hint").first.wait_for()
            done += shoot(page, folder, name)
        page = seen.go("/ui/jobs")
        page.keyboard.press("Control+k")
        page.keyboard.type("re")
        page.locator("#hits a").first.wait_for()
        done += shoot(page, folder, "palette")
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        done += shoot(page, folder, "keys")
    print(f"{done} pictures are in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SCREENS / "pages")
