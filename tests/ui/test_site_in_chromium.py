"""Dashboard pages in a real browser: accessibility, live updates, keyboard, no JavaScript, phone width."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Page, Route, TimeoutError, expect

from tests.rotation import rotated
from timebell_fcm_emulator import FakeFcm

from . import chromium as browsers
from .browser import COOKIE, PASSWORD
from .chromium import AXE, Served, open_window

FRAGMENTS = ("preview", "triggered", "sending", "deadtopic")
OVERFLOW = "() => document.documentElement.scrollWidth"
TABLES = "() => [...document.querySelectorAll('.tw')].map((box) => [box.scrollWidth, box.clientWidth])"
FOLDED_TABLES = {  # pages whose tables become cards on a phone
    "schedules", "schedule", "jobs", "dead", "deadgroup", "campaigns", "triggers", "tenants", "nodes", "audit-log",
    "users", "keys",
    "targets", "people", "left", "trigger instep",
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, phones: FakeFcm) -> Iterator[Served]:
    path: Path = tmp_path_factory.mktemp("browser")
    with browsers.serve_in_thread(f"sqlite:///{path}/timebell.db") as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with browsers.chromium() as browser:
        yield browser


def _check_pages(chromium: Chromium, served: Served, theme: str, pages: dict[str, str]) -> None:
    """Assert that these pages have no console messages, foreign requests or accessibility violations."""
    script, violations_by_page = browsers.load_axe(), {}
    with open_window(chromium, served.url, color_scheme=theme) as window:
        for name, path in pages.items():
            page = window.open(path, status=404 if name == "nowhere" else 200)
            if name == "overview":
                page.locator("#runs svg").wait_for()
                expect(page.locator("[data-live]")).to_have_text("Live")
            window.save_screenshot(f"{name}-{theme}")
        assert not [line for line in window.messages if "nowhere" not in pages or "404" not in line]
        assert not [url for url in window.requests if not url.startswith((served.url, "data:"))]
    with open_window(chromium, served.url, color_scheme=theme, bypass_csp=True) as window:  # the policy would block axe
        for name, path in pages.items():
            page = window.open(path)
            page.evaluate(script)
            if violations := page.evaluate(AXE):
                violations_by_page[name] = violations
    assert not violations_by_page


def _all_pages(served: Served) -> dict[str, str]:
    """Return the paths of complete pages by name, without fragments."""
    return {name: path for name, path in served.pages.items() if name not in FRAGMENTS} | {
        "sign-in": "/ui/sign-in", "nowhere": "/ui/nowhere", "empty": "/ui/schedules?q=zzz",
    }  # fmt: skip


@pytest.mark.parametrize("theme", rotated(["light", "dark"], ["light"]))
def test_main_pages_have_no_accessibility_violations_or_console_messages(
    chromium: Chromium, served: Served, theme: str
) -> None:
    pages = _all_pages(served)
    dark_pages = ("overview", "schedule", "jobs", "audit-log", "campaign", "triggers")
    light_pages = ("overview", "schedules", "new", "job", "dead", "nodes", "campaigns", "trigger locked", "user")
    _check_pages(
        chromium, served, theme, {name: pages[name] for name in (dark_pages if theme == "dark" else light_pages)}
    )


def test_pages_with_long_paths_have_no_accessibility_violations_on_a_phone(chromium: Chromium, served: Served) -> None:
    script, phone = browsers.load_axe(), {"width": 390, "height": 844}
    with open_window(chromium, served.url, viewport=phone, bypass_csp=True) as window:
        for name in ("edit", "mend", "people", "stop"):
            page = window.open(served.pages[name])
            page.evaluate(script)
            assert not page.evaluate(AXE), name


def test_pages_request_nothing_from_other_origins(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url) as window:
        for name in ("overview", "campaign", "trigger locked", "job"):
            window.open(served.pages[name]).wait_for_load_state("load")
        window.open("/ui/sign-in").wait_for_load_state("load")
        assert len(window.requests) > 10
        assert not [url for url in window.requests if not url.startswith((served.url, "data:"))]


def test_selected_schedules_are_paused_and_a_campaign_page_updates_itself(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url) as window:
        page = window.open("/ui/schedules?q=paused")
        page.get_by_label("Select all").check()
        page.get_by_role("button", name="Resume…").click()
        page.get_by_role("button", name="Resume 1 schedule").click()
        expect(page.get_by_role("status")).to_contain_text("Resumed.")
        page = window.open("/ui/schedules?q=paused")
        page.get_by_label("Select paused one").check()
        page.get_by_role("button", name="Pause…").click()
        page.get_by_label("Reason").fill("night work")
        page.get_by_role("button", name="Pause 1 schedule").click()
        expect(page.locator("main")).to_contain_text("night work")
        body = {"title": "Hello", "body": "You", "chunkSize": 2, "chunkDelayMs": 1500, "name": "live progress"}
        created = served.run(served.browser.web.post("/api/v1/campaigns", body)).json()
        page = window.open(f"/ui/campaigns/{created['id']}")
        expect(page.locator("#timetable")).to_contain_text("registered now")
        expect(page.locator("#far")).to_contain_text("6 of 6 devices")
        assert not window.messages


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_pages_have_no_accessibility_violations_or_console_messages(
    chromium: Chromium, served: Served, theme: str
) -> None:
    _check_pages(chromium, served, theme, _all_pages(served))


def _tile_updates(page: Page, served: Served) -> bool:
    """Run a job; return whether its tile changes within two seconds."""
    tile = page.locator("#tiles .tile").nth(1)
    before = tile.inner_text()
    served.run(served.app.schedule_at("tea.ready", timezone="UTC"))
    with contextlib.suppress(AssertionError):
        expect(tile).not_to_have_text(before, timeout=2500, use_inner_text=True)
        return True
    return False


def test_tiles_update_within_two_seconds_and_keep_the_focus(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url) as window:
        page = window.open("/ui/")
        expect(page.locator("[data-live]")).to_have_text("Live")
        page.locator("#tiles a").first.focus()
        assert any(_tile_updates(page, served) for _ in range(5))  # the machine may be busy at times
        assert page.evaluate("() => document.activeElement.closest('#tiles') !== null")
        assert not window.messages


def test_live_updates_start_when_the_last_script_loads_late(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url) as window:
        page, held_routes = window.page, list[Route]()

        def hold(route: Route) -> None:
            held_routes.append(route)

        page.route("**/hx-sse.min.js*", hold)
        page.goto(f"{served.url}/ui/", wait_until="commit")
        page.wait_for_function("() => window.htmx && document.querySelector('#tiles')")
        page.evaluate(
            "() => new Promise((done) => setTimeout(() => setTimeout(done)))"
        )  # let all pending tasks of the page run
        held_routes[0].continue_()
        expect(page.locator("[data-live]")).to_have_text("Live")


def test_a_lost_connection_is_shown_with_the_age_of_the_data(
    chromium: Chromium, tmp_path: Path, phones: FakeFcm
) -> None:
    with (
        browsers.serve_in_thread(f"sqlite:///{tmp_path}/timebell.db") as server,
        open_window(chromium, server.url) as window,
    ):
        page = window.open("/ui/")
        expect(page.locator("[data-live]")).to_have_text("Live")
        server.stop()
        expect(page.locator("[data-live]")).to_contain_text(re.compile(r"Reconnecting, data from \d+:\d\d:\d\d"))
        assert page.locator("#tiles .tile").count() == 6  # the data stays visible


def test_a_schedule_is_created_with_a_live_preview(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url) as window:
        page = window.open("/ui/schedules/new")
        preview = page.locator("#preview")
        expect(page.locator("#timezone")).to_have_value(
            "UTC"
        )  # the server knows the zone of the browser from the next request on
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
        window.save_screenshot("new-error")
        page.locator("#timezone").fill("Europe/Paris")
        page.locator("#name").fill("made-here")
        page.locator("#topic").fill("tea.ready")
        page.get_by_role("button", name="Create schedule").click()
        expect(page.get_by_role("status")).to_contain_text("Created.")
        expect(page.locator("h1")).to_contain_text("made-here")
        page.get_by_text("Pause…", exact=True).click()
        page.get_by_label("Reason").fill("at night")
        page.get_by_role("button", name="Pause", exact=True).click()
        expect(page.locator("main")).to_contain_text("at night")
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("status")).to_contain_text("Resumed.")
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Trigger now").click()
        expect(page.get_by_role("status")).to_contain_text("Triggered once")
        assert not window.messages


def test_keyboard_shortcuts_and_search(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url) as window:
        page = window.open("/ui/schedules")
        page.keyboard.press("j")
        page.keyboard.press("j")
        assert page.evaluate("() => document.activeElement.matches('[data-row] a.main')")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/ui/schedules/[0-9a-f-]+$"))
        for _ in range(5):  # the keys must follow each other quickly, which may fail on a busy machine
            page.keyboard.press("g")
            page.keyboard.press("j")
            with contextlib.suppress(TimeoutError):
                page.wait_for_url("**/ui/jobs", timeout=3000)
                break
        expect(page).to_have_url(re.compile("/ui/jobs$"))
        page.keyboard.press("Control+k")
        page.keyboard.type("paused")
        page.locator("#hits a", has_text="paused one").wait_for()
        window.save_screenshot("search")
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        expect(page.locator("#keys")).to_be_visible()
        assert not window.messages


def test_the_search_is_operated_with_the_keyboard(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url) as window:
        page = window.open("/ui/")
        page.keyboard.press("Control+k")
        page.keyboard.type("paused")
        page.locator("#hits a", has_text="paused one").wait_for()
        for _ in range(12):  # the focus stays in the dialog
            page.keyboard.press("Tab")
            assert page.evaluate("() => !document.activeElement.closest('.app')")
        page.keyboard.press("Escape")
        expect(page.locator("#palette")).not_to_be_visible()
        page.keyboard.press("Control+k")
        page.locator("#hits a", has_text="paused one").wait_for()
        page.keyboard.press("ArrowDown")
        assert page.evaluate("() => document.activeElement.matches('#hits a:first-child')")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("paused one")
        assert not window.messages


def test_a_phone_has_named_navigation_and_a_figure_on_the_first_screen(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url, viewport={"width": 390, "height": 844}) as window:
        page = window.open("/ui/")
        figure = page.locator("#tiles .tile .v").first.bounding_box()
        assert figure is not None
        assert figure["y"] < 400
        bar = page.locator(".tabbar")
        for name in ("Overview", "Schedules", "Jobs", "Dead letters", "More"):
            expect(bar.get_by_text(name, exact=True)).to_be_visible()
        bar.get_by_text("More", exact=True).click()
        bar.get_by_text("Nodes", exact=True).click()
        page.wait_for_url("**/ui/nodes")
        page = window.open("/ui/jobs")
        page.locator(".pop summary").click()
        page.get_by_label("From").fill("2020-01-01T00:00")
        page.get_by_role("button", name="Apply").click()
        page.wait_for_url("**from=2020-01-01T00*")
        assert "01 Jan 2020, 00:00 KST" in page.locator(".pop summary").inner_text()
        assert not window.messages


def test_a_filter_is_stored_in_the_url_and_keeps_its_text(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url) as window:
        page = window.open("/ui/schedules")
        page.keyboard.press("/")
        page.keyboard.type("paused")
        expect(page.locator("[data-row]")).to_have_count(1)
        page.wait_for_url(re.compile("q=paused"))
        assert page.evaluate("() => document.activeElement.value") == "paused"
        page.keyboard.type("zzz")
        page.locator(".empty").wait_for()
        assert not window.messages


@pytest.mark.parametrize(
    ("path", "long_field", "field", "value", "shown"),
    [
        ("/ui/schedules/new", "#payload", "#when", "0 9 * * 1-5", "09:00"),
        ("/ui/new/trigger", "#payload", "#column", "starts", "before starts"),
        ("/ui/new/source?kind=sql", "#query", "#everySeconds", "7", "every 7 s"),
    ],
)
def test_a_form_longer_than_a_url_is_previewed(
    chromium: Chromium, served: Served, path: str, long_field: str, field: str, value: str, shown: str
) -> None:
    with open_window(chromium, served.url) as window:
        page = window.open(path)
        long_text = f'"{"x" * 20_000}"'
        page.locator(long_field).fill(long_text)
        page.locator(field).fill(value)
        expect(page.locator("#preview")).to_contain_text(shown)
        with page.expect_navigation():
            page.get_by_role("button", name="Preview", exact=True).click()
        expect(page.locator(long_field)).to_have_value(long_text)
        expect(page.locator("#preview")).to_contain_text(shown)
        assert not window.messages  # such as a refused request
        assert max(map(len, window.requests)) < 1000


def test_a_refused_form_shows_its_problem_in_a_closed_section(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url, bypass_csp=True) as window:
        page = window.open("/ui/schedules/new?name=rent&topic=rent.due&timezone=UTC&jitterSeconds=soon")
        page.get_by_role("button", name="Create schedule").click()
        expect(page.locator("#jitterSeconds")).to_be_focused()
        expect(page.locator("#jitterSeconds-problem")).to_be_visible()
        window.save_screenshot("form-refused")
        page.evaluate(browsers.load_axe())
        assert not page.evaluate(AXE)


def test_pages_and_forms_work_without_javascript(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url, java_script_enabled=False) as window:
        page = window.open("/ui/schedules?q=paused")
        assert page.locator("[data-row]").count() == 1
        page.locator("[data-row] a.main").click()
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("status")).to_contain_text("Resumed.")
        page.get_by_text("Pause…", exact=True).click()
        page.get_by_label("Reason").fill("again")
        page.get_by_role("button", name="Pause", exact=True).click()
        expect(page.locator("main")).to_contain_text("again")
        page = window.open("/ui/schedules/new?kind=cron&when=30+2+*+*+*&timezone=America/New_York")
        assert "does not exist" in page.locator("#preview").inner_text()
        page.get_by_role("button", name="UTC").click()
        page.wait_for_load_state()
        page = window.open("/ui/")
        page.get_by_role("link", name="Show chart").click()
        expect(page.locator("svg.bars").first).to_be_visible()


def test_no_page_is_wider_than_a_phone(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url, viewport={"width": 390, "height": 844}) as window:
        too_wide: dict[str, Any] = {}
        for name, path in _all_pages(served).items():
            page = window.open(path)
            if (width := page.evaluate(OVERFLOW)) > 391:
                too_wide[name] = width
            boxes = page.evaluate(TABLES) if name in FOLDED_TABLES else []  # folded tables must not scroll
            if any(box[0] > box[1] for box in boxes):
                too_wide[name] = boxes
        window.open("/ui/")
        window.save_screenshot("phone")
        assert not too_wide


def test_no_list_is_wider_than_a_desktop(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url) as window:
        for name in ("schedules", "schedule", "jobs", "dead", "deadgroup", "campaigns", "audit-log"):
            boxes = window.open(served.pages[name]).evaluate(TABLES)
            assert boxes, name
            assert not [box for box in boxes if box[0] > box[1]], (name, boxes)


def test_sign_in_and_times_in_the_zone_of_the_browser(chromium: Chromium, served: Served) -> None:
    served.run(served.browser.create_user("dana", "operator"))
    with open_window(chromium, served.url) as window:
        page = window.open("/ui/sign-in?next=/ui/schedules")
        page.get_by_label("Name").fill("dana")
        page.get_by_label("Password").fill("wrong wrong wrong")
        page.get_by_role("button", name="Sign in", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text("Wrong name or password")
        page.get_by_label("Name").fill("dana")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Sign in", exact=True).click()
        page.wait_for_url("**/ui/schedules")
        (cookie,) = [each for each in page.context.cookies() if each["name"] == COOKIE]
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Lax")
        assert page.get_by_role("link", name="New schedule").count() == 0
        page = window.open("/ui/schedules?q=paused")
        page.get_by_role("button", name="My zone").click()
        page.wait_for_load_state()
        page.locator("[data-row] a.main").click()
        expect(page.locator("main")).to_contain_text("KST")
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/ui/sign-in")
        assert [line for line in window.messages if "401" not in line] == []


def test_a_polling_page_keeps_its_content_while_the_server_fails(chromium: Chromium, served: Served) -> None:
    created = served.run(
        served.browser.web.post("/api/v1/campaigns", {"title": "Later", "sendAt": "2040-01-01T00:00Z"})
    )
    with open_window(chromium, served.url) as window:
        page = window.open(f"/ui/campaigns/{created.json()['id']}")
        live = page.locator("[data-live]")
        expect(live).to_have_text("Live", timeout=20_000)
        page.route("**/ui/campaigns/*", lambda route: route.fulfill(status=503, body="<b>nothing</b>"))
        expect(live).to_contain_text("Reconnecting, data from", timeout=20_000)
        expect(page.locator("#far")).to_contain_text("devices")
        page.unroute("**/ui/campaigns/*")
        expect(live).to_have_text("Live", timeout=20_000)
