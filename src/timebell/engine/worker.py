"""The worker claims due jobs and starts them: it sleeps to the next due instant, claims, starts, looks again.

Claiming is starting. A node claims no more than it has hands free, and only what it can take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from timebell.engine.completer import Completer
from timebell.engine.context import Held, Known, Node
from timebell.engine.runner import Runner
from timebell.model.job import Attempt
from timebell.model.routes import Routes, route_by_name
from timebell.store.sql import admission, at_once, jobs, limits, schedules

log = logging.getLogger("timebell.worker")

SHORTEST, LONGEST = 0.0005, 0.25  # seconds to wait when what is due is another node's just now


@dataclass(slots=True)
class Hands:
    """Places for attempts of one sort: on the event loop, or in threads."""

    routes: Routes
    free: int


class Worker:
    """The service; `step` is one look at the store and the claims it leads to."""

    def __init__(self, node: Node, completer: Completer) -> None:
        self.node = node
        self.runner = Runner(node)
        self.completer = completer
        delivered = Routes(
            frozenset(f"@{kind}" for kind in node.targets if kind != "handler")
            | frozenset(route_by_name(kind) for kind in node.named)
        )
        self.hands = [
            Hands(node.handlers.routes(is_async=True) | delivered, node.options.slots),
            Hands(node.handlers.routes(is_async=False), node.options.threads),
        ]
        self._taking = [hands for hands in self.hands if hands.routes]
        self.tasks: set[asyncio.Task[None]] = set()
        self.claiming = False
        self._lent = 0
        self._behind = True
        self._pause = SHORTEST
        self._rounds = 0
        self._served: dict[tuple[str, int], tuple[int, str]] = {}

    @property
    def routes(self) -> Routes:
        """All that this node can take."""
        return self.hands[0].routes | self.hands[1].routes

    @property
    def starting(self) -> bool:
        """Whether something may start that this node does not hold yet."""
        return self.claiming or self._lent > 0

    @contextmanager
    def room(self) -> Iterator[at_once.Room]:
        """Places that are kept for jobs which start as they are made: up to half of all, as others may come due
        meanwhile; none while some wait for a place, or where only a claim can tell whether they may start."""
        hands, node = self.hands[0], self.node
        closed = self._behind or self.claiming or node.limited or not hands.routes
        most = 0 if closed else min(hands.free, node.options.slots // 2)
        hands.free -= most
        self._lent += most
        try:
            yield at_once.Room(node.id, hands.routes, most)
        finally:
            self._lent -= most
            hands.free += most
            if 0 < hands.free <= most:  # none was free, as in `_attempt`
                node.working.poke()

    async def step(self) -> datetime | None:
        """Claim what is due and fits; when to look again (None: when poked)."""
        node = self.node
        free = [hands for hands in self._taking if hands.free > 0]
        if node.stopping or not free:
            self._behind = True
            return None
        if node.limited:
            await node.store.run(admission.let_go, node.clock.now())
        routes = free[0].routes if len(free) == 1 else self.routes
        lanes = await node.store.hot(jobs.lanes, routes, node.clock.now())
        now = node.clock.now()
        due, later = self._due(lanes, now)
        claimed, all_of_it = 0, not node.store.many_nodes  # else others claim too, by the server's clock
        self.claiming, behind = True, False
        try:
            for at, lane in enumerate(due, 1):
                beside = 1 if at == len(due) else 1 + sum(other.priority == lane.priority for other in due[at:])
                for hands in free:
                    most = min(-(-hands.free // beside), node.options.batch)
                    count = await self._claim(lane, hands, most)
                    claimed += count
                    behind = behind or count >= most or lane.limited or lane.crowded
                    all_of_it = all_of_it and count < most and not (lane.limited or lane.crowded)
        finally:
            self.claiming, self._behind = False, behind
        if claimed:
            node.counters.found.observe(claimed)
            self._pause = SHORTEST
            if not all_of_it:
                return now
        if claimed:
            later += [lane.later for lane in due if lane.later is not None]
        elif due:
            later.append(node.clock.now() + timedelta(seconds=self._pause))
            self._pause = min(self._pause * 2, LONGEST)
            node.counters.claim_conflicts += any(hands.free for hands in free)
        if node.limited:  # of those that wait for their minute to be over some may start
            later.append(now + timedelta(seconds=1))
        if not node.listening:
            later.append(now + timedelta(seconds=node.options.poll))
        return min(later, default=None)

    def _due(self, lanes: Sequence[jobs.Lane], now: datetime) -> tuple[list[jobs.Lane], list[datetime]]:
        """The lanes with something to start, in order; and when something is to start in the others."""
        due: list[jobs.Lane] = []
        later: list[datetime] = []
        for lane in lanes:
            if (starts_at := lane.starts_at) is not None:
                if starts_at <= now:
                    due.append(lane)
                else:
                    later.append(starts_at)
        if len(due) > 1:
            # Those of one priority share the hands; who was served longest ago goes first, if there are too few for all
            due.sort(key=lambda lane: (lane.priority, self._served.get((lane.queue, lane.priority), (0, ""))[0]))
        return due, later

    async def _claim(self, lane: jobs.Lane, hands: Hands, most: int) -> int:
        """Claim and start up to so many jobs of a lane; how many there were."""
        node = self.node
        if most < 1 or node.stopping:
            return 0
        store, what = node.store, (lane, hands.routes, node.id, most)
        tenants = await self._turns(lane, most)
        sent = node.clock.monotonic()
        now, put_back = node.clock.now(), 0
        take = limits.claim_limited if lane.limited else limits.claim_shares
        if node.limited:
            claim = (take, *what, now, tenants)
            attempts, put_back = await store.run(admission.claim_admitted, node.limited, now, *claim)
        elif lane.limited or tenants:
            attempts = await store.run(take, *what, now, tenants)
        else:
            attempts = await store.hot(jobs.claim, *what, now)
        await self._learn(attempts)
        self.start(attempts, hands, sent)
        return len(attempts) + put_back

    def start(self, attempts: Sequence[Attempt], hands: Hands, sent: float) -> None:
        """Hold these attempts, and begin them; their leases are counted from before they were asked for."""
        lease_until, loop = sent + self.node.options.lease, asyncio.get_running_loop()
        for attempt in attempts:
            held = Held(attempt, lease_until)
            self.node.held[attempt.id] = held
            hands.free -= 1
            held.task = loop.create_task(self._attempt(held, hands))
            self.tasks.add(held.task)
        self.node.counters.started += len(attempts)

    async def _turns(self, lane: jobs.Lane, most: int) -> list[str]:
        """The tenants that share a late lane, those first whose turn is next; none where nobody has to."""
        self._rounds += 1
        key = lane.queue, lane.priority
        tenants: list[str] = []
        after = self._served.get(key, (0, ""))[1]
        if lane.crowded:
            now = self.node.clock.now()
            tenants, after = await self.node.store.hot(limits.turns_of, lane, after, most, now)
        if len(self._served) > 10_000:
            self._served.clear()
        self._served[key] = self._rounds, after
        return tenants

    async def _learn(self, attempts: Sequence[Attempt]) -> None:
        """Know the recurrence of every schedule that these jobs come from."""
        known = self.node.known
        unknown: set[tuple[str, int]] = set()
        for attempt in attempts:
            if attempt.schedule_id is not None and attempt.revision is not None:
                key = attempt.schedule_id, attempt.revision
                if key not in known:
                    unknown.add(key)
        if unknown:
            if len(known) > 100_000:
                known.clear()
            try:
                found = await self.node.store.run(schedules.revisions_of, unknown)
                known.update({key: Known(*row) for key, row in found.items()})
            except Exception:  # the jobs are claimed: they run, if without knowing what is next
                log.exception("the schedules of %d jobs cannot be read", len(attempts))

    async def _attempt(self, held: Held, hands: Hands) -> None:
        """One attempt, from claim to the completer; its place is free as soon as the work is over."""
        try:
            ending = await self.runner.run(held)
        except BaseException:
            self.node.let_go(held.attempt.id, held.attempt.number)  # its lease runs out, and it is taken back
            raise
        finally:
            self.tasks.discard(held.task)
            hands.free += 1
            if hands.free == 1:  # none was free: what is due for these hands was not looked at
                self.node.working.poke()
        if ending is None:
            self.node.let_go(held.attempt.id, held.attempt.number)
        else:
            self.completer.put(ending)
