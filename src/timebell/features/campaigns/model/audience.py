"""Audience filters of a campaign, and the validated fields of a device registration. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from hashlib import sha256
from typing import Any

import orjson

from timebell.errors import InvalidInput
from timebell.recurrence import zone

PLATFORMS = ("android", "ios", "web")
MAX_AGE_YEARS = 150
MAX_ATTRIBUTES = 50
MAX_TOPICS = 200
_FIELD_BY_FILTER = {
    "gender": "gender", "ageMin": "age_min", "ageMax": "age_max", "platform": "platform", "pushOnOff": "push_on",
    "marketingOnOff": "marketing_on", "topic": "topic", "language": "language", "timezone": "timezone",
    "attributes": "attributes", "audience": "audience",
}  # fmt: skip
FILTER_NAMES = tuple(_FIELD_BY_FILTER)
"""JSON names of the filters that select an audience."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions that every recipient satisfies; None means no condition. Ages are years, both limits inclusive."""

    gender: str | None = None
    age_min: int | None = None
    age_max: int | None = None
    platform: str | None = None
    push_on: bool = False
    marketing_on: bool = False
    topic: str | None = None
    language: str | None = None
    timezone: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    audience: str | None = None
    """The name of an audience that is read from the customer's own database."""

    @classmethod
    def from_json(cls, filters: Any) -> Filters:
        """Parse JSON filters; null and empty values are ignored. Raises InvalidInput (INVALID_FILTER)."""
        if filters is None:
            return cls()
        if not isinstance(filters, Mapping):
            raise _invalid(f"filters is {filters!r:.60}, not an object")
        for name in filters:
            if name not in _FIELD_BY_FILTER:
                near = get_close_matches(str(name), _FIELD_BY_FILTER, 1)
                raise _invalid(f"There is no filter {name!r:.60}", near)
        parsed: dict[str, Any] = {
            _FIELD_BY_FILTER[name]: value
            for name, value in filters.items()
            if value is not None and value not in ("", {})
        }
        parsed = {name: _FILTER_PARSERS[name](value, name) for name, value in parsed.items()}
        if parsed.get("age_min", 0) > parsed.get("age_max", MAX_AGE_YEARS):
            raise _invalid("ageMin is greater than ageMax, so no device matches")
        return cls(**parsed)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that `from_json` parses, without unset filters."""
        filter_by_field = {inner: outer for outer, inner in _FIELD_BY_FILTER.items()}
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {filter_by_field[name]: value for name, value in values.items() if value not in (None, False, {})}


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
    language: str | None = None
    timezone: str | None = None
    push_on: bool = True
    marketing_on: bool | None = None
    topics: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


DEVICE_FIELDS = tuple(each.name for each in fields(Device) if each.name not in ("id", "token"))
"""Fields that a registration may set."""


def validate_device(registration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a registration, normalized, under the names of `Device`.

    Raises InvalidInput (INVALID_DEVICE, or the error of an unknown time zone).
    """
    if unknown := [name for name in registration if name not in DEVICE_FIELDS]:
        near = get_close_matches(str(unknown[0]), DEVICE_FIELDS, 1)
        raise InvalidInput(
            f"A device has no field {unknown[0]!r:.60}.", code="INVALID_DEVICE",
            fix=f"Did you mean {near[0]}?" if near else "Put it into attributes.",
        )  # fmt: skip
    device = dict(registration)
    for name in ("user_id", "gender", "language"):
        if device.get(name) is not None:
            device[name] = _parse_text(device[name], name, "INVALID_DEVICE", 20 if name == "gender" else 200)
    if device.get("timezone") is not None:
        zone(device["timezone"])
    if device.get("platform") is not None:
        device["platform"] = _parse_platform(device["platform"], code="INVALID_DEVICE")
    if device.get("age") is not None:
        device["age"] = _parse_age(device["age"], "age", "INVALID_DEVICE")
    for name in ("push_on", "marketing_on"):
        if name in device:
            device[name] = _parse_consent(device[name], name)
    if device.get("push_on", True) is None:
        device["push_on"] = True
    if "topics" in device:
        device["topics"] = _parse_topics(device["topics"])
    if "attributes" in device:
        device["attributes"] = _parse_attribute_changes(device["attributes"])
    return device


