"""`timebell db upgrade`, killed (SIGKILL) before each of its statements in turn, is resumed by the next one."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, inspect, make_url

from tests.faults.harness import forked
from tests.servers import MariaDB, Postgres
from timebell.features import FEATURES
from timebell.store.open import schema_version, upgrade
from timebell.store.version import HEAD

DRIVERS = {"postgresql": "postgresql+psycopg", "mariadb": "mysql+pymysql", "sqlite": "sqlite"}
MAX_STATEMENTS = 1000


def upgrade_until(url: str, count: int) -> None:
    """Upgrade, but kill this process before the statement number `count`."""
    executed = 0

    @event.listens_for(Engine, "before_cursor_execute")
    def count_statement(*_: Any) -> None:
        nonlocal executed
        executed += 1
        if executed >= count:
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(upgrade(url, FEATURES))


def _tables(url: str) -> dict[str, Any]:
    parsed = make_url(url)
    engine = create_engine(parsed.set(drivername=DRIVERS[parsed.get_backend_name()]))
    inspector = inspect(engine)
    tables = {
        table: (
            [(column["name"], str(column["type"]), column["nullable"]) for column in inspector.get_columns(table)],
            sorted((index["name"], index["column_names"], index["unique"]) for index in inspector.get_indexes(table)),
        )
        for table in sorted(inspector.get_table_names())
    }
    engine.dispose()
    return tables


@pytest.mark.soak  # a process for each statement
@pytest.mark.parametrize("store", ["sqlite", "postgres", "mariadb"])
def test_an_upgrade_killed_at_any_statement_is_resumed(store: str, tmp_path: Any) -> None:
    server: Postgres | MariaDB | None = {"postgres": Postgres, "mariadb": MariaDB}.get(store, lambda: None)()

    def create(name: str) -> str:
        return f"sqlite:///{tmp_path}/{name}.db" if server is None else server.create_database()

    try:
        url, clean = create("killed"), create("clean")
        asyncio.run(upgrade(clean, FEATURES))
        for count in range(1, MAX_STATEMENTS):
            process = forked(upgrade_until, url, count)
            process.join()
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL
        assert 50 < count < MAX_STATEMENTS - 1
        asyncio.run(upgrade(url, FEATURES))
        assert asyncio.run(schema_version(url)) == HEAD
        assert _tables(url) == _tables(clean)
    finally:
        if server is not None:
            server.close()
