"""`python -m tests.ui.tasks`: do the tasks of a user on call in Chromium; print the steps and seconds of each.

Each task begins on the overview. A step is a click, a field that is filled in, or a pressed key; the answer is then
visible without scrolling sideways. Seconds are those of the browser and the server, without the time to read and think.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.api.web import NIGHTLY
from timebell import Arrived, Retry, Timebell
from timebell.ids import new_id
from timebell.model.payload import encode
from timebell.recurrence.instants import format_instant

from . import chromium as browsers
from .browser import Browser
from .chromium import Window, open_window
from .hostile_data import wait_until
from .screens import SIZES
from .test_job_pages import finished_job, insert_finished

TRACEBACK = 'Traceback (most recent call last):\n  File "ops.py", line 27, in sync\nConnectionError: bank is away\n'
OLD_JOBS = 5_000


@dataclass
class User:
    """User in front of a page that counts the steps."""

    page: Page
    steps: int = 0

    def click(self, target: Locator) -> None:
        """Click; dialogs are accepted."""
        self.steps += 1
        target.first.click()

    def fill(self, target: Locator, text: str) -> None:
        """Fill in a field."""
        self.steps += 1
        target.fill(text)

    def press(self, keys: str) -> None:
        """Press a key."""
        self.steps += 1
        self.page.keyboard.press(keys)

    def link(self, name: str) -> Locator:
        """Find a link of the main part of the page by its name."""
        return self.page.locator("main").get_by_role("link", name=name)

    def button(self, name: str) -> Locator:
        """Find a button of the main part of the page by its name."""
        return self.page.locator("main").get_by_role("button", name=name)

    def open(self, name: str) -> None:
        """Open a page with the navigation."""
        self.click(self.page.locator(".side").get_by_role("link", name=name))

    def sees(self, text: str, where: str = "main") -> None:
        """Wait until a text is visible."""
        expect(self.page.locator(where).get_by_text(text).first).to_be_visible()


def find_out_what_failed_and_why(user: User) -> None:
    user.sees("ConnectionError: bank is away", "#needs")
    user.click(user.page.locator("#needs").get_by_role("link", name="Show jobs"))
    user.click(user.page.locator("[data-row] a.main[href^='/ui/jobs/']"))
    user.click(user.page.locator("main").get_by_text("Traceback", exact=True))
    user.sees('File "ops.py", line 27, in sync')


def run_it_again(user: User) -> None:
    user.click(user.page.locator("#needs").get_by_role("button", name="Retry "))
    user.sees("Retry 12 jobs?")
    user.click(user.button("Retry 12"))
    user.sees("of 12 retried")


def pause_a_schedule(user: User) -> None:
    user.open("Schedules")
    user.click(user.link("price-refresh-00"))
    user.click(user.page.get_by_text("Pause…", exact=True))
    user.fill(user.page.get_by_label("Reason"), "incident 42")
    user.click(user.page.get_by_role("button", name="Pause", exact=True))
    user.sees("incident 42")


def find_out_why_it_did_not_run(user: User) -> None:
    user.click(user.page.locator("#needs .note", has_text="missed").get_by_role("link", name="Review"))
    user.click(user.link("Explain"))
    user.sees("was skipped (missed)")


def find_out_why_it_is_still_retrying(user: User) -> None:
    user.open("Jobs")
    user.click(user.link("Retrying"))
    user.sees("payment provider is away", "[data-row]")
    user.sees("1 of 8", "[data-row]")


def see_what_fires_in_the_next_hour(user: User) -> None:
    user.click(user.page.locator("#tiles a", has_text="Due in the next hour"))
    user.sees("schedules in the next hour", "h1")
    user.sees("price-refresh-01")


def create_a_schedule_with_a_zone(user: User) -> None:
    user.click(user.link("New schedule"))
    user.fill(user.page.get_by_label("Rule"), "30 2 * * *")
    user.fill(user.page.get_by_label("Time zone"), "America/New_York")
    user.sees("does not exist", "#preview")
    user.fill(user.page.get_by_label("Name"), "made-on-call")
    user.fill(user.page.get_by_label("Topic"), "mail.send")
    user.click(user.button("Create schedule"))
    user.sees("Created.")


def notice_a_topic_that_nobody_handles(user: User) -> None:
    user.click(user.link("New schedule"))
    user.fill(user.page.get_by_label("Topic"), "mail.sent")
    user.page.get_by_label("Topic").press("Tab")
    user.sees("Did you mean mail.send?", "#preview")


def find_a_job_by_its_correlation_id(user: User) -> None:
    user.open("Jobs")
    user.fill(user.page.get_by_label("Filter jobs"), "correlation:order-4711")
    user.press("Enter")
    expect(user.page.locator("[data-row]")).to_have_count(1)


def cancel_a_job(user: User) -> None:
    user.open("Jobs")
    user.click(user.link("Pending"))
    user.click(user.link("mail.later"))
    user.click(user.button("Cancel"))
    user.sees("Cancelled", "h1")


def see_the_start_lag(user: User) -> None:
    user.click(user.link("Other periods, start lag"))
    user.sees("99th percentile")
    expect(user.page.locator("svg.bars")).to_have_count(2)


def find_out_who_changed_a_schedule(user: User) -> None:
    user.open("Schedules")
    user.click(user.link("price-refresh-02"))
    user.sees("timeoutSeconds")
    user.sees("by local")


TASKS: dict[Callable[[User], None], int] = {
    find_out_what_failed_and_why: 3, run_it_again: 2, pause_a_schedule: 5, find_out_why_it_did_not_run: 2,
    find_out_why_it_is_still_retrying: 2, see_what_fires_in_the_next_hour: 1, create_a_schedule_with_a_zone: 6,
    notice_a_topic_that_nobody_handles: 2, find_a_job_by_its_correlation_id: 3, cancel_a_job: 4, see_the_start_lag: 1,
    find_out_who_changed_a_schedule: 2,
}  # fmt: skip
"""The tasks, with the number of steps."""


def on_call_app(url: str) -> Timebell:
    """Return an app with a handler that succeeds and one that is retried."""
    app = Timebell(url)

    @app.on("mail.send")
    @app.on("erp.sync")
    async def send(event: Arrived) -> None: ...

    @app.on("billing.invoice", retry=Retry(attempts=8, delay=3600))
    async def bill(event: Arrived) -> None:
        raise ConnectionError("payment provider is away")

    return app


async def fill_on_call(app: Timebell, browser: Browser) -> dict[str, str]:
    """Fill a store as after a bad night: failures, a missed run, retries, thousands of old jobs."""
    web, now = browser.web, app.clock.now()
    schedule: dict[str, Any] = {}
    for n in range(12):
        body = {**NIGHTLY, "name": f"price-refresh-{n:02}", "cronExpression": f"{n} * * * *", "jobType": "mail.send"}
        schedule = (await web.post("/api/v1/schedules", body)).json()
        change = await web.ask("PATCH", f"/api/v1/schedules/{schedule['id']}", {"timeoutSeconds": 60}, if_match="*")
        assert change.status_code == 200, change.text
    night = now - timedelta(hours=8)
    record = {"attempt": 1, "due": night.isoformat(), "startedAt": night.isoformat(), "endedAt": night.isoformat(),
              "code": "ConnectionError", "error": "ConnectionError: bank is away", "traceback": TRACEBACK}  # fmt: skip
    failed = [
        finished_job(night + n * timedelta(seconds=1), error="ConnectionError: bank is away", errors=encode([record]),
                     error_code="ConnectionError") for n in range(12)
    ]  # fmt: skip
    missed_at = now.replace(minute=11, second=0, microsecond=0) - timedelta(hours=2)
    missed = finished_job(
        missed_at, "skipped", reason="missed", kind="planned", schedule_id=schedule["id"], topic="mail.send",
        skipped_to=missed_at, skipped_count=1, started_at=None, attempt=0, attempts_used=0,
    )  # fmt: skip
    old = [
        finished_job(night - n * timedelta(seconds=9), "completed", metadata=encode({"correlation_id": f"order-{n}"}))
        for n in range(OLD_JOBS)
    ]  # fmt: skip
    await insert_finished(browser, *failed)
    await insert_finished(browser, *old)
    await insert_finished(browser, missed | {"id": new_id(missed_at + timedelta(minutes=1))})
    later = {"topic": "mail.later", "runAt": format_instant(now + timedelta(minutes=20))}
    for body in ({"topic": "billing.invoice"}, {"topic": "mail.send"}, later):
        assert (await web.post("/api/v1/jobs", {"timezone": "UTC", **body})).status_code == 201

    async def has_retry() -> bool:
        return bool((await web.get("/api/v1/jobs?status=retrying")).json()["items"])

    await wait_until(has_retry)
    return {}


def measure(window: Window, task: Callable[[User], None]) -> tuple[int, float]:
    """Do a task; return its steps and seconds."""
    user = User(window.open("/ui/"))
    expect(user.page.locator("[data-live]")).to_have_text("Live")
    started_at = time.monotonic()
    task(user)
    return user.steps, time.monotonic() - started_at


def main() -> None:
    """Print a table of the tasks."""
    with (
        tempfile.TemporaryDirectory() as directory,
        browsers.serve_in_thread(
            f"sqlite:///{Path(directory)}/timebell.db", fill_on_call, create_app=on_call_app
        ) as served,
        browsers.chromium() as browser,
        open_window(browser, served.url, viewport=SIZES[""]) as window,
    ):
        window.page.on("dialog", lambda dialog: dialog.accept())
        for task in TASKS:
            steps, seconds = measure(window, task)
            print(f"{task.__name__.replace('_', ' '):<40}{steps:>3} steps{seconds:>7.1f} s")
        for message in window.messages:
            print("console:", message, file=sys.stderr)


if __name__ == "__main__":
    main()
