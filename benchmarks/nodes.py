"""`python -m benchmarks nodes`: simulate the jobs per second of more nodes than this machine has processors for.

First the cost of a job is measured with claims of 25 and of 250 jobs, which separates the cost of a statement from the
cost of each of its jobs. With these costs, nodes and a server are simulated on virtual time: first on the processors of
this machine, compared with a real measurement; then a dedicated server with a number of processors, and nodes with one
processor each.

Not simulated: concurrent claims of one lane slow each other down, because each skips the rows that the others locked.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from dataclasses import dataclass

import uvloop

from benchmarks import workloads
from benchmarks.machine import cpu_seconds, summary_line
from benchmarks.systems import Server, TimebellOnPostgres
from timebell import Arrived, JobSpec, Timebell
from timebell.features import FEATURES
from timebell.sim.loop import run_virtual
from timebell.store.open import upgrade

SMALL_CLAIM, LARGE_CLAIM = 25, 250  # jobs
MEASURED_JOBS, SIMULATED_JOBS = 40_000, 50_000
CREATE_BATCH_SIZE = 5_000  # jobs per call
WAL_BYTES = 450  # per job, of a claim and of a completion
TIME_SLICE_SECONDS = 0.00025  # for which a processor continues the same work
ROUND_TRIP_SECONDS = 0.0002  # to a server on another machine
CLAIM_SHARE, COMPLETE_SHARE = 0.4, 0.6  # of the cost of a job for the server
DECODE_SHARE, RUN_SHARE, WRITE_SHARE = 0.4, 0.3, 0.3  # of the cost of a job for the node
NODE_COUNTS, SERVER_CORES = (1, 2, 4, 8, 16), (2, 4, 8, 16)


@dataclass(frozen=True)
class Costs:
    """Costs in seconds: of a job and of a statement, for a node and for the server; and of a write of the log."""

    node: float
    node_statement: float
    server: float
    server_statement: float
    flush: float


class Cores:
    """Processors that share the pending work in time slices."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def work(self, seconds: float) -> None:
        """Wait until `seconds` of CPU time are done."""
        while seconds > 0:
            async with self._free:
                await asyncio.sleep(min(TIME_SLICE_SECONDS, seconds))
            seconds -= TIME_SLICE_SECONDS


class EventLoop:
    """Single thread of a node on some processor; it does one thing after another."""

    def __init__(self, cores: Cores) -> None:
        self._cores, self._lock = cores, asyncio.Lock()

    async def work(self, seconds: float) -> None:
        """Wait until `seconds` of CPU time of this thread are done."""
        async with self._lock:
            await self._cores.work(seconds)


class Installation:
    """Server, its log, and nodes; `shared` if all of them use the same processors."""

    def __init__(self, costs: Costs, nodes: int, cores: int, *, shared: bool) -> None:
        self.costs, self.nodes = costs, nodes
        self.server, self.shared = Cores(cores), shared
        self.remaining = SIMULATED_JOBS
        self._flushing, self._commits, self._flushed = asyncio.Lock(), 0, 0

    async def drain(self) -> float:
        """Return the jobs per second when all jobs are due."""
        began = asyncio.get_running_loop().time()
        await asyncio.gather(
            *(self._node(EventLoop(self.server if self.shared else Cores(1))) for _ in range(self.nodes))
        )
        return SIMULATED_JOBS / (asyncio.get_running_loop().time() - began)

    async def _node(self, own: EventLoop) -> None:
        batches, ran = asyncio.Semaphore(2), asyncio.Queue[int]()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._complete_batches(own, ran))
            async with asyncio.TaskGroup() as running:
                while await batches.acquire() and (count := min(LARGE_CLAIM, self.remaining)):
                    self.remaining -= count
                    await self._statement(own, count, CLAIM_SHARE)
                    await own.work(count * self.costs.node * DECODE_SHARE)
                    running.create_task(self._run(own, count, batches, ran))
            ran.put_nowait(0)  # the end

    async def _run(self, own: EventLoop, count: int, batches: asyncio.Semaphore, ran: asyncio.Queue[int]) -> None:
        await own.work(count * self.costs.node * RUN_SHARE)
        batches.release()
        ran.put_nowait(count)

    async def _complete_batches(self, own: EventLoop, ran: asyncio.Queue[int]) -> None:
        done = False
        while not done:
            counts = [await ran.get()]
            while not ran.empty():
                counts.append(ran.get_nowait())
            done = 0 in counts
            if count := sum(counts):
                await own.work(count * self.costs.node * WRITE_SHARE)
                await self._statement(own, count, COMPLETE_SHARE)

    async def _statement(self, own: EventLoop, count: int, share: float) -> None:
        await own.work(self.costs.node_statement)
        await self.server.work(self.costs.server_statement + count * self.costs.server * share)
        self._commits += 1
        number = self._commits
        async with self._flushing:  # group commit: a write contains all commits that wait when it starts
            if self._flushed < number:
                latest = self._commits
                await asyncio.sleep(self.costs.flush)
                self._flushed = latest
        if not self.shared:
            await asyncio.sleep(ROUND_TRIP_SECONDS)


