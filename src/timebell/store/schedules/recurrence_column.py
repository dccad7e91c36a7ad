"""Recurrence column of schedules and their revisions."""

from __future__ import annotations

from functools import lru_cache

import orjson

from timebell import recurrence
from timebell.recurrence import Recurrence


@lru_cache(maxsize=10_000)
def recurrence_from_json(text: str) -> Recurrence:
    """Return a stored recurrence. Raises the decoding error if it is invalid."""
    return recurrence.recurrence_from_json(orjson.loads(text))
