"""The measured systems: Timebell on each store, with a new database for every run. The peers are in peers/."""

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

_UUID = (  # version 7, of an earlier time
    "(lpad(to_hex(1760000000000 + i / 1000), 12, '0') || '7' || substr(md5(i::text), 1, 3)"
    " || 'a' || substr(md5(i::text), 4, 15))::uuid"
)
PAYLOAD_SQL = """'{"i":' || i || ',"pad":"%s"}'""" % ("x" * 76)
INSERT_JOBS = (
    "INSERT INTO timebell_jobs (id, tenant_id, topic, kind, scheduled_at, run_at, timezone, payload, queue,"
    " priority, serial, state, attempt, attempts_used, created_at, route, shared)"
    " SELECT {id}, '{tenant}', '{topic}', 'once', {at}, {at}, 'UTC', {payload}, 'default', 0, {no}, 'pending', 0, 0,"
    " {now}, '{topic}', {shared} FROM {numbers}"
)


class Server:
    """PostgreSQL server of BENCH_POSTGRES_URL, or a temporary one; only databases of the benchmarks are touched."""

    def __init__(self) -> None:
        self._own: Any = None
        self.pid: int | None = None
        self.version = ""
        self.settings: dict[str, str] = {}

    async def start(self) -> None:
        """Connect to the server or start one."""
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
        with suppress(OSError):  # remote, or not readable: its CPU is unknown
            pidfile = Path(self.settings.pop("data_directory", "")) / "postmaster.pid"
            self.pid = int(pidfile.read_text().splitlines()[0])

    async def restart_if_down(self) -> None:
        """Start the server again if it does not respond."""
        try:
            await (await asyncpg.connect(self.url, timeout=30)).close(timeout=10)
        except (OSError, TimeoutError, asyncpg.PostgresError):
            with suppress(RuntimeError):
                await self.close()
            await self.start()

    async def close(self) -> None:
        """Stop the server if it is a temporary one."""
        if self._own is not None:
            await asyncio.to_thread(self._own.close)

    async def create_database(self, name: str) -> str:
        """Create an empty database, replacing an existing one; return its URL."""
        await self.drop_database(name)
        await self._execute(f'CREATE DATABASE "{name}"', "CHECKPOINT")
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    async def drop_database(self, name: str) -> None:
        """Drop a database if it exists."""
        await self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    async def _execute(self, *statements: str) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            for statement in statements:
                await connection.execute(statement, timeout=120)
        finally:
            await connection.close()


class BenchmarkedSystem(ABC):
    """System under test, as the workloads use it; a with-block is one run."""

    name: str
    store: str
    module: str
    batch: int
    schedules_in_code = False
    """True if schedules can only be defined in code."""
    sees_new_jobs = True
    """True if a running worker sees jobs that other processes create."""
    fires_on_creation = False
    """True if a new schedule also fires for the current minute, which takes the system a long time."""
    pace = 3000
    """Minimum rate of creating jobs per second; determines how long before the due instant creation starts."""
    workloads: ClassVar[frozenset[str]] = frozenset(("W1", "W2", "W3", "W4", "W5", "W6"))
    """The workloads that it can run."""
    max_jobs: ClassVar[Mapping[str, int]] = {}
    """Reduced number of jobs by workload."""
    http_command = "serve"
    """The command of child_http.py that serves HTTP."""
    server_pid: int | None = None
    server_version: str | None = None
    """Name and version of its server, if that is not PostgreSQL."""
    url: str

    @abstractmethod
    async def __aenter__(self) -> BenchmarkedSystem: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    @abstractmethod
    async def backlog(self, count: int) -> None:
        """Insert jobs that are due in a year."""

    @abstractmethod
    async def settle(self) -> None:
        """Run maintenance that the server would otherwise run during the measurement."""

    @abstractmethod
    async def pending(self) -> int:
        """Return the number of unfinished jobs."""

    @abstractmethod
    async def unfinished(self) -> bool:
        """Return whether a job of the run is not durably completed."""

    @abstractmethod
    async def done(self) -> int | None:
        """Return the number of completed jobs in the store; None if the store deletes them."""


ALL_WORKLOADS = BenchmarkedSystem.workloads | {"W7", "W8", "W8s", "W9", "W12", "W12r", "tenants"}


class OnPostgres(BenchmarkedSystem):
    """System whose jobs are rows in PostgreSQL; every run has a new database."""

    store = "postgres"
    table: str
    unfinished_sql: str
    backlog_sql: str | None = None

    def __init__(self, server: Server) -> None:
        self.server = server
        self.server_pid = server.pid
        self._name = f"timebell_bench_{os.getpid()}"

    async def __aenter__(self) -> OnPostgres:
        self.url = await self.server.create_database(self._name)
        await processes.run_client(self.module, "setup", self.url)
        self._connection = await asyncpg.connect(self.url, statement_cache_size=10)
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(Exception):
            await self._connection.close(timeout=10)
        await self.server.drop_database(self._name)

    async def backlog(self, count: int) -> None:
        if self.backlog_sql is None:
            await create_backlog(self, count)
        else:
            await self._connection.execute(self.backlog_sql, count, timeout=3600)
        await self.settle()

    async def execute(self, statement: str) -> None:
        """Execute a statement that may take long."""
        await self._connection.execute(statement, timeout=3600)

    async def settle(self) -> None:
        await self._connection.execute("VACUUM ANALYZE")
        await self._connection.execute("CHECKPOINT")

    async def pending(self) -> int:
        return int(await self._connection.fetchval(f"SELECT count(*) FROM {self.table}"))

    async def unfinished(self) -> bool:
        return bool(await self._connection.fetchval(self.unfinished_sql))

    async def done(self) -> int | None:
        return None


