"""Who a campaign is for: filters over what is known of a device, and what a device is registered with. Pure."""

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
OLDEST = 150
MOST_ATTRIBUTES = 50
MOST_TOPICS = 200
_NAMES = {
    "gender": "gender", "ageMin": "age_min", "ageMax": "age_max", "platform": "platform", "pushOnOff": "push_on",
    "marketingOnOff": "marketing_on", "topic": "topic", "language": "language", "timezone": "timezone",
    "attributes": "attributes", "audience": "audience",
}  # fmt: skip
FILTERS = tuple(_NAMES)
"""What an audience may be chosen by."""


@dataclass(frozen=True, slots=True)
class Filters:
    """All of these hold for whoever is sent to; None asks nothing. `age_min` and `age_max` are years, inclusive."""

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
    """The name of one that is read from a database of the customer's own."""

    @classmethod
    def read(cls, given: Any) -> Filters:
        """From JSON. What is null or empty asks nothing. Raises InvalidInput (FILTER_INVALID)."""
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise _unfit(f"filters is {given!r:.60}, and no object")
        for name in given:
            if name not in _NAMES:
                near = get_close_matches(str(name), _NAMES, 1)
                raise _unfit(f"There is no filter {name!r:.60}", near)
        found: dict[str, Any] = {
            _NAMES[name]: value for name, value in given.items() if value is not None and value not in ("", {})
        }
        found = {name: _READ[name](value, name) for name, value in found.items()}
        if found.get("age_min", 0) > found.get("age_max", OLDEST):
            raise _unfit("ageMin is more than ageMax, so nobody is meant")
        return cls(**found)

    def json(self) -> dict[str, Any]:
        """As `read` takes it; what asks nothing is left out."""
        short = {inner: outer for outer, inner in _NAMES.items()}
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        return {short[name]: value for name, value in held.items() if value not in (None, False, {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A token and what is known of whose it is. `marketing_on` None: never asked, which is no consent."""

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


KNOWN = tuple(each.name for each in fields(Device) if each.name not in ("id", "token"))
"""What a registration may say of a device."""


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a registration says of a device, by the names of `Device`. Raises InvalidInput (DEVICE_INVALID, ...)."""
    if unknown := [name for name in given if name not in KNOWN]:
        near = get_close_matches(str(unknown[0]), KNOWN, 1)
        raise InvalidInput(
            f"A device has no {unknown[0]!r:.60}.", code="DEVICE_INVALID",
            fix=f"Did you mean {near[0]}?" if near else "Put it into attributes.",
        )  # fmt: skip
    found = dict(given)
    for name in ("user_id", "gender", "language"):
        if found.get(name) is not None:
            found[name] = _text(found[name], name, "DEVICE_INVALID", 20 if name == "gender" else 200)
    if found.get("timezone") is not None:
        zone(found["timezone"])
    if found.get("platform") is not None:
        found["platform"] = _platform(found["platform"], code="DEVICE_INVALID")
    if found.get("age") is not None:
        found["age"] = _age(found["age"], "age", "DEVICE_INVALID")
    for name in ("push_on", "marketing_on"):
        if name in found:
            found[name] = _consent(found[name], name)
    if found.get("push_on", True) is None:
        found["push_on"] = True
    if "topics" in found:
        found["topics"] = _topics(found["topics"])
    if "attributes" in found:
        found["attributes"] = attributes_of(found["attributes"] or {}, "DEVICE_INVALID")
    return found


def attributes_of(given: Any, code: str = "FILTER_INVALID") -> dict[str, Any]:
    """Names with texts, numbers, booleans. Raises InvalidInput."""
    if not isinstance(given, Mapping) or len(given) > MOST_ATTRIBUTES:
        raise _unfit(f"attributes is an object of at most {MOST_ATTRIBUTES} members", code=code)
    for name, value in given.items():
        if not isinstance(value, str | int | float | bool) or not isinstance(name, str) or len(str(value)) > 500:
            raise _unfit(f"attributes.{name!s:.60} is {value!r:.60}; it may be a text, number or boolean", code=code)
    return dict(given)


def written(value: Any) -> str:
    """JSON as devices keep it: compact and sorted, so that a member can be looked for as it is written."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def hash_of(token: str) -> str:
    """What a token is found by."""
    return sha256(token.encode()).hexdigest()


def _consent(value: Any, name: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value in ("Y", "N"):
        return bool(value == "Y")
    raise _unfit(f'{name} is {value!r:.60}, not true, false, "Y" or "N"', code="DEVICE_INVALID")


def _yes(value: Any, name: str) -> bool:
    if value is True or value == "Y":
        return True
    short = "pushOnOff" if name == "push_on" else "marketingOnOff"
    raise _unfit(f'{short} is {value!r:.60}; it is true or "Y", or left out to ask nothing')


def _topics(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    fit = isinstance(given, list | tuple) and len(given) <= MOST_TOPICS
    if not fit or not all(isinstance(each, str) and 0 < len(each) <= 900 for each in given):
        raise _unfit(f"topics is a list of at most {MOST_TOPICS} topics of FCM", code="DEVICE_INVALID")
    return tuple(sorted(set(given)))


def _text(value: Any, name: str, code: str = "FILTER_INVALID", longest: int = 900) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= longest or "\0" in value:
        raise _unfit(f"{name} is {value!r:.60}, and a text is meant, of at most {longest} characters", code=code)
    return value


def _place(value: Any, name: str) -> str:
    return zone(_text(value, name)).name


def _platform(value: Any, _: str = "", code: str = "FILTER_INVALID") -> str:
    if not isinstance(value, str) or value.lower() not in PLATFORMS:
        raise _unfit(f"platform is {value!r:.60}, and is one of: {', '.join(PLATFORMS)}", code=code)
    return value.lower()


def _age(value: Any, name: str, code: str = "FILTER_INVALID") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= OLDEST:
        raise _unfit(f"{name} is {value!r:.60}, and is 0 to {OLDEST} years", code=code)
    return value


def _unfit(why: str, near: list[str] | None = None, code: str | None = None) -> InvalidInput:
    fix = f"Did you mean {near[0]}?" if near else "See docs/guides/campaigns.md."
    return InvalidInput(f"{why}.", code=code or "FILTER_INVALID", fix=fix)


_READ: dict[str, Callable[[Any, str], Any]] = {
    "gender": _text, "audience": _text, "topic": _text, "language": _text, "timezone": _place, "platform": _platform,
    "push_on": _yes, "marketing_on": _yes, "age_min": _age, "age_max": _age,
    "attributes": lambda value, _: attributes_of(value),
}  # fmt: skip
