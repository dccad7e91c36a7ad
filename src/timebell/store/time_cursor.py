"""Cursor of a list that is sorted by a time and an id."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from timebell.errors import InvalidInput
from timebell.store.types import from_micros, to_micros


def encode_time_cursor(at: datetime, id_: str) -> str:
    """Return the cursor after an entry."""
    return f"{to_micros(at)}.{id_}"


def decode_time_cursor(cursor: str) -> tuple[datetime, str]:
    """Decode a cursor of `encode_time_cursor`. Raises InvalidInput (INVALID_CURSOR)."""
    micros, _, id_ = cursor.partition(".")
    try:
        return from_micros(int(micros)), str(UUID(id_))
    except (ValueError, OverflowError) as error:
        raise InvalidInput(
            f"cursor {cursor!r:.60} is invalid.", code="INVALID_CURSOR", fix="Pass next_cursor unchanged."
        ) from error
