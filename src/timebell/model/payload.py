"""JSON payloads: validated and limited when a job is created, so that nothing unreadable is ever stored.

All JSON text from outside is parsed by `read_json`. The limits follow RFC 8259 (sections 4 and 9), PostgreSQL's jsonb,
and the interoperability rules of RFC 7493 (I-JSON).
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

MAX_PAYLOAD_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_BODY_BYTES = 256 * 1024
"""Default limit of one JSON text from outside, in bytes."""

# Everything except brackets outside of strings; includes unterminated strings. Possessive, so it never backtracks.
_BETWEEN_BRACKETS = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+(?:"|\\?\Z))++', re.DOTALL)
_NESTING_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def encode(value: Any, field: str = "payload", *, limit: int = MAX_PAYLOAD_BYTES) -> str:
    """Encode `value` as JSON text of at most `limit` bytes and MAX_DEPTH levels.

    Raises InvalidPayload (PAYLOAD_NOT_JSON, PAYLOAD_TOO_DEEP, PAYLOAD_TOO_LARGE) with the path below `field`.
    """
    _check(value, field, 0)
    try:
        text = orjson.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidPayload(f"{field} is not JSON: {error}.") from error
    if len(text) > limit:
        raise InvalidPayload(
            f"{field} is {len(text):,} bytes of JSON; the limit is {limit:,}.",
            code="PAYLOAD_TOO_LARGE",
            fix="Store the data elsewhere and schedule its id.",
        )
    return text.decode()


def decode(text: str | None) -> Any:
    """Decode JSON text; None stays None."""
    return None if text is None else orjson.loads(text)


def read_json(data: bytes, field: str = "body", *, limit: int = MAX_BODY_BYTES) -> Any:
    """Parse UTF-8 JSON text that every parser and database interprets in the same way.

    Raises InvalidPayload with the path below `field`: PAYLOAD_TOO_LARGE above `limit` bytes and PAYLOAD_TOO_DEEP above
    MAX_DEPTH levels, both before parsing; INVALID_JSON for text that is not JSON or not UTF-8; PAYLOAD_NOT_JSON for
    duplicate names in an object, NaN, Infinity, integers of more than 64 bits, NUL characters and lone surrogates.
    """
    if len(data) > limit:
        raise InvalidPayload(
            f"{field} is {len(data):,} bytes; the limit is {limit:,}.", code="PAYLOAD_TOO_LARGE", fix="Send less."
        )
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and _max_nesting(data) > MAX_DEPTH:
        raise _too_deep(field)
    try:
        value = _DECODER.decode(data.decode())
    except InvalidPayload as error:
        raise InvalidPayload(f"{field} {error.message}", fix=error.fix) from None
    except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
        raise InvalidPayload(f"{field} is not JSON in UTF-8: {error}.", code="INVALID_JSON") from error
    _check(value, field, 0)
    return value


def _max_nesting(data: bytes) -> int:
    """Return the maximum number of brackets that are open at any position."""
    steps = _BETWEEN_BRACKETS.sub(b"", data).translate(_NESTING_STEPS)
    return max(accumulate(memoryview(steps).cast("b")), default=0)


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        duplicate = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise InvalidPayload(f"has an object with the duplicate name {duplicate!r:.60}.", fix="Keep one of them.")
    return members


def _parse_integer(digits: str) -> int:
    return int(digits[:21])  # 64-bit integers have at most 20 characters: a truncated number is rejected later


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_object, parse_int=_parse_integer)


def sanitize_text(text: str, max_length: int) -> str:
    """Return external text, such as an exception message, in a form that every store accepts.

    Truncates to `max_length` characters and replaces NUL characters and lone surrogates.
    """
    return text[:max_length].replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def _check(value: Any, path: str, depth: int) -> None:
    """Reject values that JSON, orjson or PostgreSQL would reject or silently change."""
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
            fix="Use strings, numbers, booleans, None, lists, dicts; for a datetime .isoformat() or a pydantic model.",
        )


def _check_object(value: dict[Any, Any], path: str, depth: int) -> None:
    """Check an object like `_check`, with the common string and integer checks inlined for speed."""
    for key, item in value.items():
        if type(key) is not str:
            raise InvalidPayload(f"{path} has the key {key!r}; JSON keys are strings.")
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
        raise InvalidPayload(f"{path} contains a NUL character, which databases reject.")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPayload(f"{path} contains a lone surrogate, which is not valid text.") from error
