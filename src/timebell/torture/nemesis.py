"""The nemesis breaks things, one after another and some at once, makes sure that each fault bit, and heals them.

It owns the nodes, the database and the proxies between them. What it did is in `fault.jsonl`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from random import Random
from typing import Any

from timebell.store.open import upgrade
from timebell.torture import grounds, injectors
from timebell.torture.bouncer import Bouncer
from timebell.torture.driver import fill_table, make_tables
from timebell.torture.injectors import LEASE
from timebell.torture.ledgers import Ledger, clocks
from timebell.torture.mariadb import MariaDB
from timebell.torture.nodes import NodeProcess, waited
from timebell.torture.plan import Plan, as_all, environment, load, take_precedence, write
from timebell.torture.postgres import Postgres
from timebell.torture.proxy import Proxy

AT_ONCE = 2  # faults
LOOK = 0.2  # seconds
DISK = 3 * 2**29  # bytes, of the small one
# What strikes all nodes alike, and so not two of these at once.
OF_STORE = ("dbstop", "dbclock", "diskfull", "migrate")


class Nemesis:
    """The things that can be broken, and how."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chance = Random(f"{plan.seed}/nemesis")
        self.ledger = Ledger(plan.path("fault.jsonl"))
        self.server: Postgres | MariaDB | None = None
        self.nodes: dict[str, NodeProcess] = {}
        self.proxies: dict[str, Proxy] = {}
        self.busy: set[str] = set()
        self.count = 0
        self.bouncer: Bouncer | None = None
        self.disk = Path(plan.sockets) / "disk"
        self.direct = ""

    async def start(self) -> None:
        """A database, proxies and nodes, all of them up."""
        if "diskfull" in self.plan.faults:
            grounds.mount(self.disk, DISK)
        elif self.plan.store == "sqlite":
            self.disk = Path(self.plan.out)
        if self.plan.store == "sqlite":
            self.direct = f"sqlite:///{self.disk / 'timebell.db'}"
            urls = dict.fromkeys(["client", *self.plan.nodes], self.direct)
        else:
            urls = await self._start_servers()
        await upgrade(self.direct)
        await asyncio.to_thread(make_tables, self.direct)
        for name in self.plan.nodes:
            self.nodes[name] = NodeProcess(self.plan, name, urls[name])
            self.nodes[name].launch()
        for node in self.nodes.values():
            if not await node.ready():
                raise RuntimeError(f"{node.name} does not start: {node.log.read_text()[-2000:]}")
        write(self.plan.path("nemesis.json"), {
            "direct": self.direct, "client": urls["client"], "http": [node.port for node in self.nodes.values()],
            "key": await self._run_timebell("key", "create", "torture", "--role", "platform"),
        })  # fmt: skip

    async def _start_servers(self) -> dict[str, str]:
        """The database, and PgBouncer before it: for all, or else for the last node alone."""
        if self.plan.store == "mariadb":
            self.server = await asyncio.to_thread(MariaDB, self.disk / "mariadb")
        else:
            self.server = Postgres(self.disk / "postgres", steps="dbclock" in self.plan.faults)
        await asyncio.to_thread(self.server.start)
        self.direct = self.server.url()
        pooled = ["client", *self.plan.nodes] if self.plan.store == "pgbouncer" else self.plan.nodes[-1:]
        if self.plan.store == "pgbouncer" or "pool" in self.plan.faults:
            self.bouncer = Bouncer(Path(self.plan.sockets) / "pgbouncer", self.server.port)
            self.bouncer.start()
        urls = {}
        for name in ("client", *self.plan.nodes):
            port = self.bouncer.port if self.bouncer is not None and name in pooled else self.server.port
            proxy = Proxy("127.0.0.1", port, Random(f"{self.plan.seed}/proxy/{name}"))
            urls[name] = self.server.url(await proxy.start())
            self.proxies[name] = proxy
        return urls

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
        if self.bouncer is not None:
            self.bouncer.kill()
        if self.server is not None and self.server.answers():
            await asyncio.to_thread(self.server.stop)
        if "diskfull" in self.plan.faults:
            grounds.unmount(self.disk)

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

    async def watch(self) -> None:
        """Write down when a node, or what it waits for, had to wait for a processor: that lateness is this machine's.

        What it waits for are the database's processes that serve it, the sink, and the proxies in here. One that still
        starts is late by itself.
        """
        sink = json.loads(self.plan.path("sink.json").read_text())["pid"]
        before: dict[int, float] = {}
        gone: set[str] = set()
        start = clocks()
        while True:
            await asyncio.sleep(LOOK)
            serving = self.server.serving() if self.server is not None else {}
            nodes = {name: node.pid for name, node in self.nodes.items() if node.serves}
            end = clocks()
            now = {each: waited(each) for each in (sink, os.getpid(), *serving, *nodes.values())}
            more = {each: at - before.get(each, at) for each, at in now.items()}
            long = (end["mono"] - start["mono"]) / 1e9
            lost = {  # they wait at the same time when there are too few processors: of all the longest, not the sum
                name: max(
                    more[sink], more[os.getpid()], more[process],
                    *(more[each] for each, port in serving.items() if self._serves(name, port)),
                ) for name, process in nodes.items()
            }  # fmt: skip
            await asyncio.gather(*(
                self.ledger.append(
                    kind="starved", target=name, start_mono=start["mono"], end_mono=end["mono"], verified_start=True,
                    verified_end=True, detail=round(each, 3),
                ) for name, each in lost.items() if each > long / 2
            ))  # fmt: skip
            for name, node in self.nodes.items():
                if name in self.busy or node.alive or node.code == -signal.SIGKILL:  # a fail point may come late
                    gone.discard(name)
                elif name not in gone:
                    gone.add(name)
                    await self.ledger.append(
                        kind="ended", target=name, start_mono=end["mono"], end_mono=end["mono"], verified_start=True,
                        verified_end=True, detail=node.code,
                    )  # fmt: skip
            before, start = now, end

    def _serves(self, node: str, port: int) -> bool:
        """Whether what the database has at a port is of a node: through a pooler, all that is of no other may be; and
        what has none (0) serves everybody."""
        ways = {name: proxy.ports for name, proxy in self.proxies.items()}
        if port in ways[node] or port == 0:
            return True
        return self.bouncer is not None and not any(port in each for each in ways.values())

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
                    await (injectors.cut if kind == "client" else injectors.ALL[kind])(self, target)
                finally:
                    self.busy.discard(target)
            await asyncio.sleep(self.chance.uniform(0.5, 2.5))

    def _target(self, kind: str) -> str | None:
        """What to strike: never all nodes at once, unless there is only one."""
        if kind in OF_STORE or kind == "client":
            name = "client" if kind == "client" else "store"
            return None if name in self.busy else name
        if kind == "pool":  # of which it is the only way
            return None if self.plan.nodes[-1] in self.busy else self.plan.nodes[-1]
        free = [name for name in self.nodes if name not in self.busy]
        return self.chance.choice(free) if len(free) > 1 or len(self.nodes) == 1 else None

    async def note(self, kind: str, target: str, start: dict[str, int], bit: bool, healed: bool, detail: Any) -> None:
        self.count += 1
        await self.ledger.append(
            id=self.count, kind=kind, target=target, start_mono=start["mono"], end_mono=clocks()["mono"],
            verified_start=bit, verified_end=healed, detail=detail,
        )  # fmt: skip

    async def restart(self, node: NodeProcess) -> bool:
        """Start it until it comes: it may find the database gone."""
        for _ in range(10):
            node.launch()
            if await node.ready():
                return True
            node.end()
            await asyncio.sleep(0.3)
        return False

    async def upgrade_again(self) -> int:
        """`timebell db upgrade`, as people run it; its exit code."""
        try:
            await self._run_timebell("db", "upgrade")
        except RuntimeError:
            return 1
        return 0

    async def _run_timebell(self, *words: str) -> str:
        """A command on the database; what it prints. Raises RuntimeError when it fails."""
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "timebell.cli.main", *words, "--database", self.direct,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, cwd=self.plan.out,
            env=environment(self.plan),
        )  # fmt: skip
        as_all(command.pid)
        said, _ = await command.communicate()
        if command.returncode:
            raise RuntimeError(f"timebell {' '.join(words)} ended with {command.returncode}")
        return said.decode().strip()

    async def refuses_writes(self, seconds: float) -> bool:
        """Whether, within so many seconds, the database cannot take a row, or is gone."""
        until = self.plan.now + seconds
        while self.plan.now < until:
            try:
                await asyncio.wait_for(asyncio.to_thread(fill_table, self.direct), 5)
            except Exception:
                return True
            await asyncio.sleep(0.05)
        return False


def _longest(kind: str) -> float:
    return {
        "freeze": LEASE + 5, "cut": 21.0, "drop": 21.0, "point": 13.0, "churn": 8.0, "clock": 22.0, "dbclock": 16.0,
        "diskfull": 14.0,
    }.get(kind, 7.0)  # fmt: skip


async def main(plan: Plan) -> None:
    """Until the run is over, or SIGTERM."""
    take_precedence()
    nemesis, over = Nemesis(plan), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    try:
        await nemesis.start()
        while not load(plan.out).began and not over.is_set():
            await asyncio.sleep(0.02)
        nemesis.plan = load(plan.out)
        haunting = asyncio.create_task(nemesis.haunt())
        waiting, watching = asyncio.create_task(over.wait()), asyncio.create_task(nemesis.watch())
        await asyncio.wait([haunting, waiting], return_when=asyncio.FIRST_COMPLETED)
        if haunting.done():
            haunting.result()
            write(plan.path("healed.json"), {"at": nemesis.plan.now})
        await over.wait()
        haunting.cancel()
        watching.cancel()
    finally:
        await nemesis.close()
