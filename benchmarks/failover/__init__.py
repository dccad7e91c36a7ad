"""Failover and outages of the database: `python -m benchmarks failover [fault,...]`.

Two nodes use PostgreSQL with a synchronous standby through a proxy, and 20 jobs are due every second. One fault follows
the other, each after a calm period. Printed per fault: how long the database did not accept writes, how long after its
return the first job, and the last one that was due meanwhile, started, until when each node reported that it was
ready, and whether all jobs ran once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import asyncpg
import httpx2

from timebell import Arrived, JobSpec, Timebell
from timebell.store.open import upgrade
from timebell_torture.postgres import PostgresServer, PostgresStandby
from timebell_torture.proxy import Switch

NODES = 2
JOBS_PER_SECOND = 20
CALM_SECONDS = 8.0  # before and after a fault
OUTAGE_SECONDS = 25.0  # of faults that end by themselves
STARTS = "TIMEBELL_TEST_STARTS"

app = Timebell(timezone="UTC")


@app.on("benchmark.failover")
async def record_start(event: Arrived) -> None:
    """Append the number of the job and the time to the node's file."""
    with open(os.environ[STARTS], "a") as file:
        file.write(f"{event.payload['number']} {time.time():.3f}\n")


@dataclass
class Cluster:
    """A primary, its synchronous standby, and the proxy by which the nodes reach the primary."""

    folder: Path
    proxy: Switch
    primary: PostgresServer
    standby: PostgresServer | None = None
    count: int = 1

    async def add_standby(self) -> None:
        """Create a standby of the primary, and make commits wait for it."""
        self.count += 1
        self.standby = await asyncio.to_thread(PostgresStandby, self.folder / f"server{self.count}", self.primary)
        await asyncio.to_thread(self.standby.start)
        await asyncio.to_thread(self.primary.set, synchronous_standby_names="*")

    async def promote(self) -> None:
        """Promote the standby and point the proxy at it."""
        assert self.standby is not None
        await asyncio.to_thread(self.standby.promote)
        # Its settings were copied from the primary, whose commits waited for this standby.
        await asyncio.to_thread(self.standby.set, synchronous_standby_names="")
        self.primary, self.standby = self.standby, None
        self.proxy.point_at(self.primary.port)


async def strand(cluster: Cluster) -> None:
    """The host of the primary disappears without a word; the standby is promoted after 3 s."""
    old = cluster.primary
    cluster.proxy.strand(refuse=True)
    await asyncio.sleep(3)
    await cluster.promote()
    await asyncio.to_thread(old.stop)


async def kill(cluster: Cluster) -> None:
    """The primary is killed, and the standby promoted."""
    cluster.primary.kill()
    await cluster.promote()


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
    await asyncio.to_thread(cluster.primary.set, default_transaction_read_only="on")
    await asyncio.sleep(OUTAGE_SECONDS)
    await asyncio.to_thread(cluster.primary.set, default_transaction_read_only="off")


FAULTS: dict[str, Callable[[Cluster], Awaitable[None]]] = {
    each.__name__: each for each in (strand, kill, stop, freeze, cut, read_only)
}


