"""Rows that a database accepts and Timebell cannot use: they stop no other row, and are listed with the reason."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pymysql
import pytest

from tests.servers import MariaDB, Postgres
from timebell import Timebell
from timebell.errors import InvalidInput, SourceFailed
from timebell.features.triggers.sources import create_adapter
from timebell.features.triggers.sources.base import InvalidSourceValue
from timebell.features.triggers.sources.sql_table import SqlTable

from .test_sql_sources import Rows, follow, pending, soon, until

FAR_DATES = ("20260-05-01", "0044-03-15 BC", "infinity", "-infinity")


def test_dates_beyond_pythons_range_do_not_stop_other_rows(tmp_path: Path, postgres: Postgres) -> None:
    url = postgres.create_database()

    async def body() -> None:
        rows, app = Rows(url), Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        await rows.make()
        at = soon(hours=1)
        for number in range(10):
            await rows.put(number, at)
        for number, text in enumerate(FAR_DATES):
            await rows.write(f"UPDATE duty_schedules SET start_at = '{text}' WHERE id = {number}")
        await follow(app, rows)
        try:
            async with app.running(heartbeat=0.1):
                await until(lambda: _planned(app, set(range(4, 10))))
                fields = {item.key: item.fields for item in await app.triggers.list_items("shifts")}
                assert fields["0"]["start_at"].startswith("20260-05-01")  # type: ignore[index]
                assert (await app.triggers.get_source("shifts")).state == "ready"
                await rows.put(0, at)  # corrected
                await until(lambda: _planned(app, {0, *range(4, 10)}))
        finally:
            await app.close()

    _run(body(), postgres, url)


async def _planned(app: Timebell, keys: set[int]) -> bool:
    return {int(key) for key, _ in await pending(app)} == keys


def test_a_column_that_no_row_has_and_a_short_grace_are_refused(tmp_path: Path) -> None:
    async def body() -> None:
        rows, app = Rows(f"sqlite:///{tmp_path}/theirs.db"), Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        await rows.make()
        await rows.put(1, soon(hours=1))
        await follow(app, rows, everySeconds=400)
        try:
            assert (await app.triggers.get("reminder")).rule.grace == 800
            async with app.running(heartbeat=0.1):
                await until(lambda: _planned(app, {1}))
            for options, code, text in (
                ({"column": "startAt"}, "UNKNOWN_COLUMN", "Did you mean start_at?"),
                ({"column": "start_at", "recipients": "user"}, "UNKNOWN_COLUMN", "Did you mean users?"),
                ({"column": "start_at", "grace": 300}, "GRACE_TOO_SHORT", "400 s"),
            ):
                with pytest.raises(InvalidInput) as refused:
                    await app.triggers.put("other", "shifts", topic="t", **options)  # type: ignore[arg-type]
                assert (refused.value.code, text in str(refused.value)) == (code, True)
            with pytest.raises(InvalidInput) as refused:
                await app.triggers.put_source(
                    "shifts", "sql", {"url": rows.url, "table": "duty_schedules", "everySeconds": 900}
                )
            assert refused.value.code == "GRACE_TOO_SHORT"
        finally:
            await app.close()

    asyncio.run(body())


def test_a_text_in_another_encoding_is_listed_and_does_not_stop_other_rows(tmp_path: Path, postgres: Postgres) -> None:
    server_url = postgres.create_database()
    url = server_url.rsplit("/", 1)[0] + "/other_encoding"

    async def body() -> None:
        admin = Rows(server_url)
        await admin.write("DROP DATABASE IF EXISTS other_encoding")
        await admin.write(
            "CREATE DATABASE other_encoding ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        )
        rows, app = Rows(url), Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        await rows.make()
        for number in range(5):
            await rows.put(number, soon(hours=1))
        await rows.write(r"UPDATE duty_schedules SET status = E'caf\xe9' WHERE id = 2")
        await follow(app, rows)

        async def listed() -> list[tuple[str, str | None]]:
            page = await app.triggers.list_items("shifts", rejected=True)
            return [(item.key, item.problem) for item in page]

        try:
            async with app.running(heartbeat=0.1):
                await until(lambda: _planned(app, {0, 1, 3, 4}))
                await until(listed)
                ((key, problem),) = await listed()
                assert (key, "invalid byte sequence" in str(problem)) == ("2", True)
                source = await app.triggers.get_source("shifts")
                assert "A row is rejected" in str(source.error)
                adapter = create_adapter("sql", {"url": url, "table": "duty_schedules"})
                read = await adapter.read_rows(["1", "2", "3"])  # as before a delivery
                await adapter.close()
                assert (set(read.rows), set(read.problems)) == ({"1", "3"}, {"2"})
                await rows.write("UPDATE duty_schedules SET status = 'on' WHERE id = 2")
                await until(lambda: _planned(app, set(range(5))))
                assert await listed() == []
        finally:
            await app.close()
            await admin.write("DROP DATABASE other_encoding WITH (FORCE)")

    _run(body(), postgres, server_url)


def test_binary_and_null_keys_are_read_in_pages(tmp_path: Path, postgres: Postgres, mariadb: MariaDB) -> None:
    for server, key_type, keys in (
        (postgres, "bytea", [f"'\\x0{n}ff'" for n in range(7)]),
        (mariadb, "binary(2)", [f"x'0{n}ff'" for n in range(7)]),
    ):
        url = server.create_database()

        async def body(url: str = url, key_type: str = key_type, keys: list[str] = keys) -> None:
            rows = Rows(url)
            await rows.write(f"CREATE TABLE shifts (id {key_type} NULL, start_at text)")
            for key in [*keys, "NULL"]:
                await rows.write(f"INSERT INTO shifts VALUES ({key}, '2040-01-01')")
            adapter = create_adapter("sql", {"url": url, "table": "shifts"})
            pages = [await adapter.read_page(None, 3)]
            while (cursor := pages[-1].cursor) is not None:
                pages.append(await adapter.read_page(cursor, 3))
            assert [key for page in pages for key in page.rows] == [f"0{n}ff" for n in range(7)]
            assert pages[-1].problems == {"": "1 rows have no id."}
            assert set((await adapter.read_rows(["03ff", "zz", "0"])).rows) == {"03ff"}
            await adapter.close()

        _run(body(), server, url)


def test_text_of_sqlite_in_another_encoding_is_listed_and_hides_no_other_row(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/theirs.db"

    async def body() -> None:
        rows = Rows(url)
        await rows.write("CREATE TABLE shifts (id text, start_at text)")
        good = ["a", "b", "\u00e9", "\U0001f514"]
        for key in good:
            await rows.write("INSERT INTO shifts VALUES ($1, '2040-01-01')", key)
        await rows.write("INSERT INTO shifts VALUES ('c', CAST(x'636166e9' AS text))")
        await rows.write("INSERT INTO shifts VALUES (CAST(x'62e9' AS text), '2040-01-01')")  # sorts after b
        adapter = create_adapter("sql", {"url": url, "table": "shifts"})
        for size in (2, 3, 500):
            pages = [await adapter.read_page(None, size)]
            while (cursor := pages[-1].cursor) is not None:
                assert len(pages) < 20
                pages.append(await adapter.read_page(cursor, size))
            assert {key for page in pages for key in page.rows} == set(good)
            problems = {key: problem for page in pages for key, problem in page.problems.items()}
            assert problems == {
                "c": "A value cannot be read: start_at is 'caf\ufffd' in UTF-8.",
                "b\ufffd": "A value cannot be read: id is 'b\ufffd' in UTF-8.",
            }
        page = await adapter.read_rows(["a", "c"])
        assert (set(page.rows), set(page.problems)) == ({"a"}, {"c"})
        await adapter.close()

    asyncio.run(body())


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb"])
def test_a_key_of_several_rows_is_listed(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    server = None if kind == "sqlite" else request.getfixturevalue(kind)
    url = f"sqlite:///{tmp_path}/theirs.db" if server is None else server.create_database()

    async def body() -> None:
        rows = Rows(url)
        await rows.make()
        for number in (1, 2):
            await rows.put(number, soon(hours=1))
        query = "SELECT s.* FROM duty_schedules s JOIN duty_schedules o ON s.id = 1 OR o.id = 1"
        adapter = create_adapter("sql", {"url": url, "query": query})
        for page in (await adapter.read_page(None, 10), await adapter.read_rows(["1", "2"])):
            assert list(page.rows) == ["2"]
            assert page.problems == {"1": "Several rows have the id '1', so it does not identify a row."}
        await adapter.close()

    if server is None:
        asyncio.run(body())
    else:
        _run(body(), server, url)


def test_the_outbox_of_a_table_with_binary_keys_is_read_by_a_new_process(postgres: Postgres) -> None:
    url = postgres.create_database()

    async def body() -> None:
        rows = Rows(url)
        await rows.write("CREATE TABLE shifts (id bytea PRIMARY KEY, start_at text)")
        options = {"url": url, "table": "shifts", "changes": "outbox"}
        first, second, notified = SqlTable(options), SqlTable(options), list[str | None]()
        await rows.write(first.install_sql())
        for key in ("01", "02"):
            await rows.write(f"INSERT INTO shifts VALUES ('\\x{key}', '2040-01-01')")
        start = await first.read_changes(None, 10)
        assert start is not None
        await rows.write("UPDATE shifts SET start_at = '2040-01-02' WHERE id = '\\x01'")
        await rows.write("DELETE FROM shifts WHERE id = '\\x02'")
        page = await second.read_changes(start.cursor, 10)
        assert page is not None
        assert (list(page.rows), page.deleted) == (["01"], ("02",))
        assert await second.listen(notified.append)
        await rows.write("UPDATE shifts SET start_at = '2040-01-03' WHERE id = '\\x01'")
        await until(lambda: notified == ["01"])
        await first.close()
        await second.close()

    _run(body(), postgres, url)


def test_names_with_capitals_and_spaces_are_used_as_written(
    postgres: Postgres, mariadb: MariaDB, tmp_path: Path
) -> None:
    places: list[tuple[Any, str]] = [(postgres, '"'), (mariadb, "`"), (None, '"')]
    for server, mark in places:
        url = f"sqlite:///{tmp_path}/theirs.db" if server is None else server.create_database()

        async def body(url: str = url, mark: str = mark) -> None:
            rows = Rows(url)
            table, key = f"{mark}Duty Shift{mark}", f"{mark}shiftId{mark}"
            await rows.write(f"CREATE TABLE {table} ({key} integer primary key, start_at text)")
            await rows.write(f"INSERT INTO {table} VALUES (1, '2040-01-01'), (2, '2040-01-01')")
            options = {"url": url, "table": "Duty Shift", "key": "shiftId"}
            adapter = create_adapter("sql", {**options, "changes": "cursor", "cursor": "shiftId"})
            assert list((await adapter.read_page("1", 5)).rows) == ["2"]
            assert list((await adapter.read_rows(["2", "3"])).rows) == ["2"]
            start = await adapter.read_changes(None, 5)
            assert start is not None
            await rows.write(f"INSERT INTO {table} VALUES (3, '2040-01-01')")
            found = await adapter.read_changes(start.cursor, 5)
            assert found is not None
            assert "3" in found.rows
            await adapter.close()

        asyncio.run(body())
        if server is not None:
            server.drop_database(url)


def test_a_sequence_number_that_commits_late_is_found_by_the_cursor(postgres: Postgres) -> None:
    """A takes a number, B takes the next one and commits; A commits later."""
    url = postgres.create_database()

    async def body() -> None:
        import asyncpg

        rows, first = Rows(url), await asyncpg.connect(url)
        await rows.write("CREATE TABLE shifts (id bigserial primary key, start_at text)")
        adapter = create_adapter("sql", {"url": url, "table": "shifts", "changes": "cursor", "cursor": "id"})
        page = await adapter.read_changes(None, 10)
        assert page is not None
        begun = first.transaction()
        await begun.start()
        await first.execute("INSERT INTO shifts (start_at) VALUES ('2040-01-01')")
        await rows.write("INSERT INTO shifts (start_at) VALUES ('2040-01-01')")
        found = set[str]()
        for _ in range(3):
            page = await adapter.read_changes(page.cursor, 10)
            assert page is not None
            found |= page.rows.keys()
        assert found == {"2"}
        await begun.commit()
        page = await adapter.read_changes(page.cursor, 10)
        assert page is not None
        assert "1" in page.rows
        await first.close()
        await adapter.close()

    _run(body(), postgres, url)


def test_the_outbox_records_changes_of_joined_tables_in_commit_order(postgres: Postgres) -> None:
    url = postgres.create_database()

    async def body() -> None:
        import asyncpg

        rows = Rows(url)
        await rows.write('CREATE TABLE "Shift" ("shiftId" integer primary key, start_at timestamptz)')
        await rows.write("CREATE TABLE participants (shift_id integer, person text)")
        options = {
            "url": url, "table": "Shift", "key": "shiftId", "changes": "outbox",
            "joined": [{"table": "participants", "key": "shift_id"}],
        }  # fmt: skip
        adapter = SqlTable(options)
        await rows.write(adapter.install_sql())
        await rows.write(adapter.install_sql())  # again
        await rows.write('INSERT INTO "Shift" SELECT n, now() FROM generate_series(1, 5) n')
        start = await adapter.read_changes(None, 10)
        assert start is not None
        late = await asyncpg.connect(url)
        begun = late.transaction()
        await begun.start()
        await late.execute("INSERT INTO participants VALUES (1, 'ana')")
        await rows.write("INSERT INTO participants VALUES (2, 'bo')")
        await rows.write('DELETE FROM "Shift" WHERE "shiftId" = 3')
        page = await adapter.read_changes(start.cursor, 10)
        assert page is not None
        assert (set(page.rows), page.deleted, page.cursor) == ({"2"}, ("3",), start.cursor), "it is not delayed"
        page = await adapter.read_changes(page.cursor, 10)
        assert page is not None
        assert (page.rows, page.deleted) == ({}, ()), "the same changes are read twice"
        await begun.commit()
        page = await adapter.read_changes(page.cursor, 10)
        assert page is not None
        assert (set(page.rows), page.deleted) == ({"1", "2"}, ("3",))
        page = await adapter.read_changes(page.cursor, 10)
        assert page is not None
        assert page.rows == {}
        await late.close()
        await adapter.close()
        await rows.write(adapter.uninstall_sql())
        left = await asyncpg.connect(url)
        assert await left.fetchval("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal") == 0
        assert await left.fetchval("SELECT to_regclass('timebell_changes')") is None
        await left.close()

    _run(body(), postgres, url)


def test_keys_beyond_the_range_of_their_column_hide_no_other_row(tmp_path: Path, postgres: Postgres) -> None:
    server_url = postgres.create_database()

    async def body() -> None:
        for url in (server_url, f"sqlite:///{tmp_path}/theirs.db"):
            rows = Rows(url)
            await rows.write("CREATE TABLE shifts (id integer PRIMARY KEY, start_at text)")
            await rows.write("INSERT INTO shifts VALUES (1, '2040-01-01'), (2, '2040-01-01'), (4, '2040-01-01')")
            adapter = create_adapter("sql", {"url": url, "table": "shifts"})
            found = await adapter.read_rows(["1", "3000000000", "2", "9" * 25, "4"])
            assert set(found.rows) == {"1", "2", "4"}
            with pytest.raises(InvalidSourceValue):
                await adapter.matches("SELECT 1 FROM shifts WHERE id = :id", {"id": 2**70})
            await adapter.close()

    _run(body(), postgres, server_url)


def _run(test: Any, server: Any, url: str) -> None:
    try:
        asyncio.run(asyncio.wait_for(test, timedelta(seconds=50).total_seconds()))
    finally:
        server.drop_database(url)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_missing_table_is_named_with_the_nearest_one(tmp_path: Path, postgres: Postgres, kind: str) -> None:
    url = postgres.create_database() if kind == "postgres" else f"sqlite:///{tmp_path}/theirs.db"

    async def body() -> None:
        await Rows(url).make()
        reader = create_adapter("sql", {"url": url, "table": "duty_schedule"})
        try:
            with pytest.raises(SourceFailed) as failed:
                await reader.read_page(None, 10)
            assert failed.value.fix == "Did you mean duty_schedules?"
        finally:
            await reader.close()

    if kind == "postgres":
        _run(body(), postgres, url)
    else:
        asyncio.run(body())


def test_a_table_with_a_range_of_times_is_refused_and_a_query_of_its_ends_is_read(
    tmp_path: Path, postgres: Postgres
) -> None:
    url = postgres.create_database()

    async def body() -> None:
        rows, app = Rows(url), Timebell(f"sqlite:///{tmp_path}/ours.db", timezone="UTC")
        await rows.write("CREATE TABLE bookings (id integer PRIMARY KEY, at tstzrange)")
        await rows.write("INSERT INTO bookings VALUES (1, '[2027-03-01 09:00+00,2027-03-05 18:00+00)')")
        with pytest.raises(InvalidInput, match="tstzrange") as refused:
            await app.triggers.put_source("bookings", "sql", {"url": url, "table": "bookings"})
        ends = refused.value.fix.partition(": ")[2]
        options = {"url": url, "query": f"{ends} FROM bookings"}
        await app.triggers.put_source("bookings", "sql", options)
        await app.close()
        reader = create_adapter("sql", options)
        try:
            (row,) = (await reader.read_page(None, 10)).rows.values()
        finally:
            await reader.close()
        assert row == {"id": 1, "start": "2027-03-01T09:00:00+00:00", "end": "2027-03-05T18:00:00+00:00"}

    _run(body(), postgres, url)


def test_long_names_and_keys_do_not_break_the_outbox(postgres: Postgres) -> None:
    url = postgres.create_database()

    async def body() -> None:
        rows, table = Rows(url), "t" * 60
        await rows.write(f"CREATE TABLE {table} (id text, first text, second text)")
        options = {
            "url": url, "table": table, "changes": "outbox",
            "joined": [{"table": table, "key": "first"}, {"table": table, "key": "second"}],
        }  # fmt: skip
        adapter = SqlTable(options)
        await rows.write(adapter.install_sql())
        start = await adapter.read_changes(None, 10)
        assert start is not None
        await rows.write(f"INSERT INTO {table} VALUES ('1', '2', repeat('x', 9000))")
        page = await adapter.read_changes(start.cursor, 10)
        assert page is not None
        assert (set(page.rows), set(page.deleted)) == ({"1"}, {"2", "x" * 9000})
        await rows.write(adapter.uninstall_sql())
        await rows.write(f"INSERT INTO {table} VALUES ('2', '3', '4')")
        await adapter.close()

    _run(body(), postgres, url)


def test_a_missing_outbox_is_to_be_installed(postgres: Postgres) -> None:
    url = postgres.create_database()

    async def body() -> None:
        rows = Rows(url)
        reader = create_adapter("sql", {"url": url, "table": "duty_schedules", "changes": "outbox"})
        try:
            with pytest.raises(SourceFailed, match="has no tables"):
                await reader.read_page(None, 10)
            await rows.make()
            with pytest.raises(SourceFailed, match="trigger install"):
                await reader.read_changes("[0, 0]", 10)
        finally:
            await reader.close()

    _run(body(), postgres, url)


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_a_source_is_read_again_after_its_server_closed_the_connections(
    kind: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(kind)
    url = server.create_database()

    async def body() -> None:
        rows = Rows(url)
        await rows.make()
        await rows.put(1, soon(hours=1))
        reader = create_adapter("sql", {"url": url, "table": "duty_schedules"})
        try:
            for _ in range(3):
                pages = await asyncio.gather(*(reader.read_page(None, 10) for _ in range(2)))
                assert [set(page.rows) for page in pages] == [{"1"}, {"1"}]
                if kind == "postgres":
                    await rows.write(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                else:
                    await asyncio.to_thread(_close_connections, url)
                with suppress(SourceFailed):  # the first read may still find the closed connections
                    await reader.read_page(None, 10)
        finally:
            await reader.close()

    _run(body(), server, url)


def _close_connections(url: str) -> None:
    place = urlsplit(url)
    connection = pymysql.connect(host=place.hostname, port=place.port or 3306, user=place.username, autocommit=True)
    with closing(connection), connection.cursor() as cursor:
        cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", [place.path[1:]])
        for (id_,) in cursor.fetchall():
            cursor.execute(f"KILL {id_}")
