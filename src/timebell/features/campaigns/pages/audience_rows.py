"""The rows of the audience in the campaign form: one comparison each, all of which must match.

A row becomes a member of `all` in the filters: `field{n}`, `op{n}` and `value{n}`. Attributes are named like columns of
an import: `attributes.score:number`. A segment or a campaign is a field of its own, `segment=Gold customers`, whose row
has no value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from timebell.dashboard.fields import format_value, parse_number, parsing_field, text_fields
from timebell.dashboard.views import View
from timebell.errors import InvalidInput
from timebell.features.campaigns.store import devices

OPERATORS = (("is", "is"), ("not", "is not"), ("min", "at least"), ("max", "at most"))
FIELDS = (
    ("platform", "Platform"), ("language", "Language"), ("gender", "Gender"), ("age", "Age"),
    ("timezone", "Time zone"), ("lastSeen", "Last seen, days ago"), ("topic", "Topic"), ("audience", "Audience"),
)  # fmt: skip
CONSENTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"pushOnOff": True}, "accepts push messages"), ({"marketingOnOff": True}, "has consented to marketing"),
)  # fmt: skip
ATTRIBUTE_PREFIX = "attributes."
OBJECT_PREFIXES = ("segment=", "received=")
MAX_CAMPAIGNS = 20
"""Campaigns whose recipients can be chosen."""
MAX_ROWS = 50
_NUMBERS = {"age": {"min": "ageMin", "max": "ageMax"}, "lastSeen": {"min": "notSeenForDays", "max": "seenWithinDays"}}
_BOOLEANS = {"true": True, "false": False, "yes": True, "no": False}


async def list_fields(view: View, form: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the fields that a condition can compare, with their labels.

    They include attributes of devices, segments, the newest campaigns that have started, and what the form has.
    """
    kinds = await view.app.store.run(devices.sample_attributes, view.caller.tenant_id)
    chosen = {text for name, text in form.items() if name.startswith("field")}
    names = {f"{ATTRIBUTE_PREFIX}{name}{kind}" for name, kind in kinds.items()}
    names |= {name for name in chosen if name.startswith(ATTRIBUTE_PREFIX)}
    attributes = [(name, name.removeprefix(ATTRIBUTE_PREFIX).partition(":")[0]) for name in sorted(names)]
    segments = (await view.get("/segments", limit=200))["items"]
    campaigns = (await view.get("/campaigns", limit=MAX_CAMPAIGNS))["items"]
    objects = {f"segment={each['name']}": f"In segment {each['name']}" for each in segments}
    objects |= {
        f"received={each['id']}": f"Got {each['name'] or each['title'] or 'campaign'}, {each['actualSendStart'][:10]}"
        for each in campaigns
        if each["actualSendStart"]
    }
    for name in sorted(chosen - objects.keys()):
        if name.startswith(OBJECT_PREFIXES):
            objects[name] = name.replace("segment=", "In segment ").replace("received=", "Got campaign ")
    return [("", "Choose…"), *FIELDS, *attributes, *objects.items()]


def count_rows(form: Mapping[str, str]) -> int:
    """Return the number of rows: those with a value, or more after "Add condition"."""
    requested = form.get("conditions", "")
    filled = [n for n in range(1, MAX_ROWS + 1) if form.get(f"field{n}") or form.get(f"value{n}", "").strip()]
    return min(MAX_ROWS, max([int(requested) if requested.isdecimal() else 0, *filled]))


