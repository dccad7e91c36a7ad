"""A primary, its synchronous standby, the proxy before them, and the faults."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy import select

from timebell.clock import system_now
from timebell.store.open import open_store
from timebell.store.schema import finished, jobs
from timebell.store.transaction import Transaction
from timebell_torture.mariadb import MariaDBServer, MariaDBStandby
from timebell_torture.postgres import PostgresServer, PostgresStandby
from timebell_torture.proxy import Switch

OUTAGE_SECONDS = 25.0  # of faults that end by themselves
LOST_SECONDS = 3.0  # of the history, by a rewind
PROBE_TIMEOUT_SECONDS = 1.0
PROBE = "UPDATE timebell_nodes SET id = id WHERE false"


class Cluster:
    """The servers that the nodes reach through one proxy."""

    def __init__(self, store: str, folder: Path) -> None:
        self.folder = folder
        self.primary = MariaDBServer(folder / "server1") if store == "mariadb" else PostgresServer(folder / "server1")
        self.primary.start()
        self.standby: MariaDBStandby | PostgresStandby | None = None
        self.proxy = Switch(self.primary.port)
        self.found_after_rewind: set[str] | None = None
        """The ids of the jobs that the promoted standby had, before any node could write to it."""
        self._count = 1

    def add_standby(self) -> None:
        """Create a standby of the primary, and make commits wait for it."""
        self._count += 1
        folder = self.folder / f"server{self._count}"
        if isinstance(self.primary, MariaDBServer):
            self.standby = MariaDBStandby(folder, self.primary)
        else:
            self.standby = PostgresStandby(folder, self.primary)
        self.standby.start()
        self.standby.replicate_synchronously()

    async def promote(self) -> None:
        """Promote the standby and point the proxy at it."""
        assert self.standby is not None
        await asyncio.to_thread(self.standby.promote)
        # Its settings were copied from the primary, whose commits waited for this standby.
        await asyncio.to_thread(self.standby.stop_waiting_for_standbys)
        self.primary, self.standby = self.standby, None

    def close(self) -> None:
        """Stop the servers."""
        for server in filter(None, (self.primary, self.standby)):
            with suppress(RuntimeError):
                server.stop()

    async def write(self) -> None:
        """Write through the proxy on a new connection. Raises the error of the driver."""
        url = self.primary.url(self.proxy.port)
        if isinstance(self.primary, MariaDBServer):
            await asyncio.to_thread(_write_to_mariadb, url)
            return
        import asyncpg

        connection = await asyncpg.connect(url)
        try:
            await connection.execute("CREATE TEMPORARY TABLE probe (id int)")
            await connection.execute(PROBE)
        finally:
            connection.terminate()


def _write_to_mariadb(url: str) -> None:
    import pymysql

    parts = urlsplit(url)
    options = dict.fromkeys(("connect_timeout", "read_timeout", "write_timeout"), PROBE_TIMEOUT_SECONDS)
    connection = pymysql.connect(
        host=parts.hostname, port=parts.port, user=parts.username, database=parts.path[1:], **options
    )
    with connection, connection.cursor() as cursor:
        cursor.execute("UPDATE timebell_nodes SET heartbeat = heartbeat LIMIT 1")
        connection.commit()


async def strand(cluster: Cluster) -> None:
    """The host of the primary disappears without a word; the standby is promoted after 3 s."""
    old = cluster.primary
    cluster.proxy.strand(refuse=True)
    await asyncio.sleep(3)
    await cluster.promote()
    cluster.proxy.point_at(cluster.primary.port)
    await asyncio.to_thread(old.stop)


async def kill(cluster: Cluster) -> None:
    """The primary is killed, and the standby promoted."""
    cluster.primary.kill()
    await cluster.promote()
    cluster.proxy.point_at(cluster.primary.port)


async def rewind(cluster: Cluster) -> None:
    """The primary is killed, and a standby promoted that lacks the last seconds."""
    assert cluster.standby is not None
    await asyncio.to_thread(cluster.primary.stop_waiting_for_standbys)
    await asyncio.to_thread(cluster.standby.wait_until_replayed, cluster.primary.position())
    await asyncio.to_thread(cluster.standby.stop)
    await asyncio.sleep(LOST_SECONDS)
    cluster.primary.kill()
    await asyncio.to_thread(cluster.standby.start)
    await cluster.promote()
    cluster.found_after_rewind = await _read_job_ids(cluster.primary.url())
    cluster.proxy.point_at(cluster.primary.port)


async def _read_job_ids(url: str) -> set[str]:
    def read(tx: Transaction) -> set[str]:
        return {str(row[0]) for table in (jobs, finished) for row in tx.execute(select(table.c.id))}

    store = open_store(url, system_now)
    try:
        return await store.run(read)
    finally:
        await store.close()


async def stop(cluster: Cluster) -> None:
    """The primary is stopped, and started again later."""
    await asyncio.to_thread(cluster.primary.stop)
    await asyncio.sleep(OUTAGE_SECONDS)
    await asyncio.to_thread(cluster.primary.start)


async def freeze(cluster: Cluster) -> None:
    """All processes of the primary are frozen for some time."""
    cluster.primary.send(signal.SIGSTOP)
    await asyncio.sleep(OUTAGE_SECONDS)
    cluster.primary.send(signal.SIGCONT)


async def cut(cluster: Cluster) -> None:
    """The network loses open and new connections, and heals later."""
    cluster.proxy.strand(refuse=True)
    await asyncio.sleep(OUTAGE_SECONDS)
    cluster.proxy.point_at(cluster.primary.port)


async def read_only(cluster: Cluster) -> None:
    """The primary refuses writes for some time."""
    await asyncio.to_thread(cluster.primary.refuse_writes, True)
    await asyncio.sleep(OUTAGE_SECONDS)
    await asyncio.to_thread(cluster.primary.refuse_writes, False)


FAULTS: dict[str, Callable[[Cluster], Awaitable[None]]] = {
    each.__name__: each for each in (strand, kill, stop, freeze, cut, read_only, rewind)
}
