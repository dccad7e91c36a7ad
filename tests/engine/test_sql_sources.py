"""Sources that are tables of a database: read, followed and swept, over SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pymysql
import pytest

from tests.servers import Postgres
from timebell import Arrived, Timebell
from timebell.errors import InvalidInput, SourceFailed
from timebell.features.triggers.engine.source_adapters import AdapterCache
from timebell.features.triggers.model.trigger import Source
from timebell.features.triggers.sources import create_adapter, sql_values
from timebell.model.payload import encode

TABLE = """CREATE TABLE duty_schedules (id {id}, start_at {instant}, users {list}, status text, updated_at {instant})"""


class Rows:
    """A table of an external database."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def write(self, query: str, *values: Any) -> None:
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection:
                plain = [one.isoformat() if isinstance(one, datetime) else one for one in values]
                plain = [json.dumps(one) if isinstance(one, list) else one for one in plain]
                connection.execute(query.replace("$", "?"), plain)
                connection.commit()
            return
        if self.url.startswith(("mariadb", "mysql")):
            query = re.sub(r"\bON CONFLICT \(id\) DO UPDATE SET", "ON DUPLICATE KEY UPDATE", query)
            query = re.sub(r"\bexcluded\.(\w+)", r"VALUES(\1)", query)
            plain = [json.dumps(one) if isinstance(one, list) else one for one in values]
            await asyncio.to_thread(_on_mariadb, self.url, re.sub(r"\$\d", "%s", query), plain)
            return
        connection = await asyncpg.connect(self.url)
        try:
            await connection.execute(query, *values)
        finally:
            await connection.close()

    async def make(self) -> None:
        sqlite = self.url.startswith("sqlite")
        if self.url.startswith(("mariadb", "mysql")):
            await self.write(TABLE.format(id="integer primary key", instant="timestamp(6) null", list="text"))
            return
        types = {"id": "integer primary key", "instant": "text" if sqlite else "timestamptz",
                 "list": "text" if sqlite else "text[]"}  # fmt: skip
        await self.write(TABLE.format(**types))

    async def put(
        self, id_: int, start_at: datetime | None, users: list[str] | None = None, status: str = "on"
    ) -> None:
        await self.write(
            "INSERT INTO duty_schedules VALUES ($1, $2, $3, $4, $5)"
            " ON CONFLICT (id) DO UPDATE SET start_at = excluded.start_at, users = excluded.users,"
            " status = excluded.status, updated_at = excluded.updated_at",
            id_, start_at, users or ["ana"], status, datetime.now(UTC),
        )  # fmt: skip


def _on_mariadb(url: str, query: str, values: list[Any]) -> None:
    place = urlsplit(url)
    settings: dict[str, Any] = {"database": place.path[1:], "init_command": "SET time_zone = '+00:00'"}
    connection = pymysql.connect(
        host=place.hostname, port=place.port or 3306, user=place.username, autocommit=True, **settings
    )
    with closing(connection), connection.cursor() as cursor:
        cursor.execute(query, values)


def soon(**spans: float) -> datetime:
    return datetime.now(UTC) + timedelta(**spans)


async def until(holds: Callable[[], Any], within: float = 40.0) -> None:
    async with asyncio.timeout(within):
        while True:
            found = holds()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.02)


