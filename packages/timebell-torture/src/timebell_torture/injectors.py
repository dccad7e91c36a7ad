"""The faults, one function each: inject, verify the effect, heal, verify the recovery, and record the fault.

Each is called with its target: a node's name, `store`, `client` or `pool`. A fault without a verified effect does not
count.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from timebell_torture import capabilities
from timebell_torture.ledger import RunningAttempts, read_clocks
from timebell_torture.postgres import PostgresServer, wall_offset
from timebell_torture.proxy import CUT_MODES

if TYPE_CHECKING:
    from timebell_torture.nemesis import Nemesis, Server

FAIL_POINTS = (
    "claim_batch.done", "fire_due_schedules.1", "fire_due_schedules.3", "fire_due_schedules.commit",
    "fire_due_schedules.done", "complete_jobs.1", "complete_jobs.done", "schedule_retries.1", "complete_serial.1",
    "complete_serial.2", "complete_serial.commit", "complete_serial.done", "create.1", "create.2", "cancel.1",
    "reschedule.1",
)  # fmt: skip
LEASE_SECONDS = 15.0
NODE_CLOCK_STEPS_SECONDS = (-3600, -30, 5, 600, 86_400)
DATABASE_CLOCK_STEPS_SECONDS = (-4.0, -3.0, 3.0, 4.0)  # instants more than 5 s in the past are refused
CLOCK_CACHE_SECONDS = 1.2  # until every process of the server has reread the faketime file
CLOCK_TOLERANCE_SECONDS = 0.5
MAX_BRIEF_OUTAGE_SECONDS = 7.0  # with a heartbeat of 5 s shorter than a lease, so results are written in time
MAX_IDLE_SECONDS = 4.0  # until a fault that needs running attempts is given up
LONG_ATTEMPT_SECONDS = 0.3  # an attempt that has lasted for this long probably lasts for another second
DETECTION_SECONDS = 5.0  # within which every process compares what it wrote with a promoted server
Injector = Callable[["Nemesis", str], Awaitable[None]]


async def kill(nemesis: Nemesis, target: str) -> None:
    """Kill a node (SIGKILL) and restart it."""
    node, start = nemesis.nodes[target], read_clocks()
    node.send(signal.SIGKILL)
    took_effect = await node.wait_for_exit(5) and node.exit_code == -signal.SIGKILL
    await asyncio.sleep(nemesis.rng.uniform(0.2, 4))
    await nemesis.record_fault("kill", target, start, took_effect, await nemesis.restart(node), None)


async def freeze(nemesis: Nemesis, target: str) -> None:
    """Stop a node (SIGSTOP) for longer than a lease."""
    node, start = nemesis.nodes[target], read_clocks()
    node.send(signal.SIGSTOP)
    await asyncio.sleep(0.05)
    took_effect = node.is_frozen
    seconds = nemesis.rng.uniform(LEASE_SECONDS + 1, LEASE_SECONDS + 4)
    await asyncio.sleep(seconds)
    node.send(signal.SIGCONT)
    await asyncio.sleep(0.05)
    await nemesis.record_fault(
        "freeze", target, start, took_effect, node.is_alive and not node.is_frozen, round(seconds, 1)
    )


async def churn(nemesis: Nemesis, target: str) -> None:
    """Stop a node cleanly (SIGTERM) and start it again."""
    node, start = nemesis.nodes[target], read_clocks()
    node.send(signal.SIGTERM)
    left_cleanly = await node.wait_for_exit(40) and node.exit_code == 0
    code = node.exit_code
    node.kill()
    await asyncio.sleep(nemesis.rng.uniform(0.2, 3))
    await nemesis.record_fault("churn", target, start, left_cleanly, await nemesis.restart(node), code)


async def point(nemesis: Nemesis, target: str) -> None:
    """Kill a node (SIGKILL) between two statements, or directly before or after a commit."""
    node, name = nemesis.nodes[target], nemesis.rng.choice(FAIL_POINTS)
    node.fail_point.write_text(name)
    took_effect = await node.wait_for_exit(8)
    start = read_clocks()
    node.fail_point.unlink(missing_ok=True)
    if not took_effect:  # the node did not pass this fail point
        return
    code = node.exit_code
    await asyncio.sleep(nemesis.rng.uniform(0.2, 2))
    await nemesis.record_fault("point", target, start, code == -signal.SIGKILL, await nemesis.restart(node), name)


async def clock(nemesis: Nemesis, target: str) -> None:
    """Shift the wall clock of a node, and back."""
    node, step, start = nemesis.nodes[target], nemesis.rng.choice(NODE_CLOCK_STEPS_SECONDS), read_clocks()
    node.set_clock(step)
    took_effect = await _wait_for(5, lambda: abs(node.clock_offset - step) < CLOCK_TOLERANCE_SECONDS)
    await asyncio.sleep(nemesis.rng.uniform(2, 12))
    node.set_clock(0)
    healed = await _wait_for(5, lambda: abs(node.clock_offset) < CLOCK_TOLERANCE_SECONDS)
    await nemesis.record_fault("clock", target, start, took_effect, healed and node.is_alive, step)


async def dbstop(nemesis: Nemesis, target: str) -> None:
    """Stop the database immediately, as in a crash, and restart it."""
    assert nemesis.server is not None
    start = read_clocks()
    await asyncio.to_thread(nemesis.server.stop)
    took_effect = not nemesis.server.is_listening()
    await asyncio.sleep(nemesis.rng.uniform(0.1, 4))
    await asyncio.to_thread(nemesis.server.start)
    await nemesis.record_fault("dbstop", target, start, took_effect, nemesis.server.is_listening(), None)


async def dbclock(nemesis: Nemesis, target: str) -> None:
    """Shift the wall clock of the database, and back."""
    assert isinstance(nemesis.server, PostgresServer)
    step, start = nemesis.rng.choice(DATABASE_CLOCK_STEPS_SECONDS), read_clocks()
    nemesis.server.set_clock(step)
    took_effect = await _reports_offset(nemesis.server.url(), step)
    await asyncio.sleep(nemesis.rng.uniform(8, 15))
    nemesis.server.set_clock(0)
    healed = await _reports_offset(nemesis.server.url(), 0.0)
    await nemesis.record_fault("dbclock", target, start, took_effect, healed, step)


async def _reports_offset(url: str, step: float) -> bool:
    """Return whether the database reports this clock offset within a few seconds."""
    await asyncio.sleep(CLOCK_CACHE_SECONDS)
    for _ in range(5):
        if abs(await wall_offset(url) - step) < CLOCK_TOLERANCE_SECONDS:
            return True
        await asyncio.sleep(0.3)
    return False


async def diskfull(nemesis: Nemesis, target: str) -> None:
    """Fill the disk of the database, and free it again. PostgreSQL may crash, and is then restarted."""
    start = read_clocks()
    ballast = await asyncio.to_thread(capabilities.fill_disk, nemesis.disk)
    took_effect = await nemesis.refuses_writes(8)
    await asyncio.sleep(nemesis.rng.uniform(0.5, 3))
    ballast.unlink()
    healed = True
    if nemesis.server is not None:
        await asyncio.to_thread(nemesis.server.restart_if_stopped)
        healed = nemesis.server.is_listening()
    await nemesis.record_fault("diskfull", target, start, took_effect, healed, None)


async def migrate(nemesis: Nemesis, target: str) -> None:
    """Run `timebell db upgrade` under load: it must change nothing and block nothing."""
    start = read_clocks()
    code = await nemesis.upgrade_again()
    await nemesis.record_fault("migrate", target, start, code == 0, code == 0, code)


async def cut(nemesis: Nemesis, target: str) -> None:
    """Hold the traffic between a node and the database, or drop the replies to commits."""
    proxy, start = nemesis.proxies[target], read_clocks()
    mode = nemesis.rng.choice(CUT_MODES) if target != "client" else nemesis.rng.choice(("replies", "replies", "down"))
    proxy.cut(mode)
    await asyncio.sleep(nemesis.rng.uniform(2, 5) if target == "client" else nemesis.rng.uniform(3, 20))
    took_effect = proxy.affected_count > 0
    proxy.heal()
    kind = "client" if target == "client" else "cut"
    await nemesis.record_fault(kind, target, start, took_effect, proxy.mode is None, mode)


async def drop(nemesis: Nemesis, target: str) -> None:
    """Have the kernel drop packets between a node and the database, in one or both directions."""
    port, start = nemesis.proxies[target].port, read_clocks()
    direction = nemesis.rng.choice(("up", "down", "both"))
    ports = {"up": ("dport",), "down": ("sport",), "both": ("dport", "sport")}[direction]
    table = ("inet", f"torture_{target}")
    capabilities.filter_packets("add", "table", *table)
    try:
        capabilities.filter_packets("add", "chain", *table, "input", "{ type filter hook input priority 0; }")
        for port_field in ports:
            capabilities.filter_packets("add", "rule", *table, "input", "tcp", port_field, str(port), "counter", "drop")
        await asyncio.sleep(nemesis.rng.uniform(3, 20))
        packet_counts = re.findall(r"packets (\d+)", capabilities.filter_packets("list", "table", *table))
    finally:
        capabilities.filter_packets("delete", "table", *table)
    await nemesis.record_fault("drop", target, start, any(map(int, packet_counts)), True, direction)


async def pool(nemesis: Nemesis, target: str) -> None:
    """Kill the PgBouncer between a node and the database (SIGKILL), and restart it."""
    assert nemesis.bouncer is not None
    start = read_clocks()
    took_effect = nemesis.bouncer.kill()
    await asyncio.sleep(nemesis.rng.uniform(0.2, 3))
    nemesis.bouncer.start()
    healed = await _wait_for(5, nemesis.bouncer.is_listening)
    if nemesis.plan.store == "pgbouncer":  # then every node uses it
        target = "store"
    await nemesis.record_fault("pool", target, start, took_effect, healed, None)


async def strand(nemesis: Nemesis, target: str) -> None:
    """Let the host of the database go silent: no connection is answered or closed; then another one takes its place.

    It begins when there are connections, which are missing for a moment after another outage. The node behind PgBouncer
    is not affected, unless all clients use PgBouncer: its own host goes silent then.
    """
    proxies = nemesis.server_proxies() or list(nemesis.proxies.values())
    if not await _wait_for(MAX_IDLE_SECONDS, lambda: any(proxy.connection_count for proxy in proxies)):
        return
    start, stranded_count = read_clocks(), sum(proxy.connection_count for proxy in proxies)
    for proxy in proxies:
        proxy.strand()
    await asyncio.sleep(nemesis.rng.uniform(2, MAX_BRIEF_OUTAGE_SECONDS))
    for proxy in proxies:
        proxy.heal()
    await nemesis.record_fault("strand", target, start, True, True, stranded_count)


async def read_only(nemesis: Nemesis, target: str) -> None:
    """Make the database refuse writes, like a standby before its promotion, until an attempt has ended meanwhile.

    It begins while an attempt runs: the results of a database without work cannot be lost.
    """
    assert nemesis.server is not None
    attempts = RunningAttempts(nemesis.plan.path("effect.jsonl"))
    if not await _wait_for(MAX_IDLE_SECONDS, lambda: bool(attempts.longer_than(LONG_ATTEMPT_SECONDS))):
        return
    start = read_clocks()
    await asyncio.to_thread(nemesis.server.refuse_writes, True)
    took_effect = await nemesis.refuses_writes(2)
    interrupted = attempts.longer_than(0)
    took_effect &= await _wait_for(2, lambda: bool(interrupted - attempts.longer_than(0)))
    await asyncio.sleep(nemesis.rng.uniform(0.5, MAX_BRIEF_OUTAGE_SECONDS - 5))
    await asyncio.to_thread(nemesis.server.refuse_writes, False)
    healed = not await nemesis.refuses_writes(0.5)
    await nemesis.record_fault("read-only", target, start, took_effect, healed, None)


async def promote(nemesis: Nemesis, target: str) -> None:
    """Kill the database, and promote its synchronous standby: nothing acknowledged may be lost."""
    standby = await nemesis.add_standby()
    assert nemesis.server is not None
    start = read_clocks()
    took_effect = await _kill_server(nemesis.server)
    await asyncio.to_thread(standby.promote)
    await nemesis.fail_over_to(standby)
    await nemesis.record_fault("promote", target, start, took_effect, not await nemesis.refuses_writes(0.5), None)


async def rewind(nemesis: Nemesis, target: str) -> None:
    """Kill the database, and promote a standby that lacks the last seconds, which are lost.

    The detail is the number of these seconds.
    """
    standby = await nemesis.add_standby()
    assert nemesis.server is not None
    start = read_clocks()
    await asyncio.to_thread(nemesis.server.stop_waiting_for_standbys)
    # A replica of MariaDB that restarts forgets what it has received but not replayed.
    await asyncio.to_thread(standby.wait_until_replayed, await asyncio.to_thread(nemesis.server.position))
    await asyncio.to_thread(standby.stop)
    await asyncio.sleep(nemesis.rng.uniform(1, 3))
    took_effect = await _kill_server(nemesis.server)
    lost_seconds = (read_clocks()["mono"] - start["mono"]) / 1e9
    await asyncio.to_thread(standby.start)
    await asyncio.to_thread(standby.promote)
    await nemesis.fail_over_to(standby)
    healed = not await nemesis.refuses_writes(0.5)
    await nemesis.record_fault("rewind", target, start, took_effect, healed, lost_seconds)
    await asyncio.sleep(DETECTION_SECONDS)  # a process that ends before cannot report what it wrote


async def _kill_server(server: Server) -> bool:
    """Kill the database; return whether nothing listens on its port any more."""
    await asyncio.to_thread(server.kill)
    return await _wait_for(5, lambda: not server.is_listening())


async def _wait_for(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


INJECTORS: dict[str, Injector] = {
    each.__name__.replace("_", "-"): each
    for each in (
        kill, freeze, dbstop, cut, churn, point, clock, dbclock, diskfull, migrate, drop, pool, strand, read_only,
        promote, rewind,
    )
}  # fmt: skip
