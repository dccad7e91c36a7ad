"""The pulse of a node: every few seconds it measures the clock, renews leases, and looks after the others.

A lease is a counter on the attempt. Its owner raises it; whoever watches judges its age by his own monotonic
clock. So no step of any wall clock can end a lease or make one last.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from math import inf

from timebell.engine.completer import Completer
from timebell.engine.leader.leader import Leader
from timebell.engine.node import Node
from timebell.engine.runner import mark
from timebell.model import decide
from timebell.model.job import Attempt, Ending, JobState
from timebell.model.payload import decode
from timebell.model.repair_report import Healed
from timebell.store.cluster import nodes, stalled_sessions
from timebell.store.jobs import claim, complete, unhandled_topics
from timebell.store.notifications import ARRIVALS
from timebell.store.tenancy import monthly_quota, tenant_limits
from timebell.store.transaction import SCHEDULES

log = logging.getLogger("timebell.pulse")

FAR = 0.5  # seconds of clock offset from which it is worth a look
CALLED_IN = 500  # attempts of outside workers that are looked at at once
AGAIN = 0.5  # seconds until what another transaction has locked is looked at again
STOP_WITHIN = 10.0  # seconds that an attempt has to stop when a later occurrence asks it to


class Pulse:
    """The service; `step` is one heartbeat."""

    def __init__(self, node: Node, completer: Completer, leader: Leader, announced: nodes.Node) -> None:
        self.node = node
        self.completer = completer
        self.leader = leader
        self.announced = announced
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}
        self._asked: dict[tuple[str, int], float] = {}
        self._over_at = inf  # when the next lease of another node is over, unless it is renewed
        self._locked = False  # whether there was something that others had locked

    async def start(self) -> None:
        """Before the first claim: know the time, be known, and take back what a dead engine left."""
        node = self.node
        await self._measure()
        if abs(ahead := node.clock.offset) > FAR:
            log.warning(
                "this node's clock is %.1f s %s the database's, which is the one that counts: check NTP here and there",
                abs(ahead), "behind" if ahead > 0 else "ahead of",
            )  # fmt: skip
        await node.store.run(nodes.announce, self.announced)
        await self._warn_of_newer_zone_data()
        await node.store.run(unhandled_topics.hear, self.announced.routes)
        node.limited = await node.store.run(tenant_limits.limited)
        node.metered = await node.store.run(monthly_quota.metered)
        if not node.store.many_nodes:  # its file is ours alone, so whatever runs there has no one
            rescued = await self._rescue(list(await node.store.run(claim.running)))
            node.healed += Healed({"lease": rescued})

    async def _warn_of_newer_zone_data(self) -> None:
        mine = self.announced.tzdata
        newer = [one for one in await self.node.store.run(nodes.listed) if one.tzdata > mine]
        if newer:
            log.warning(
                "this node has the zone data %s, and %s has %s: upgrade the tzdata package here",
                mine, newer[0].name, newer[0].tzdata,
            )  # fmt: skip

    async def step(self) -> datetime | None:
        """One heartbeat; when the next is."""
        node = self.node
        self._locked = False
        self._drop_lapsed()
        await self._measure()
        await self._renew()
        if ended := await node.store.hot(stalled_sessions.end):  # before all that may wait for what they have locked
            log.warning("sessions that fell silent in the middle of a statement were ended: %s", ended)
        self.announced = self._announcement()
        if await node.store.run(nodes.announce, self.announced) and not node.stopping:
            log.info("this node was asked to drain")
            node.stopping = True
            node.drain_asked.set()
        node.listening = await node.store.listen(self._told)
        rescued = await self._watch()
        node.healed += rescued  # not in one line: the sum before the wait would undo what others add meanwhile
        node.limited = await node.store.run(tenant_limits.limited)
        node.metered = await node.store.run(monthly_quota.metered)
        self.leader.alarm.poke()  # not in here: what it waits for must keep no lease from being renewed, or watched
        node.working.poke()
        node.planning.poke()
        pause = min(node.options.heartbeat, max(0.0, self._over_at - node.clock.monotonic()))
        if self._locked:
            pause = min(pause, AGAIN)
        if self._asked:
            pause = min(pause, max(0.0, min(self._asked.values()) + STOP_WITHIN - node.clock.monotonic()))
        return node.clock.now() + timedelta(seconds=pause)

    def _told(self, of: str) -> None:
        """Another process says that something is due sooner than this node knows, or wants to know what starts."""
        if of == ARRIVALS:
            if self.node.arrivals is not None:
                self.node.arrivals.asked()
            return
        self.node.working.poke()
        if of == SCHEDULES:
            self.node.planning.poke()

    def _announcement(self) -> nodes.Node:
        was, node = self.announced, self.node
        return nodes.Node(
            was.id, was.name, was.version, was.tzdata, was.routes, was.beat + 1, was.started_at, node.clock.now(),
            slots=node.options.slots, running=len(node.held), clock_ahead=round(-1000 * node.clock.offset),
        )  # fmt: skip

    async def _measure(self) -> None:
        clock = self.node.clock
        sent = clock.monotonic()
        reading = await self.node.store.reading()
        step = clock.discipline(reading, sent, clock.monotonic())
        if step is not None:
            self.node.counters.clock_steps += 1
            log.warning("the database's clock stepped by %.3f s; due times follow it", step.seconds)

    def _drop_lapsed(self) -> None:
        """Stop what this node may no longer do: attempts whose lease it could not renew in time."""
        now = self.node.clock.monotonic()
        for held in list(self.node.held.values()):
            if held.lease_until <= now:
                self._drop(held.attempt.id)

    def _drop(self, id_: str) -> None:
        held = self.node.held.get(id_)
        if held is None or held.task is None or held.task.done() or held.completing:
            return
        log.warning("the lease of job %s was lost; its attempt %d is stopped", id_, held.attempt.number)
        held.stop("lost")

    async def _renew(self) -> None:
        node = self.node
        clock = node.clock
        soon = clock.monotonic() + node.options.lease - node.options.heartbeat * 0.5
        aging = [
            (held.attempt.id, held.attempt.number)
            for held in node.held.values()
            if held.lease_until < soon and not held.completing and held.drop != "lost"
        ]
        if not aging:
            return
        sent = clock.monotonic()
        ours = await node.store.hot(complete.beat, aging, skip=self.completer.skip)
        left = [(id_, number, JobState.RUNNING) for id_, number in aging if id_ not in ours]
        locked = await node.store.hot(complete.still, left) if left and self.completer.skip else {}
        self._locked = self._locked or bool(locked)
        for id_, number in aging:
            held = node.held.get(id_)
            if held is None or held.attempt.number != number:  # over meanwhile
                continue
            if id_ in ours:
                held.lease_until = sent + node.options.lease
            elif id_ not in locked:
                self._drop(id_)

    async def look(self) -> Healed:
        """Watch the leases and hear what is held for this node, now: what that healed, and what others hold."""
        watched = await self._watch()
        freed = await self.node.store.run(unhandled_topics.hear, self.announced.routes)
        if freed:
            self.node.working.poke()
        return watched + Healed({"unheard": freed})

    async def _watch(self) -> Healed:
        """Take back attempts whose counter has stood still for a whole lease, and stop those that were asked to."""
        node = self.node
        now = node.clock.monotonic()
        running = await node.store.hot(claim.running)
        await self._stop([key for key, (_, stopping) in running.items() if stopping], now)
        held = {(one.attempt.id, one.attempt.number) for one in node.held.values()}
        seen: dict[tuple[str, int], tuple[int, float]] = {}
        dead = []
        for key, (beat, _) in running.items():
            if key in held:
                continue
            was = self._seen.get(key)
            seen[key] = was if was is not None and was[0] == beat else (beat, now)
            if now - seen[key][1] >= node.options.lease:
                dead.append(key)
        self._seen = seen
        ends = [since + node.options.lease for _, since in seen.values()]
        self._over_at = min((end for end in ends if end > now), default=inf)
        await self._call_in()
        rescued = await self._rescue(dead)
        return Healed({"lease": rescued}, {"leased": len(seen) - len(dead)})

    async def _stop(self, asked: list[tuple[str, int]], now: float) -> None:
        """Tell the attempts of this node that a later occurrence waits; end for them those that do not listen."""
        node = self.node
        self._asked = {key: self._asked.get(key, now) for key in asked}
        deaf = [key for key, since in self._asked.items() if now - since >= STOP_WITHIN]
        for id_, number in asked:
            held = node.held.get(id_)
            if held is None or held.attempt.number != number or held.drop or held.task is None or held.task.done():
                continue
            if node.can_stop(held.attempt):
                held.stop("stop")
        attempts = await node.store.run(claim.abandoned, deaf, node.clock.now()) if deaf else []
        at = node.clock.now()
        await self.completer.write([
            mark(attempt, decide.superseded(attempt.id, attempt.number, at), node.id) for attempt in attempts
        ])  # fmt: skip

    async def _call_in(self) -> None:
        """What outside workers were given and have not reported on in time has failed."""
        node = self.node
        now = node.clock.now()
        while True:
            late = await node.store.hot(claim.overdue, CALLED_IN, now)
            ended = []
            for attempt in late:
                retry = node.retry_of(attempt, decode(attempt.retry))
                error = f"Nothing was reported within its timeout of {node.timeout_of(attempt):g} s."
                ending = decide.after_failure(
                    attempt.id, attempt.number, attempt.tries, retry, now, "TIMEOUT", error
                )  # fmt: skip
                ended.append((attempt, mark(attempt, ending, node.id)))
            await self._write(ended)
            if len(late) < CALLED_IN or self._locked:
                return

    async def _rescue(self, keys: list[tuple[str, int]]) -> int:
        """Let abandoned attempts be tried again at once, or fail those that have used up their tries; how many."""
        if not keys:
            return 0
        node = self.node
        now = node.clock.now()
        ended = []
        for attempt in await node.store.run(claim.abandoned, keys, now):
            retry = node.retry_of(attempt, decode(attempt.retry))
            ending = decide.after_failure(
                attempt.id, attempt.number, attempt.tries, retry, now, "LEASE_LOST",
                "The node that ran it stopped answering.",
            )  # fmt: skip
            if ending.state is JobState.PENDING:
                ending.run_at = now
            ended.append((attempt, mark(attempt, ending, node.id)))
        rescued = await self._write(ended)
        node.counters.rescued += rescued
        if rescued:
            log.warning("%d attempts of nodes that stopped answering were taken back", rescued)
        return rescued

    async def _write(self, ended: list[tuple[Attempt, Ending]]) -> int:
        """Write the ends of attempts of others; how many. Those that are locked are found again."""
        locked = {ending.id for ending in await self.completer.write([ending for _, ending in ended])}
        for attempt, ending in ended:
            if ending.id not in locked:
                self.node.counters.came_to(attempt.topic, ending)
        self._locked = self._locked or bool(locked)
        return len(ended) - len(locked)
