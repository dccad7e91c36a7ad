"""How a message looks and behaves on each platform: the common options, and FCM's own fields. Does no I/O.

The names of the fields are those of FCM's `AndroidConfig`, `ApnsConfig` and `WebpushConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from timebell.errors import InvalidInput
from timebell.features.campaigns.model.campaign_plan import APPEARANCE_OPTIONS as APPEARANCE_OPTIONS

PRIORITIES = ("high", "normal")
MAX_ACTIONS = 5
_URL = re.compile(r"https://\S+")
_ANALYTICS_LABEL = re.compile(r"[a-zA-Z0-9\-_.~%]{1,50}")
_ANDROID_NOTIFICATION = frozenset({
    "title", "body", "icon", "color", "sound", "tag", "click_action", "body_loc_key", "body_loc_args", "title_loc_key",
    "title_loc_args", "channel_id", "ticker", "sticky", "event_time", "local_only", "notification_priority",
    "default_sound", "default_vibrate_timings", "default_light_settings", "vibrate_timings", "visibility",
    "notification_count", "light_settings", "image", "bypass_proxy_notification", "proxy",
})  # fmt: skip
# The fields of each platform; a set lists the fields of an object, None allows anything.
_PLATFORM_FIELDS: dict[str, dict[str, frozenset[str] | None]] = {
    "android": {
        "collapse_key": None, "priority": None, "ttl": None, "restricted_package_name": None, "data": None,
        "notification": _ANDROID_NOTIFICATION, "fcm_options": frozenset({"analytics_label"}), "direct_boot_ok": None,
        "bandwidth_constrained_ok": None, "restricted_satellite_ok": None,
    },
    "apns": {
        "headers": None, "payload": None, "fcm_options": frozenset({"analytics_label", "image"}),
        "live_activity_token": None,
    },
    "webpush": {
        "headers": None, "data": None, "notification": None, "fcm_options": frozenset({"link", "analytics_label"}),
    },
}  # fmt: skip


def check_appearance(options: Mapping[str, Any]) -> None:
    """Check the options named in APPEARANCE_OPTIONS. Raises InvalidInput (INVALID_PUSH_MESSAGE)."""
    for name in ("image", "link"):
        if (url := options.get(name)) is not None and not (isinstance(url, str) and _URL.fullmatch(url)):
            raise _invalid(f"{name} is {url!r:.80}", "Use an https URL.")
    for name in ("sound", "channel"):
        if (text := options.get(name)) is not None and not (isinstance(text, str) and 0 < len(text) <= 200):
            raise _invalid(f"{name} is {text!r:.60}", 'Use a name that the app defines; for sound also "default".')
    badge = options.get("badge")
    if badge is not None and (not isinstance(badge, int) or isinstance(badge, bool) or badge < 0):
        raise _invalid(f"badge is {badge!r:.60}", "Use a number; 0 removes it.")
    if (priority := options.get("priority")) is not None and priority not in PRIORITIES:
        raise _invalid(f"priority is {priority!r:.60}", f"Use one of {', '.join(PRIORITIES)}.")
    label = options.get("analyticsLabel")
    if label is not None and not (isinstance(label, str) and _ANALYTICS_LABEL.fullmatch(label)):
        raise _invalid(f"analyticsLabel is {label!r:.60}", "Use at most 50 letters, digits, -, _, ., ~ and %.")
    _check_actions(options.get("actions"))
    for platform in _PLATFORM_FIELDS:
        if (config := options.get(platform)) is not None:
            _check_platform(platform, config)


def _check_actions(actions: Any) -> None:
    if actions is None:
        return
    is_list = isinstance(actions, list | tuple) and len(actions) <= MAX_ACTIONS
    names = ({"action", "title"}, {"action", "title", "icon"})
    if not is_list or not all(
        isinstance(each, Mapping)
        and each.keys() in names
        and all(isinstance(text, str) and text for text in each.values())
        for each in actions
    ):
        raise _invalid("actions is not a list of at most 5 buttons", 'Use e.g. [{"action": "open", "title": "Open"}].')


def _check_platform(platform: str, config: Any) -> None:
    known = _PLATFORM_FIELDS[platform]
    if not isinstance(config, Mapping):
        raise _invalid(f"{platform} is {config!r:.60}", "Use an object with the fields of FCM.")
    for name, value in config.items():
        _check_name(platform, name, known.keys())
        inner = known[name]
        if inner is not None:
            if not isinstance(value, Mapping):
                raise _invalid(f"{platform}.{name} is {value!r:.60}", "It must be an object.")
            for field in value:
                _check_name(f"{platform}.{name}", field, inner)
    for name in ("headers", "data"):
        texts = config.get(name, {})
        if not isinstance(texts, Mapping) or not all(isinstance(text, str) for text in texts.values()):
            raise _invalid(f"{platform}.{name} has a value that is not a string", "FCM accepts only strings there.")
    if platform == "apns" and not isinstance(config.get("payload", {}), Mapping):
        raise _invalid("apns.payload is not an object", 'Use e.g. {"aps": {"category": "REPLY"}}.')


def _check_name(path: str, name: Any, known: Any) -> None:
    if name not in known:
        near = get_close_matches(str(name), known, 1)
        fix = f"Did you mean {near[0]}?" if near else f"FCM has: {', '.join(sorted(known))}."
        raise _invalid(f"{path} has no field {name!r:.60}", fix)


def apply_appearance(message: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Add the options to FCM's `Message`. The fields of a platform override those of the common options."""
    image, sound, badge, priority, link, label = (
        options.get(name) for name in ("image", "sound", "badge", "priority", "link", "analyticsLabel")
    )
    common: dict[str, Any] = {
        "fcm_options": {"analytics_label": label},
        "data": {"link": None if "link" in message.get("data", {}) else link},
        "android": {"priority": None if priority is None else priority.upper()},
        "apns": {
            "headers": {"apns-priority": {"high": "10", "normal": "5"}.get(priority or "")},
            # mutable-content lets the app's service extension load the image.
            "payload": {"aps": {"sound": sound, "badge": badge, "mutable-content": None if image is None else 1}},
            "fcm_options": {"image": image},
        },
        "webpush": {"headers": {"Urgency": priority}, "fcm_options": {"link": link}},
    }
    if "notification" in message:  # otherwise these would turn a data message into a notification
        common["notification"] = {"image": image}
        common["android"]["notification"] = {
            "sound": sound, "notification_count": badge, "channel_id": options.get("channel"),
        }  # fmt: skip
        common["webpush"]["notification"] = {"image": image, "actions": options.get("actions")}
    _merge(message, common)
    _merge(message, {platform: options.get(platform) for platform in _PLATFORM_FIELDS})


def _merge(target: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Merge objects recursively into `target`, without None and empty objects; other values replace earlier ones."""
    for name, value in changes.items():
        if isinstance(value, Mapping):
            inner = dict(target.get(name) or {})
            _merge(inner, value)
            if inner:
                target[name] = inner
        elif value is not None:
            target[name] = value


def _invalid(reason: str, fix: str) -> InvalidInput:
    return InvalidInput(f"{reason}.", code="INVALID_PUSH_MESSAGE", fix=fix)
