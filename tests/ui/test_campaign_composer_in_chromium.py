"""A new user composes a campaign in a real browser: from an empty list of campaigns to a planned and edited one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import Dialog, expect

from timebell import Timebell
from timebell_fcm_emulator import FakeFcm

from . import chromium as browsers
from .browser import Browser
from .chromium import Served, open_window


async def _register_devices(app: Timebell, browser: Browser) -> dict[str, str]:
    """Register ten devices, five of them in the tier gold; the first user has no name."""
    await app.devices.register_many([
        {"token": f"phone-number-{n:04}", "user_id": f"user-{n}", "language": ("ko", "en")[n % 2],
         "timezone": ("Asia/Seoul", "Europe/Berlin")[n % 2],
         "attributes": {"tier": ("gold", "silver")[n % 2]} | ({"name": f"Name {n}"} if n else {})}
        for n in range(10)
    ])  # fmt: skip
    return {}


@pytest.fixture
def served(tmp_path: Path, phones: FakeFcm) -> Iterator[Served]:
    with browsers.serve_in_thread(f"sqlite:///{tmp_path}/timebell.db", _register_devices) as server:
        yield server


@pytest.fixture
def chromium() -> Iterator[Chromium]:
    with browsers.chromium() as browser:
        yield browser


def test_a_campaign_without_recipients_is_saved_only_after_a_warning(chromium: Chromium, served: Served) -> None:
    warning = "No registered device is in the audience now. Unless devices join it before the send time, "
    with open_window(chromium, served.url) as window:
        page = window.page
        questions: list[str] = []
        answers = [False, True, False]

        def answer(dialog: Dialog) -> None:
            questions.append(dialog.message)
            dialog.accept() if answers.pop(0) else dialog.dismiss()

        page.on("dialog", answer)
        fields = {"title": "Hello", "at": "2040-01-02T09:00", "timezone": "UTC", "field1": "attributes.tier"}
        window.open(f"/ui/new/campaign?{urlencode({**fields, 'value1': 'platinum'})}")
        expect(page.locator("#preview")).to_contain_text(warning)
        window.save_screenshot("composer-no-audience")
        page.get_by_role("button", name="Create campaign").click()
        assert served.run(served.app.campaigns.list()).items == []
        page.get_by_role("button", name="Create campaign").click()
        expect(page.get_by_text("Planned")).to_be_visible()
        page.get_by_role("link", name="Edit").click()
        expect(page.locator("#preview")).to_contain_text(warning)
        page.get_by_label("Title", exact=True).fill("Good morning")
        page.get_by_role("button", name="Save changes").click()
        assert [warning in question for question in questions] == [True, True, True]
        assert questions[0].startswith("Create this campaign?")
        [campaign] = served.run(served.app.campaigns.list()).items
        assert campaign.plan.title == "Hello"  # the last question was answered with Cancel


def test_a_campaign_is_composed_planned_and_edited(chromium: Chromium, served: Served) -> None:
    with open_window(chromium, served.url) as window:
        page = window.page
        questions: list[str] = []
        page.on("dialog", lambda dialog: (questions.append(dialog.message), dialog.accept()))
        window.open("/ui/campaigns")
        page.get_by_role("link", name="New campaign").first.click()
        preview = page.locator("#preview")
        expect(preview).to_contain_text("10 devices")  # before anything is entered
        expect(preview).to_contain_text("Choose a send time")
        page.get_by_label("Title", exact=True).fill("Hi {{attributes.name|there}}")
        expect(preview).to_contain_text("Hi there")
        expect(preview).to_contain_text("Hi Name 1")
        window.save_screenshot("composer-message")

        page.get_by_role("button", name="Create campaign").click()
        expect(page.get_by_role("alert")).to_contain_text("The campaign has no send time.")
        expect(page.get_by_label("Time", exact=True)).to_be_focused()
        expect(page.locator("#at-problem")).to_have_text("The campaign has no send time. Enter a date and a time.")
        window.save_screenshot("composer-refused")
        expect(page.get_by_label("Title", exact=True)).to_have_value("Hi {{attributes.name|there}}")
        page.get_by_label("Send", exact=True).select_option("At a local time of each recipient")
        page.get_by_label("Time", exact=True).fill("2040-01-02T09:00")
        expect(preview).to_contain_text("Asia/Seoul")
        expect(preview).to_contain_text("09:00 CET")

        page.get_by_role("button", name="Add condition").click()
        page.get_by_label("Condition 1").select_option("tier")
        page.get_by_label("Value", exact=True).fill("gold")
        expect(preview).to_contain_text("5 devices")
        long_text = "안" * 2000  # more than fits into a URL
        page.get_by_label("Body", exact=True).fill(long_text)
        expect(preview).to_contain_text("the limit for a token is 4,096")
        page.get_by_role("button", name="Add language").click()
        expect(page.get_by_label("Body", exact=True).first).to_have_value(long_text)
        page.get_by_label("Body", exact=True).first.fill("")
        page.get_by_label("Language", exact=True).fill("ko")
        page.locator("[name=title1]").fill("Annyeong {{attributes.name|yeoreobun}}")
        expect(preview).to_contain_text("Annyeong Name 2")
        page.get_by_label("Name", exact=True).fill("Spring sale")
        window.save_screenshot("composer-complete")
        page.get_by_role("button", name="Create campaign").click()

        expect(page.get_by_role("heading", name="Spring sale")).to_be_visible()
        assert questions[-1].endswith("at its send time.\n5 devices")
        expect(page.get_by_text("Planned")).to_be_visible()
        expect(page.get_by_text("of 5 devices")).to_be_visible()
        window.save_screenshot("composer-planned")
        page.get_by_role("link", name="Edit").click()
        expect(page.get_by_label("Value", exact=True)).to_have_value("gold")
        page.get_by_label("Body", exact=True).first.fill("New in the shop")
        page.get_by_role("button", name="Save changes").click()
        expect(page.get_by_text("New in the shop").first).to_be_visible()
        [campaign] = served.run(served.app.campaigns.list()).items
        assert (campaign.state, campaign.plan.body) == ("pending", "New in the shop")
        served.run(served.app.campaigns.start(campaign.id))
        expect(page.get_by_role("heading", name="Spring sale Sent")).to_be_visible()  # without a reload by the user
        expect(page.get_by_role("button", name="Archive")).to_be_visible()
        errors = [line for line in window.messages if "422" not in line]  # the refused form
        assert not errors
