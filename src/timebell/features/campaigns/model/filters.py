"""Filters of devices: which of them are the recipients of a campaign. Pure.

A filter is a JSON object. All its members must match: comparisons of fields and attributes, and `all`, `any` and `not`
with further filters. A comparison does not match a device whose value is unknown, so `not` matches exactly the devices
that the inner filter does not match.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any
from uuid import UUID

from timebell.errors import InvalidInput
from timebell.features.campaigns.model.device import MAX_AGE_YEARS, MAX_ATTRIBUTES, PLATFORMS, is_attribute_value
from timebell.recurrence import zone

MAX_VALUES = 200
MAX_DEPTH = 8
MAX_DAYS = 3650
MAX_CAP_DAYS = 90
_FIELD_BY_FILTER = {
    "gender": "gender", "ageMin": "age_min", "ageMax": "age_max", "platform": "platform", "pushOnOff": "push_on",
    "marketingOnOff": "marketing_on", "topic": "topic", "language": "language", "timezone": "timezone",
    "seenWithinDays": "seen_within_days", "notSeenForDays": "not_seen_for_days", "attributes": "attributes",
    "audience": "audience", "segment": "segment", "received": "received",
    "all": "all_of", "any": "any_of", "not": "none_of",
    "onePerUser": "one_per_user", "frequencyCap": "frequency_cap",
}  # fmt: skip
FILTER_NAMES = tuple(_FIELD_BY_FILTER)
"""JSON names of the filters that select an audience."""
_OUTERMOST_ONLY = ("onePerUser", "frequencyCap")


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `minimum` to `maximum`, both inclusive; None: no limit."""

    minimum: float | None = None
    maximum: float | None = None

    def to_json(self) -> dict[str, float]:
        """Return the JSON form."""
        limits = {"min": self.minimum, "max": self.maximum}
        return {name: limit for name, limit in limits.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class FrequencyCap:
    """Exclude devices that got `messages` messages of other campaigns that started in the `days` before this one."""

    messages: int
    days: int

    def to_json(self) -> dict[str, int]:
        """Return the JSON form."""
        return {"messages": self.messages, "days": self.days}


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions that every recipient satisfies; None and empty mean no condition.

    A tuple matches any of its values. Ages are years, both limits inclusive. `seen` refers to the last registration.
    """

    gender: tuple[str, ...] = ()
    age_min: int | None = None
    age_max: int | None = None
    platform: tuple[str, ...] = ()
    push_on: bool = False
    marketing_on: bool = False
    topic: tuple[str, ...] = ()
    language: tuple[str, ...] = ()
    timezone: tuple[str, ...] = ()
    seen_within_days: int | None = None
    not_seen_for_days: int | None = None
    attributes: Mapping[str, tuple[Any, ...] | Range] = field(default_factory=dict)
    audience: tuple[str, ...] = ()
    """Names of audiences that are read from the customer's own database."""
    segment: tuple[str, ...] = ()
    """Names of segments; the store replaces them by their filters."""
    received: tuple[str, ...] = ()
    """Ids of campaigns whose message was accepted for the device."""
    all_of: tuple[Filters, ...] = ()
    any_of: tuple[Filters, ...] = ()
    none_of: tuple[Filters, ...] = ()
    one_per_user: bool = False
    """Only the most recently created of the matching devices of a user."""
    frequency_cap: FrequencyCap | None = None

    @classmethod
    def from_json(cls, filters: Any) -> Filters:
        """Parse JSON filters; null and empty values are ignored. Raises InvalidInput (INVALID_FILTER)."""
        return cls() if filters is None else _parse(filters, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form that `from_json` parses, without unset filters."""
        filter_by_field = {inner: outer for outer, inner in _FIELD_BY_FILTER.items()}
        values = {filter_by_field[each.name]: _to_json(getattr(self, each.name)) for each in fields(self)}
        nested = {name: [inner.to_json() for inner in getattr(self, _FIELD_BY_FILTER[name])] for name in ("all", "any")}
        excluded = [inner.to_json() for inner in self.none_of]
        values |= {**nested, "not": excluded[0] if len(excluded) == 1 else excluded}
        return {name: value for name, value in values.items() if value not in (None, {}, []) and value is not False}

    def walk(self) -> Iterator[Filters]:
        """Yield this filter and all those in it."""
        yield self
        for inner in (*self.all_of, *self.any_of, *self.none_of):
            yield from inner.walk()

    @property
    def audiences(self) -> list[str]:
        """The names of all audiences, also of those in `not`."""
        return sorted({name for each in self.walk() for name in each.audience})

    @property
    def segments(self) -> list[str]:
        """The names of all segments, also of those in `not`."""
        return sorted({name for each in self.walk() for name in each.segment})

    @property
    def matching(self) -> Filters:
        """The conditions on a device alone: without consents and `frequency_cap`."""
        return replace(self, push_on=False, marketing_on=False, frequency_cap=None)


def parse_segment(filters: Any) -> Filters:
    """Parse the filters of a segment, which are conditions on a device alone. Raises InvalidInput (INVALID_FILTER)."""
    return _parse(filters, 1)


def _parse(filters: Any, depth: int) -> Filters:
    if not isinstance(filters, Mapping):
        raise _invalid(f"filters is {filters!r:.60}, not an object")
    if depth > MAX_DEPTH:
        raise _invalid(f"Filters are nested more than {MAX_DEPTH} levels deep")
    for name in filters:
        if name not in _FIELD_BY_FILTER:
            near = get_close_matches(str(name), _FIELD_BY_FILTER, 1)
            raise _invalid(f"There is no filter {name!r:.60}", f"Did you mean {near[0]}?" if near else "")
        if depth and name in _OUTERMOST_ONLY and filters[name]:
            raise _invalid(f"{name} applies to all recipients, so it cannot be within all, any or not")
    parsed = {
        _FIELD_BY_FILTER[name]: _parse_value(name, value, depth)
        for name, value in filters.items()
        if value is not None and value not in ("", {}, [])
    }
    if parsed.get("age_min", 0) > parsed.get("age_max", MAX_AGE_YEARS):
        raise _invalid("ageMin is greater than ageMax, so no device matches")
    return Filters(**parsed)


def _parse_value(name: str, value: Any, depth: int) -> Any:
    match name:
        case "pushOnOff" | "marketingOnOff":
            if value is not True and value != "Y":
                raise _invalid(f'{name} is {value!r:.60}; use true or "Y", or omit the filter')
            return True
        case "ageMin" | "ageMax":
            return _parse_integer(value, name, 0, MAX_AGE_YEARS)
        case "seenWithinDays" | "notSeenForDays":
            return _parse_integer(value, name, 1, MAX_DAYS)
        case "attributes":
            return _parse_attributes(value)
        case "all" | "any":
            return tuple(_parse(each, depth + 1) for each in _parse_list(value, name))
        case "not":
            return tuple(_parse(each, depth + 1) for each in (value if isinstance(value, list) else [value]))
        case "onePerUser":
            if not isinstance(value, bool):
                raise _invalid(f"onePerUser is {value!r:.60}; use true or false")
            return value
        case "frequencyCap":
            return _parse_frequency_cap(value)
        case _:
            values = value if isinstance(value, list | tuple) else [value]
            return tuple(_parse_text(name, each) for each in _parse_list(values, name))


def _parse_list(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or len(value) > MAX_VALUES:
        raise _invalid(f"{name} is not a list of at most {MAX_VALUES} values")
    return value


def _parse_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 900 or "\0" in value:
        raise _invalid(f"{name} is {value!r:.60}, not a string of at most 900 characters")
    if name == "timezone":
        return zone(value).name
    if name == "platform":
        if value.lower() not in PLATFORMS:
            raise _invalid(f"platform is {value!r:.60}; use one of {', '.join(PLATFORMS)}")
        return value.lower()
    if name == "received":
        try:
            return str(UUID(value))
        except ValueError:
            raise _invalid(f"received is {value!r:.60}, not the id of a campaign") from None
    return value


def _parse_attributes(attributes: Any) -> dict[str, tuple[Any, ...] | Range]:
    if not isinstance(attributes, Mapping) or len(attributes) > MAX_ATTRIBUTES:
        raise _invalid(f"attributes must be an object of at most {MAX_ATTRIBUTES} members")
    return {str(name): _parse_attribute(f"attributes.{name!s:.60}", value) for name, value in attributes.items()}


def _parse_attribute(name: str, value: Any) -> tuple[Any, ...] | Range:
    if isinstance(value, Mapping):
        if '"' in name or "\\" in name or not value or value.keys() - {"min", "max"}:
            raise _invalid(f'{name} is {value!r:.60}; a range is like {{"min": 10, "max": 20}}')
        for limit in value.values():
            if not isinstance(limit, int | float) or isinstance(limit, bool) or not -1e15 < limit < 1e15:
                raise _invalid(f"{name} has the limit {limit!r:.60}, which is not a number")
        return Range(value.get("min"), value.get("max"))
    values = _parse_list(value if isinstance(value, list) else [value], name)
    if not values or not all(map(is_attribute_value, values)):
        raise _invalid(f"{name} is {value!r:.60}, not a string, number or boolean, a list of them, or a range")
    return tuple(values)


def _parse_frequency_cap(value: Any) -> FrequencyCap:
    if not isinstance(value, Mapping) or value.keys() != {"messages", "days"}:
        raise _invalid('frequencyCap must be like {"messages": 2, "days": 7}')
    return FrequencyCap(
        _parse_integer(value["messages"], "frequencyCap.messages", 1, 1000),
        _parse_integer(value["days"], "frequencyCap.days", 1, MAX_CAP_DAYS),
    )


def _parse_integer(value: Any, name: str, minimum: int, maximum: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise _invalid(f"{name} is {value!r:.60}; it must be an integer from {minimum} to {maximum:,}")
    return value


def _to_json(value: Any) -> Any:
    """Return the JSON form of a value; a single value is not a list."""
    if isinstance(value, Range | FrequencyCap):
        return value.to_json()
    if isinstance(value, Mapping):
        return {name: _to_json(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return None if not value else value[0] if len(value) == 1 else list(value)
    return value


def _invalid(problem: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_FILTER", fix=fix or "See docs/guides/campaigns.md.")
