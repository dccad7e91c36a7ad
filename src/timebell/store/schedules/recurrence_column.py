"""Recurrences as they are stored with schedules and their revisions."""

from __future__ import annotations

from functools import lru_cache

import orjson

from timebell.recurrence import Recurrence


@lru_cache(maxsize=10_000)
def recurrence_of(text: str) -> Recurrence:
    """A stored recurrence. Raises what it is that makes it unreadable."""
    return Recurrence.from_json(orjson.loads(text))
