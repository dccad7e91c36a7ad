"""Fixtures: one database per session on each store, emptied before each test, which is faster than a new one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import delete

from tests.servers import MariaDB, Postgres
from timebell.features import FEATURES
from timebell.store.dialects.base import Store
from timebell.store.metadata import load_tables
from timebell.store.open import open_store, upgrade
from timebell.store.transaction import Transaction

from .helpers import T0

# The files that run on MariaDB each time; the others are slow there.
FAST_MARIADB_FILES = (
    "test_caller_connections", "test_claim", "test_complete", "test_external_reports", "test_nodes_leadership",
    "test_remote_claims", "test_repository_cancel", "test_repository_create", "test_schedules_fire", "test_schema",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the MariaDB variants of all other files as slow."""
    for item in items:
        given = getattr(item, "callspec", None)
        if given is not None and "mariadb" in given.params.values() and item.path.stem not in FAST_MARIADB_FILES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def store_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database on each store in turn."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of all stores of the session."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="session")
def _migrated_file(tmp_path_factory: pytest.TempPathFactory, runner: asyncio.Runner) -> Path:
    file = tmp_path_factory.mktemp("conformance") / "timebell.db"
    runner.run(upgrade(f"sqlite:///{file}", FEATURES))
    return file


@pytest.fixture(scope="session")
def _postgres_store(postgres: Postgres, runner: asyncio.Runner) -> Iterator[Store]:
    url = postgres.create_database()
    runner.run(upgrade(url, FEATURES))
    store = open_store(url, lambda: T0, server_clock=False)
    runner.run(store.open())
    yield store
    runner.run(store.close())
    postgres.drop_database(url)


@pytest.fixture(scope="session")
def _mariadb_store(mariadb: MariaDB, runner: asyncio.Runner) -> Iterator[Store]:
    url = mariadb.create_database()
    runner.run(upgrade(url, FEATURES))
    store = open_store(url, lambda: T0, server_clock=False)
    runner.run(store.open())
    yield store
    runner.run(store.close())
    mariadb.drop_database(url)


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def store(request: pytest.FixtureRequest, tmp_path: Path, runner: asyncio.Runner) -> Iterator[Store]:
    """An open, empty store of each kind in turn, whose clock is fixed at T0."""
    if request.param == "sqlite":
        file = shutil.copy(request.getfixturevalue("_migrated_file"), tmp_path / "timebell.db")
        opened = open_store(f"sqlite:///{file}", lambda: T0, server_clock=False)
        runner.run(opened.open())
        yield opened
        runner.run(opened.close())
    else:
        shared: Store = request.getfixturevalue(f"_{request.param}_store")
        runner.run(shared.run(_empty))
        yield shared


def _empty(tx: Transaction) -> None:
    for table in load_tables(FEATURES).sorted_tables:
        tx.execute(delete(table))
