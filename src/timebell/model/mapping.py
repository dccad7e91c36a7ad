"""Build request bodies for receivers: rename fields, and fill templates. Pure.

A template is a JSON document whose strings may contain placeholders such as `{{payload.title}}`. There are no
expressions or loops.

    {{payload.items.0."odd name"}}   a path; a part in double quotes may contain anything except quotes and braces
    {{payload.version?}}             optional: if absent or null, the enclosing member or element is omitted
    {{payload.version|string}}       converted to a string; `|strings` converts every member of an object
    {{'{{'}}                         two literal braces

A string that consists of one placeholder becomes its value, of any JSON type; within a longer string the value is
inserted as text. A value that is absent and not optional is an error, so that no receiver gets "undefined", "null" or
an empty string instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import orjson

from timebell.errors import InvalidInput, InvalidPayload
from timebell.model.payload import MAX_DEPTH

_BRACES = re.compile(r"\{\{(?:'([^']*+)'|([^{}]*+))\}\}")
_EXPRESSION = re.compile(
    r"\s*(?P<path>(?:[\w$-]+|\"[^\"{}]+\")(?:\.(?:[\w$-]+|\"[^\"{}]+\"))*)"
    r"(?P<optional>\?)?\s*(?:\|\s*(?P<form>strings?)\s*)?"
)
_PATH_PART = re.compile(r"\"([^\"]+)\"|([^.\"]+)")
_POSITION = re.compile(r"\d{1,9}", re.ASCII)
_SYNTAX = "Write {{payload.title}}, {{payload.title?}} where it may be absent, {{payload.count|string}} for text."
_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class _Placeholder:
    source: str
    path: tuple[str, ...]
    optional: bool
    conversion: str | None


@dataclass(frozen=True, slots=True)
class FieldMapping:
    """Transform an object's fields: rename them, convert values to strings, omit nulls.

    Numbers, booleans, lists and objects are converted to their JSON text; `strings` omits nulls.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    strings: bool = False
    omit_null: bool = False

    def apply(self, source: Any) -> Any:
        """Return the transformed object. 0, false and "" are not omitted. Raises InvalidPayload (INVALID_BODY)."""
        if not isinstance(source, Mapping):
            raise _invalid_body("fields requires an object, and the payload is not one")
        mapped: dict[str, Any] = {}
        for name, value in source.items():
            if value is None and (self.strings or self.omit_null):
                continue
            new = self.rename.get(name, name)
            if new in mapped:
                raise _invalid_body(f"payload has two fields that would be named {new!r:.60}")
            mapped[new] = to_text(value) if self.strings else value
        return mapped


def check_template(template: Any, roots: Mapping[str, Any] | frozenset[str], location: str = "template") -> None:
    """Validate a template; each path must begin with one of `roots`. Raises InvalidInput (INVALID_TEMPLATE)."""
    _check_node(template, location, roots, 0)
    if isinstance(template, str) and any(each.optional for each in _placeholders(template)):
        raise _invalid("template is a single string, which cannot be omitted", "Remove the ?.")


def fill_template(template: Any, source: Mapping[str, Any], location: str = "template") -> Any:
    """Return a validated template with its placeholders filled from `source`; neither argument is modified.

    Raises InvalidPayload (INVALID_BODY) with the location and the missing value.
    """
    return _fill_node(template, source, location)


