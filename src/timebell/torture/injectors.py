"""The faults, one function each: break, make sure that it bit, heal, make sure of that too, and write it down.

Each is called with what it strikes: a node's name, or `store`, `client`, `pool`. What did not bite counts as none.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from timebell.torture import grounds
from timebell.torture.ledgers import clocks
from timebell.torture.postgres import Postgres, wall_offset
from timebell.torture.proxy import MODES

if TYPE_CHECKING:
    from timebell.torture.nemesis import Nemesis

POINTS = (
    "claim.done", "fire.1", "fire.3", "fire.commit", "fire.done", "end.1", "end.done", "retry.1", "end_in_turn.1",
    "end_in_turn.2", "end_in_turn.commit", "end_in_turn.done", "create.1", "create.2", "cancel.1", "reschedule.1",
)  # fmt: skip
LEASE = 15.0
STEPS = (-3600, -30, 5, 600, 86_400)  # seconds, of a node's clock
STORE_STEPS = (-4.0, -3.0, 3.0, 4.0)  # of the database's: what is more than 5 s in the past would be refused
CACHED = 1.2  # seconds until every process of the server has looked at its clock again
NEAR = 0.5  # seconds that a step may be off
Injector = Callable[["Nemesis", str], Awaitable[None]]


async def kill(nemesis: Nemesis, target: str) -> None:
    """kill -9, and another start."""
    node, start = nemesis.nodes[target], clocks()
    node.send(signal.SIGKILL)
    bit = await node.ended(5) and node.code == -signal.SIGKILL
    await asyncio.sleep(nemesis.chance.uniform(0.2, 4))
    await nemesis.note("kill", target, start, bit, await nemesis.restart(node), None)


async def freeze(nemesis: Nemesis, target: str) -> None:
    """SIGSTOP, for longer than a lease."""
    node, start = nemesis.nodes[target], clocks()
    node.send(signal.SIGSTOP)
    await asyncio.sleep(0.05)
    bit = node.stopped
    long = nemesis.chance.uniform(LEASE + 1, LEASE + 4)
    await asyncio.sleep(long)
    node.send(signal.SIGCONT)
    await asyncio.sleep(0.05)
    await nemesis.note("freeze", target, start, bit, node.alive and not node.stopped, round(long, 1))


async def churn(nemesis: Nemesis, target: str) -> None:
    """A node leaves in good order, and joins again."""
    node, start = nemesis.nodes[target], clocks()
    node.send(signal.SIGTERM)
    left = await node.ended(40) and node.code == 0
    code = node.code
    node.end()
    await asyncio.sleep(nemesis.chance.uniform(0.2, 3))
    await nemesis.note("churn", target, start, left, await nemesis.restart(node), code)


async def point(nemesis: Nemesis, target: str) -> None:
    """kill -9 between two statements, or right before or after a commit."""
    node, name = nemesis.nodes[target], nemesis.chance.choice(POINTS)
    node.point.write_text(name)
    bit = await node.ended(8)
    start = clocks()
    node.point.unlink(missing_ok=True)
    if not bit:  # nothing of the kind came by
        return
    code = node.code
    await asyncio.sleep(nemesis.chance.uniform(0.2, 2))
    await nemesis.note("point", target, start, code == -signal.SIGKILL, await nemesis.restart(node), name)


async def clock(nemesis: Nemesis, target: str) -> None:
    """A node's wall clock jumps, and jumps back."""
    node, step, start = nemesis.nodes[target], nemesis.chance.choice(STEPS), clocks()
    node.set_clock(step)
    bit = await _within(5, lambda: abs(node.clock_offset - step) < NEAR)
    await asyncio.sleep(nemesis.chance.uniform(2, 12))
    node.set_clock(0)
    healed = await _within(5, lambda: abs(node.clock_offset) < NEAR)
    await nemesis.note("clock", target, start, bit, healed and node.alive, step)


async def dbstop(nemesis: Nemesis, target: str) -> None:
    """An immediate stop of the database, as in a crash, and its recovery."""
    assert nemesis.server is not None
    start = clocks()
    await asyncio.to_thread(nemesis.server.stop)
    bit = not nemesis.server.answers()
    await asyncio.sleep(nemesis.chance.uniform(0.1, 4))
    await asyncio.to_thread(nemesis.server.start)
    await nemesis.note("dbstop", target, start, bit, nemesis.server.answers(), None)