class TimebellOnPostgres(OnPostgres):
    """Timebell on PostgreSQL."""

    name = "Timebell"
    module = "child_timebell"
    workloads = ALL_WORKLOADS
    batch = 5000
    table = "timebell_jobs"
    unfinished_sql = (  # with conditions that use an index, so that the backlog is not read
        "SELECT EXISTS (SELECT 1 FROM timebell_jobs WHERE state = 'running') OR EXISTS (SELECT 1 FROM timebell_jobs"
        " WHERE state = 'pending' AND hold IS NULL AND queue = 'default' AND priority = 0"
        " AND run_at < now() + interval '1 hour')"
    )
    backlog_sql = INSERT_JOBS.format(
        id=_UUID, at="now() + interval '1 year' + i * interval '1 ms'", payload=PAYLOAD_SQL, no="false", shared="false",
        now="now()", numbers="generate_series(1, $1::int) i", tenant="default", topic="bench",
    )  # fmt: skip
    flood_sql = INSERT_JOBS.format(
        id=_UUID, at="now()", payload=PAYLOAD_SQL, no="false", shared="true", now="now()",
        numbers="generate_series(1, $1::int) i", tenant="flood", topic="flood",
    )  # fmt: skip

    async def flood(self, count: int) -> None:
        """Insert due jobs of one tenant."""
        await self._connection.execute(self.flood_sql, count, timeout=3600)
        await self.settle()

    async def done(self) -> int | None:
        count = await self._connection.fetchval("SELECT count(*) FROM timebell_finished WHERE state = 'completed'")
        return int(count)


class TimebellOnSqlite(BenchmarkedSystem):
    """Timebell on SQLite."""

    name = "Timebell"
    store = "sqlite"
    module = "child_timebell"
    workloads = ALL_WORKLOADS
    batch = 5000

    async def __aenter__(self) -> TimebellOnSqlite:
        self._folder = tempfile.TemporaryDirectory(prefix="timebell-bench-")
        path = f"{self._folder.name}/bench.db"
        self.url = f"sqlite:///{path}"
        await processes.run_client(self.module, "setup", self.url)
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=30, check_same_thread=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connection.close()
        self._folder.cleanup()

    async def backlog(self, count: int) -> None:
        now = self._now
        await self._load(count, at=f"{now} + 31536000000000 + i * 1000", shared="0", tenant="default", topic="bench")

    async def flood(self, count: int) -> None:
        await self._load(count, at=self._now, shared="1", tenant="flood", topic="flood")

    _now = "CAST(strftime('%s') AS INTEGER) * 1000000"

    async def _load(self, count: int, **values: str) -> None:
        series = f"(WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) SELECT i FROM n)"
        id_sql = "printf('0199c851-0000-7000-a000-%012x', i)"
        values |= {"id": id_sql, "payload": PAYLOAD_SQL, "no": "0", "now": self._now, "numbers": series}
        await self.execute(INSERT_JOBS.format(**values))
        await self.settle()

    async def execute(self, statement: str) -> None:
        """Execute a statement that may take long."""
        await asyncio.to_thread(self._connection.execute, statement)

    async def settle(self) -> None:
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    async def pending(self) -> int:
        return int(self._connection.execute("SELECT count(*) FROM timebell_jobs").fetchone()[0])

    async def unfinished(self) -> bool:
        soon = "(CAST(strftime('%s') AS INTEGER) + 3600) * 1000000"
        rows = self._connection.execute(f"SELECT EXISTS (SELECT 1 FROM timebell_jobs WHERE run_at < {soon})")
        return bool(rows.fetchone()[0])

    async def done(self) -> int | None:
        rows = self._connection.execute("SELECT count(*) FROM timebell_finished WHERE state = 'completed'")
        return int(rows.fetchone()[0])


FIRST_BACKLOG_NUMBER = 10_000_000
"""Number of the first job of a backlog."""


async def create_backlog(system: BenchmarkedSystem, count: int) -> None:
    """Create jobs that are due in a year with the client of the system."""
    spec = {"n": count, "first": FIRST_BACKLOG_NUMBER, "batch": system.batch, "lead": 31_536_000, "span": 1000}
    await processes.run_client(system.module, "create", system.url, **spec)


@asynccontextmanager
async def open_systems(stores: str) -> AsyncIterator[list[Any]]:
    """Yield Timebell on each of these stores (a comma-separated list), and stop the server afterwards."""
    server = Server() if "postgres" in stores else None
    try:
        if server is not None:
            await server.start()
        systems: list[Any] = [TimebellOnSqlite()] if "sqlite" in stores else []
        yield systems + ([TimebellOnPostgres(server)] if server is not None else [])
    finally:
        if server is not None:
            await server.close()
