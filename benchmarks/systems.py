"""What is measured: Timebell on each store, with its own fresh database for every run. The peers are in peers/."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from benchmarks import processes

_UUID = (  # version 7, of some earlier time
    "(lpad(to_hex(1760000000000 + i / 1000), 12, '0') || '7' || substr(md5(i::text), 1, 3)"
    " || 'a' || substr(md5(i::text), 4, 15))::uuid"
)
_PAYLOAD = """'{"i":' || i || ',"pad":"%s"}'""" % ("x" * 76)
_LOAD = (
    "INSERT INTO timebell_jobs (id, tenant_id, topic, kind, scheduled_at, run_at, timezone, payload, queue,"
    " priority, serial, state, attempt, tries, created_at, route, shared) SELECT {id}, '{tenant}', '{topic}', 'once',"
    " {at}, {at}, 'UTC', {payload}, 'default', 0, {no}, 'pending', 0, 0, {now}, '{topic}', {shared} FROM {numbers}"
)


class Server:
    """The PostgreSQL server: BENCH_POSTGRES_URL, else one of our own. Only databases of our names."""

    def __init__(self) -> None:
        self._own: Any = None
        self.pid: int | None = None
        self.version = ""
        self.settings: dict[str, str] = {}

    async def start(self) -> None:
        """Find or start it."""
        url = os.environ.get("BENCH_POSTGRES_URL")
        if url is None:
            from tests.servers import Postgres

            self._own = await asyncio.to_thread(Postgres, durable=True)
            url = self._own.url
        self.url = url
        connection = await asyncpg.connect(url)
        self.version = await connection.fetchval("SHOW server_version")
        for name in ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size", "data_directory"):
            with suppress(asyncpg.PostgresError):
                self.settings[name] = await connection.fetchval(f"SHOW {name}")
        await connection.close()
        with suppress(OSError):  # another machine's, or not ours to read: then its CPU is unknown
            pidfile = Path(self.settings.pop("data_directory", "")) / "postmaster.pid"
            self.pid = int(pidfile.read_text().splitlines()[0])

    async def revive(self) -> None:
        """Start it anew, if it does not answer."""
        try:
            await (await asyncpg.connect(self.url, timeout=30)).close(timeout=10)
        except (OSError, TimeoutError, asyncpg.PostgresError):
            with suppress(RuntimeError):
                await self.close()
            await self.start()

    async def close(self) -> None:
        """Stop it, if we started it."""
        if self._own is not None:
            await asyncio.to_thread(self._own.close)

    async def fresh(self, name: str) -> str:
        """The URL of a new, empty database; one of that name goes."""
        await self.drop(name)
        await self._execute(f'CREATE DATABASE "{name}"', "CHECKPOINT")
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    async def drop(self, name: str) -> None:
        """Remove it."""
        await self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    async def _execute(self, *statements: str) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            for statement in statements:
                await connection.execute(statement, timeout=120)
        finally:
            await connection.close()


class Measured(ABC):
    """What the workloads have to know of a system."""

    name: str
    store: str
    module: str
    batch: int
    in_code = False
    """Whether its schedules are defined in code, as it has no other way."""
    notices = True
    """Whether a worker sees what others make while it runs."""
    fires_at_once = False
    """Whether a schedule also fires for the minute in which it is made, and is long busy with that."""
    pace = 3000
    """Jobs a second that it makes at the least, to know how long before they are due to begin."""
    most: ClassVar[Mapping[str, int]] = {}
    """By workload, so many jobs instead; of 0 it is not run."""
    server_pid: int | None = None
    server_version: str | None = None
    """What it runs on, if that is not the PostgreSQL of all."""
    url: str

    @abstractmethod
    async def __aenter__(self) -> Measured: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    @abstractmethod
    async def backlog(self, count: int) -> None:
        """Load jobs that are due in a year."""

    @abstractmethod
    async def settle(self) -> None:
        """Have the chores behind us that a server would do in its own time."""

    @abstractmethod
    async def pending(self) -> int:
        """How many jobs there are."""

    @abstractmethod
    async def unfinished(self) -> bool:
        """Whether any job of the run is not durably done."""

    @abstractmethod
    async def done(self) -> int | None:
        """How many jobs the store says were completed; None where it does not keep them."""


class OnPostgres(Measured):
    """A system whose jobs are rows in PostgreSQL; a block with it is one run in a fresh database."""

    store = "postgres"
    table: str
    waiting: str
    backlog_sql: str | None = None

    def __init__(self, server: Server) -> None:
        self.server = server
        self.server_pid = server.pid
        self._name = f"timebell_bench_{os.getpid()}"

    async def __aenter__(self) -> OnPostgres:
        self.url = await self.server.fresh(self._name)
        await processes.call(self.module, "setup", self.url)
        self._connection = await asyncpg.connect(self.url, statement_cache_size=10)
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(Exception):
            await self._connection.close(timeout=10)
        await self.server.drop(self._name)

    async def backlog(self, count: int) -> None:
        """Load jobs that are due in a year, on the server's side where that is known."""
        if self.backlog_sql is None:
            await fill(self, count)
        else:
            await self._connection.execute(self.backlog_sql, count, timeout=3600)
        await self.settle()

    async def settle(self) -> None:
        """Have the chores behind us that a server would do in its own time."""
        await self._connection.execute("VACUUM ANALYZE")
        await self._connection.execute("CHECKPOINT")

    async def pending(self) -> int:
        """How many jobs there are."""
        return int(await self._connection.fetchval(f"SELECT count(*) FROM {self.table}"))

    async def unfinished(self) -> bool:
        """Whether any job of the run is not durably done."""
        return bool(await self._connection.fetchval(self.waiting))

    async def done(self) -> int | None:
        """How many jobs the store says were completed; None where it does not keep them."""
        return None


