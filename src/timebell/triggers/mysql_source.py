"""How a table of a MySQL or MariaDB is read: in a thread, as its driver blocks, and never written."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, create_engine, event, make_url, text

from timebell.errors import Refused

_SESSION = ("SET SESSION time_zone = '+00:00'", "SET SESSION TRANSACTION READ ONLY")


def engine_for(url: str) -> Engine:
    """An engine of PyMySQL that reads only; TIMESTAMP columns are instants. Raises Refused (EXTRA_MISSING)."""
    try:
        from pymysql.constants import FIELD_TYPE
        from pymysql.converters import conversions
    except ImportError as missing:
        raise Refused(
            "To read a MySQL or MariaDB takes the package PyMySQL, which is not installed.", code="EXTRA_MISSING",
            fix='Run: pip install "timebell[mysql]".',
        ) from missing  # fmt: skip
    engine = create_engine(
        make_url(url).set(drivername="mysql+pymysql"), isolation_level="READ COMMITTED", pool_size=2,
        connect_args={
            "connect_timeout": 5, "read_timeout": 20,
            "conv": {**conversions, FIELD_TYPE.TIMESTAMP: _instant},
        },
    )  # fmt: skip

    @event.listens_for(engine, "connect")
    def _connected(driver: Any, _: Any) -> None:
        with driver.cursor() as cursor:
            for statement in _SESSION:
                cursor.execute(statement)

    return engine


def rows(engine: Engine, query: str, given: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """Up to so many rows of a query."""
    with engine.connect() as connection:
        result = connection.execute(text(query), dict(given))
        return [dict(row._mapping) for row in result.fetchmany(most)]


def _instant(written: str) -> datetime | str:
    try:
        return datetime.fromisoformat(written).replace(tzinfo=UTC)
    except ValueError:  # as MySQL writes none: 0000-00-00 00:00:00
        return written
