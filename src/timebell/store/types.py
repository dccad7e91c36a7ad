"""Column types: how each database represents instants and ids.

In Python the values are the same for all databases: aware UTC datetimes, and ids as text. JSON is stored as the text
that was validated, so it is returned unchanged.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, Dialect, String, types

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def to_micros(instant: datetime) -> int:
    """Convert an instant to microseconds since 1970."""
    return (instant - EPOCH) // MICROSECOND


def from_micros(micros: int) -> datetime:
    """Convert microseconds since 1970 to an instant."""
    return EPOCH + timedelta(microseconds=micros)


@lru_cache(maxsize=1024)  # the same values are read repeatedly within moments
def optional_from_micros(micros: int | None) -> datetime | None:
    """Convert microseconds since 1970, or NULL, to an instant."""
    return None if micros is None else EPOCH + timedelta(microseconds=micros)


def to_utc(instant: datetime) -> datetime:
    """Convert an instant to UTC.

    The connection of a caller may have another session time zone, in which its driver returns instants.
    """
    return instant if instant.tzinfo is UTC else instant.astimezone(UTC)


class Instant(types.TypeDecorator[datetime]):
    """An instant: timestamptz on PostgreSQL, microseconds since 1970 elsewhere."""

    impl = BigInteger
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> types.TypeEngine[Any]:
        """Return the type of this dialect."""
        if dialect.name == "postgresql":
            from sqlalchemy.dialects import postgresql

            return dialect.type_descriptor(postgresql.TIMESTAMP(timezone=True))
        return dialect.type_descriptor(BigInteger())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Convert a Python value to a database value."""
        return value if value is None or dialect.name == "postgresql" else to_micros(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Convert a database value to a Python value."""
        if value is None:
            return None
        return to_utc(value) if dialect.name == "postgresql" else from_micros(value)


class Id(types.TypeDecorator[str]):
    """An id: uuid on PostgreSQL, its text elsewhere; text in Python."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> types.TypeEngine[Any]:
        """Return the type of this dialect."""
        if dialect.name == "postgresql":
            from sqlalchemy.dialects import postgresql

            return dialect.type_descriptor(postgresql.UUID(as_uuid=False))
        return dialect.type_descriptor(String(36))
