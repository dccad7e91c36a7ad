"""Fixtures for all tests: fresh databases on each store. PostgreSQL databases are copies of a migrated template."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.servers import MariaDB, Postgres

# Objects that tests create in large numbers, such as statements, would otherwise be traversed again and again. The
# engine does the same in its process.
gc.set_threshold(50_000)

# The time per example depends on the machine; separate tests verify the speed of time-critical code.
settings.register_profile("timebell", deadline=None)
settings.load_profile("timebell")

pytest_plugins = ["timebell.testing"]

# Slow files start first, so that none of them runs alone at the end. Those that mostly compute (the model) start while
# others mostly wait.
SLOW_FILES = (
    "torture", "test_watch.py", "test_targeted_histories.py", "test_model.py", "test_kill.py",
    "test_schemathesis.py", "faults", "brokers", "test_snippets.py", "test_serve.py", "test_address_ssrf.py",
)  # fmt: skip

# Fixtures that start a server, or programs in processes of their own.
SERVER_FIXTURES = {"postgres", "mariadb", "start_bouncer"}

# Parameters on which no result should depend: the database and the event loop.
VARIANTS = {"store_url", "run"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select tests."""
    parser.addoption(
        "--slow-tenth", metavar="SEED", help="also run a tenth of the slow tests, chosen by SEED; soaks are left out"
    )
    parser.addoption(
        "--one-variant", action="store_true",
        help="run each test on one database and one event loop, depending on its name; the others are slow"
    )  # fmt: skip
    parser.addoption("--without-servers", action="store_true", help="leave out the tests that start a server")


def pytest_configure(config: pytest.Config) -> None:
    """Include slow tests in the selection if a tenth of them is requested; let programs under test be interrupted."""
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as in a background job of a shell; programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--slow-tenth"):
        config.option.markexpr = "not soak"


def is_in_tenth(name: str, seed: str) -> bool:
    """Return whether a test is in the tenth of all tests that `seed` chooses."""
    return zlib.crc32(f"{seed} {name}".encode()) % 10 == 0


def uses_server(item: pytest.Item) -> bool:
    """Return whether a test uses a fixture that starts a server, also one that its parameters name."""
    given = getattr(item, "callspec", None)
    parameters = given.params.values() if given is not None else ()
    names = {*getattr(item, "fixturenames", ()), *(value for value in parameters if isinstance(value, str))}
    return not SERVER_FIXTURES.isdisjoint(names)


def other_variants(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return all variants of each test but one, which depends on the name of the test.

    So each folder is tested with all variants. The conformance tests are about their differences, so all of these run.
    """
    variants = defaultdict(list)
    for item in items:
        given = getattr(item, "callspec", None)
        if given is not None and not VARIANTS.isdisjoint(given.params) and "conformance" not in item.path.parts:
            test, _, case = item.nodeid.partition("[")
            for value in (value for name, value in given.params.items() if name in VARIANTS):
                case = case.replace(getattr(value, "__name__", value), "*", 1)
            variants[f"{test}[{case}"].append(item)
    return {
        item
        for name, group in variants.items()
        for index, item in enumerate(group)
        if index != zlib.crc32(name.encode()) % len(group)
    }


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the tests that the options exclude; sort those of SLOW_FILES first and keep the order of the rest."""
    omitted = {item for item in items if uses_server(item)} if config.getoption("--without-servers") else set()
    slow = {item for item in items if "slow" in item.keywords}
    others: set[pytest.Item] = set()
    if config.getoption("--one-variant"):
        others = other_variants([item for item in items if item not in slow | omitted and "soak" not in item.keywords])
    if seed := config.getoption("--slow-tenth"):
        omitted |= {item for item in slow | others if not is_in_tenth(item.nodeid, seed)}
    else:
        omitted |= others
    config.hook.pytest_deselected(items=list(omitted))
    items[:] = [item for item in items if item not in omitted]
    items.sort(
        key=lambda item: next((at for at, part in enumerate(SLOW_FILES) if part in item.path.parts), len(SLOW_FILES))
    )


def pytest_collection_finish() -> None:
    """Exclude permanent objects from garbage collection, for tests that measure time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The server of this session."""
    server = Postgres(os.environ.get("TIMEBELL_TEST_POSTGRES_URL"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """The server of this session."""
    server = MariaDB(os.environ.get("TIMEBELL_TEST_MARIADB_URL"))
    yield server
    server.close()


def _migrate(url: str) -> None:
    from timebell.features import FEATURES
    from timebell.store.open import upgrade

    asyncio.run(upgrade(url, FEATURES))


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """A fresh, migrated PostgreSQL database."""
    url = postgres.create_database(_migrate)
    yield url
    postgres.drop_database(url)


@pytest.fixture
def mariadb_url(mariadb: MariaDB) -> Iterator[str]:
    """A fresh, migrated MariaDB database."""
    url = mariadb.create_database(_migrate)
    yield url
    mariadb.drop_database(url)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file that is never opened; tests use copies of it."""
    file = tmp_path_factory.mktemp("migrated") / "timebell.db"
    _migrate(f"sqlite:///{file}")
    assert [one.name for one in file.parent.iterdir()] == [file.name]  # no write-ahead log is left
    return file


@pytest.fixture
def sqlite_url(migrated_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh, migrated SQLite file. In this process, commits do not wait for the disk, as on the servers of tests."""
    from timebell.store.dialects.sqlite import store

    engine_for = store.engine_for
    monkeypatch.setattr(store, "engine_for", lambda url, **options: engine_for(url, **options | {"durable": False}))
    return f"sqlite:///{shutil.copy(migrated_file, tmp_path / 'timebell.db')}"


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    """A fresh, migrated database on each store in turn."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove TIMEBELL_ variables, so that tests see the default settings."""
    for name in list(os.environ):
        if name.startswith("TIMEBELL_") and not name.startswith("TIMEBELL_TEST_"):
            monkeypatch.delenv(name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report tests that ran against an emulator; printed output would be captured."""
    if any("test_kafka.py" in report.nodeid for report in terminalreporter.getreports("passed")):
        message = "the target kafka was tested against an emulator of the protocol, not a Kafka broker"
        terminalreporter.write_line(f"*** {message} ***", yellow=True, bold=True)
