"""Payloads: JSON with limits, checked when a job is made so that nothing unreadable is ever stored."""

from __future__ import annotations

from math import isfinite
from typing import Any

import orjson

from timebell.errors import InvalidPayload

MAX_BYTES = 64 * 1024
MAX_DEPTH = 32


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
        raise InvalidPayload(
            f"{path.split('.', 1)[0]} is nested deeper than {MAX_DEPTH} levels.", code="PAYLOAD_TOO_DEEP"
        )
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise InvalidPayload(f"{path} has the key {key!r}; keys in JSON are strings.")
            _check_text(key, path)
            _check(item, f"{path}.{key}", depth + 1)
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}.{index}", depth + 1)
    else:
        raise InvalidPayload(
            f"{path} is a {kind.__name__} object; payloads are JSON.",
            fix="Use text, numbers, booleans, None, lists and dicts; for a datetime, .isoformat() or a pydantic model.",
        )


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
