"""Images, sounds, buttons and platform fields of messages: what FCM receives, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.features.campaigns.push.message import Content, check_content
from timebell.features.campaigns.testing import NOW


def fcm(title: str | None = "Hi", data: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    content = Content(title, None, data or {}, tag="t", appearance=options)
    check_content(content, "token")
    return content.to_fcm(NOW)


def test_common_options_reach_every_platform() -> None:
    sent = fcm(
        image="https://x.test/a.png", sound="default", badge=3, priority="high", channel="news",
        link="https://x.test/a", actions=[{"action": "open", "title": "Open"}], analyticsLabel="spring",
    )  # fmt: skip
    assert sent == {
        "notification": {"title": "Hi", "image": "https://x.test/a.png"},
        "data": {"link": "https://x.test/a"},
        "fcm_options": {"analytics_label": "spring"},
        "android": {
            "priority": "HIGH",
            "notification": {"tag": "t", "sound": "default", "notification_count": 3, "channel_id": "news"},
        },
        "apns": {
            "headers": {"apns-collapse-id": "t", "apns-priority": "10"},
            "payload": {"aps": {"sound": "default", "badge": 3, "mutable-content": 1}},
            "fcm_options": {"image": "https://x.test/a.png"},
        },
        "webpush": {
            "headers": {"Urgency": "high"},
            "notification": {
                "image": "https://x.test/a.png",
                "actions": [{"action": "open", "title": "Open"}],
            },
            "fcm_options": {"link": "https://x.test/a"},
        },
    }


def test_a_data_message_does_not_become_a_notification() -> None:
    sent = fcm(title=None, data={"a": "1"}, sound="default", badge=0, channel="news", priority="normal")
    assert "notification" not in sent
    assert sent["android"] == {"priority": "NORMAL"}
    assert sent["apns"]["payload"] == {"aps": {"sound": "default", "badge": 0}}


def test_platform_fields_override_the_common_ones() -> None:
    sent = fcm(
        sound="default", android={"notification": {"sound": "bell", "color": "#ff0000"}, "direct_boot_ok": True},
        apns={"payload": {"aps": {"category": "REPLY"}, "own": 1}, "headers": {"apns-collapse-id": "mine"}},
        data={"link": "own"}, link="https://x.test",
    )  # fmt: skip
    assert sent["android"] == {
        "notification": {"tag": "t", "sound": "bell", "color": "#ff0000"},
        "direct_boot_ok": True,
    }
    assert sent["apns"]["payload"] == {"aps": {"sound": "default", "category": "REPLY"}, "own": 1}
    assert sent["apns"]["headers"] == {"apns-collapse-id": "mine"}
    assert sent["data"] == {"link": "own"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"image": "http://x.test/a.png"}, "Use an https URL"),
        ({"badge": -1}, "Use a number"),
        ({"priority": "urgent"}, "high, normal"),
        ({"actions": [{"id": "open"}]}, "action"),
        ({"analyticsLabel": "a b"}, "at most 50"),
        ({"android": {"notificaton": {}}}, "Did you mean notification"),
        ({"android": {"notification": {"chanel_id": "x"}}}, "Did you mean channel_id"),
        ({"apns": {"payload": "x"}}, "aps"),
        ({"apns": {"headers": {"apns-priority": 5}}}, "only strings"),
        ({"webpush": []}, "an object"),
        ({"android": {"fcm_options": {"link": "x"}}}, "analytics_label"),
        ({"apns": {"payload": {"x": "y" * 4096}}}, "Send an id"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        fcm(**options)
    assert problem in (refused.value.fix or "")
