"""Timebell on a MariaDB of its own, which syncs each commit as it does out of the box."""

from __future__ import annotations

import asyncio
from typing import Any

import pymysql
from sqlalchemy import make_url

from benchmarks import processes
from benchmarks.systems import _LOAD, _PAYLOAD, Measured


class TimebellOnMariadb(Measured):
    """As the others; the server is there for as long as one run."""

    name = "Timebell"
    store = "mariadb"
    module = "child_timebell"
    batch = 5000

    async def __aenter__(self) -> TimebellOnMariadb:
        from tests.servers import MariaDB

        self._server = await asyncio.to_thread(MariaDB, durable=True)
        self.server_pid = self._server.pid
        self.url = await asyncio.to_thread(self._server.create_database)
        await processes.call(self.module, "setup", self.url)
        place = make_url(self.url)
        self._connection = pymysql.connect(
            host=place.host, port=place.port or 3306, user=place.username, database=place.database, autocommit=True,
            init_command="SET sql_mode = 'PIPES_AS_CONCAT', time_zone = '+00:00'",
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connection.close()
        await asyncio.to_thread(self._server.close)

    _now = "UNIX_TIMESTAMP() * 1000000"

    async def backlog(self, count: int) -> None:
        """As above."""
        now = self._now
        await self._load(count, at=f"{now} + 31536000000000 + i * 1000", shared="0", tenant="default", topic="bench")

    async def flood(self, count: int) -> None:
        """As above."""
        await self._load(count, at=self._now, shared="1", tenant="flood", topic="flood")

    async def _load(self, count: int, **words: str) -> None:
        ident = "'0199c851-0000-7000-a000-' || LPAD(LOWER(HEX(i)), 12, '0')"
        series = f"(SELECT seq AS i FROM seq_1_to_{count}) AS n"
        self._ask(_LOAD.format(id=ident, payload=_PAYLOAD, no="0", now=self._now, numbers=series, **words))
        await self.settle()

    async def settle(self) -> None:
        """As above."""
        self._ask("ANALYZE TABLE timebell_jobs, timebell_finished")

    def _ask(self, statement: str) -> Any:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()

    async def pending(self) -> int:
        """As above."""
        return int(self._ask("SELECT count(*) FROM timebell_jobs")[0])

    async def unfinished(self) -> bool:
        """As above."""
        soon = f"{self._now} + 3600000000"
        return bool(self._ask(f"SELECT EXISTS (SELECT 1 FROM timebell_jobs WHERE run_at < {soon})")[0])

    async def done(self) -> int | None:
        """As above."""
        return int(self._ask("SELECT count(*) FROM timebell_finished WHERE state = 'completed'")[0])
