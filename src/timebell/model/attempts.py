"""The record of a job's attempts: a line for each that failed, or was delivered outside of Python."""

from __future__ import annotations

from typing import Any

from timebell.errors import InvalidPayload
from timebell.model.payload import encode

KEPT = 20
KEPT_BYTES = KEPT * 16_384

Line = dict[str, Any]


def kept(lines: list[Line]) -> str:
    """The last of these lines as JSON; where it gets too long, only the very last one keeps its response."""
    lines = lines[-KEPT:]
    try:
        return encode(lines, "attempts", limit=KEPT_BYTES)
    except InvalidPayload:
        for line in lines[:-1]:
            line.pop("response", None)
        return encode(lines, "attempts", limit=KEPT_BYTES)


def with_delivery(lines: list[Line], delivery: Line) -> list[Line]:
    """The lines with that of a delivery among them, whose end was written before it: what was said of the end stays."""
    number = delivery["attempt"]
    said = [line for line in lines if line.get("attempt", 0) == number]
    others = [line for line in lines if line.get("attempt", 0) != number]
    return sorted([*others, {**delivery, **(said[-1] if said else {})}], key=lambda line: line.get("attempt", 0))
