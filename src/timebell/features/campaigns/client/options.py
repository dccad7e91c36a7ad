"""The keyword options of `devices.register`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Literal, TypedDict
from zoneinfo import ZoneInfo


class DeviceOptions(TypedDict, total=False):
    """Facts about a device and its user; those that are not specified stay as they were."""

    user_id: str | None
    platform: Literal["android", "ios", "web"] | None
    gender: str | None
    age: int | None
    birth_date: date | str | None
    language: str | None
    timezone: str | ZoneInfo | None
    push_on: bool | None
    """Consent to push messages (default: True)."""
    marketing_on: bool | None
    """Consent to marketing (default: None, not requested)."""
    topics: Sequence[str]
    """Topics of FCM."""
    attributes: Mapping[str, Any]
    """Strings, numbers and booleans by name; None removes one."""
