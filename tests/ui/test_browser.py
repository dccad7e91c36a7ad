"""The pages in a real browser: clean for axe and the console, live, by keyboard, without JavaScript, on a phone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Page, Route, TimeoutError, expect

from timebell.testing.fcm import FakeFcm

from . import chromium as browsers
from .browsing import COOKIE, PASSWORD
from .chromium import AXE, Served, window

PARTS = ("preview", "triggered", "sending", "deadtopic")
OVERFLOW = "() => document.documentElement.scrollWidth"
TABLES = "() => [...document.querySelectorAll('.tw')].map((of) => [of.scrollWidth, of.clientWidth])"
FOLDED = {
    "schedules", "schedule", "jobs", "dead", "deadgroup", "campaigns", "triggers", "tenants", "nodes", "audit",
    "targets", "people", "left", "trigger instep",
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, phones: FakeFcm) -> Iterator[Served]:
    path: Path = tmp_path_factory.mktemp("browser")
    with browsers.serving(f"sqlite:///{path}/timebell.db") as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browsers.chromium() as browser:
        yield browser


def _look(chromium: Chromium, served: Served, theme: str, pages: dict[str, str]) -> None:
    script, found = browsers.axe(), {}
    with window(chromium, served.url, color_scheme=theme) as seen:
        for name, path in pages.items():
            page = seen.go(path)
            if name == "overview":
                page.locator("#runs svg").wait_for()
                expect(page.locator("[data-live]")).to_have_text("Live")
            seen.shoot(f"{name}-{theme}")
        assert not [line for line in seen.said if "nowhere" not in pages or "404" not in line]
        assert not [url for url in seen.asked if not url.startswith((served.url, "data:"))]  # S66
    with window(chromium, served.url, color_scheme=theme, bypass_csp=True) as seen:  # axe is a script from elsewhere
        for name, path in pages.items():
            page = seen.go(path)
            page.evaluate(script)
            if violations := page.evaluate(AXE):
                found[name] = violations
    assert not found


def _whole(served: Served) -> dict[str, str]:
    return {name: path for name, path in served.pages.items() if name not in PARTS} | {
        "sign-in": "/ui/sign-in", "nowhere": "/ui/nowhere", "empty": "/ui/schedules?q=zzz",
    }  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_main_pages_are_clean(chromium: Chromium, served: Served, theme: str) -> None:
    pages = _whole(served)
    first = ("overview", "schedule", "jobs", "audit", "campaign", "triggers")
    second = ("overview", "schedules", "new", "job", "dead", "nodes", "campaigns", "trigger locked")
    _look(chromium, served, theme, {name: pages[name] for name in (first if theme == "dark" else second)})


def test_s66_no_page_asks_another_origin_for_anything(chromium: Chromium, served: Served) -> None:
    with window(chromium, served.url) as seen:
        for name in ("overview", "campaign", "trigger locked", "job"):
            seen.go(served.pages[name]).wait_for_load_state("load")
        seen.go("/ui/sign-in").wait_for_load_state("load")
        assert len(seen.asked) > 10
        assert not [url for url in seen.asked if not url.startswith((served.url, "data:"))]


def test_several_schedules_are_chosen_and_a_campaign_goes_on_by_itself(chromium: Chromium, served: Served) -> None:
    with window(chromium, served.url) as seen:
        page = seen.go("/ui/schedules?q=paused")
        page.get_by_label("Choose all").check()
        page.get_by_role("button", name="Resume…").click()
        page.get_by_role("button", name="Resume 1 schedule").click()
        expect(page.get_by_role("status")).to_contain_text("Resumed.")
        page = seen.go("/ui/schedules?q=paused")
        page.get_by_label("Choose paused one").check()
        page.get_by_role("button", name="Pause…").click()
        page.get_by_label("Why").fill("by night")
        page.get_by_role("button", name="Pause 1 schedule").click()
        expect(page.locator("main")).to_contain_text("by night")
        body = {"title": "Hello", "body": "You", "chunkSize": 2, "chunkDelayMs": 1500, "name": "by itself"}
        made = served.run(served.browser.web.post("/api/v1/campaigns", body)).json()
        page = seen.go(f"/ui/campaigns/{made['id']}")
        expect(page.locator("#timetable")).to_contain_text("registered now")
        expect(page.locator("#far")).to_contain_text("6 of 6 devices")
        assert not seen.said


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_is_clean(chromium: Chromium, served: Served, theme: str) -> None:
    _look(chromium, served, theme, _whole(served))


def _follows(page: Page, served: Served) -> bool:
    """Whether a job that runs is on the page within two seconds."""
    tile = page.locator("#tiles .tile").nth(1)
    before = tile.inner_text()
    served.run(served.app.schedule_at("tea.ready", timezone="UTC"))
    with contextlib.suppress(AssertionError):
        expect(tile).not_to_have_text(before, timeout=2500, use_inner_text=True)
        return True
    return False


def test_tiles_are_live_within_two_seconds_and_focus_stays(chromium: Chromium, served: Served) -> None:
    with window(chromium, served.url) as seen:
        page = seen.go("/ui/")
        expect(page.locator("[data-live]")).to_have_text("Live")
        page.locator("#tiles a").first.focus()
        assert any(_follows(page, served) for _ in range(5))  # the machine may have been busy with something else
        assert page.evaluate("() => document.activeElement.closest('#tiles') !== null")
        assert not seen.said


def test_tiles_are_live_also_where_the_last_script_comes_late(chromium: Chromium, served: Served) -> None:
    with window(chromium, served.url) as seen:
        page, held = seen.page, list[Route]()

        def hold(route: Route) -> None:
            held.append(route)

        page.route("**/hx-sse.min.js*", hold)
        page.goto(f"{served.url}/ui/", wait_until="commit")
        page.wait_for_function("() => window.htmx && document.querySelector('#tiles')")
        page.evaluate("() => new Promise((done) => setTimeout(() => setTimeout(done)))")  # who waited its turn had it
        held[0].continue_()
        expect(page.locator("[data-live]")).to_have_text("Live")


def test_a_lost_connection_is_told_with_the_age_of_what_is_shown(
    chromium: Chromium, tmp_path: Path, phones: FakeFcm
) -> None:
    with browsers.serving(f"sqlite:///{tmp_path}/timebell.db") as short, window(chromium, short.url) as seen:
        page = seen.go("/ui/")
        expect(page.locator("[data-live]")).to_have_text("Live")
        short.stop()
        expect(page.locator("[data-live]")).to_contain_text(re.compile(r"Reconnecting, data from \d+:\d\d:\d\d"))
        assert page.locator("#tiles .tile").count() == 6  # what was shown stays


def test_a_schedule_is_made_with_a_live_preview(chromium: Chromium, served: Served) -> None:
    with window(chromium, served.url) as seen:
        page = seen.go("/ui/schedules/new")
        preview = page.locator("#preview")
        expect(page.locator("#timezone")).to_have_value("UTC")  # the zone of the browser is known from its next page
        page.locator("#timezone").fill("America/New_York")
        expect(preview).to_contain_text("does not exist")
        page.locator("#when").fill("0 9 * * 1-5")
        expect(preview.locator("h2")).to_contain_text("09:00")
        expect(preview).not_to_contain_text("does not exist")
        page.locator("#when").fill("61 * * * *")
        expect(preview.get_by_role("alert")).to_be_visible()
        page.locator("#when").fill("0 9 * * *")
        page.locator("#timezone").fill("EST")
        expect(preview).to_contain_text("America/New_York")
        page.locator("#timezone").fill("Europe/Pariss")
        expect(preview).to_contain_text("Europe/Paris")
        seen.shoot("new-error")
        page.locator("#timezone").fill("Europe/Paris")
        page.locator("#name").fill("made-here")
        page.locator("#topic").fill("tea.ready")
        page.get_by_role("button", name="Create schedule").click()
        expect(page.get_by_role("status")).to_contain_text("Created.")
        expect(page.locator("h1")).to_contain_text("made-here")
        page.locator("input[name=reason]").fill("at night")
        page.get_by_role("button", name="Pause", exact=True).click()
        expect(page.locator("main")).to_contain_text("at night")
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("status")).to_contain_text("Resumed.")
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Fire now").click()
        expect(page.get_by_role("status")).to_contain_text("Fired once")
        assert not seen.said


def test_keys_and_search(chromium: Chromium, served: Served) -> None:
    with window(chromium, served.url) as seen:
        page = seen.go("/ui/schedules")
        page.keyboard.press("j")
        page.keyboard.press("j")
        assert page.evaluate("() => document.activeElement.matches('[data-row] a.main')")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/ui/schedules/[0-9a-f-]+$"))
        for _ in range(5):  # one soon after the other, which a busy machine may not manage
            page.keyboard.press("g")
            page.keyboard.press("j")
            with contextlib.suppress(TimeoutError):
                page.wait_for_url("**/ui/jobs", timeout=3000)
                break
        expect(page).to_have_url(re.compile("/ui/jobs$"))
        page.keyboard.press("Control+k")
        page.keyboard.type("paused")
        page.locator("#hits a", has_text="paused one").wait_for()
        seen.shoot("search")
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        expect(page.locator("#keys")).to_be_visible()
        assert not seen.said


def test_a_filter_is_in_the_address_and_keeps_its_text(chromium: Chromium, served: Served) -> None:
    with window(chromium, served.url) as seen:
        page = seen.go("/ui/schedules")
        page.keyboard.press("/")
        page.keyboard.type("paused")
        expect(page.locator("[data-row]")).to_have_count(1)
        page.wait_for_url(re.compile("q=paused"))
        assert page.evaluate("() => document.activeElement.value") == "paused"
        page.keyboard.type("zzz")
        page.locator(".empty").wait_for()
        assert not seen.said


def test_reading_and_pressing_works_without_javascript(chromium: Chromium, served: Served) -> None:
    with window(chromium, served.url, java_script_enabled=False) as seen:
        page = seen.go("/ui/schedules?q=paused")
        assert page.locator("[data-row]").count() == 1
        page.locator("[data-row] a.main").click()
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("status")).to_contain_text("Resumed.")
        page.locator("input[name=reason]").fill("again")
        page.get_by_role("button", name="Pause", exact=True).click()
        expect(page.locator("main")).to_contain_text("again")
        page = seen.go("/ui/schedules/new?kind=cron&when=30+2+*+*+*&timezone=America/New_York")
        assert "does not exist" in page.locator("#preview").inner_text()
        page.get_by_role("button", name="UTC").click()
        page.wait_for_load_state()
        page = seen.go("/ui/")
        page.get_by_role("link", name="Show the chart").click()
        expect(page.locator("svg[role=img]")).to_have_count(1)


def test_nothing_is_wider_than_a_phone(chromium: Chromium, served: Served) -> None:
    with window(chromium, served.url, viewport={"width": 390, "height": 844}) as seen:
        wide: dict[str, Any] = {}
        for name, path in _whole(served).items():
            page = seen.go(path)
            if (width := page.evaluate(OVERFLOW)) > 391:
                wide[name] = width
            boxes = page.evaluate(TABLES) if name in FOLDED else []  # what is folded has nothing beyond the edge
            if any(box[0] > box[1] for box in boxes):
                wide[name] = boxes
        seen.go("/ui/")
        seen.shoot("phone")
        assert not wide


def test_signing_in_and_times_of_the_reader(chromium: Chromium, served: Served) -> None:
    served.run(served.browser.user("dana", "operator"))
    with window(chromium, served.url) as seen:
        page = seen.go("/ui/sign-in?next=/ui/schedules")
        page.get_by_label("Name").fill("dana")
        page.get_by_label("Password").fill("wrong wrong wrong")
        page.get_by_role("button", name="Sign in", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("open nothing")
        page.get_by_label("Name").fill("dana")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Sign in", exact=True).click()
        page.wait_for_url("**/ui/schedules")
        (cookie,) = [one for one in page.context.cookies() if one["name"] == COOKIE]
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Lax")
        assert page.get_by_role("link", name="New schedule").count() == 0
        page = seen.go("/ui/schedules?q=paused")
        page.get_by_role("button", name="My zone").click()
        page.wait_for_load_state()
        page.locator("[data-row] a.main").click()
        expect(page.locator("main")).to_contain_text("KST")
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/ui/sign-in")
        assert [line for line in seen.said if "401" not in line] == []


def test_a_page_that_asks_again_keeps_what_it_has_when_the_server_does_not_answer(
    chromium: Chromium, served: Served
) -> None:
    made = served.run(served.browser.web.post("/api/v1/campaigns", {"title": "Later", "sendAt": "2040-01-01T00:00Z"}))
    with window(chromium, served.url) as seen:
        page = seen.go(f"/ui/campaigns/{made.json()['id']}")
        live = page.locator("[data-live]")
        expect(live).to_have_text("Live", timeout=20_000)
        page.route("**/ui/campaigns/*", lambda route: route.fulfill(status=503, body="<b>nothing</b>"))
        expect(live).to_contain_text("Reconnecting, data from", timeout=20_000)
        expect(page.locator("#far")).to_contain_text("devices")
        page.unroute("**/ui/campaigns/*")
        expect(live).to_have_text("Live", timeout=20_000)