def _check_node(template: Any, location: str, roots: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _invalid(f"template is nested deeper than {MAX_DEPTH} levels")
    if isinstance(template, str):
        for each in _placeholders(template, location):
            if each.path[0] not in roots:
                near = get_close_matches(each.path[0], roots, 1)
                known = f"It is one of: {', '.join(sorted(roots))}."
                raise _invalid(
                    f"{location} uses {each.path[0]!r:.60}, which no delivery has",
                    f"Did you mean {near[0]}? {known}" if near else known,
                )
    elif isinstance(template, dict):
        for name, item in template.items():
            if isinstance(name, str) and "{{" in name:
                raise _invalid(f"{location} has a placeholder in the name {name!r:.60}", "Only values are filled in.")
            _check_node(item, f"{location}.{name}", roots, depth + 1)
    elif isinstance(template, list):
        for index, item in enumerate(template):
            _check_node(item, f"{location}.{index}", roots, depth + 1)


def _fill_node(template: Any, source: Mapping[str, Any], location: str) -> Any:
    if isinstance(template, str):
        return _fill_string(template, source, location)
    if isinstance(template, dict):
        members = {name: _fill_node(item, source, f"{location}.{name}") for name, item in template.items()}
        return {name: value for name, value in members.items() if value is not _ABSENT}
    if isinstance(template, list):
        elements = (_fill_node(item, source, f"{location}.{index}") for index, item in enumerate(template))
        return [value for value in elements if value is not _ABSENT]
    return template


def _fill_string(template: str, source: Mapping[str, Any], location: str) -> Any:
    parts = _parse(template)
    if len(parts) == 1 and isinstance(parts[0], _Placeholder):
        return _resolve(parts[0], source, location)
    texts = []
    for part in parts:
        if isinstance(part, _Placeholder):
            value = _resolve(part, source, location)
            if value is _ABSENT:
                return _ABSENT
            if value is None:
                raise _invalid_body(f"{location} has {{{{{part.source}}}}} within a string, and it is null")
            part = to_text(value)
        texts.append(part)
    return "".join(texts)


def _resolve(placeholder: _Placeholder, source: Mapping[str, Any], location: str) -> Any:
    value = _lookup(source, placeholder.path)
    if value is _ABSENT or (value is None and placeholder.optional):
        if placeholder.optional:
            return _ABSENT
        raise _invalid_body(f"{location} needs {{{{{placeholder.source}}}}}, which is absent")
    if placeholder.conversion is None:
        return value
    if value is None:
        raise _invalid_body(f"{location} converts {{{{{placeholder.source}}}}} to a string, and it is null")
    if placeholder.conversion == "string":
        return to_text(value)
    if not isinstance(value, Mapping):
        raise _invalid_body(
            f"{location} converts the members of {{{{{placeholder.source}}}}} to strings, and it is not an object"
        )
    return FieldMapping(strings=True).apply(value)


def _lookup(source: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        if isinstance(source, Mapping):
            source = source.get(part, _ABSENT)
        elif isinstance(source, list) and _POSITION.fullmatch(part) and int(part) < len(source):
            source = source[int(part)]
        else:
            return _ABSENT
    return source


def to_text(value: Any) -> str:
    """Return a string unchanged, and any other value as its JSON text."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _placeholders(template: str, location: str = "template") -> list[_Placeholder]:
    return [part for part in _parse(template, location) if isinstance(part, _Placeholder)]


@lru_cache(maxsize=1_000)
def _parse(template: str, location: str = "template") -> tuple[str | _Placeholder, ...]:
    """Split a template string into text and placeholders. Raises InvalidInput (INVALID_TEMPLATE)."""
    parts: list[str | _Placeholder] = []
    position = 0
    for braces in _BRACES.finditer(template):
        parts += [_check_literal(template[position : braces.start()], location)]
        position = braces.end()
        if braces[1] is not None:
            parts.append(braces[1])
            continue
        expression = _EXPRESSION.fullmatch(braces[2])
        if expression is None:
            raise _invalid(f"{location} has {braces[0]!r:.100}, which is not a placeholder", _SYNTAX)
        path = tuple(quoted or bare for quoted, bare in _PATH_PART.findall(expression["path"]))
        parts.append(_Placeholder(braces[2].strip(), path, expression["optional"] is not None, expression["form"]))
    parts.append(_check_literal(template[position:], location))
    non_empty = tuple(part for part in parts if part != "")
    return non_empty or ("",)


def _check_literal(text: str, location: str) -> str:
    if "{{" in text or "}}" in text:
        raise _invalid(f"{location} has unmatched braces", f"{_SYNTAX} Two literal braces: {{{{'{{{{'}}}}.")
    return text


def _invalid(problem: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{problem}.", code="INVALID_TEMPLATE", fix=fix)


def _invalid_body(problem: str) -> InvalidPayload:
    return InvalidPayload(
        f"The body cannot be built: {problem}.", code="INVALID_BODY",
        fix="Add the value to the payload, or mark the placeholder as optional: {{...?}}.",
    )  # fmt: skip
