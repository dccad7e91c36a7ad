"""From the names things are stored under to those a receiver reads: fields renamed, documents filled in. Pure.

A template is a JSON document whose strings hold placeholders: `{{payload.title}}`. There is nothing to run in one.

    {{payload.items.0."odd name"}}   a path; a part in double quotes may hold anything but quotes and braces
    {{payload.version?}}             may be absent or null: then the member or element it stands in is left out
    {{payload.version|string}}       as text; `|strings` makes text of every member of an object
    {{'{{'}}                         two braces, as they are

A string that is one placeholder becomes its value, whatever JSON type it has; in a longer one the value is put in as
text. What is absent and not marked `?` is an error: no receiver reads "undefined", "null" or an empty place instead.
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

_OPEN = re.compile(r"\{\{(?:'([^']*+)'|([^{}]*+))\}\}")
_PLACE = re.compile(
    r"\s*(?P<path>(?:[\w$-]+|\"[^\"{}]+\")(?:\.(?:[\w$-]+|\"[^\"{}]+\"))*)"
    r"(?P<optional>\?)?\s*(?:\|\s*(?P<form>strings?)\s*)?"
)
_PART = re.compile(r"\"([^\"]+)\"|([^.\"]+)")
_SYNTAX = "Write {{payload.title}}, {{payload.title?}} where it may be absent, {{payload.count|string}} for text."
_ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class _Placeholder:
    written: str
    path: tuple[str, ...]
    optional: bool
    form: str | None


@dataclass(frozen=True, slots=True)
class Fields:
    """What becomes of an object's fields on their way out: new names, all values as strings, nulls left out.

    A string of a number, a boolean, a list or an object is its JSON; null has none, so `strings` leaves it out.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    strings: bool = False
    omit_null: bool = False

    def of(self, source: Any) -> Any:
        """The renamed object. 0, false and "" are values and stay. Raises InvalidPayload (BODY_UNFIT)."""
        if not isinstance(source, Mapping):
            raise _unfit("fields are of an object, and payload is none")
        mapped: dict[str, Any] = {}
        for name, value in source.items():
            if value is None and (self.strings or self.omit_null):
                continue
            new = self.rename.get(name, name)
            if new in mapped:
                raise _unfit(f"payload has two fields that would be named {new!r:.60}")
            mapped[new] = _text(value) if self.strings else value
        return mapped


def check(template: Any, roots: Mapping[str, Any] | frozenset[str]) -> None:
    """Raises InvalidInput (TEMPLATE_INVALID) for what `fill` cannot read, and paths that begin with none of `roots`."""
    _check(template, "template", roots, 0)
    if isinstance(template, str) and any(each.optional for each in _placeholders(template)):
        raise _invalid("template is one string, which cannot be left out", "Leave the ? away.")


def fill(template: Any, source: Mapping[str, Any]) -> Any:
    """A checked template with its placeholders filled in from `source`; neither is changed.

    Raises InvalidPayload (BODY_UNFIT), naming the place and what it misses.
    """
    return _fill(template, source, "template")