def _parse_attribute_changes(attributes: Any) -> dict[str, Any]:
    """Return the attributes to set, and those to remove with the value None. Raises InvalidInput (INVALID_DEVICE)."""
    if not isinstance(attributes, Mapping):
        return validate_attributes(attributes or {}, "INVALID_DEVICE")
    validate_attributes({name: value for name, value in attributes.items() if value is not None}, "INVALID_DEVICE")
    return dict(attributes)


def validate_attributes(attributes: Any, code: str = "INVALID_FILTER") -> dict[str, Any]:
    """Return the attributes as a dict: names with strings, numbers or booleans. Raises InvalidInput (`code`)."""
    if not isinstance(attributes, Mapping) or len(attributes) > MAX_ATTRIBUTES:
        raise _invalid(f"attributes must be an object of at most {MAX_ATTRIBUTES} members", code=code)
    for name, value in attributes.items():
        if not isinstance(value, str | int | float | bool) or not isinstance(name, str) or len(str(value)) > 500:
            problem = f"attributes.{name!s:.60} is {value!r:.60}, not a string, number or boolean"
            raise _invalid(problem, code=code)
    return dict(attributes)


def encode_sorted(value: Any) -> str:
    """Encode compact JSON with sorted keys, as stored with devices, so that SQL can search for a member as text."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def hash_token(tenant_id: str, token: str) -> str:
    """Return the hex SHA-256 digest under which a tenant's token is stored and looked up."""
    return sha256(f"{tenant_id}\0{token}".encode()).hexdigest()


def _parse_consent(value: Any, name: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value in ("Y", "N"):
        return bool(value == "Y")
    raise _invalid(f'{name} is {value!r:.60}; use true, false, "Y" or "N"', code="INVALID_DEVICE")


def _parse_required_consent(value: Any, name: str) -> bool:
    if value is True or value == "Y":
        return True
    filter_name = "pushOnOff" if name == "push_on" else "marketingOnOff"
    raise _invalid(f'{filter_name} is {value!r:.60}; use true or "Y", or omit the filter')


def _parse_topics(topics: Any) -> tuple[str, ...]:
    if topics is None:
        return ()
    is_short_list = isinstance(topics, list | tuple) and len(topics) <= MAX_TOPICS
    if not is_short_list or not all(isinstance(topic, str) and 0 < len(topic) <= 900 for topic in topics):
        raise _invalid(f"topics must be a list of at most {MAX_TOPICS} FCM topics", code="INVALID_DEVICE")
    return tuple(sorted(set(topics)))


def _parse_text(value: Any, name: str, code: str = "INVALID_FILTER", max_length: int = 900) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= max_length or "\0" in value:
        raise _invalid(f"{name} is {value!r:.60}, not a string of at most {max_length} characters", code=code)
    return value


def _parse_timezone(value: Any, name: str) -> str:
    return zone(_parse_text(value, name)).name


def _parse_platform(value: Any, _: str = "", code: str = "INVALID_FILTER") -> str:
    if not isinstance(value, str) or value.lower() not in PLATFORMS:
        raise _invalid(f"platform is {value!r:.60}; use one of {', '.join(PLATFORMS)}", code=code)
    return value.lower()


def _parse_age(value: Any, name: str, code: str = "INVALID_FILTER") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_AGE_YEARS:
        raise _invalid(f"{name} is {value!r:.60}; it must be 0 to {MAX_AGE_YEARS} years", code=code)
    return value


def _invalid(problem: str, suggestions: list[str] | None = None, code: str | None = None) -> InvalidInput:
    fix = f"Did you mean {suggestions[0]}?" if suggestions else "See docs/guides/campaigns.md."
    return InvalidInput(f"{problem}.", code=code or "INVALID_FILTER", fix=fix)


_FILTER_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "gender": _parse_text, "audience": _parse_text, "topic": _parse_text, "language": _parse_text,
    "timezone": _parse_timezone, "platform": _parse_platform, "push_on": _parse_required_consent,
    "marketing_on": _parse_required_consent, "age_min": _parse_age, "age_max": _parse_age,
    "attributes": lambda value, _: validate_attributes(value),
}  # fmt: skip