class TimebellOnPostgres(OnPostgres):
    """Timebell."""

    name = "Timebell"
    module = "child_timebell"
    batch = 5000
    table = "timebell_jobs"
    waiting = (  # in words that have an index, as a backlog is not to be read for it
        "SELECT EXISTS (SELECT 1 FROM timebell_jobs WHERE state = 'running') OR EXISTS (SELECT 1 FROM timebell_jobs"
        " WHERE state = 'pending' AND hold IS NULL AND queue = 'default' AND priority = 0"
        " AND run_at < now() + interval '1 hour')"
    )
    backlog_sql = _LOAD.format(
        id=_UUID, at="now() + interval '1 year' + i * interval '1 ms'", payload=_PAYLOAD, no="false", shared="false",
        now="now()", numbers="generate_series(1, $1::int) i", tenant="default", topic="bench",
    )  # fmt: skip
    flood_sql = _LOAD.format(
        id=_UUID, at="now()", payload=_PAYLOAD, no="false", shared="true", now="now()",
        numbers="generate_series(1, $1::int) i", tenant="flood", topic="flood",
    )  # fmt: skip

    async def flood(self, count: int) -> None:
        """Load jobs of one tenant that are all due now, on the server's side."""
        await self._connection.execute(self.flood_sql, count, timeout=3600)
        await self.settle()

    async def done(self) -> int | None:
        """As above."""
        found = await self._connection.fetchval("SELECT count(*) FROM timebell_finished WHERE state = 'completed'")
        return int(found)


class TimebellOnSqlite(Measured):
    """Timebell in one file."""

    name = "Timebell"
    store = "sqlite"
    module = "child_timebell"
    batch = 5000

    async def __aenter__(self) -> TimebellOnSqlite:
        self._folder = tempfile.TemporaryDirectory(prefix="timebell-bench-")
        path = f"{self._folder.name}/bench.db"
        self.url = f"sqlite:///{path}"
        await processes.call(self.module, "setup", self.url)
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=30)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connection.close()
        self._folder.cleanup()

    async def backlog(self, count: int) -> None:
        """As above."""
        now = self._now
        await self._load(count, at=f"{now} + 31536000000000 + i * 1000", shared="0", tenant="default", topic="bench")

    async def flood(self, count: int) -> None:
        """As above."""
        await self._load(count, at=self._now, shared="1", tenant="flood", topic="flood")

    _now = "CAST(strftime('%s') AS INTEGER) * 1000000"

    async def _load(self, count: int, **words: str) -> None:
        series = f"(WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) SELECT i FROM n)"
        ident = "printf('0199c851-0000-7000-a000-%012x', i)"
        fixed = {"id": ident, "payload": _PAYLOAD, "no": "0", "now": self._now, "numbers": series}
        self._connection.execute(_LOAD.format(**fixed, **words))
        await self.settle()

    async def settle(self) -> None:
        """As above."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    async def pending(self) -> int:
        """As above."""
        return int(self._connection.execute("SELECT count(*) FROM timebell_jobs").fetchone()[0])

    async def unfinished(self) -> bool:
        """As above."""
        soon = "(CAST(strftime('%s') AS INTEGER) + 3600) * 1000000"
        found = self._connection.execute(f"SELECT EXISTS (SELECT 1 FROM timebell_jobs WHERE run_at < {soon})")
        return bool(found.fetchone()[0])

    async def done(self) -> int | None:
        """As above."""
        found = self._connection.execute("SELECT count(*) FROM timebell_finished WHERE state = 'completed'")
        return int(found.fetchone()[0])


BACKLOG = 10_000_000
"""The numbers of a backlog's jobs begin here."""


async def fill(system: Measured, count: int) -> None:
    """Have a client make jobs that are due in a year."""
    spec = {"n": count, "first": BACKLOG, "batch": system.batch, "lead": 31_536_000, "span": 1000}
    await processes.call(system.module, "create", system.url, **spec)


@asynccontextmanager
async def chosen(stores: str) -> AsyncIterator[list[Any]]:
    """Timebell on each of these stores, separated by commas, while the block runs."""
    server = Server() if "postgres" in stores else None
    try:
        if server is not None:
            await server.start()
        systems: list[Any] = [TimebellOnSqlite()] if "sqlite" in stores else []
        yield systems + ([TimebellOnPostgres(server)] if server is not None else [])
    finally:
        if server is not None:
            await server.close()
