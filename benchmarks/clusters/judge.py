"""Fail a cluster over under load, and judge the runs of jobs from outside.

Two nodes run jobs that a client creates all the time, also during the failovers: it repeats each request until it is
acknowledged. Each acknowledged job must run once, and not before it is due. Printed per event: how long the database
accepted no write, how long after its return the first job started, and until when the last job of the outage started.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.failover.node import start_node
from timebell import JobSpec, Timebell
from timebell.errors import InThePast, StoreError
from timebell.features import FEATURES
from timebell.store.open import upgrade

JOBS_PER_SECOND = 20
BATCH_INTERVAL_SECONDS = 0.25
LEAD_SECONDS = (1.0, 6.0)  # jobs are due this long after they are created: those of an outage, and those after it
CALM_SECONDS = 6.0  # before and after each event
SETTLE_SECONDS = 25.0  # after the last event: longer than a takeover
LEASE_SECONDS = 15.0
PROBE_TIMEOUT_SECONDS = 2.0
NODE_START_SECONDS = 300.0  # with the import of the package, on a busy machine


class Cluster(Protocol):
    """A cluster of database servers."""

    url: str

    @property
    def node_urls(self) -> Sequence[str]:
        """The URL of each node."""

    def start(self) -> None:
        """Start all members."""

    def stop(self) -> None:
        """Stop all members."""

    def wait_until_complete(self) -> None:
        """Wait until all members take part."""

    async def write(self) -> None:
        """Write a row on a new connection. Raises the error of the driver."""


C = TypeVar("C", bound=Cluster)


@dataclass
class Outcome:
    """The observation of one event, in seconds."""

    event: str
    outage: float
    first_start: float | None
    last_due_started: float | None
    second_runs: int = 0
    unexplained: int = 0


@dataclass
class Result:
    """The judgment of a run."""

    outcomes: list[Outcome]
    acknowledged: int
    lost: list[int]
    early: list[int]
    log: str = ""

    @property
    def unexplained(self) -> int:
        """Second runs of jobs that no outage of at least a lease explains."""
        return sum(each.unexplained for each in self.outcomes)

    def print(self) -> None:
        """Print a line per event, and the totals."""
        for outcome in self.outcomes:
            print(json.dumps(asdict(outcome)), flush=True)
        print(json.dumps({
            "acknowledged": self.acknowledged, "lost": len(self.lost), "early": len(self.early),
            "second_runs": sum(each.second_runs for each in self.outcomes), "unexplained": self.unexplained,
        }), flush=True)  # fmt: skip


@dataclass
class _Creator:
    """Creates jobs all the time."""

    url: str
    due: dict[int, float] = field(default_factory=dict)
    acknowledged: dict[int, float] = field(default_factory=dict)
    _next: int = 0

    async def run(self) -> None:
        """Create batches until cancelled; each is repeated until it is acknowledged."""
        app = Timebell(self.url, timezone="UTC")
        batches: set[asyncio.Task[None]] = set()
        try:
            while True:
                batch = asyncio.create_task(self._create(app))
                batches.add(batch)
                batch.add_done_callback(batches.discard)
                await asyncio.sleep(BATCH_INTERVAL_SECONDS)
        except asyncio.CancelledError:
            await asyncio.gather(*batches)
            await app.close()
            raise

    async def _create(self, app: Timebell) -> None:
        count = int(JOBS_PER_SECOND * BATCH_INTERVAL_SECONDS)
        numbers = range(self._next, self._next + count)
        self._next += count
        low, high = LEAD_SECONDS
        due = {each: time.time() + low + (high - low) * (each % 20) / 20 for each in numbers}
        self.due |= due
        while True:
            specs = [
                JobSpec(
                    topic="benchmark.failover", run_at=datetime.fromtimestamp(due[each], UTC),
                    payload={"number": each}, client_request_id=f"job-{each}",
                ) for each in numbers
            ]  # fmt: skip
            try:
                await app.schedule_many(specs, on_conflict="keep")
                break
            except InThePast:  # the outage was long; an earlier attempt may have succeeded with the earlier time
                due = {each: time.time() + low for each in numbers}
            except StoreError:
                await asyncio.sleep(0.2)
        self.acknowledged |= dict.fromkeys(numbers, time.time())


async def _watch_writes(cluster: Cluster, accepted: list[float]) -> None:
    while True:
        with suppress(Exception):  # of any driver
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                await cluster.write()
                accepted.append(time.time())
        await asyncio.sleep(0.1)


@contextmanager
def _running_nodes(folder: Path, urls: Sequence[str]) -> Iterator[None]:
    nodes: list[subprocess.Popen[bytes]] = []
    ports = []
    try:
        for number, url in enumerate(urls):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                ports.append(probe.getsockname()[1])
            nodes.append(start_node(folder, number, url, ports[-1]))
        for number, port in enumerate(ports):
            deadline = time.monotonic() + NODE_START_SECONDS
            while not _is_ready(port):
                if nodes[number].poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / f"node{number}.log").read_text()[-3000:])
                time.sleep(0.2)
        yield
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait()


def _is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=3) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def _read_starts(folder: Path) -> list[tuple[int, float]]:
    lines = [line.split() for file in folder.glob("starts*") for line in file.read_text().splitlines()]
    return sorted(((int(line[0]), float(line[1])) for line in lines if len(line) == 2), key=lambda start: start[1])


def judge(create: Callable[[Path], C], events: Sequence[tuple[str, Callable[[C], None]]]) -> Result:
    """Start a cluster and nodes, cause the events one after another, and return the judgment."""
    with tempfile.TemporaryDirectory(prefix="timebell-cluster-") as path:
        folder = Path(path)
        folder.chmod(0o755)
        cluster = create(folder)
        try:
            cluster.start()
            asyncio.run(upgrade(cluster.url, FEATURES))
            with _running_nodes(folder, cluster.node_urls):
                return asyncio.run(_judge(cluster, events, folder))
        finally:
            cluster.stop()


async def _judge(cluster: C, events: Sequence[tuple[str, Callable[[C], None]]], folder: Path) -> Result:
    creator, accepted = _Creator(cluster.url), list[float]()
    creating = asyncio.create_task(creator.run())
    watching = asyncio.create_task(_watch_writes(cluster, accepted))
    spans = []
    for name, cause in events:
        await asyncio.sleep(CALM_SECONDS)
        began = time.time()
        await asyncio.to_thread(cause, cluster)
        await asyncio.to_thread(cluster.wait_until_complete)
        await asyncio.sleep(CALM_SECONDS)
        spans.append((name, began, time.time()))
    creating.cancel()
    with suppress(asyncio.CancelledError):
        await creating
    await asyncio.sleep(SETTLE_SECONDS)
    watching.cancel()
    starts = _read_starts(folder)
    runs = Counter(number for number, _ in starts)
    outcomes = []
    for name, began, ended in spans:
        writes = [began, *(at for at in accepted if began < at <= ended)]
        before, back = max(pairwise(writes), key=lambda pair: pair[1] - pair[0], default=(began, ended))
        after = [at for number, at in starts if at > back]
        # Jobs that were due in the outage and acknowledged by its end.
        waiting = {
            n
            for n, due in creator.due.items()
            if before <= due <= back and creator.acknowledged.get(n, back + 1) <= back
        }
        firsts = {number: at for number, at in reversed(starts) if number in waiting}
        repeated = {number for number, at in starts if runs[number] > 1 and began <= creator.due[number] <= ended}
        outage = back - before
        outcomes.append(
            Outcome(
                name, round(outage, 2), round(after[0] - back, 2) if after else None,
                round(max(0.0, max(firsts.values()) - back), 2) if firsts else None, len(repeated),
                0 if outage > LEASE_SECONDS else len(repeated),
            )
        )  # fmt: skip
    logs = "\n".join(file.read_text()[-4000:] for file in sorted(folder.glob("node*.log")))
    return Result(
        outcomes, len(creator.acknowledged), [n for n in creator.acknowledged if not runs[n]],
        [number for number, at in starts if at < creator.due[number] - 0.001], logs,
    )  # fmt: skip
