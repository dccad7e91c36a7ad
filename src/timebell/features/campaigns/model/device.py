"""Devices: the validated fields of a registration, and their stored form. Pure."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import date, datetime
from difflib import get_close_matches
from functools import partial
from hashlib import blake2b
from typing import Any

import orjson

from timebell.errors import InvalidInput
from timebell.recurrence import zone, zone_key

PLATFORMS = ("android", "ios", "web")
MAX_AGE_YEARS = 150
MAX_ATTRIBUTES = 50
MAX_ATTRIBUTE_LENGTH = 500
MAX_TOPICS = 200
_ATTRIBUTE_TYPES = (str, int, float, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A push token and the registered facts about its user.

    `marketing_on` None means that consent was never requested, which counts as no consent.
    """

    id: str
    token: str
    user_id: str | None = None
    platform: str | None = None
    gender: str | None = None
    age: int | None = None
    birth_date: date | None = None
    language: str | None = None
    timezone: str | None = None
    push_on: bool = True
    marketing_on: bool | None = None
    topics: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    seen_at: datetime | None = None
    """When the device was last registered."""


DEVICE_FIELDS = tuple(each.name for each in fields(Device) if each.name not in ("id", "token", "seen_at"))
"""Fields that a registration may set."""


def validate_device(registration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a registration, normalized, under the names of `Device`.

    Raises InvalidInput (INVALID_DEVICE, or the error of an unknown time zone).
    """
    if unknown := [name for name in registration if name not in _FIELD_PARSERS]:
        near = get_close_matches(str(unknown[0]), DEVICE_FIELDS, 1)
        raise InvalidInput(
            f"A device has no field {unknown[0]!r:.60}.", code="INVALID_DEVICE",
            fix=f"Did you mean {near[0]}?" if near else "Put it into attributes.",
        )  # fmt: skip
    return {name: parse(registration[name]) for name, parse in _FIELD_PARSERS.items() if name in registration}


def _parse_attribute_changes(attributes: Any) -> dict[str, Any]:
    """Return the attributes to set, and those to remove with the value None. Raises InvalidInput (INVALID_DEVICE)."""
    if not isinstance(attributes, Mapping):
        return validate_attributes(attributes or {})
    if None not in attributes.values():
        return validate_attributes(attributes)
    validate_attributes({name: value for name, value in attributes.items() if value is not None})
    return dict(attributes)


def validate_attributes(attributes: Any) -> dict[str, Any]:
    """Return the attributes as a dict: names with strings, numbers or booleans. Raises InvalidInput."""
    if not isinstance(attributes, Mapping) or len(attributes) > MAX_ATTRIBUTES:
        raise _invalid(f"attributes must be an object of at most {MAX_ATTRIBUTES} members")
    for name, value in attributes.items():
        if not isinstance(name, str) or not is_attribute_value(value):
            raise _invalid(f"attributes.{name!s:.60} is {value!r:.60}, not a string, number or boolean")
    return dict(attributes)


def is_attribute_value(value: Any) -> bool:
    """Return whether a value may be that of an attribute: a short text, a number or a boolean."""
    return isinstance(value, _ATTRIBUTE_TYPES) and len(str(value)) <= MAX_ATTRIBUTE_LENGTH


def encode_sorted(value: Any) -> str:
    """Encode compact JSON with sorted keys, as stored with devices, so that SQL can search for a member as text."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def hash_token(tenant_id: str, token: str) -> str:
    """Return the digest under which a tenant's token is stored and looked up: BLAKE2b with 168 bits, in Base64.

    It is short, because new tokens are spread over all pages of their index: the smaller it is, the fewer are written.
    """
    return b64encode(blake2b(f"{tenant_id}\0{token}".encode(), digest_size=21).digest()).decode()


# The fields of a registration. None is an unknown value, or the default.


def _parse_consent(name: str, value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value in ("Y", "N"):
        return bool(value == "Y")
    raise _invalid(f'{name} is {value!r:.60}; use true, false, "Y" or "N"')


def _parse_push_consent(value: Any) -> bool:
    return _parse_consent("push_on", value) is not False


def _parse_topics(topics: Any) -> tuple[str, ...]:
    if topics is None:
        return ()
    is_short_list = isinstance(topics, list | tuple) and len(topics) <= MAX_TOPICS
    if not is_short_list or not all(isinstance(topic, str) and 0 < len(topic) <= 900 for topic in topics):
        raise _invalid(f"topics must be a list of at most {MAX_TOPICS} FCM topics")
    return tuple(sorted(set(topics)))


def _parse_text(name: str, max_length: int, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= max_length or "\0" in value:
        raise _invalid(f"{name} is {value!r:.60}, not a string of at most {max_length} characters")
    return value


def _parse_timezone(value: Any) -> str | None:
    return None if value is None else zone(zone_key(value)).name


def _parse_platform(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() not in PLATFORMS:
        raise _invalid(f"platform is {value!r:.60}; use one of {', '.join(PLATFORMS)}")
    return value.lower()


def _parse_age(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_AGE_YEARS:
        raise _invalid(f"age is {value!r:.60}; it must be 0 to {MAX_AGE_YEARS} years")
    return value


def _parse_birth_date(value: Any) -> date | None:
    try:
        return value if value is None or type(value) is date else date.fromisoformat(value)
    except (TypeError, ValueError):
        raise _invalid(f"birth_date is {value!r:.60}, not a date such as 1990-12-31") from None


def _invalid(problem: str) -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_DEVICE", fix="See docs/guides/campaigns.md.")


_FIELD_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "user_id": partial(_parse_text, "user_id", 200),
    "gender": partial(_parse_text, "gender", 20),
    "language": partial(_parse_text, "language", 35),
    "timezone": _parse_timezone,
    "platform": _parse_platform,
    "age": _parse_age,
    "birth_date": _parse_birth_date,
    "push_on": _parse_push_consent,
    "marketing_on": partial(_parse_consent, "marketing_on"),
    "topics": _parse_topics,
    "attributes": _parse_attribute_changes,
}
