"""Fixtures: databases, servers, and node processes that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.coroutines import pytest_pyfunc_call as pytest_pyfunc_call
from tests.faults.harness import NodeProcess
from tests.servers import MariaDB, Postgres

# Real time passes in these tests, and much more of it on MariaDB.
ON_MARIADB = pytest.param("mariadb", marks=pytest.mark.soak)


@pytest.fixture(params=["sqlite", "postgres", ON_MARIADB])
def store_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database on each store in turn."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=["postgres", ON_MARIADB])
def nodes_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database on each store that several nodes may share."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=[Postgres, pytest.param(MariaDB, marks=pytest.mark.soak)])
def own_server(request: pytest.FixtureRequest) -> Iterator[Postgres | MariaDB]:
    """A dedicated server for fault injection, of each kind that several nodes may share."""
    server: Postgres | MariaDB = request.param()
    yield server
    server.close()


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    """The file in which nodes record their effects."""
    return tmp_path / "effects.jsonl"


@pytest.fixture
def node(effects: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Start a node on a store."""
    started: list[NodeProcess] = []

    def start(url: str, **options: Any) -> NodeProcess:
        started.append(NodeProcess(url, effects, **options))
        return started[-1]

    yield start
    for one in started:
        one.end()
