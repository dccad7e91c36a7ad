"""Column values as JSON, and keys and cursor values as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from itertools import chain
from math import isfinite
from typing import Any
from uuid import UUID

import orjson

MAX_BINARY_BYTES = 64
"""Longer binary values are not read: they are neither keys nor people."""
BINARY_TYPES = (bytes, bytearray, memoryview)
CONVERTED_SINGLY = (time, list, tuple, dict)
"""Types that orjson does not convert like `to_json_value`: a time, also in a list, may lose a zero of its fraction."""


class InvalidText(str):
    """Text in another encoding, with replacement characters."""

    __slots__ = ()


def to_json_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the values of rows as JSON; see `to_json_value`.

    orjson converts plain values in less than half the time.
    """
    encoded = b""
    if set(map(type, chain.from_iterable(row.values() for row in rows))).isdisjoint(CONVERTED_SINGLY):
        with suppress(TypeError):  # an integer of more than 64 bits
            encoded = orjson.dumps(rows, default=to_json_value, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    if not encoded or b'"[' in encoded or b"\\u0000" in encoded:  # the latter are texts that `to_json_value` changes
        return [{name: to_json_value(value) for name, value in row.items()} for row in rows]
    plain_rows: list[dict[str, Any]] = orjson.loads(encoded)
    return plain_rows


def to_json_value(value: Any) -> Any:
    """Return a column value as JSON that the store accepts.

    Values that JSON cannot represent, such as NaN, are null. Text that is a JSON list is a list, because SQLite has no
    list type. A binary value is its hexadecimal text.
    """
    kind = type(value)
    if kind is datetime:  # first those that nearly all columns have, because this runs for each value of a scan
        return value.isoformat()
    if kind is int and -(2**63) <= value < 2**64:
        return value
    match value:
        case None | bool():
            return value
        case str() if value.startswith("[") and value.endswith("]"):
            try:
                return to_json_value(json.loads(value))
            except (ValueError, RecursionError):
                return _replace_nul(value)
        case str():
            return _replace_nul(value)
        case datetime() | date() | time():
            return value.isoformat()
        case int() | float() | Decimal():
            return _to_json_number(value)
        case list() | tuple():
            return [to_json_value(element) for element in value]
        case dict():
            return {_replace_nul(str(name)): to_json_value(element) for name, element in value.items()}
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex() if len(value) <= MAX_BINARY_BYTES else None
    return str(value)


def key_text(value: Any) -> str:
    """Return a key as text. A binary key is its hexadecimal text."""
    return bytes(value).hex() if isinstance(value, BINARY_TYPES) else str(value)


def parse_key(text: str, key_type: type) -> Any:
    """Return the value of a key's text. Raises ValueError if no key of this type has this text."""
    if key_type is str:
        return text
    try:
        return bytes.fromhex(text) if key_type is bytes else key_type(text)
    except (TypeError, ArithmeticError) as error:
        raise ValueError(text) from error


def encode_key(value: Any) -> Any:
    """Encode a key or cursor value for JSON; `decode_key` restores the type that the driver expects."""
    if isinstance(value, datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, UUID):
        return {"uuid": str(value)}
    if isinstance(value, BINARY_TYPES):
        return {"bytes": bytes(value).hex()}
    return value if isinstance(value, int | float) else str(value)


def decode_key(encoded: Any) -> Any:
    """Return the value of an encoded key or cursor value."""
    if not isinstance(encoded, dict):
        return encoded
    if "datetime" in encoded:
        return datetime.fromisoformat(encoded["datetime"])
    return UUID(encoded["uuid"]) if "uuid" in encoded else bytes.fromhex(encoded["bytes"])


def _to_json_number(value: float | Decimal) -> float | str | None:
    if isinstance(value, Decimal):
        if not value.is_finite() or value.adjusted() > 20:
            return str(value) if value.is_finite() else None
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if -(2**63) <= value < 2**64 else str(value)


def _replace_nul(value: str) -> str:
    """Replace NUL characters, which no store accepts."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in value else value
