"""Conformance of every source kind, and proof that the suite detects faulty sources."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_monday import Monday, board
from tests.engine.test_monday import monday as monday  # a fixture
from tests.engine.test_sql_sources import Rows
from tests.servers import MariaDB, Postgres
from timebell import Timebell
from timebell.features.triggers.sources import create_adapter
from timebell.features.triggers.sources.base import RowPage, SourceAdapter
from timebell.features.triggers.sources.sql_table import SqlTable
from timebell.features.triggers.testing import Scene, SourceConformance


class TestWebhook(SourceConformance):
    """A source that receives its items by webhook."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @asynccontextmanager
    async def scene(self) -> AsyncIterator[Scene]:
        app = Timebell(f"sqlite:///{self.folder}/ours.db", timezone="UTC")
        await app.triggers.put_source("rows")

        async def put(key: str, at: datetime | None) -> None:
            await app.triggers.put_items("rows", [{"key": key, "fields": {"due": at and at.isoformat()}}])

        async def remove(key: str) -> None:
            await app.triggers.put_items("rows", [{"key": key, "deleted": True}])

        yield Scene(app, "rows", "due", put, remove, invalid_options=[{"x": 1}])
        await app.close()


class OfSql(SourceConformance):
    """A table of an external database."""

    changes: dict[str, Any] = {"changes": "compare"}

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def url(self) -> str:
        """Return the URL of an empty database."""
        return f"sqlite:///{self.folder}/theirs.db"

    def adapter(self, options: dict[str, Any]) -> SourceAdapter:
        return create_adapter("sql", options)

    @asynccontextmanager
    async def scene(self) -> AsyncIterator[Scene]:
        rows, app = Rows(self.url()), Timebell(f"sqlite:///{self.folder}/ours.db", timezone="UTC")
        await rows.make()
        options = {"url": rows.url, "table": "duty_schedules", "everySeconds": 0.1, **self.changes}
        made = self.adapter(options)
        if self.changes["changes"] == "outbox":
            await rows.write(made.install_sql())  # type: ignore[attr-defined]
        await app.triggers.put_source("duty", "sql", options)

        async def remove(key: str) -> None:
            await rows.write("DELETE FROM duty_schedules WHERE id = $1", int(key))

        async def down(away: bool) -> None:
            names = ("duty_schedules", "away") if away else ("away", "duty_schedules")
            await rows.write(f"ALTER TABLE {names[0]} RENAME TO {names[1]}")

        try:
            yield Scene(
                app, "duty", "start_at", lambda key, at: rows.put(int(key), at), remove,
                create_adapter=lambda: self.adapter(options), kind="sql", set_down=down,
                invalid_options=[{}, {"url": rows.url}, {"url": rows.url, "table": "a;b"}, {**options, "x": 1}],
                queries=("SELECT 1 FROM duty_schedules WHERE id = 1", "SELECT 1 FROM duty_schedules WHERE id = 2"),
            )  # fmt: skip
        finally:
            await app.close()


class TestSqlite(OfSql):
    """All rows are compared."""


@pytest.mark.slow
class TestSqliteByARisingColumn(OfSql):
    """Changes are found by cursor, removed rows by the sweep."""

    changes = {"changes": "cursor", "cursor": "updated_at", "sweepEverySeconds": 0.5}


class OfPostgres(OfSql):
    @pytest.fixture(autouse=True)
    def _database(self, postgres: Postgres) -> Iterator[None]:
        self.made = postgres.create_database()
        yield
        postgres.drop_database(self.made)

    def url(self) -> str:
        return self.made


@pytest.mark.slow
class TestPostgres(OfPostgres):
    """All rows are compared."""


@pytest.mark.slow
class TestPostgresByOutbox(OfPostgres):
    """Triggers of the table record its changes."""

    changes = {"changes": "outbox", "sweepEverySeconds": 1.0}


@pytest.mark.slow
class TestPostgresByARisingColumn(OfPostgres):
    """Changes are found by cursor, removed rows by the sweep."""

    changes = {"changes": "cursor", "cursor": "updated_at", "sweepEverySeconds": 0.5}


class OfMariaDB(OfSql):
    @pytest.fixture(autouse=True)
    def _database(self, mariadb: MariaDB) -> Iterator[None]:
        self.made = mariadb.create_database()
        yield
        mariadb.drop_database(self.made)

    def url(self) -> str:
        return self.made


@pytest.mark.slow
class TestMariaDB(OfMariaDB):
    """All rows are compared."""


@pytest.mark.slow
class TestMariaDBByARisingColumn(OfMariaDB):
    """Changes are found by cursor, removed rows by the sweep."""

    changes = {"changes": "cursor", "cursor": "updated_at", "sweepEverySeconds": 0.5}


