"""`python -m benchmarks nodes`: jobs a second of more nodes than this machine has processors for, by simulation.

What a job costs is measured first, with claims of 25 and of 250, which tells what a statement costs from what each job
of it does. With that nodes and a server are simulated on virtual time: of this machine, beside what it really does, and
of a server of so many processors that has nothing else to do, with nodes that have one each.

Not in it: what claims of one lane cost each other, as each passes over what the others have locked.
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
from benchmarks.machine import cpu, line
from benchmarks.systems import Server, TimebellOnPostgres
from timebell import Arrived, JobSpec, Timebell
from timebell.sim.loop import run_virtual
from timebell.store.open import upgrade

FEW, MANY = 25, 250  # jobs of a claim
MEASURED, SIMULATED = 40_000, 50_000  # jobs
CREATED = 5_000  # jobs a call
WAL = 450  # bytes that a claim, or an ending, writes of each job
SLICE = 0.00025  # seconds for which a processor goes on with the same work
NETWORK = 0.0002  # seconds there and back, where the server is another machine
CLAIM, END = 0.4, 0.6  # shares of what a job costs the server
DECODE, RUN, WRITE = 0.4, 0.3, 0.3  # and of what it costs the node
NODES, SERVERS = (1, 2, 4, 8, 16), (2, 4, 8, 16)


@dataclass(frozen=True)
class Costs:
    """In seconds: of a job and of a statement, for a node and for the server; and of a write of the log."""

    node: float
    node_statement: float
    server: float
    server_statement: float
    flush: float


class Cores:
    """Processors that take turns with what there is to do."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def work(self, seconds: float) -> None:
        """Until so much of it is done."""
        while seconds > 0:
            async with self._free:
                await asyncio.sleep(min(SLICE, seconds))
            seconds -= SLICE


class Loop:
    """The one thread of a node, on some processor: it does one thing after another."""

    def __init__(self, cores: Cores) -> None:
        self._cores, self._turn = cores, asyncio.Lock()

    async def work(self, seconds: float) -> None:
        """As of Cores."""
        async with self._turn:
            await self._cores.work(seconds)


class Installation:
    """A server, its log, and nodes; `shared` if all of them have the same processors."""

    def __init__(self, costs: Costs, nodes: int, cores: int, *, shared: bool) -> None:
        self.costs, self.nodes = costs, nodes
        self.server, self.shared = Cores(cores), shared
        self.left = SIMULATED
        self._writing, self._asked, self._written = asyncio.Lock(), 0, 0

    async def drain(self) -> float:
        """Jobs a second, when they are all due."""
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._node(Loop(self.server if self.shared else Cores(1))) for _ in range(self.nodes)))
        return SIMULATED / (asyncio.get_running_loop().time() - began)

    async def _node(self, own: Loop) -> None:
        hands, ran = asyncio.Semaphore(2), asyncio.Queue[int]()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._end(own, ran))
            async with asyncio.TaskGroup() as running:
                while await hands.acquire() and (count := min(MANY, self.left)):
                    self.left -= count
                    await self._statement(own, count, CLAIM)
                    await own.work(count * self.costs.node * DECODE)
                    running.create_task(self._run(own, count, hands, ran))
            ran.put_nowait(0)

    async def _run(self, own: Loop, count: int, hands: asyncio.Semaphore, ran: asyncio.Queue[int]) -> None:
        await own.work(count * self.costs.node * RUN)
        hands.release()
        ran.put_nowait(count)

    async def _end(self, own: Loop, ran: asyncio.Queue[int]) -> None:
        over = False
        while not over:
            counts = [await ran.get()]
            while not ran.empty():
                counts.append(ran.get_nowait())
            over = 0 in counts
            if count := sum(counts):
                await own.work(count * self.costs.node * WRITE)
                await self._statement(own, count, END)

    async def _statement(self, own: Loop, count: int, share: float) -> None:
        await own.work(self.costs.node_statement)
        await self.server.work(self.costs.server_statement + count * self.costs.server * share)
        self._asked += 1
        mine = self._asked
        async with self._writing:  # all that wait when a write begins are in it
            if self._written < mine:
                upto = self._asked
                await asyncio.sleep(self.costs.flush)
                self._written = upto
        if not self.shared:
            await asyncio.sleep(NETWORK)


def simulated(costs: Costs, nodes: int, cores: int, *, shared: bool = False) -> float:
    """Jobs a second."""

    async def drain() -> float:
        return await Installation(costs, nodes, cores, shared=shared).drain()

    return run_virtual(drain())


async def _measured(server: Server, batch: int) -> tuple[float, float]:
    """Seconds that a job costs the node, and the server."""
    url = await server.fresh("timebell_bench_nodes")
    await upgrade(url)
    app = Timebell(url, timezone="UTC")

    @app.on("bench")
    async def handle(_: Arrived) -> None:
        pass

    for _ in range(MEASURED // CREATED):
        await app.schedule_many([JobSpec(topic="bench", payload={"pad": "x" * 85})] * CREATED)
    gc.collect()
    gc.freeze()
    before = time.process_time(), cpu(server.pid)
    async with app.running(batch=batch) as service:
        while service.node.counters.ended < MEASURED:
            await asyncio.sleep(0.02)
        node, served = time.process_time() - before[0], cpu(server.pid) - before[1]
    await app.close()
    return node / MEASURED, served / MEASURED


def _flush() -> float:
    """Seconds for a durable write of a batch."""
    took = []
    with tempfile.TemporaryFile() as file:
        for at in range(100):
            began = time.perf_counter()
            os.pwrite(file.fileno(), b"x" * (WAL * MANY), at * WAL * MANY)
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return sorted(took)[50]


async def _costs(server: Server) -> Costs:
    few, many = await _measured(server, FEW), await _measured(server, MANY)
    statements = 2 / FEW - 2 / MANY  # a job, that the smaller claims need more
    each = [max(0.0, (a - b) / statements) for a, b in zip(few, many, strict=True)]
    node, served = (b - 2 * one / MANY for b, one in zip(many, each, strict=True))
    return Costs(node, each[0], served, each[1], _flush())


async def _really(server: Server, nodes: int) -> float:
    async with TimebellOnPostgres(server) as system:
        figures = await workloads.w6(system, nodes, workloads.Sizes(drain=SIMULATED))
    return float(figures["jobs_s"])


async def _measure() -> tuple[Costs, list[float]]:
    server = Server()
    await server.start()
    try:
        return await _costs(server), [await _really(server, nodes) for nodes in (1, 2)]
    finally:
        await server.close()


def main() -> None:
    """Measure, simulate, print."""
    costs, really = uvloop.run(_measure())
    print(line())
    print(
        f"a job: {costs.node * 1e6:.1f} us of the node, {costs.server * 1e6:.1f} us of the server; a statement:"
        f" {costs.node_statement * 1e6:.0f} and {costs.server_statement * 1e6:.0f} us; a write of the log:"
        f" {costs.flush * 1e6:.0f} us"
    )
    cores = os.cpu_count() or 1
    for nodes, measured in enumerate(really, 1):
        here = f"simulated {simulated(costs, nodes, cores, shared=True):,.0f}/s"
        print(f"here, {nodes} nodes and the server on {cores} cores: {here}, measured {measured:,.0f}/s")
    print(f"\n| nodes | {' | '.join(f'server of {cores} cores' for cores in SERVERS)} |")
    print(f"|---|{'---:|' * len(SERVERS)}")
    for nodes in NODES:
        row = (f"{simulated(costs, nodes, cores):,.0f}" for cores in SERVERS)
        print(f"| {nodes} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
