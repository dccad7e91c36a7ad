"""Instants as integers and as text. An instant is the number of microseconds since 1970-01-01T00:00Z.

Instants are integers because arithmetic and comparison of aware datetimes within one zone use the wall clock and
ignore the fold (PEP 495).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

from timebell.errors import InvalidRecurrence

SECOND_US: Final = 1_000_000
DAY_S: Final = 86_400
DAY_US: Final = DAY_S * SECOND_US
MIN_S: Final = 0
"""The first supported second, 1970-01-01T00:00Z."""
MAX_S: Final = 7_258_118_400
"""The end of the supported range (exclusive), 2200-01-01T00:00Z."""
MIN_US: Final = MIN_S * SECOND_US
MAX_US: Final = MAX_S * SECOND_US

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NAIVE = _EPOCH.replace(tzinfo=None)
_MICROSECOND = timedelta(microseconds=1)
_ISO = re.compile(r"\d{4}-\d\d-\d\d(?:[Tt ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?P<zone>[Zz]|[+-]\d\d:\d\d)?)?", re.ASCII)


def to_us(instant: datetime, name: str = "the instant") -> int:
    """Return the microseconds since the epoch of an aware datetime. Raises InvalidRecurrence for anything else."""
    if type(instant) is datetime and instant.tzinfo is UTC:
        pass  # fast path: nearly all datetimes are in UTC
    elif not isinstance(instant, datetime) or instant.utcoffset() is None:
        raise InvalidRecurrence(
            f"{name} must be a datetime with a time zone, not {instant!r}.",
            code="INSTANT_WITHOUT_TIMEZONE",
            fix="Add a zone, e.g. datetime(2027, 3, 14, 7, tzinfo=UTC).",
        )
    since = instant - _EPOCH
    return (since.days * DAY_S + since.seconds) * SECOND_US + since.microseconds


@lru_cache(maxsize=1024)  # the planner and the dashboard convert the same instants repeatedly
def from_us(instant: int) -> datetime:
    """Return the aware UTC datetime of an instant within 1970..2199."""
    return _EPOCH + timedelta(0, *divmod(instant, SECOND_US))


def local_to_us(local: datetime) -> int:
    """Return a naive local time as microseconds of the wall clock since its 1970-01-01T00:00."""
    return (local - _EPOCH_NAIVE) // _MICROSECOND


def local_from_us(local: int) -> datetime:
    """Return the naive datetime of a local time in microseconds of the wall clock; the inverse of `local_to_us`."""
    return _EPOCH_NAIVE + timedelta(microseconds=local)


def parse_instant(text: object, name: str = "the instant") -> datetime:
    """Parse RFC 3339 text to a UTC datetime, or to a naive datetime if the text has no offset.

    Seconds may be omitted, and so may the time of day (midnight). Raises InvalidRecurrence (INVALID_INSTANT).
    """
    match = _ISO.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        try:
            instant = datetime.fromisoformat(match[0].upper())
            return instant if instant.tzinfo is None else instant.astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    excerpt = text[:60] if isinstance(text, str) else text
    raise InvalidRecurrence(
        f"{name} is {excerpt!r}, which is not a date and time.",
        code="INVALID_INSTANT",
        fix="Write it like 2027-03-14T07:00:00Z, or 2027-03-14T02:30:00 for a local time.",
    )


def format_instant(instant: datetime) -> str:
    """Return RFC 3339 text, with `Z` for an aware datetime, without for a local time; with a fraction if it has one."""
    if instant.tzinfo is None:
        return instant.isoformat()
    return instant.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"