@dataclass
class Observation:
    """What was observed from outside: writes that the database accepted, and the readiness of each node."""

    writes: list[float] = field(default_factory=list)
    ready: dict[int, list[tuple[float, bool]]] = field(default_factory=dict)

    async def watch_database(self, port: int) -> None:
        """Write through the proxy, each time on a new connection."""
        while True:
            try:
                async with asyncio.timeout(1):
                    connection = await asyncpg.connect(f"postgresql://timebell@127.0.0.1:{port}/postgres")
                    try:
                        await connection.execute("CREATE TEMPORARY TABLE probe (id int)")
                        await connection.execute("UPDATE timebell_nodes SET id = id WHERE false")
                        self.writes.append(time.time())
                    finally:
                        connection.terminate()
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                pass
            await asyncio.sleep(0.1)

    async def watch_node(self, port: int) -> None:
        """Poll the readiness of a node."""
        seen = self.ready.setdefault(port, [])
        async with httpx2.AsyncClient(trust_env=False, timeout=5) as client:
            while True:
                asked = time.time()
                try:
                    ready = (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200
                except httpx2.HTTPError:
                    ready = False
                seen.append((asked, ready))
                await asyncio.sleep(0.1)


async def _create_jobs(url: str, first: int, begin: float, seconds: float) -> int:
    client = Timebell(url, timezone="UTC")
    count = int(seconds * JOBS_PER_SECOND)
    due = [datetime.fromtimestamp(begin + number / JOBS_PER_SECOND, UTC) for number in range(count)]
    jobs = [JobSpec(topic="benchmark.failover", run_at=at, payload={"number": first + n}) for n, at in enumerate(due)]
    await client.schedule_many(jobs)
    await client.close()
    return count


def _read_starts(folder: Path) -> list[tuple[int, float]]:
    lines = [line.split() for file in folder.glob("starts*") for line in file.read_text().splitlines()]
    return [(int(line[0]), float(line[1])) for line in lines if len(line) == 2]


async def _measure(cluster: Cluster, name: str, ports: list[int], first: int) -> tuple[dict[str, object], int]:
    if cluster.standby is None:
        await cluster.add_standby()
    length = 2 * CALM_SECONDS + OUTAGE_SECONDS + 12
    begin = time.time() + 3
    count = await _create_jobs(cluster.primary.url(), first, begin, length)
    observation = Observation()
    watchers = [asyncio.create_task(observation.watch_database(cluster.proxy.port))]
    watchers += [asyncio.create_task(observation.watch_node(port)) for port in ports]
    await asyncio.sleep(begin + CALM_SECONDS - time.time())
    fault_at = time.time()
    await FAULTS[name](cluster)
    fault_ended_at = time.time()
    await asyncio.sleep(max(CALM_SECONDS, begin + length + 2 - time.time()))
    for watcher in watchers:
        watcher.cancel()
    starts = [(number, at) for number, at in _read_starts(cluster.folder) if first <= number < first + count]
    times = sorted(at for _, at in starts)
    # The outage is the longest time without a write that began during the fault: later ones are those of the machine.
    writes = [fault_at, *(at for at in observation.writes if at > fault_at)]
    away_at, back_at = max(
        (pair for pair in pairwise(writes) if pair[0] <= fault_ended_at), key=lambda pair: pair[1] - pair[0]
    )
    after = [at for at in times if at > back_at]
    first_starts: dict[int, float] = {}
    for number, at in starts:
        first_starts[number] = min(at, first_starts.get(number, at))
    waited = [
        at for number, at in first_starts.items() if away_at <= begin + (number - first) / JOBS_PER_SECOND <= back_at
    ]
    runs = Counter(number for number, _ in starts)
    unready = {
        port: [at for at, ready in seen if at > fault_at and not ready] for port, seen in observation.ready.items()
    }
    return {
        "fault": name,
        "outage_s": round(back_at - away_at, 1),
        "first_start_s": round(after[0] - back_at, 2) if after else None,
        "last_due_start_s": round(max(0.0, max(waited) - back_at), 2) if waited else None,
        "unready_from_s": [round(min(at) - fault_at, 1) if at else None for at in unready.values()],
        "unready_until_s": [round(max(at) - back_at, 1) if at else None for at in unready.values()],
        "jobs": count,
        "lost": count - len(runs),
        "second_runs": sum(runs.values()) - len(runs),
    }, first + count


def start_node(folder: Path, number: int, url: str, port: int) -> subprocess.Popen[bytes]:
    with open(folder / f"node{number}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "timebell.cli.main", "run", "benchmarks.failover:app", "--port", str(port)],
            stderr=log,
            env={
                **os.environ, "TIMEBELL_DATABASE_URL": url, "TIMEBELL_SECRET_KEY": "a secret key of the benchmark",
                "TIMEBELL_NODE_NAME": f"n{number}", STARTS: str(folder / f"starts{number}"),
            },
        )  # fmt: skip


async def _run(names: list[str], folder: Path) -> None:
    primary = PostgresServer(folder / "server1")
    primary.start()
    await upgrade(primary.url())
    proxy = Switch(primary.port)
    await proxy.start()
    cluster = Cluster(folder, proxy, primary)
    nodes, ports = [], []
    try:
        for number in range(NODES):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                ports.append(probe.getsockname()[1])
            nodes.append(start_node(folder, number, primary.url(proxy.port), ports[-1]))
        async with httpx2.AsyncClient(trust_env=False, timeout=5) as client:
            for port in ports:
                for _ in range(600):
                    with suppress(httpx2.HTTPError):
                        if (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 200:
                            break
                    await asyncio.sleep(0.1)
                else:
                    raise SystemExit((folder / "node0.log").read_text())
        first = 0
        for name in names:
            figures, first = await _measure(cluster, name, ports, first)
            print(json.dumps(figures), flush=True)
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait()
        await proxy.close()
        for server in filter(None, (cluster.primary, cluster.standby)):
            with suppress(RuntimeError):
                server.stop()


def main(arguments: list[str]) -> None:
    """Run the faults and print one line of figures for each."""
    names = arguments[0].split(",") if arguments else list(FAULTS)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        asyncio.run(_run(names, Path(folder)))
