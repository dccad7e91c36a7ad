"""The peers, as the workloads see them."""

from __future__ import annotations

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from benchmarks import processes
from benchmarks.systems import _PAYLOAD, Measured, OnPostgres, Server, fill


class PgQueuer(OnPostgres):
    """In Python, on PostgreSQL."""

    name = "PgQueuer"
    module = "peers.pgqueuer"
    in_code = True
    batch = 1000
    table = "pgqueuer"
    waiting = "SELECT EXISTS (SELECT 1 FROM pgqueuer WHERE execute_after < now() + interval '1 hour')"
    backlog_sql = (
        "INSERT INTO pgqueuer (priority, status, entrypoint, execute_after, payload) SELECT 0, 'queued', 'bench',"
        f" now() + interval '1 year' + i * interval '1 ms', convert_to({_PAYLOAD}, 'UTF8')"
        " FROM generate_series(1, $1::int) i"
    )


class Procrastinate(OnPostgres):
    """In Python, on PostgreSQL."""

    name = "Procrastinate"
    module = "peers.procrastinate"
    in_code = True
    batch = 1000
    most: ClassVar[Mapping[str, int]] = {"W4": 200_000}
    table = "procrastinate_jobs"
    waiting = (
        "SELECT EXISTS (SELECT 1 FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
        " AND coalesce(scheduled_at, now()) < now() + interval '1 hour')"
    )


class APScheduler(OnPostgres):
    """In Python, with a store in PostgreSQL. A job leaves it before it has run, so W6 has nothing to wait for."""

    name = "APScheduler"
    module = "peers.apscheduler"
    notices = False
    pace = 500
    batch = 100
    most: ClassVar[Mapping[str, int]] = {"W4": 0, "W6": 0}
    table = "apscheduler_jobs"
    waiting = "SELECT EXISTS (SELECT 1 FROM apscheduler_jobs WHERE next_run_time < extract(epoch FROM now()) + 3600)"


class GraphileWorker(OnPostgres):
    """In Node, on PostgreSQL."""

    name = "Graphile Worker"
    module = "peers/graphile.mjs"
    in_code = True
    batch = 5000
    table = "graphile_worker._private_jobs"
    waiting = "SELECT EXISTS (SELECT 1 FROM graphile_worker._private_jobs WHERE run_at < now() + interval '1 hour')"


class PgBoss(OnPostgres):
    """In Node, on PostgreSQL. A new schedule of it also fires for the minute that has begun."""

    name = "pg-boss"
    module = "peers/pgboss.mjs"
    fires_at_once = True
    batch = 5000
    table = "pgboss.job"
    waiting = (
        "SELECT EXISTS (SELECT 1 FROM pgboss.job WHERE name = 'bench' AND state < 'completed'"
        " AND start_after < now() + interval '1 hour')"
    )


class OnRedis(Measured, ABC):
    """A system whose jobs are in a Redis that keeps what it confirmed, to a second."""

    store = "redis"

    def __init__(self, _: Server) -> None:
        self._before = 0

    async def __aenter__(self) -> OnRedis:
        from redis.asyncio import Redis

        from tests import servers

        self._server = await asyncio.to_thread(servers.Redis)
        self.url = self._server.url
        self.server_pid = self._server._process.pid if self._server._process else None
        self.redis = Redis.from_url(self.url)
        try:
            self.server_version = f"Redis {(await self.redis.info('server'))['redis_version']}"
            await processes.call(self.module, "setup", self.url)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.redis.aclose()
        await asyncio.to_thread(self._server.close)

    async def backlog(self, count: int) -> None:
        """Jobs that are due in a year."""
        await fill(self, count)
        self._before = await self.pending()

    async def settle(self) -> None:
        """It has no chores."""

    @abstractmethod
    async def pending(self) -> int:
        """How many jobs there are."""

    async def unfinished(self) -> bool:
        """Whether there are more than before the run."""
        return await self.pending() > self._before

    async def done(self) -> int | None:
        """It keeps none."""
        return None


class BullMQ(OnRedis):
    """In Node, on Redis."""

    name = "BullMQ"
    module = "peers/bullmq.mjs"
    batch = 2000

    async def pending(self) -> int:
        """As above."""
        lists = [await _count(self.redis.llen(f"bull:bench:{name}")) for name in ("wait", "active")]
        sets = [await _count(self.redis.zcard(f"bull:bench:{name}")) for name in ("delayed", "prioritized")]
        return sum(lists) + sum(sets)


class Celery(OnRedis):
    """In Python, over Redis; its worker holds what is to come in memory."""

    name = "Celery"
    module = "peers.celery"
    in_code = True
    batch = 100
    pace = 1000
    most: ClassVar[Mapping[str, int]] = {"W4": 100_000}

    async def pending(self) -> int:
        """As above."""
        return await _count(self.redis.llen("celery")) + await _count(self.redis.hlen("unacked"))


async def _count(asked: Any) -> int:
    return int(await asked)


PEERS: dict[str, type[OnPostgres] | type[OnRedis]] = {
    "pgqueuer": PgQueuer,
    "graphile": GraphileWorker,
    "pgboss": PgBoss,
    "bullmq": BullMQ,
    "procrastinate": Procrastinate,
    "apscheduler": APScheduler,
    "celery": Celery,
}
"""In the order in which they are shown."""


def prepare(names: Sequence[str]) -> dict[str, str]:
    """Install what those in Node need, once; of those that are not there, why. Nothing else is looked for."""
    missing = {}
    in_node = [name for name in names if PEERS[name].module.endswith(".mjs")]
    try:
        if in_node:
            from benchmarks import node  # needs a package of its own

            node.install()
    except (ImportError, OSError, RuntimeError) as failed:
        missing = dict.fromkeys(in_node, str(failed))
    for name in names:
        if name not in in_node:
            try:
                importlib.import_module(f"benchmarks.{PEERS[name].module}")
            except ImportError as failed:
                missing[name] = str(failed)
    return missing