def simulate(costs: Costs, nodes: int, cores: int, *, shared: bool = False) -> float:
    """Return the simulated jobs per second."""

    async def drain() -> float:
        return await Installation(costs, nodes, cores, shared=shared).drain()

    return run_virtual(drain())


async def _measure_batch(server: Server, batch: int) -> tuple[float, float]:
    """Return the CPU seconds of a job for the node and for the server, with claims of `batch` jobs."""
    url = await server.create_database("timebell_bench_nodes")
    await upgrade(url, FEATURES)
    app = Timebell(url, timezone="UTC")

    @app.on("bench")
    async def handle(_: Arrived) -> None:
        pass

    for _ in range(MEASURED_JOBS // CREATE_BATCH_SIZE):
        await app.schedule_many([JobSpec(topic="bench", payload={"pad": "x" * 85})] * CREATE_BATCH_SIZE)
    gc.collect()
    gc.freeze()
    before = time.process_time(), cpu_seconds(server.pid)
    async with app.running(batch_size=batch) as service:
        while service.node.counters.ended < MEASURED_JOBS:
            await asyncio.sleep(0.02)
        node_cpu, server_cpu = time.process_time() - before[0], cpu_seconds(server.pid) - before[1]
    await app.close()
    return node_cpu / MEASURED_JOBS, server_cpu / MEASURED_JOBS


def _measure_flush() -> float:
    """Return the median seconds of a durable write of one batch."""
    durations = []
    with tempfile.TemporaryFile() as file:
        for at in range(100):
            began = time.perf_counter()
            os.pwrite(file.fileno(), b"x" * (WAL_BYTES * LARGE_CLAIM), at * WAL_BYTES * LARGE_CLAIM)
            os.fdatasync(file.fileno())
            durations.append(time.perf_counter() - began)
    return sorted(durations)[50]


async def _measure_costs(server: Server) -> Costs:
    small, large = await _measure_batch(server, SMALL_CLAIM), await _measure_batch(server, LARGE_CLAIM)
    extra_statements = 2 / SMALL_CLAIM - 2 / LARGE_CLAIM  # that small claims need more, per job
    statement = [max(0.0, (a - b) / extra_statements) for a, b in zip(small, large, strict=True)]
    node, server_cost = (b - 2 * cost / LARGE_CLAIM for b, cost in zip(large, statement, strict=True))
    return Costs(node, statement[0], server_cost, statement[1], _measure_flush())


async def _measure_real(server: Server, nodes: int) -> float:
    async with TimebellOnPostgres(server) as system:
        figures = await workloads.w6(system, nodes, workloads.Sizes(drain=SIMULATED_JOBS))
    return float(figures["jobs_s"])


async def _measure() -> tuple[Costs, list[float]]:
    server = Server()
    await server.start()
    try:
        return await _measure_costs(server), [await _measure_real(server, nodes) for nodes in (1, 2)]
    finally:
        await server.close()


def main() -> None:
    """Measure, simulate, and print the results."""
    costs, real_rates = uvloop.run(_measure())
    print(summary_line())
    print(
        f"job: {costs.node * 1e6:.1f} us of the node, {costs.server * 1e6:.1f} us of the server; statement:"
        f" {costs.node_statement * 1e6:.0f} and {costs.server_statement * 1e6:.0f} us; write of the log:"
        f" {costs.flush * 1e6:.0f} us"
    )
    cores = os.cpu_count() or 1
    for nodes, measured in enumerate(real_rates, 1):
        rate = f"simulated {simulate(costs, nodes, cores, shared=True):,.0f}/s"
        print(f"this machine, {nodes} nodes and the server on {cores} cores: {rate}, measured {measured:,.0f}/s")
    print(f"\n| nodes | {' | '.join(f'server of {cores} cores' for cores in SERVER_CORES)} |")
    print(f"|---|{'---:|' * len(SERVER_CORES)}")
    for nodes in NODE_COUNTS:
        row = (f"{simulate(costs, nodes, cores):,.0f}" for cores in SERVER_CORES)
        print(f"| {nodes} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
