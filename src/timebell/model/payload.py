"""Payloads: JSON with limits, checked when a job is made so that nothing unreadable is ever stored.

`read_json` is the one way in for JSON text from outside. The limits are those of RFC 8259 (sections 4 and 9), of
what PostgreSQL's jsonb takes, and of what other readers of JSON agree on (RFC 7493, I-JSON).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import accumulate
from math import isfinite
from typing import Any

import orjson

from timebell.errors import InvalidPayload

MAX_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_BODY = 256 * 1024
"""Bytes of one JSON text from outside."""

# All that is no bracket outside of a string, unfinished strings too. Possessive: it never goes back.
_BETWEEN_BRACKETS = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+(?:"|\\?\Z))++', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def encode(value: Any, field: str = "payload", *, limit: int = MAX_BYTES) -> str:
    """`value` as JSON text of at most `limit` bytes and 32 levels.

    Raises InvalidPayload (PAYLOAD_NOT_JSON, PAYLOAD_TOO_DEEP, PAYLOAD_TOO_LARGE), naming the place.
    """
    _check(value, field, 0)
    try:
        text = orjson.dumps(value)
    except (TypeError, ValueError) as refused:
        raise InvalidPayload(f"{field} is not JSON: {refused}.") from refused
    if len(text) > limit:
        raise InvalidPayload(
            f"{field} is {len(text):,} bytes of JSON; the limit is {limit:,}.",
            code="PAYLOAD_TOO_LARGE",
            fix="Store the data elsewhere and schedule its id.",
        )
    return text.decode()


def decode(text: str | None) -> Any:
    """The value of JSON text; None for none."""
    return None if text is None else orjson.loads(text)


def read_json(data: bytes, field: str = "body", *, limit: int = MAX_BODY) -> Any:
    """The value of JSON text in UTF-8, if it means the same to every reader and can be stored.

    Refused are more than `limit` bytes (PAYLOAD_TOO_LARGE) and more than 32 levels (PAYLOAD_TOO_DEEP), both before
    anything parses it; text that is not JSON or not UTF-8 (JSON_INVALID); and what readers or databases disagree
    on: a name that comes twice in an object, NaN and Infinity, integers of more than 64 bits, NUL, lone surrogates
    (PAYLOAD_NOT_JSON). Raises InvalidPayload, naming `field` and the place within it.
    """
    if len(data) > limit:
        raise InvalidPayload(
            f"{field} is {len(data):,} bytes; the limit is {limit:,}.", code="PAYLOAD_TOO_LARGE", fix="Send less."
        )
    if _depth(data) > MAX_DEPTH:
        raise _too_deep(field)
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object, parse_int=_integer)
    except InvalidPayload as twice:
        raise InvalidPayload(f"{field} {twice.message}", fix=twice.fix) from None
    except ValueError as bad:  # JSONDecodeError and UnicodeDecodeError are ones
        raise InvalidPayload(f"{field} is not JSON in UTF-8: {bad}.", code="JSON_INVALID") from bad
    _check(value, field, 0)
    return value


def _depth(data: bytes) -> int:
    """The most brackets that are open at once."""
    steps = _BETWEEN_BRACKETS.sub(b"", data).translate(_STEPS)
    return max(accumulate(memoryview(steps).cast("b")), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise InvalidPayload(f"has an object with {twice!r:.60} in it twice.", fix="Keep one of them.")
    return found


def _integer(digits: str) -> int:
    return int(digits[:21])  # of the 64-bit ones the longest has 20: what is cut here is refused later


def legible(text: str, most: int) -> str:
    """Text from outside, such as what an exception says, as every store can keep it; cut to `most` characters."""
    return text[:most].replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def _check(value: Any, path: str, depth: int) -> None:
    """Refuse what JSON, orjson or PostgreSQL would refuse or silently change, before any of them sees it."""
    kind = type(value)
    if value is None or kind is bool:
        return
    if kind is str:
        _check_text(value, path)
    elif kind is int or kind is float:
        _check_number(value, path)
    elif depth >= MAX_DEPTH:
        raise _too_deep(path.split(".", 1)[0])
    elif kind is dict:
        _check_object(value, path, depth)
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}.{index}", depth + 1)
    else:
        raise InvalidPayload(
            f"{path} is a {kind.__name__} object; payloads are JSON.",
            fix="Use text, numbers, booleans, None, lists and dicts; for a datetime, .isoformat() or a pydantic model.",
        )


def _check_object(value: dict[Any, Any], path: str, depth: int) -> None:
    """As `_check`, without a call for each of the values that most are: text and numbers."""
    for key, item in value.items():
        if type(key) is not str:
            raise InvalidPayload(f"{path} has the key {key!r}; keys in JSON are strings.")
        if "\x00" in key or not key.isascii():
            _check_text(key, path)
        kind = type(item)
        if kind is str:
            if "\x00" in item or not item.isascii():
                _check_text(item, f"{path}.{key}")
        elif kind is not int or not -(2**63) <= item < 2**63:
            _check(item, f"{path}.{key}", depth + 1)


def _too_deep(field: str) -> InvalidPayload:
    return InvalidPayload(f"{field} is nested deeper than {MAX_DEPTH} levels.", code="PAYLOAD_TOO_DEEP")


def _check_number(number: float, path: str) -> None:
    if isinstance(number, int):
        if not -(2**63) <= number < 2**64:
            raise InvalidPayload(f"{path} is an integer of more than 64 bits.", fix="Send it as a string.")
    elif not isfinite(number):
        raise InvalidPayload(f"{path} is {number}; JSON has no such number.")


def _check_text(text: str, path: str) -> None:
    if "\x00" in text:
        raise InvalidPayload(f"{path} holds a NUL character, which databases refuse.")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as lone:
            raise InvalidPayload(f"{path} holds a lone surrogate, which is not text.") from lone
