"""Audiences in the database of a customer, read page by page with a declared query."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.servers import MariaDB, Postgres
from timebell import Timebell
from timebell.errors import InvalidInput
from timebell.features.campaigns.engine import external_audience
from timebell.features.campaigns.engine.external_audience import AudienceReader
from timebell.features.campaigns.store import audiences, campaign_jobs
from timebell_fcm_emulator import FakeFcm

QUERY = "SELECT id, fcm AS token, 'x:y' AS tag, age, consent AS marketing_on FROM people WHERE age > 9"
ONE_SELECT = "Write one SELECT"
CustomerDatabase = tuple[str, Callable[[str], None]]


@contextmanager
def database(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[CustomerDatabase]:
    """Create the database of a customer with a people table; yield its URL and a function that executes statements."""
    if kind == "sqlite":
        file = folder / "theirs.db"

        def execute(statements: str) -> None:
            with sqlite3.connect(file) as connection:
                connection.executescript(statements)

        url = f"sqlite:///{file}"
    elif kind == "mariadb":
        maria: MariaDB = request.getfixturevalue("mariadb")
        url = maria.create_database()

        def execute(statements: str) -> None:
            maria.execute(f"USE `{url.rpartition('/')[2]}`", statements)

    else:
        server: Postgres = request.getfixturevalue("postgres")
        url = server.create_database()

        def execute(statements: str) -> None:
            async def run() -> None:
                connection = await asyncpg.connect(url)
                await connection.execute(statements)
                await connection.close()

            asyncio.run(run())

    rows = ", ".join(f"({n}, 'phone-of-{n:04}', {n}, {'true' if n % 2 else 'false'})" for n in range(1, 31))
    execute("CREATE TABLE people (id integer PRIMARY KEY, fcm text, age integer, consent boolean)")
    execute(f"INSERT INTO people VALUES {rows}")
    yield url, execute
    if kind == "postgres":
        server.drop_database(url)
    if kind == "mariadb":
        maria.drop_database(url)


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def people(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CustomerDatabase]:
    """A database per test, for tests that change it."""
    with database(request.param, tmp_path, request) as found:
        yield found


@pytest.fixture(scope="module", params=["sqlite", "postgres", "mariadb"])
def unchanged_people(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CustomerDatabase]:
    """A database per module, for tests that do not change it."""
    with database(request.param, tmp_path_factory.mktemp("theirs"), request) as found:
        yield found


def test_a_campaign_reads_its_audience_when_it_starts(
    run: Callable[..., None], fcm: FakeFcm, people: CustomerDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_audience, "PAGE_SIZE", 7)
    url, execute = people
    execute("UPDATE people SET fcm = 'no token' WHERE id = 12")
    execute("UPDATE people SET fcm = NULL WHERE id = 14")

    async def body(app: Timebell, service: Any) -> None:
        await app.devices.register("phone-of-another-user")
        created = await app.audiences.put("crm", {"url": url, "query": QUERY, "key": "id"})
        assert (created.members, created.refreshed_at) == (0, None)
        for gone, count in ((None, 19), (20, 18)):
            if gone is not None:
                await asyncio.to_thread(execute, f"DELETE FROM people WHERE id = {gone}")
            filters = {"audience": "crm", "attributes": {"tag": "x:y"}}
            sent = await app.campaigns.create({"title": "Hello", "filters": filters})
            while (found := await app.campaigns.get(sent.id)).state != "completed":
                await asyncio.sleep(0.02)
            read = await app.audiences.get("crm")
            assert (found.accepted, read.members, read.refused, read.loading) == (count, count, 1, None)
            assert (read.without_token, found.excluded["noToken"]) == (1, 1)
        assert "phone-of-another-user" not in fcm.received()
        assert await app.devices.count({"audience": "crm", "marketingOnOff": True}) == 10

    run(body)


def test_a_campaign_whose_audience_cannot_be_read_pauses_until_it_is_resumed(
    run: Callable[..., None], fcm: FakeFcm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    for name, value in (("attempts", 2), ("delay", 0.01)):
        monkeypatch.setitem(campaign_jobs.CHUNK_RETRY, name, value)

    async def body(app: Timebell, service: Any) -> None:
        with database("sqlite", tmp_path, request) as (url, execute):
            await app.audiences.put("crm", {"url": url, "query": QUERY, "key": "id"})
            await asyncio.to_thread(execute, "ALTER TABLE people RENAME TO moved")
            sent = await app.campaigns.create({"title": "Hello", "filters": {"audience": "crm"}})
            while (found := await app.campaigns.get(sent.id)).state != "paused":
                await asyncio.sleep(0.02)
            assert (found.reason or "").startswith("blocked: AUDIENCE_UNREADABLE: The audience cannot be read: ")
            assert fcm.received() == {}
            await asyncio.to_thread(execute, "ALTER TABLE moved RENAME TO people")
            await app.campaigns.resume(sent.id)
            while (found := await app.campaigns.get(sent.id)).state != "completed":
                await asyncio.sleep(0.02)
            assert found.accepted == 21
            # Resuming it did not approve it, because no size check had paused it.
            assert found.approved_by is None

    run(body)


def test_a_pinned_audience_is_fixed_at_creation(
    run: Callable[..., None], fcm: FakeFcm, people: CustomerDatabase
) -> None:
    url, execute = people

    async def body(app: Timebell, service: Any) -> None:
        await app.audiences.put("crm", {"url": url, "query": QUERY, "key": "id"})
        message = {"title": "Hello", "filters": {"audience": "crm"}, "audienceFormat": "pinned"}
        created = await app.campaigns.create(message, send_at="2035-01-01T00:00:00Z")
        while (await app.campaigns.get(created.id)).pinned_at is None:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(execute, "DELETE FROM people WHERE id = 20")
        await app.audiences.refresh("crm")
        while (await app.audiences.get("crm")).members != 20:
            await asyncio.sleep(0.02)
        await app.campaigns.start(created.id)
        while (found := await app.campaigns.get(created.id)).state != "completed":
            await asyncio.sleep(0.02)
        assert found.accepted == 21

    run(body)


def test_an_interrupted_refresh_resumes_at_its_cursor(
    people: CustomerDatabase, sqlite_url: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(external_audience, "PAGE_SIZE", 5)
    url, execute = people
    stored_pages: list[list[str]] = []
    real = audiences.store_page

    def store_page(tx: Any, was: Any, fields: Any, *more: Any) -> Any:
        if len(stored_pages) == 2:
            stored_pages.append([])
            raise OSError("the node dies here")
        stored_pages.append([token for token, _ in fields])
        return real(tx, was, fields, *more)

    monkeypatch.setattr(audiences, "store_page", store_page)

    async def body() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        await app.audiences.put("crm", {"url": url, "query": QUERY, "key": "id"})
        reader = AudienceReader(app.store, app._keyring, app.clock.now)
        with pytest.raises(OSError, match="dies"):
            await reader.refresh("default", "crm")
        # Added to the table after the refresh began: not part of this refresh.
        await asyncio.to_thread(execute, "INSERT INTO people VALUES (99, 'phone-of-late', 40, true)")
        await asyncio.to_thread(execute, "INSERT INTO people VALUES (0, 'phone-of-first', 40, true)")
        found = await reader.refresh("default", "crm")
        await app.close()
        assert found.members == 21

    asyncio.run(body())
    tokens = [token for page in stored_pages for token in page]
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 21


@pytest.mark.parametrize(
    ("more", "code", "remedy"),
    [
        ({"key": None}, "AUDIENCE_KEY_MISSING", 'Set "key"'),
        ({"key": "number"}, "AUDIENCE_KEY_MISSING", "Its columns are: id, token"),
        ({"query": "SELECT id FROM people"}, "INVALID_AUDIENCE", "AS token"),
        ({"query": "SELECT id, no_such AS token FROM people"}, "AUDIENCE_UNREADABLE", "Run the query"),
        ({"query": "DELETE FROM people"}, "AUDIENCE_QUERY_WRITES", ONE_SELECT),
        ({"query": "SELECT 1; DROP TABLE people"}, "AUDIENCE_QUERY_WRITES", ONE_SELECT),
        ({"query": "WITH x AS (DELETE FROM people RETURNING *) SELECT * FROM x"}, "AUDIENCE_QUERY_WRITES", ONE_SELECT),
        ({"query": "SELECT id, fcm AS token INTO another FROM people"}, "AUDIENCE_QUERY_WRITES", ONE_SELECT),
        ({"url": "postgresql://me:secret@localhost/x"}, "INVALID_AUDIENCE", "in a secret"),
        ({"url": "postgresql://localhost/x?password=secret"}, "INVALID_AUDIENCE", "in a secret"),
        ({"url": "postgresql://localhost:port/x"}, "INVALID_AUDIENCE", "docs/guides/campaigns.md"),
        ({"url": "mongodb://localhost/x"}, "INVALID_AUDIENCE", "docs/guides/campaigns.md"),
        ({"url": "sqlite:////no/such/file.db"}, "AUDIENCE_UNREADABLE", "Run the query"),
    ],
)
def test_an_unreadable_audience_is_refused_at_creation(
    unchanged_people: CustomerDatabase, sqlite_url: str, more: dict[str, Any], code: str, remedy: str
) -> None:
    url, _ = unchanged_people

    async def body() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        with pytest.raises(InvalidInput) as refused:
            await app.audiences.put("crm", {"url": url, "query": QUERY, "key": "id", **more})
        assert (refused.value.code, (await app.audiences.list()).items) == (code, [])
        assert remedy in (refused.value.fix or "")
        await app.close()

    asyncio.run(body())


def test_a_duplicate_key_is_refused(people: CustomerDatabase, sqlite_url: str) -> None:
    url, execute = people
    execute("INSERT INTO people VALUES (50, 'phone-of-twin', 12, true)")

    async def body() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        await app.audiences.put("crm", {"url": url, "query": QUERY, "key": "age"})
        with pytest.raises(InvalidInput) as refused:
            await AudienceReader(app.store, app._keyring, app.clock.now).refresh("default", "crm")
        assert refused.value.code == "DUPLICATE_AUDIENCE_KEY"
        await app.close()

    asyncio.run(body())


def test_the_audience_query_cannot_write(
    unchanged_people: CustomerDatabase, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = unchanged_people
    monkeypatch.setattr("timebell.features.campaigns.model.audience_source._check_query", lambda query: None)

    async def body() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        for query in ("SELECT id, fcm AS token FROM people) AS x; DELETE FROM people; SELECT (1",
                      "WITH x AS (DELETE FROM people RETURNING *) SELECT id, fcm AS token FROM x"):  # fmt: skip
            with pytest.raises(InvalidInput, match="cannot be read"):
                await app.audiences.put("crm", {"url": url, "query": query, "key": "id"})
        await app.audiences.put("crm", {"url": url, "query": QUERY, "key": "id"})
        assert (await AudienceReader(app.store, app._keyring, app.clock.now).refresh("default", "crm")).members == 21
        await app.close()

    asyncio.run(body())


@pytest.mark.parametrize("column", ["push_on", "PUSH_ON", "pushOn", "push_onoff"])
def test_columns_mean_fields_in_any_spelling(unchanged_people: CustomerDatabase, sqlite_url: str, column: str) -> None:
    url, _ = unchanged_people
    quote = "`" if url.startswith("m") else '"'
    query = f"SELECT id, fcm AS token, consent AS {quote}{column}{quote} FROM people"

    async def body() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        await app.audiences.put("crm", {"url": url, "query": query, "key": "id"})
        await AudienceReader(app.store, app._keyring, app.clock.now).refresh("default", "crm")
        assert await app.devices.count({"audience": "crm", "pushOnOff": True}) == 15
        await app.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("column", "remedy"),
    [
        ("pushonof", "Did you mean pushOnOff? If it is an attribute, name it attributes.pushonof."),
        ("marketing_on, consent AS marketingonoff", "Select one of them."),
    ],
)
def test_a_column_that_resembles_a_field_is_refused(
    unchanged_people: CustomerDatabase, sqlite_url: str, column: str, remedy: str
) -> None:
    url, _ = unchanged_people

    async def body() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        query = f"SELECT id, fcm AS token, consent AS {column} FROM people"
        with pytest.raises(InvalidInput) as refused:
            await app.audiences.put("crm", {"url": url, "query": query, "key": "id"})
        assert (refused.value.code, refused.value.fix) == ("INVALID_AUDIENCE", remedy)
        await app.close()

    asyncio.run(body())


def test_a_date_beyond_the_range_of_python_refuses_only_its_row(
    request: pytest.FixtureRequest, tmp_path: Path, sqlite_url: str
) -> None:
    query = "SELECT id, fcm AS token, birth AS birth_date, joined FROM people"

    async def body(url: str) -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        await app.audiences.put("crm", {"url": url, "query": query, "key": "id"})
        read = await AudienceReader(app.store, app._keyring, app.clock.now).refresh("default", "crm")
        assert (read.members, read.refused) == (29, 1)
        joined = {"joined": "2026-01-02 03:04:05+00:00"}
        assert await app.devices.count({"ageMin": 30, "attributes": joined}) == 28
        await app.close()

    with database("postgres", tmp_path, request) as (url, execute):
        execute("ALTER TABLE people ADD birth date DEFAULT '1990-12-31'")
        execute("ALTER TABLE people ADD joined timestamptz DEFAULT '2026-01-02 04:04:05+01'")
        execute("UPDATE people SET birth = '20260-05-01' WHERE id = 12")
        execute("UPDATE people SET joined = 'infinity' WHERE id = 13")
        asyncio.run(body(url))


def test_servers_that_do_not_answer_occupy_no_shared_threads(sqlite_url: str) -> None:
    connections: list[asyncio.StreamWriter] = []

    async def body() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        app = Timebell(sqlite_url, timezone="UTC")
        server = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
        source = {"url": f"mysql://me@127.0.0.1:{server.sockets[0].getsockname()[1]}/crm", "query": QUERY, "key": "id"}
        checks = [asyncio.create_task(app.audiences.put(f"crm-{number}", source)) for number in range(4)]
        try:
            async with asyncio.timeout(20):
                while len(connections) < 4:
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(int)
        finally:
            server.close()
            for connection in connections:
                connection.close()
        refused = await asyncio.gather(*checks, return_exceptions=True)
        assert [getattr(error, "code", error) for error in refused] == ["AUDIENCE_UNREADABLE"] * 4
        await app.close()

    asyncio.run(body())