class OfMySQL(OfSql):
    """On the server TIMEBELL_TEST_MYSQL_URL, as a user without password: Debian has no MySQL."""

    @pytest.fixture(autouse=True)
    def _database(self) -> Iterator[None]:
        if (url := os.environ.get("TIMEBELL_TEST_MYSQL_URL")) is None:
            pytest.skip("TIMEBELL_TEST_MYSQL_URL is not set")
        server = MariaDB(url)
        self.made = server.create_database()
        yield
        server.drop_database(self.made)

    def url(self) -> str:
        return self.made


@pytest.mark.slow
class TestMySQL(OfMySQL):
    """All rows are compared."""


@pytest.mark.slow
class TestMySQLByARisingColumn(OfMySQL):
    """Changes are found by cursor, removed rows by the sweep."""

    changes = {"changes": "cursor", "cursor": "updated_at", "sweepEverySeconds": 0.5}


@pytest.mark.slow
class TestMonday(SourceConformance):
    """A board of monday.com."""

    @pytest.fixture(autouse=True)
    def _board(self, tmp_path: Path, monday: Monday) -> None:
        self.folder, self.monday = tmp_path, monday

    @asynccontextmanager
    async def scene(self) -> AsyncIterator[Scene]:
        app = Timebell(f"sqlite:///{self.folder}/ours.db", timezone="UTC")
        options = board(self.monday, everySeconds=0.1)
        await app.triggers.put_source("board", "monday", options)

        async def put(key: str, at: datetime | None) -> None:
            self.monday.put(int(key), at)

        async def remove(key: str) -> None:
            self.monday.items.pop(int(key), None)

        async def down(away: bool) -> None:
            self.monday.says = (500, {"error_message": "out of order"}) if away else None

        yield Scene(
            app, "board", "due", put, remove, create_adapter=lambda: create_adapter("monday", options), kind="monday",
            set_down=down,
            invalid_options=[{}, {**options, "boardId": "x"}, {**options, "token": 5}, {**options, "x": 1}],
        )  # fmt: skip
        await app.close()


# --- The suite detects faults ------------------------------------------------------------------------


class Faulty(SqlTable):
    """A table adapter with one fault."""

    error = ""

    async def read_page(self, after: str | None, most: int) -> RowPage:
        read = await super().read_page(after, most)
        if self.error == "loses the last row of a page" and read.cursor is not None:
            read.rows.popitem()
        if self.error == "shifts instants":
            for row in read.rows.values():
                row["start_at"] = str(row["start_at"]).replace("+00:00", "+01:00")
        return read

    async def read_rows(self, keys: Sequence[str]) -> RowPage:
        page = await super().read_rows(keys)
        if self.error == "reads what it read before":
            self.known = getattr(self, "known", {}) | page.rows
            return RowPage(self.known, None)
        return page

    async def read_changes(self, since: str | None, most: int) -> RowPage | None:
        found = await super().read_changes(since, most)
        if self.error == "forgets where it was" and found is not None and since is not None:
            return RowPage(found.rows, None)
        return found

    async def matches(self, query: str, parameters: Mapping[str, Any]) -> bool:
        return self.error == "always finds" or await super().matches(query, parameters)

    async def close(self) -> None:
        if self.error == "closes once" and getattr(self, "closed", False):
            raise RuntimeError
        self.closed = True
        await super().close()


class Suite(OfSql):
    changes = {"changes": "cursor", "cursor": "updated_at"}

    def __init__(self, folder: Path, fault: str) -> None:
        self.folder, self.error = folder, fault

    def adapter(self, options: dict[str, Any]) -> SourceAdapter:
        made = Faulty(options)
        made.error = self.error
        return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("loses the last row of a page", "test_pages_contain_every_row_once"),
        ("shifts instants", "test_pages_contain_every_row_once"),
        ("reads what it read before", "test_rows_are_read_by_key_with_current_values"),
        ("forgets where it was", "test_changes_are_found_from_the_last_cursor"),
        ("always finds", "test_query_result_is_true_or_false"),
        ("closes once", "test_adapter_can_be_closed_twice"),
    ],
)
def test_each_fault_is_detected(tmp_path: Path, fault: str, test: str) -> None:
    for one, suite in (("none", Suite(tmp_path / "good", "none")), (fault, Suite(tmp_path / "bad", fault))):
        suite.folder.mkdir()
        played: Callable[[], None] = getattr(suite, test)
        if one == "none":
            played()
        else:
            with pytest.raises((AssertionError, RuntimeError, KeyError)):
                played()
