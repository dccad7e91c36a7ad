"""Read-only access to MySQL and MariaDB sources. The driver blocks, so it is called in a thread."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, create_engine, event, make_url, text

from timebell.errors import Refused
from timebell.features.triggers.sources.driver_threads import DriverThreads

_SESSION_STATEMENTS = ("SET SESSION time_zone = '+00:00'", "SET SESSION TRANSACTION READ ONLY")


class MysqlDatabase:
    """A MySQL or MariaDB database, read through a small pool."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._engine: Engine | None = None
        self._threads = DriverThreads()

    async def fetch(self, query: str, parameters: Mapping[str, Any], *, first: bool = False) -> list[dict[str, Any]]:
        """Return the rows of a query with `:name` parameters, or only the first one."""
        return await self._threads.run(_fetch, self._open_engine(), query, dict(parameters), first)

    async def list_columns(self, query: str) -> list[str]:
        """Return the columns of a query without parameters."""
        return await self._threads.run(_list_columns, self._open_engine(), query)

    def _open_engine(self) -> Engine:
        if self._engine is None:
            self._engine = create_read_only_engine(self._url)
        return self._engine

    async def close(self) -> None:
        """Close all connections."""
        self._threads.close()
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None


def create_read_only_engine(url: str) -> Engine:
    """Return a read-only PyMySQL engine that reads TIMESTAMP columns as UTC. Raises Refused (EXTRA_MISSING)."""
    try:
        from pymysql.constants import FIELD_TYPE
        from pymysql.converters import conversions
    except ImportError as missing:
        raise Refused(
            "Reading MySQL or MariaDB requires the package PyMySQL, which is not installed.", code="EXTRA_MISSING",
            fix='Run: pip install "timebell[mysql]".',
        ) from missing  # fmt: skip
    engine = create_engine(
        make_url(url).set(drivername="mysql+pymysql"), isolation_level="READ COMMITTED", pool_size=2,
        connect_args={
            "connect_timeout": 5, "read_timeout": 20,
            "conv": {**conversions, FIELD_TYPE.TIMESTAMP: _parse_timestamp},
        },
    )  # fmt: skip

    @event.listens_for(engine, "connect")
    def _configure_session(driver_connection: Any, _: Any) -> None:
        with driver_connection.cursor() as cursor:
            for statement in _SESSION_STATEMENTS:
                cursor.execute(statement)

    return engine


def _fetch(engine: Engine, query: str, parameters: dict[str, Any], first: bool) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        result = connection.execute(text(query), parameters)
        return [dict(row._mapping) for row in (result.fetchmany(1) if first else result)]


def _list_columns(engine: Engine, query: str) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text(query)).keys())


def _parse_timestamp(value: str) -> datetime | str:
    try:
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    except ValueError:  # MySQL's zero date: 0000-00-00 00:00:00
        return value