async def dbclock(nemesis: Nemesis, target: str) -> None:
    """The database's wall clock jumps, and jumps back."""
    assert isinstance(nemesis.server, Postgres)
    step, start = nemesis.chance.choice(STORE_STEPS), clocks()
    nemesis.server.set_clock(step)
    bit = await _tells(nemesis.server.url(), step)
    await asyncio.sleep(nemesis.chance.uniform(8, 15))
    nemesis.server.set_clock(0)
    healed = await _tells(nemesis.server.url(), 0.0)
    await nemesis.note("dbclock", target, start, bit, healed, step)


async def _tells(url: str, step: float) -> bool:
    """Whether the database says, within some seconds, that its clock is so far off."""
    await asyncio.sleep(CACHED)
    for _ in range(5):
        if abs(await wall_offset(url) - step) < NEAR:
            return True
        await asyncio.sleep(0.3)
    return False


async def diskfull(nemesis: Nemesis, target: str) -> None:
    """The disk of the database has no room left, until it has again. PostgreSQL may crash of it, and is started."""
    start = clocks()
    ballast = await asyncio.to_thread(grounds.fill, nemesis.disk)
    bit = await nemesis.refuses_writes(8)
    await asyncio.sleep(nemesis.chance.uniform(0.5, 3))
    ballast.unlink()
    healed = True
    if nemesis.server is not None:
        await asyncio.to_thread(nemesis.server.revive)
        healed = nemesis.server.answers()
    await nemesis.note("diskfull", target, start, bit, healed, None)


async def migrate(nemesis: Nemesis, target: str) -> None:
    """`timebell db upgrade` while everything runs: it has to change nothing, and to hold nobody up."""
    start = clocks()
    code = await nemesis.upgrade_again()
    await nemesis.note("migrate", target, start, code == 0, code == 0, code)


async def cut(nemesis: Nemesis, target: str) -> None:
    """Hold what a node and the database say to each other, or lose the replies to commits."""
    proxy, start = nemesis.proxies[target], clocks()
    mode = nemesis.chance.choice(MODES) if target != "client" else nemesis.chance.choice(("replies", "replies", "down"))
    proxy.cut(mode)
    await asyncio.sleep(nemesis.chance.uniform(2, 5) if target == "client" else nemesis.chance.uniform(3, 20))
    bit = proxy.bit > 0
    proxy.heal()
    kind = "client" if target == "client" else "cut"
    await nemesis.note(kind, target, start, bit, proxy.mode is None, mode)


async def drop(nemesis: Nemesis, target: str) -> None:
    """The kernel drops the packets between a node and the database, one way or both."""
    port, start = nemesis.proxies[target].port, clocks()
    way = nemesis.chance.choice(("up", "down", "both"))
    ends = {"up": ("dport",), "down": ("sport",), "both": ("dport", "sport")}[way]
    table = ("inet", f"torture_{target}")
    grounds.filter_packets("add", "table", *table)
    try:
        grounds.filter_packets("add", "chain", *table, "way", "{ type filter hook input priority 0; }")
        for end in ends:
            grounds.filter_packets("add", "rule", *table, "way", "tcp", end, str(port), "counter", "drop")
        await asyncio.sleep(nemesis.chance.uniform(3, 20))
        counted = re.findall(r"packets (\d+)", grounds.filter_packets("list", "table", *table))
    finally:
        grounds.filter_packets("delete", "table", *table)
    await nemesis.note("drop", target, start, any(map(int, counted)), True, way)


async def pool(nemesis: Nemesis, target: str) -> None:
    """kill -9 of the PgBouncer that is between a node and the database, and another start."""
    assert nemesis.bouncer is not None
    start = clocks()
    bit = nemesis.bouncer.kill()
    await asyncio.sleep(nemesis.chance.uniform(0.2, 3))
    nemesis.bouncer.start()
    healed = await _within(5, nemesis.bouncer.answers)
    if nemesis.plan.store == "pgbouncer":  # then all go through it
        target = "store"
    await nemesis.note("pool", target, start, bit, healed, None)


async def _within(seconds: float, look: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not look():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.1)
    return True


ALL: dict[str, Injector] = {
    each.__name__: each
    for each in (kill, freeze, dbstop, cut, churn, point, clock, dbclock, diskfull, migrate, drop, pool)
}