def _check(template: Any, place: str, roots: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _invalid(f"template is nested deeper than {MAX_DEPTH} levels")
    if isinstance(template, str):
        for each in _placeholders(template, place):
            if each.path[0] not in roots:
                near = get_close_matches(each.path[0], roots, 1)
                known = f"It is one of: {', '.join(sorted(roots))}."
                raise _invalid(
                    f"{place} asks for {each.path[0]!r:.60}, which no delivery has",
                    f"Did you mean {near[0]}? {known}" if near else known,
                )
    elif isinstance(template, dict):
        for name, item in template.items():
            if isinstance(name, str) and "{{" in name:
                raise _invalid(f"{place} has a placeholder in the name {name!r:.60}", "Only values are filled in.")
            _check(item, f"{place}.{name}", roots, depth + 1)
    elif isinstance(template, list):
        for index, item in enumerate(template):
            _check(item, f"{place}.{index}", roots, depth + 1)


def _fill(template: Any, source: Mapping[str, Any], place: str) -> Any:
    if isinstance(template, str):
        return _string(template, source, place)
    if isinstance(template, dict):
        members = {name: _fill(item, source, f"{place}.{name}") for name, item in template.items()}
        return {name: value for name, value in members.items() if value is not _ABSENT}
    if isinstance(template, list):
        elements = (_fill(item, source, f"{place}.{index}") for index, item in enumerate(template))
        return [value for value in elements if value is not _ABSENT]
    return template


def _string(template: str, source: Mapping[str, Any], place: str) -> Any:
    parts = _parts(template)
    if len(parts) == 1 and isinstance(parts[0], _Placeholder):
        return _value(parts[0], source, place)
    texts = []
    for part in parts:
        if isinstance(part, _Placeholder):
            value = _value(part, source, place)
            if value is _ABSENT:
                return _ABSENT
            if value is None:
                raise _unfit(f"{place} puts {{{{{part.written}}}}} in a text, and it is null")
            part = _text(value)
        texts.append(part)
    return "".join(texts)


def _value(placeholder: _Placeholder, source: Mapping[str, Any], place: str) -> Any:
    value = _at(source, placeholder.path)
    if value is _ABSENT or (value is None and placeholder.optional):
        if placeholder.optional:
            return _ABSENT
        raise _unfit(f"{place} needs {{{{{placeholder.written}}}}}, which is absent")
    if placeholder.form is None:
        return value
    if value is None:
        raise _unfit(f"{place} makes a string of {{{{{placeholder.written}}}}}, and it is null")
    if placeholder.form == "string":
        return _text(value)
    if not isinstance(value, Mapping):
        raise _unfit(f"{place} makes strings of the members of {{{{{placeholder.written}}}}}, which is no object")
    return Fields(strings=True).of(value)


def _at(source: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        if isinstance(source, Mapping):
            source = source.get(part, _ABSENT)
        elif isinstance(source, list) and part.isascii() and part.isdigit() and int(part[:9]) < len(source):
            source = source[int(part[:9])]
        else:
            return _ABSENT
    return source


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _placeholders(template: str, place: str = "template") -> list[_Placeholder]:
    return [part for part in _parts(template, place) if isinstance(part, _Placeholder)]


@lru_cache(maxsize=1_000)
def _parts(template: str, place: str = "template") -> tuple[str | _Placeholder, ...]:
    """Text and placeholders in turn. Raises InvalidInput (TEMPLATE_INVALID)."""
    parts: list[str | _Placeholder] = []
    at = 0
    for found in _OPEN.finditer(template):
        parts += [_plain(template[at : found.start()], place)]
        at = found.end()
        if found[1] is not None:
            parts.append(found[1])
            continue
        read = _PLACE.fullmatch(found[2])
        if read is None:
            raise _invalid(f"{place} has {found[0]!r:.100}, which is no placeholder", _SYNTAX)
        path = tuple(quoted or bare for quoted, bare in _PART.findall(read["path"]))
        parts.append(_Placeholder(found[2].strip(), path, read["optional"] is not None, read["form"]))
    parts.append(_plain(template[at:], place))
    kept = tuple(part for part in parts if part != "")
    return kept or ("",)


def _plain(text: str, place: str) -> str:
    if "{{" in text or "}}" in text:
        raise _invalid(
            f"{place} has braces that open or close nothing", f"{_SYNTAX} Two braces as text: {{{{'{{{{'}}}}."
        )
    return text


def _invalid(why: str, fix: str = "") -> InvalidInput:
    return InvalidInput(f"{why}.", code="TEMPLATE_INVALID", fix=fix)


def _unfit(why: str) -> InvalidPayload:
    return InvalidPayload(
        f"The body cannot be made: {why}.", code="BODY_UNFIT",
        fix="Give the payload what the target asks for, or mark it {{...?}} to leave it out.",
    )  # fmt: skip
