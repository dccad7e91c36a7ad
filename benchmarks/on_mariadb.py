"""Timebell on a temporary MariaDB server, which syncs each commit (its default)."""

from __future__ import annotations

import asyncio
from typing import Any

import pymysql
from sqlalchemy import make_url

from benchmarks import processes
from benchmarks.systems import ALL_WORKLOADS, INSERT_JOBS, PAYLOAD_SQL, BenchmarkedSystem


class TimebellOnMariadb(BenchmarkedSystem):
    """Timebell on MariaDB; the server exists for one run."""

    name = "Timebell"
    store = "mariadb"
    module = "child_timebell"
    workloads = ALL_WORKLOADS
    batch = 5000

    async def __aenter__(self) -> TimebellOnMariadb:
        from tests.servers import MariaDB

        self._server = await asyncio.to_thread(MariaDB, durable=True)
        self.server_pid = self._server.pid
        self.url = await asyncio.to_thread(self._server.create_database)
        await processes.run_client(self.module, "setup", self.url)
        parsed = make_url(self.url)
        self._connection = pymysql.connect(
            host=parsed.host, port=parsed.port or 3306, user=parsed.username, database=parsed.database, autocommit=True,
            init_command="SET sql_mode = 'PIPES_AS_CONCAT', time_zone = '+00:00'",
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connection.close()
        await asyncio.to_thread(self._server.close)

    _now = "UNIX_TIMESTAMP() * 1000000"

    async def backlog(self, count: int) -> None:
        now = self._now
        await self._load(count, at=f"{now} + 31536000000000 + i * 1000", shared="0", tenant="default", topic="bench")

    async def flood(self, count: int) -> None:
        await self._load(count, at=self._now, shared="1", tenant="flood", topic="flood")

    async def _load(self, count: int, **values: str) -> None:
        id_sql = "'0199c851-0000-7000-a000-' || LPAD(LOWER(HEX(i)), 12, '0')"
        series = f"(SELECT seq AS i FROM seq_1_to_{count}) AS n"
        self._query(INSERT_JOBS.format(id=id_sql, payload=PAYLOAD_SQL, no="0", now=self._now, numbers=series, **values))
        await self.settle()

    async def settle(self) -> None:
        self._query("ANALYZE TABLE timebell_jobs, timebell_finished")

    def _query(self, statement: str) -> Any:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()

    async def pending(self) -> int:
        return int(self._query("SELECT count(*) FROM timebell_jobs")[0])

    async def unfinished(self) -> bool:
        soon = f"{self._now} + 3600000000"
        return bool(self._query(f"SELECT EXISTS (SELECT 1 FROM timebell_jobs WHERE run_at < {soon})")[0])

    async def done(self) -> int | None:
        return int(self._query("SELECT count(*) FROM timebell_finished WHERE state = 'completed'")[0])
