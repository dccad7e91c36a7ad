"""The column types, the only place where dialects disagree about what a value looks like.

Values in Python are the same everywhere: aware UTC datetimes and ids as text. JSON is kept as the text it was
checked as, so that it comes back to the letter.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, Dialect, String, types
from sqlalchemy.dialects import postgresql

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def to_micros(instant: datetime) -> int:
    """Microseconds since 1970."""
    return (instant - EPOCH) // MICROSECOND


def from_micros(micros: int) -> datetime:
    """The inverse of `to_micros`."""
    return EPOCH + timedelta(microseconds=micros)


@lru_cache(maxsize=1024)  # the same ones are read again and again within moments
def read_micros(micros: int | None) -> datetime | None:
    """As `from_micros`, of a column that may be empty."""
    return None if micros is None else EPOCH + timedelta(microseconds=micros)


def in_utc(instant: datetime) -> datetime:
    """As it is, or moved from the zone of a caller's own connection."""
    return instant if instant.tzinfo is UTC else instant.astimezone(UTC)


class Instant(types.TypeDecorator[datetime]):
    """timestamptz on PostgreSQL; microseconds since 1970 elsewhere."""

    impl = BigInteger
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> types.TypeEngine[Any]:
        """The dialect's own type."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.TIMESTAMP(timezone=True))
        return dialect.type_descriptor(BigInteger())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Out to the database."""
        return value if value is None or dialect.name == "postgresql" else to_micros(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """In from the database."""
        if value is None:
            return None
        return in_utc(value) if dialect.name == "postgresql" else from_micros(value)


class Id(types.TypeDecorator[str]):
    """uuid on PostgreSQL, its text elsewhere; text in Python."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> types.TypeEngine[Any]:
        """The dialect's own type."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.UUID(as_uuid=False))
        return dialect.type_descriptor(String(36))
