"""The nemesis breaks things, one after another and some at once, makes sure that each fault bit, and heals them.

It owns the nodes, the database and the proxies between them. What it did is in `fault.jsonl`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

from timebell.store.open import upgrade
from timebell.torture.driver import make_table
from timebell.torture.ledgers import Ledger, clocks
from timebell.torture.nodes import NodeProcess
from timebell.torture.plan import Plan, load, write
from timebell.torture.postgres import Postgres
from timebell.torture.proxy import MODES, Proxy

AT_ONCE = 2  # faults
POINTS = (
    "claim.done", "fire.1", "fire.3", "fire.commit", "fire.done", "end.1", "end.done", "retry.1", "end_in_turn.1",
    "end_in_turn.2", "end_in_turn.commit", "end_in_turn.done",
)  # fmt: skip
LEASE = 15.0


class Nemesis:
    """The things that can be broken, and how."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chance = Random(f"{plan.seed}/nemesis")
        self.ledger = Ledger(plan.path("fault.jsonl"))
        self.server: Postgres | None = None
        self.nodes: dict[str, NodeProcess] = {}
        self.proxies: dict[str, Proxy] = {}
        self.busy: set[str] = set()
        self.count = 0
        self.faults: dict[str, Callable[[str], Awaitable[None]]] = {
            "kill": self.kill, "freeze": self.freeze, "dbstop": self.dbstop, "cut": self.cut, "churn": self.churn,
            "point": self.point, "client": self.cut,
        }  # fmt: skip

    async def start(self) -> None:
        """A database, proxies and nodes, all of them up."""
        if self.plan.store == "sqlite":
            direct = f"sqlite:///{self.plan.path('timebell.db')}"
            urls = dict.fromkeys(["client", *self.plan.nodes], direct)
        else:
            self.server = Postgres(Path(self.plan.sockets) / "postgres")
            await asyncio.to_thread(self.server.start)
            direct = self.server.url()
            urls = {}
            for name in ("client", *self.plan.nodes):
                proxy = Proxy("127.0.0.1", self.server.port, Random(f"{self.plan.seed}/proxy/{name}"))
                urls[name] = self.server.url(await proxy.start())
                self.proxies[name] = proxy
        await upgrade(direct)
        await asyncio.to_thread(make_table, direct)
        for name in self.plan.nodes:
            self.nodes[name] = NodeProcess(self.plan, name, urls[name])
            self.nodes[name].launch()
        for node in self.nodes.values():
            if not await node.ready():
                raise RuntimeError(f"{node.name} does not start: {node.log.read_text()[-2000:]}")
        write(self.plan.path("nemesis.json"), {"direct": direct, "client": urls["client"]})

    async def close(self) -> None:
        """Everything that it started, ended."""
        for node in self.nodes.values():
            node.send(signal.SIGCONT)
            node.send(signal.SIGTERM)
        await asyncio.gather(*(node.ended(35) for node in self.nodes.values()))
        for node in self.nodes.values():
            node.end()
        for proxy in self.proxies.values():
            await proxy.close()
        if self.server is not None and self.server.answers():
            await asyncio.to_thread(self.server.stop)

    async def haunt(self) -> None:
        """Break things through the faulted phase."""
        start, end = self.plan.phases["faulted"]
        for name, (a, b) in self.plan.phases.items():
            began = self.plan.began
            await self.ledger.append(
                kind="phase", target=name, start_mono=began + int(a * 1e9), end_mono=began + int(b * 1e9),
                verified_start=True, verified_end=True,
            )  # fmt: skip
        await asyncio.sleep(start - self.plan.now)
        await asyncio.gather(*(self._strike_on(end) for _ in range(AT_ONCE if len(self.nodes) > 1 else 1)))

    async def _strike_on(self, end: float) -> None:
        bag: list[str] = []
        kinds = [*self.plan.faults, *(["client"] if self.proxies and "cut" in self.plan.faults else [])]
        while self.plan.now < end - 6:
            if not bag:
                bag = list(kinds)
                self.chance.shuffle(bag)
            kind = bag.pop()
            target = self._target(kind)
            if target is not None and self.plan.now + _longest(kind) < end:
                self.busy.add(target)
                try:
                    await self.faults[kind](target)
                finally:
                    self.busy.discard(target)
            await asyncio.sleep(self.chance.uniform(0.5, 2.5))

    def _target(self, kind: str) -> str | None:
        """What to strike: never all nodes at once, unless there is only one."""
        if kind in ("dbstop", "client"):
            name = "store" if kind == "dbstop" else "client"
            return None if name in self.busy else name
        free = [name for name in self.nodes if name not in self.busy]
        return self.chance.choice(free) if len(free) > 1 or len(self.nodes) == 1 else None

    async def _note(self, kind: str, target: str, start: dict[str, int], bit: bool, healed: bool, detail: Any) -> None:
        self.count += 1
        await self.ledger.append(
            id=self.count, kind=kind, target=target, start_mono=start["mono"], end_mono=clocks()["mono"],
            verified_start=bit, verified_end=healed, detail=detail,
        )  # fmt: skip

    async def _restart(self, node: NodeProcess) -> bool:
        """Start it until it comes: it may find the database gone."""
        for _ in range(10):
            node.launch()
            if await node.ready():
                return True
            node.end()
            await asyncio.sleep(0.3)
        return False

    async def kill(self, target: str) -> None:
        """kill -9, and another start."""
        node, start = self.nodes[target], clocks()
        node.send(signal.SIGKILL)
        bit = await node.ended(5) and node.code == -signal.SIGKILL
        await asyncio.sleep(self.chance.uniform(0.2, 4))
        await self._note("kill", target, start, bit, await self._restart(node), None)

    async def freeze(self, target: str) -> None:
        """SIGSTOP, for longer than a lease."""
        node, start = self.nodes[target], clocks()
        node.send(signal.SIGSTOP)
        await asyncio.sleep(0.05)
        bit = node.stopped
        long = self.chance.uniform(LEASE + 1, LEASE + 4)
        await asyncio.sleep(long)
        node.send(signal.SIGCONT)
        await asyncio.sleep(0.05)
        await self._note("freeze", target, start, bit, node.alive and not node.stopped, round(long, 1))

    async def dbstop(self, target: str) -> None:
        """An immediate stop of PostgreSQL, as in a crash, and its recovery."""
        assert self.server is not None
        start = clocks()
        await asyncio.to_thread(self.server.stop)
        bit = not self.server.answers()
        await asyncio.sleep(self.chance.uniform(0.1, 4))
        await asyncio.to_thread(self.server.start)
        await self._note("dbstop", target, start, bit, self.server.answers(), None)

    async def cut(self, target: str) -> None:
        """Hold what a node and the database say to each other, or lose the replies to commits."""
        proxy, start = self.proxies[target], clocks()
        mode = self.chance.choice(MODES) if target != "client" else self.chance.choice(("replies", "replies", "down"))
        proxy.cut(mode)
        await asyncio.sleep(self.chance.uniform(2, 5) if target == "client" else self.chance.uniform(3, 20))
        bit = proxy.bit > 0
        proxy.heal()
        kind = "client" if target == "client" else "cut"
        await self._note(kind, target, start, bit, proxy.mode is None, mode)

    async def churn(self, target: str) -> None:
        """A node leaves in good order, and joins again."""
        node, start = self.nodes[target], clocks()
        node.send(signal.SIGTERM)
        left = await node.ended(40) and node.code == 0
        code = node.code
        node.end()
        await asyncio.sleep(self.chance.uniform(0.2, 3))
        await self._note("churn", target, start, left, await self._restart(node), code)

    async def point(self, target: str) -> None:
        """kill -9 between two statements, or right before or after a commit."""
        node, name = self.nodes[target], self.chance.choice(POINTS)
        node.point.write_text(name)
        bit = await node.ended(8)
        start = clocks()
        node.point.unlink(missing_ok=True)
        if not bit:  # nothing of the kind came by
            return
        code = node.code
        await asyncio.sleep(self.chance.uniform(0.2, 2))
        await self._note("point", target, start, code == -signal.SIGKILL, await self._restart(node), name)


def _longest(kind: str) -> float:
    return {"freeze": LEASE + 5, "cut": 21.0, "point": 13.0, "churn": 8.0}.get(kind, 7.0)


async def main(plan: Plan) -> None:
    """Until the run is over, or SIGTERM."""
    nemesis, over = Nemesis(plan), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    try:
        await nemesis.start()
        while not load(plan.out).began and not over.is_set():
            await asyncio.sleep(0.02)
        nemesis.plan = load(plan.out)
        haunting = asyncio.create_task(nemesis.haunt())
        waiting = asyncio.create_task(over.wait())
        await asyncio.wait([haunting, waiting], return_when=asyncio.FIRST_COMPLETED)
        if haunting.done():
            haunting.result()
            write(plan.path("healed.json"), {"at": nemesis.plan.now})
        await over.wait()
        haunting.cancel()
    finally:
        await nemesis.close()