def parse_rows(form: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the filters of the rows. Raises InvalidField (INVALID_FILTER)."""
    filters = []
    for n in range(1, count_rows(form) + 1):
        row = text_fields(form, f"field{n}", f"value{n}")
        if f"field{n}" in row:
            with parsing_field(f"value{n}"):
                if f"value{n}" not in row and not row[f"field{n}"].startswith(OBJECT_PREFIXES):
                    raise _invalid(f"Condition {n} has no value", "Enter one, or several with commas between them.")
                filters.append(_parse_row(row[f"field{n}"], form.get(f"op{n}", "is"), row.get(f"value{n}", "")))
    return filters


def _parse_row(name: str, operator: str, text: str) -> dict[str, Any]:
    if operator == "not":
        return {"not": _parse_row(name, "is", text)}
    if name.startswith(OBJECT_PREFIXES):
        kind, _, chosen = name.partition("=")
        if operator != "is":
            raise _invalid(f"A {kind} is not a number", "Choose “is” or “is not”.")
        return {kind: chosen}
    if name in _NUMBERS:
        names = _NUMBERS[name]
        if operator == "is" and name == "lastSeen":
            raise _invalid("Last seen is a number of days", "Choose “at least” or “at most”.")
        number = parse_number(name, text)
        return {names[each]: number for each in (("min", "max") if operator == "is" else (operator,))}
    is_attribute = name.startswith(ATTRIBUTE_PREFIX)
    bare, _, kind = name.removeprefix(ATTRIBUTE_PREFIX).partition(":") if is_attribute else (name, "", "")
    if operator != "is":
        if kind != "number":
            raise _invalid(f"{bare:.60} is not a number", "Choose “is” or “is not”.")
        return {"attributes": {bare: {operator: parse_number(bare, text)}}}
    values = [_parse_value(bare, kind, part.strip()) for part in text.split(",") if part.strip()]
    value = values[0] if len(values) == 1 else values
    return {"attributes": {bare: value}} if is_attribute else {name: value}


def _parse_value(name: str, kind: str, text: str) -> Any:
    if kind == "number":
        return parse_number(name, text)
    if kind == "boolean":
        if text.lower() not in _BOOLEANS:
            raise _invalid(f"{name:.60} is {text!r:.60}", "Enter yes or no.")
        return _BOOLEANS[text.lower()]
    return text


def split_filters(filters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the filters that rows cannot show, and the form fields of the others."""
    rest, form, rows = dict(filters), dict[str, str](), 0
    kept = []
    for each in rest.pop("all", []):
        row = None if rows == MAX_ROWS else _to_row(each)
        if row is None or _parse_row(*row) != each:
            kept.append(each)
            continue
        rows += 1
        form |= dict(zip((f"field{rows}", f"op{rows}", f"value{rows}"), row, strict=True))
    return rest | ({"all": kept} if kept else {}), form


def describe_filters(filters: Mapping[str, Any]) -> list[str]:
    """Return the conditions of filters in words; those that rows cannot show are JSON."""
    rest, form = split_filters(to_rows(filters))
    texts = [
        _describe_row(form[f"field{n}"], form[f"op{n}"], form[f"value{n}"]) for n in range(1, count_rows(form) + 1)
    ]  # fmt: skip
    others = [*rest.pop("all", []), *([rest] if rest else [])]
    return texts + [
        next((text for known, text in CONSENTS if each == known), json.dumps(each, ensure_ascii=False))
        for each in others
    ]  # fmt: skip


def _describe_row(name: str, operator: str, value: str) -> str:
    kind, _, chosen = name.partition("=")
    if name.startswith(OBJECT_PREFIXES):
        words = {"segment": ("in segment", "not in segment"), "received": ("got campaign", "did not get campaign")}
        return f"{words[kind][operator == 'not']} {chosen}"
    label = dict(FIELDS).get(name) or name.removeprefix(ATTRIBUTE_PREFIX).partition(":")[0]
    return f"{label} {dict(OPERATORS)[operator]} {value}"


def to_rows(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return equivalent filters in which each condition is a member of `all`, so that rows can show it."""
    conditions = [{name: value} for name, value in filters.items() if name not in ("all", "any", "not", "attributes")]
    conditions += [{"attributes": {name: value}} for name, value in filters.get("attributes", {}).items()]
    excluded = filters.get("not", [])
    conditions += [{"not": each} for each in (excluded if isinstance(excluded, list) else [excluded])]
    kept = {name: filters[name] for name in ("any",) if name in filters}
    return {**kept, "all": [*conditions, *filters.get("all", [])]}


def _to_row(filters: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the field, operator and value of a filter; None if there is no such row."""
    if filters.keys() == {"not"} and isinstance(filters["not"], Mapping):
        row = _to_row(filters["not"])
        return None if row is None or row[1] != "is" else (row[0], "not", row[2])
    for name, limits in _NUMBERS.items():
        if filters.keys() == set(limits.values()) and len(set(filters.values())) == 1:
            return name, "is", format_value(filters[limits["min"]])
        for operator, filter_name in limits.items():
            if filters.keys() == {filter_name}:
                return name, operator, format_value(filters[filter_name])
    if len(filters) != 1:
        return None
    (name, value), *_ = filters.items()
    if name == "attributes" and isinstance(value, Mapping) and len(value) == 1:
        (bare, value), *_ = value.items()
        if isinstance(value, Mapping) and len(value) == 1:
            (operator, limit), *_ = value.items()
            return f"{ATTRIBUTE_PREFIX}{bare}:number", operator, format_value(limit)
        return (f"{ATTRIBUTE_PREFIX}{bare}{_kind_of(value)}", "is", _join(value)) if _is_plain(value) else None
    if f"{name}=" in OBJECT_PREFIXES:
        return (f"{name}={value}", "is", "") if isinstance(value, str) else None
    return (name, "is", _join(value)) if name in dict(FIELDS) and _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    return all(isinstance(each, str | int | float) for each in (value if isinstance(value, Sequence) else [value]))


def _kind_of(value: Any) -> str:
    first = value[0] if isinstance(value, list) else value
    return ":boolean" if isinstance(first, bool) else "" if isinstance(first, str) else ":number"


def _join(value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return ", ".join(("yes" if each else "no") if isinstance(each, bool) else format_value(each) for each in values)


def _invalid(problem: str, fix: str) -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_FILTER", fix=fix)