def both(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test on a table of SQLite, PostgreSQL and MariaDB; Timebell itself uses SQLite."""

    @pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb"])
    def run(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        server = None if kind == "sqlite" else request.getfixturevalue(kind)
        url = f"sqlite:///{tmp_path}/theirs.db" if server is None else server.create_database()

        async def body() -> None:
            rows, app = Rows(url), Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
            await rows.make()
            try:
                await test(rows, app)
            finally:
                await app.close()

        try:
            asyncio.run(body())
        finally:
            if server is not None:
                server.drop_database(url)

    run.__name__ = test.__name__
    return run


async def follow(app: Timebell, rows: Rows, **options: Any) -> list[Arrived]:
    events: list[Arrived] = []

    @app.on("shift.remind")
    async def remind(event: Arrived) -> None:
        events.append(event)

    given = {"url": rows.url, "table": "duty_schedules", "everySeconds": 0.1, **options}
    await app.triggers.put_source("shifts", "sql", {name: value for name, value in given.items() if value is not None})
    await app.triggers.put("reminder", "shifts", "start_at", "shift.remind", recipients="users")
    return events


async def pending(app: Timebell) -> list[tuple[str, datetime]]:
    return sorted((job.payload["itemId"], job.run_at) for job in await app.list(status="pending", limit=500))


@both
async def test_rows_are_read_followed_and_removed(rows: Rows, app: Timebell) -> None:
    """Only rows of the query are planned; the job of a row that leaves it is cancelled."""
    for number in range(3):
        await rows.put(number, soon(hours=1))
    events = await follow(app, rows, table=None, query="SELECT * FROM duty_schedules WHERE status = 'on'")
    async with app.running(heartbeat=0.1):
        await until(lambda: _count(app, 3))
        moved = soon(hours=2)
        await rows.put(1, moved)
        await rows.put(2, soon(hours=1), status="off")  # leaves the query
        await until(lambda: _is(app, 1, moved, 2))
        await rows.put(0, soon(seconds=0.5), ["ana", "bo"])
        await until(lambda: len(events) == 2)
        source = await app.triggers.get_source("shifts")
        assert source.synced_at is not None
        assert source.error is None
    assert {event.payload["recipient"] for event in events} == {"ana", "bo"}
    assert [key for key, _ in await pending(app)] == ["1"]


async def _count(app: Timebell, count: int) -> bool:
    return len(await pending(app)) == count


async def _is(app: Timebell, key: int, at: datetime, count: int) -> bool:
    found = await pending(app)
    return len(found) == count and (str(key), at) in found


@both
async def test_an_increasing_column_finds_changes_and_the_sweep_finds_the_rest(rows: Rows, app: Timebell) -> None:
    """A sweep finds changes that the cursor column does not show."""
    await rows.put(1, soon(hours=1))
    await follow(app, rows, changes="cursor", cursor="updated_at", sweepEverySeconds=1.0)
    async with app.running(heartbeat=0.1):
        await until(lambda: _count(app, 1))
        await rows.put(2, soon(hours=1))
        await until(lambda: _count(app, 2))
        await rows.write("DELETE FROM duty_schedules WHERE id = 1")
        await until(lambda: _count(app, 1))


@both
async def test_an_unavailable_source_removes_nothing_and_reports_its_error(rows: Rows, app: Timebell) -> None:
    await rows.put(1, soon(hours=1))
    await follow(app, rows)
    async with app.running(heartbeat=0.1):
        await until(lambda: _count(app, 1))
        await rows.write("ALTER TABLE duty_schedules RENAME TO away")

        async def has_error() -> bool:
            return (await app.triggers.get_source("shifts")).error is not None

        await until(has_error)
        assert await _count(app, 1)


CHECKED_IN = "SELECT 1 FROM attendance_logs WHERE schedule_id = :id AND user_id = :recipient AND type = 'check_in'"


@both
async def test_a_recipient_who_checked_in_is_not_reminded(rows: Rows, app: Timebell) -> None:
    """The condition is evaluated at delivery, for each recipient."""
    await rows.write("CREATE TABLE attendance_logs (schedule_id integer, user_id text, type text)")
    await rows.put(1, soon(hours=1), ["ana", "bo"])
    events = await follow(app, rows)
    await app.triggers.put("reminder", "shifts", "start_at", "shift.remind", recipients="users", unless=CHECKED_IN)
    async with app.running(heartbeat=0.1):
        await until(lambda: _count(app, 2))
        await app.pause_queue("default")  # ana checks in before they go out, however long that takes
        await rows.put(1, soon(seconds=0.5), ["ana", "bo"])
        await until(lambda: _sooner(app, soon(minutes=30)))
        await rows.write("INSERT INTO attendance_logs VALUES ($1, $2, $3)", 1, "ana", "check_in")
        await app.resume_queue("default")
        await until(lambda: _count(app, 0))
    assert [event.payload["recipient"] for event in events] == ["bo"]
    (skipped,) = await app.list(status="skipped", topic="shift.remind")
    assert (skipped.owner_id, skipped.reason) == ("ana", "condition")
    assert skipped.result["condition"]["unless"] == {"found": True, "parameters": {"id": 1, "recipient": "ana"}}


async def _sooner(app: Timebell, than: datetime) -> bool:
    return all(at < than for _, at in await pending(app))


@both
async def test_the_row_is_read_again_before_delivery(rows: Rows, app: Timebell) -> None:
    """The column is read again at fire time."""
    await rows.put(1, soon(seconds=0.5))
    await rows.put(2, soon(seconds=0.5))
    events = await follow(app, rows, everySeconds=3600)
    await app.pause_queue("default")
    async with app.running(heartbeat=0.1):
        await until(lambda: _count(app, 2))
        later = soon(hours=1)
        await rows.put(1, later)  # and no scan runs before it fires
        await app.resume_queue("default")
        await until(lambda: len(events) == 1)
        await until(lambda: _is(app, 1, later, 1))
    assert [event.payload["itemId"] for event in events] == ["2"]


def test_a_row_that_became_invalid_fires_with_its_last_valid_value(tmp_path: Path) -> None:
    async def body() -> None:
        rows, app = Rows(f"sqlite:///{tmp_path}/theirs.db"), Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        await rows.make()
        due = soon(seconds=1.0)
        await rows.put(1, due)
        events = await follow(app, rows, everySeconds=3600)

        async def read() -> bool:
            return (await app.triggers.get_source("shifts")).synced_at is not None

        try:
            async with app.running(heartbeat=0.1):
                await until(read)
                await rows.put(1, due, status="x" * 70_000)  # more than the limit of an item
                await until(lambda: bool(events), within=20)
        finally:
            await app.close()

    asyncio.run(body())


@both
async def test_an_invalid_row_is_reported_and_the_others_continue(rows: Rows, app: Timebell) -> None:
    first, moved = soon(hours=1), soon(hours=2)
    await rows.put(1, first)
    await rows.put(2, first)
    await follow(app, rows)

    async def has_error(count: int) -> bool:
        source = await app.triggers.get_source("shifts")
        return source.state == "errored" and f"{count} rows are rejected" in (source.error or "")

    async def is_ready() -> bool:
        return (await app.triggers.get_source("shifts")).state == "ready"

    async with app.running(heartbeat=0.1):
        await until(lambda: _count(app, 2))
        for key in (1, 3):  # a known and a new row, each larger than the limit of an item
            await rows.put(key, moved, ["x" * 40_000], status="x" * 40_000)
        await rows.put(4, moved)
        await until(lambda: has_error(2))
        await rows.put(2, moved)
        await until(lambda: _is(app, 2, moved, 3))
        assert await pending(app) == [("1", first), ("2", moved), ("4", moved)]
        assert app.service is not None
        assert app.service.node.counters.of_features["timebell_source_items_total"].values["unusable",] >= 2
        await rows.put(1, moved)
        await rows.put(3, moved)
        await until(is_ready)
        assert await pending(app) == [(str(key), moved) for key in range(1, 5)]


def test_a_row_with_an_invalid_key_is_reported(tmp_path: Path) -> None:
    async def body() -> None:
        rows, app = Rows(f"sqlite:///{tmp_path}/theirs.db"), Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        await rows.write("CREATE TABLE duty_schedules (id text primary key, start_at text, users text)")
        for key in ("a", "k" * 201, "n\0l", "z" * 200):
            await rows.write("INSERT INTO duty_schedules VALUES ($1, $2, $3)", key, soon(hours=1), ["ana"])
        await follow(app, rows)

        async def has_error() -> bool:
            error = (await app.triggers.get_source("shifts")).error or ""
            return "2 rows are rejected" in error and "the key has 201 characters" in error

        try:
            async with app.running(heartbeat=0.1):
                await until(has_error)
                assert [key for key, _ in await pending(app)] == ["a", "z" * 200]
        finally:
            await app.close()

    asyncio.run(body())


def test_notify_delivers_changes_immediately(tmp_path: Path, postgres: Postgres) -> None:
    url = postgres.create_database()

    async def body() -> None:
        rows, app = Rows(url), Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        await rows.make()
        options = {"url": url, "table": "duty_schedules", "changes": "outbox"}
        made = create_adapter("sql", options)
        await rows.write(made.install_sql())  # type: ignore[attr-defined]
        await rows.put(1, soon(hours=1))
        events = await follow(app, rows, everySeconds=None, changes="outbox")
        try:
            async with app.running(heartbeat=0.1):
                await until(lambda: _count(app, 1))
                await rows.put(2, soon(seconds=0.3))
                await until(lambda: len(events) == 1)
                await rows.write("DELETE FROM duty_schedules WHERE id = 1")
                await until(lambda: _count(app, 0))
        finally:
            await app.close()

    try:
        asyncio.run(body())
    finally:
        postgres.drop_database(url)


def test_values_without_a_json_form_do_not_stop_the_read(tmp_path: Path) -> None:
    file = tmp_path / "theirs #1.db"  # a name with special characters of URLs
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE items (id integer, far real, odd text, listed text)")
        connection.execute("INSERT INTO items VALUES (1, 9e999, 'a' || char(0) || 'b', '[1e999, NaN, 7, \"c\"]')")
        connection.commit()
    read = asyncio.run(create_adapter("sql", {"url": f"sqlite:///{file}", "table": "items"}).read_page(None, 10))
    assert read.rows == {"1": {"id": 1, "far": None, "odd": "a\ufffdb", "listed": [None, None, 7, "c"]}}
    assert json.loads(encode(read.rows["1"])) == read.rows["1"]
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    given = [Decimal("Infinity"), Decimal("NaN"), Decimal(10**30), 10**400, Decimal("1.5"), {"a\0": float("nan")}]
    assert sql_values.to_json_value(given) == [None, None, str(10**30), str(10**400), 1.5, {"a\ufffd": None}]


class Standby:
    """A connection to a server that refuses LISTEN."""

    def __init__(self) -> None:
        self.open = True

    async def add_listener(self, *_: Any) -> None:
        raise asyncpg.ReadOnlySQLTransactionError("cannot execute LISTEN during recovery")

    def add_termination_listener(self, _: Any) -> None: ...

    def is_closed(self) -> bool:
        return not self.open

    def terminate(self) -> None:
        self.open = False


def test_a_failed_listen_raises_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Standby] = []

    async def connect(*_: Any, **__: Any) -> Standby:
        made.append(Standby())
        return made[-1]

    monkeypatch.setattr(asyncpg, "connect", connect)

    async def body() -> None:
        source = create_adapter("sql", {"url": "postgresql://localhost/theirs", "table": "items", "changes": "outbox"})
        for _ in range(2):
            with pytest.raises(SourceFailed, match="during recovery"):
                await source.listen(lambda _: None)

    asyncio.run(body())
    assert [one.open for one in made] == [False, False]


def test_concurrent_readers_of_a_source_share_one_adapter() -> None:
    async def values(*_: Any) -> dict[str, str]:
        await asyncio.sleep(0)
        return {"where": "sqlite:///theirs.db"}

    async def body() -> None:
        node: Any = SimpleNamespace(store=SimpleNamespace(run=values), secret_key="a secret key")
        options = {"url": {"secret": "where"}, "table": "items"}
        at = soon()
        source = Source(id="1", tenant_id="x", name="s", kind="sql", options=options, created_at=at, updated_at=at)
        adapters = AdapterCache(node)
        made = await asyncio.gather(*(adapters.get(source) for _ in range(8)))
        assert len({id(one) for one in made}) == 1
        await adapters.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    "options",
    [{}, {"url": "oracle://x/y", "table": "t"}, {"url": "sqlite:///x.db"},
     {"url": "sqlite:///x.db", "table": "t; DROP"},
     {"url": "sqlite:///x.db", "table": "t", "key": " "}, {"url": "sqlite:///x.db", "table": "t", "changes": "guess"},
     {"url": "sqlite:///x.db", "table": "t", "changes": "cursor"}, {"url": "sqlite:///x.db", "table": "t", "x": 1},
     {"url": "sqlite:///x.db", "table": "t", "changes": "outbox"},
     {"url": "sqlite:///x.db", "query": 5}, {"url": "postgresql://host:port/db", "table": "t"},
     {"url": "postgresql://[host/db", "table": "t"}],
)  # fmt: skip
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as refused:
        create_adapter("sql", options)
    assert refused.value.code == "INVALID_SOURCE_OPTIONS"
