"""Nodes that are gone when the test is over, and stores by the dozen."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import _migrate
from tests.faults.harness import NodeProcess, Nursery
from tests.servers import Postgres


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    """Where the nodes write what they do."""
    return tmp_path / "effects.jsonl"


@pytest.fixture
def node(nursery: Nursery, effects: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Start a node on a store."""
    started: list[NodeProcess] = []

    def start(url: str, *, effects: Path = effects, **options: Any) -> NodeProcess:
        started.append(NodeProcess(nursery, url, effects, **options))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(params=["sqlite", "postgres"])
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Make fresh, migrated databases, on each store in turn."""
    made: list[str] = []
    template = tmp_path / "template.db"
    postgres: Postgres | None = request.getfixturevalue("postgres") if request.param == "postgres" else None

    def make() -> str:
        if postgres is not None:
            made.append(postgres.create_database(_migrate))
        else:
            made.append(f"sqlite:///{tmp_path}/{len(made)}.db")
            if not template.exists():
                _migrate(f"sqlite:///{template}")
            shutil.copyfile(template, tmp_path / f"{len(made) - 1}.db")
        return made[-1]

    yield make
    if postgres is not None:
        for url in made:
            postgres.drop_database(url)


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A server that may be stopped."""
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(scope="session")
def faketime() -> str:
    """The library that lies to a process about the time."""
    found = sorted(glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1") + glob.glob("/usr/lib/faketime/*MT.so.1"))
    if not found:
        pytest.skip("CLOCK STEPS ARE NOT TESTED HERE: there is no libfaketime (Debian: apt-get install libfaketime)")
    return found[0]
