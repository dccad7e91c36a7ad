"""Instants as integers and as text. An instant is a count of microseconds since 1970-01-01T00:00Z.

Integers, because arithmetic and comparison of aware datetimes within one zone work on the wall clock
and ignore the fold (PEP 495).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

from timebell.errors import InvalidRecurrence

SECOND: Final = 1_000_000
DAY_S: Final = 86_400
DAY: Final = DAY_S * SECOND
MIN_S: Final = 0
"""The first second the engine knows, 1970-01-01T00:00Z."""
MAX_S: Final = 7_258_118_400
"""The first second the engine no longer knows, 2200-01-01T00:00Z."""
MIN: Final = MIN_S * SECOND
MAX: Final = MAX_S * SECOND

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NAIVE = _EPOCH.replace(tzinfo=None)
_TICK = timedelta(microseconds=1)
_ISO = re.compile(r"\d{4}-\d\d-\d\d(?:[Tt ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?P<zone>[Zz]|[+-]\d\d:\d\d)?)?", re.ASCII)


def to_us(instant: datetime, what: str = "the instant") -> int:
    """Microseconds since the epoch of an aware datetime. Raises InvalidRecurrence for anything else."""
    if type(instant) is datetime and instant.tzinfo is UTC:
        pass  # as nearly all of ours are
    elif not isinstance(instant, datetime) or instant.utcoffset() is None:
        raise InvalidRecurrence(
            f"{what} must be a datetime with a time zone, not {instant!r}.",
            code="INSTANT_WITHOUT_TIMEZONE",
            fix="Give it a zone, e.g. datetime(2027, 3, 14, 7, tzinfo=UTC).",
        )
    since = instant - _EPOCH
    return (since.days * DAY_S + since.seconds) * SECOND + since.microseconds


@lru_cache(maxsize=1024)  # planning and showing ask for the same ones within moments
def from_us(instant: int) -> datetime:
    """The aware UTC datetime of an instant within 1970..2199."""
    return _EPOCH + timedelta(0, *divmod(instant, SECOND))


def wall_us(wall: datetime) -> int:
    """A naive local time as microseconds of the wall clock since its 1970-01-01T00:00."""
    return (wall - _EPOCH_NAIVE) // _TICK


def from_wall_us(wall: int) -> datetime:
    """The naive datetime of such a count."""
    return _EPOCH_NAIVE + timedelta(microseconds=wall)


def parse_instant(text: object, what: str = "the instant") -> datetime:
    """RFC 3339 text to a UTC datetime, or to a naive one where the text has no offset.

    Seconds may be left out, and so may the time of day (midnight). Raises InvalidRecurrence.
    """
    match = _ISO.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        try:
            found = datetime.fromisoformat(match[0].upper())
            return found if found.tzinfo is None else found.astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    shown = text[:60] if isinstance(text, str) else text
    raise InvalidRecurrence(
        f"{what} is {shown!r}, which is not a date and time.",
        code="INVALID_INSTANT",
        fix="Write it like 2027-03-14T07:00:00Z, or 2027-03-14T02:30:00 for a local time.",
    )


def format_instant(instant: datetime) -> str:
    """RFC 3339 text: with `Z` for an aware datetime, without for a local time; fraction only if any."""
    if instant.tzinfo is None:
        return instant.isoformat()
    return instant.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"
