"""The nemesis injects faults, one after another and some concurrently, verifies their effect, and heals them.

It owns the nodes, the database and the proxies between them. It records the faults in `fault.jsonl`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from random import Random
from typing import Any

from timebell import Timebell
from timebell_torture import capabilities, injectors
from timebell_torture.driver import create_tables, insert_filler_row
from timebell_torture.ledger import Ledger, read_clocks
from timebell_torture.mariadb import MariaDBServer, MariaDBStandby
from timebell_torture.nodes import NodeProcess, cpu_wait_seconds
from timebell_torture.pgbouncer import PgBouncer
from timebell_torture.plan import (
    EXCLUSIVE_FAULTS,
    MAX_CONCURRENT_FAULTS,
    MAX_FAULT_PAUSE_SECONDS,
    MAX_FAULT_SECONDS,
    STORE_WIDE_FAULTS,
    Plan,
    environment,
    load_plan,
    raise_priority,
    reset_priority,
    write_json,
)
from timebell_torture.postgres import PostgresServer, PostgresStandby
from timebell_torture.proxy import Proxy

SAMPLE_INTERVAL_SECONDS = 0.2
DISK_SIZE_BYTES = 3 * 2**29
Server = PostgresServer | MariaDBServer
Standby = PostgresStandby | MariaDBStandby


class Nemesis:
    """The processes that faults are injected into, and the loop that injects them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = Random(f"{plan.seed}/nemesis")
        self.ledger = Ledger(plan.path("fault.jsonl"))
        self.server: Server | None = None
        self.nodes: dict[str, NodeProcess] = {}
        self.proxies: dict[str, Proxy] = {}
        self.direct_proxy: Proxy | None = None
        """Leads to the current server, without faults."""
        self.standby: Standby | None = None
        """The standby of the server, until it is promoted."""
        self._standby_count = 0
        self._exclusive = asyncio.Lock()
        self._remaining_kinds: list[str] = []
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_FAULTS)
        self.faulted_targets: set[str] = set()
        self.fault_count = 0
        self.bouncer: PgBouncer | None = None
        self.disk = Path(plan.sockets) / "disk"
        self.direct = ""

    async def start(self) -> None:
        """Start the database, the proxies and the nodes, and wait until they are ready."""
        if "diskfull" in self.plan.faults:
            capabilities.mount_tmpfs(self.disk, DISK_SIZE_BYTES)
        elif self.plan.store == "sqlite":
            self.disk = Path(self.plan.out)
        if self.plan.store == "sqlite":
            self.direct = f"sqlite:///{self.disk / 'timebell.db'}"
            urls = dict.fromkeys(["client", *self.plan.nodes], self.direct)
        else:
            urls = await self._start_servers()
        await Timebell(self.direct).upgrade()
        await asyncio.to_thread(create_tables, self.direct)
        for name in self.plan.nodes:
            self.nodes[name] = NodeProcess(self.plan, name, urls[name])
            self.nodes[name].launch()
        for node in self.nodes.values():
            if not await node.ready():
                raise RuntimeError(f"{node.name} did not start: {node.log.read_text()[-2000:]}")
        write_json(self.plan.path("nemesis.json"), {
            "direct": self.direct, "client": urls["client"], "http": [node.port for node in self.nodes.values()],
            "key": await self._run_timebell("key", "create", "torture", "--role", "platform"),
        })  # fmt: skip

    async def _start_servers(self) -> dict[str, str]:
        """Start the database, and PgBouncer: for all clients, or else only for the last node. Return a URL for each."""
        if self.plan.store == "mariadb":
            self.server = await asyncio.to_thread(MariaDBServer, self.disk / "mariadb")
        else:
            self.server = PostgresServer(self.disk / "postgres", adjustable_clock="dbclock" in self.plan.faults)
        await asyncio.to_thread(self.server.start)
        self.direct_proxy = Proxy("127.0.0.1", self.server.port, Random(0))
        self.direct = self.server.url(await self.direct_proxy.start())
        if self.plan.store == "pgbouncer" or "pool" in self.plan.faults:
            self.bouncer = PgBouncer(Path(self.plan.sockets) / "pgbouncer", self.direct_proxy.port)
            self.bouncer.start()
        urls = {}
        for name in ("client", *self.plan.nodes):
            is_pooled = self.bouncer is not None and self._is_pooled(name)
            port = self.bouncer.port if self.bouncer is not None and is_pooled else self.server.port
            proxy = Proxy("127.0.0.1", port, Random(f"{self.plan.seed}/proxy/{name}"))
            urls[name] = self.server.url(await proxy.start())
            self.proxies[name] = proxy
        return urls

    async def add_standby(self) -> Standby:
        """Start a standby of the server, for whose receipt every commit waits from now on."""
        assert self.server is not None
        self._standby_count += 1
        folder = self.disk / f"{self.plan.store}{self._standby_count}"
        standby: Standby
        if isinstance(self.server, MariaDBServer):
            standby = await asyncio.to_thread(MariaDBStandby, folder, self.server)
        else:
            adjustable_clock = "dbclock" in self.plan.faults
            standby = await asyncio.to_thread(PostgresStandby, folder, self.server, adjustable_clock=adjustable_clock)
        self.standby = standby
        await asyncio.to_thread(standby.start)
        await asyncio.to_thread(standby.replicate_synchronously)
        return standby

    async def fail_over_to(self, standby: Standby) -> None:
        """Connect all clients to a promoted standby, and remove the former server."""
        former, self.server, self.standby = self.server, standby, None
        assert former is not None
        assert self.direct_proxy is not None
        for proxy in (*self.server_proxies(), self.direct_proxy):
            proxy.point_at(standby.port)
        await asyncio.to_thread(shutil.rmtree, former.folder, ignore_errors=True)

    def server_proxies(self) -> list[Proxy]:
        """Return the proxies that lead directly to the host of the database, without PgBouncer in between."""
        return [proxy for name, proxy in self.proxies.items() if self.bouncer is None or not self._is_pooled(name)]

    def _is_pooled(self, name: str) -> bool:
        """Return whether a client uses PgBouncer, if there is one: all, or only the last node."""
        return self.plan.store == "pgbouncer" or name == self.plan.nodes[-1]

    async def close(self) -> None:
        """End every process that it started."""
        for node in self.nodes.values():
            node.send(signal.SIGCONT)
            node.send(signal.SIGTERM)
        await asyncio.gather(*(node.wait_for_exit(35) for node in self.nodes.values()))
        for node in self.nodes.values():
            node.kill()
        for proxy in (*self.proxies.values(), *filter(None, [self.direct_proxy])):
            await proxy.close()
        if self.bouncer is not None:
            self.bouncer.kill()
        for server in (self.server, self.standby):
            if server is not None and server.is_listening():
                await asyncio.to_thread(server.stop)
        if "diskfull" in self.plan.faults:
            capabilities.unmount(self.disk)

    async def inject_faults(self) -> None:
        """Record the phases, and inject faults during the faulted phase."""
        start, end = self.plan.phases["faulted"]
        for name, (a, b) in self.plan.phases.items():
            began = self.plan.began
            await self.ledger.append(
                kind="phase", target=name, start_mono=began + int(a * 1e9), end_mono=began + int(b * 1e9),
                verified_start=True, verified_end=True,
            )  # fmt: skip
        await asyncio.sleep(start - self.plan.elapsed)
        await asyncio.gather(
            *(self._inject_until(end) for _ in range(MAX_CONCURRENT_FAULTS if len(self.nodes) > 1 else 1))
        )

    async def watch_nodes(self) -> None:
        """Record CPU starvation of nodes, and nodes that ended without a fault.

        Lateness is attributed to this machine while a node, or a process that it depends on, waits for a CPU. These
        processes are the database backends that serve the node, the receiver, and this process, which contains the
        proxies. A node that is still starting is excluded.
        """
        receiver = json.loads(self.plan.path("receiver.json").read_text())["pid"]
        previous_waits: dict[int, float] = {}
        reported_exits: set[str] = set()
        start = read_clocks()
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_SECONDS)
            backend_ports = self.server.backend_ports() if self.server is not None else {}
            nodes = {name: node.pid for name, node in self.nodes.items() if node.is_serving}
            end = read_clocks()
            waits = {each: cpu_wait_seconds(each) for each in (receiver, os.getpid(), *backend_ports, *nodes.values())}
            added_waits = {each: total - previous_waits.get(each, total) for each, total in waits.items()}
            interval = (end["mono"] - start["mono"]) / 1e9
            node_waits = {  # the longest wait, not the sum: with too few CPUs the processes wait at the same time
                name: max(
                    added_waits[receiver], added_waits[os.getpid()], added_waits[process],
                    *(added_waits[each] for each, port in backend_ports.items() if self._backend_may_serve(name, port)),
                ) for name, process in nodes.items()
            }  # fmt: skip
            await asyncio.gather(*(
                self.ledger.append(
                    kind="starved", target=name, start_mono=start["mono"], end_mono=end["mono"], verified_start=True,
                    verified_end=True, detail=round(each, 3),
                ) for name, each in node_waits.items() if each > interval / 2
            ))  # fmt: skip
            for name, node in self.nodes.items():
                # SIGKILL is expected at any time, because a fail point may be reached after its fault has ended.
                if name in self.faulted_targets or node.is_alive or node.exit_code == -signal.SIGKILL:
                    reported_exits.discard(name)
                elif name not in reported_exits:
                    reported_exits.add(name)
                    await self.ledger.append(
                        kind="ended", target=name, start_mono=end["mono"], end_mono=end["mono"], verified_start=True,
                        verified_end=True, detail=node.exit_code,
                    )  # fmt: skip
            previous_waits, start = waits, end

    def _backend_may_serve(self, node: str, port: int) -> bool:
        """Return whether the backend whose client has this port may serve a node.

        Through a pooler, that is every backend that serves no other node. Port 0 is a backend that serves any client.
        """
        proxy_ports = {name: proxy.ports for name, proxy in self.proxies.items()}
        if port in proxy_ports[node] or port == 0:
            return True
        return self.bouncer is not None and not any(port in each for each in proxy_ports.values())

    async def _inject_until(self, end: float) -> None:
        kinds = [*self.plan.faults, *(["client"] if self.proxies and "cut" in self.plan.faults else [])]
        while self.plan.elapsed < end - 6:
            if not self._remaining_kinds:
                self._remaining_kinds = list(kinds)
                self.rng.shuffle(self._remaining_kinds)
            kind = self._remaining_kinds.pop()
            if not self._ends_before(end, kind):
                continue
            if kind in EXCLUSIVE_FAULTS:
                async with self._exclusive:
                    await self._inject(kind, MAX_CONCURRENT_FAULTS, end)
            else:
                await self._inject(kind, 1, end)
            await asyncio.sleep(self.rng.uniform(0.5, MAX_FAULT_PAUSE_SECONDS))

    def _ends_before(self, end: float, kind: str) -> bool:
        """Return whether a fault that starts now ends in the faulted phase."""
        return self.plan.elapsed + MAX_FAULT_SECONDS.get(kind, 7.0) < end

    async def _inject(self, kind: str, slot_count: int, end: float) -> None:
        """Inject a fault that occupies this many slots, or put it back if it has no target now.

        It is omitted if the wait for the slots was so long that it would not end in time.
        """
        for _ in range(slot_count):
            await self._slots.acquire()
        try:
            if not self._ends_before(end, kind):
                return
            target = self._choose_target(kind)
            if target is None:
                self._remaining_kinds.insert(0, kind)
                return
            self.faulted_targets.add(target)
            try:
                await (injectors.cut if kind == "client" else injectors.INJECTORS[kind])(self, target)
            finally:
                self.faulted_targets.discard(target)
        finally:
            for _ in range(slot_count):
                self._slots.release()

    def _choose_target(self, kind: str) -> str | None:
        """Return a target without a fault, or None: never all nodes simultaneously, unless there is only one."""
        if kind in STORE_WIDE_FAULTS or kind == "client":
            name = "client" if kind == "client" else "store"
            return None if name in self.faulted_targets else name
        if kind == "pool":  # only the last node connects through PgBouncer
            return None if self.plan.nodes[-1] in self.faulted_targets else self.plan.nodes[-1]
        free = [name for name in self.nodes if name not in self.faulted_targets]
        return self.rng.choice(free) if len(free) > 1 or len(self.nodes) == 1 else None

    async def record_fault(
        self, kind: str, target: str, start: dict[str, int], took_effect: bool, healed: bool, detail: Any
    ) -> None:
        """Record a fault that began at `start` and ends now."""
        self.fault_count += 1
        await self.ledger.append(
            id=self.fault_count, kind=kind, target=target, start_mono=start["mono"], end_mono=read_clocks()["mono"],
            verified_start=took_effect, verified_end=healed, detail=detail,
        )  # fmt: skip

    async def restart(self, node: NodeProcess) -> bool:
        """Start a node, with retries because the database may be down; return whether it is ready."""
        for _ in range(10):
            node.launch()
            if await node.ready():
                return True
            node.kill()
            await asyncio.sleep(0.3)
        return False

    async def upgrade_again(self) -> int:
        """Run `timebell db upgrade`; return 0, or 1 if it failed."""
        try:
            await self._run_timebell("db", "upgrade")
        except RuntimeError:
            return 1
        return 0

    async def _run_timebell(self, *arguments: str) -> str:
        """Run a command on the database; return its output. Raises RuntimeError if it fails."""
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "timebell.cli.main", *arguments, "--database", self.direct,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, cwd=self.plan.out,
            env=environment(self.plan),
        )  # fmt: skip
        reset_priority(command.pid)
        output, _ = await command.communicate()
        if command.returncode:
            raise RuntimeError(f"timebell {' '.join(arguments)} ended with {command.returncode}")
        return output.decode().strip()

    async def refuses_writes(self, seconds: float) -> bool:
        """Return whether the database refuses a row, or is unreachable, within this many seconds."""
        deadline = self.plan.elapsed + seconds
        while self.plan.elapsed < deadline:
            try:
                await asyncio.wait_for(asyncio.to_thread(insert_filler_row, self.direct), 5)
            except Exception:
                return True
            await asyncio.sleep(0.05)
        return False


async def main(plan: Plan) -> None:
    """Run until SIGTERM."""
    raise_priority()
    nemesis, stopped = Nemesis(plan), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        await nemesis.start()
        while not load_plan(plan.out).began and not stopped.is_set():
            await asyncio.sleep(0.02)
        nemesis.plan = load_plan(plan.out)
        injecting = asyncio.create_task(nemesis.inject_faults())
        stopping, watching = asyncio.create_task(stopped.wait()), asyncio.create_task(nemesis.watch_nodes())
        await asyncio.wait([injecting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if injecting.done():
            injecting.result()
            write_json(plan.path("healed.json"), {"at": nemesis.plan.elapsed})
        await stopped.wait()
        injecting.cancel()
        watching.cancel()
        await asyncio.wait([injecting])  # a fault reverts what it did
    finally:
        await nemesis.close()
