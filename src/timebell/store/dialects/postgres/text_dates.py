"""Dates and times of foreign tables, read as text.

A date beyond the range of Python (the year 20260, BC, infinity) is then only an unusual value of its row, and not an
error of the driver that hides all rows of a page.
"""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

import asyncpg

SESSION_SETTINGS = {"DateStyle": "ISO", "TimeZone": "UTC"}
"""Settings of a session, without which the texts have another format."""


async def read_dates_as_text(connection: asyncpg.Connection[Any]) -> None:
    """Return dates and times that Python has no value for as texts, instead of raising an error."""
    for name, decode in (("timestamptz", _parse_instant), ("timestamp", _parse_instant), ("date", _parse_date)):
        await connection.set_type_codec(
            name, schema="pg_catalog", encoder=_format_time, decoder=decode, format="text"
        )  # fmt: skip


def _format_time(value: Any) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


def _parse_instant(value: str) -> datetime | str:
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return value


def _parse_date(value: str) -> date | str:
    try:
        return date.fromisoformat(value)
    except ValueError:
        return value
