"""The worker claims due jobs and starts them: it sleeps to the next due instant, claims, starts, looks again.

Claiming is starting. A node claims no more than it has hands free, and only what it can take.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime, timedelta

from timebell.engine.completer import Completer
from timebell.engine.context import Held, Known, Node
from timebell.engine.runner import Runner
from timebell.model.job import Attempt, Ending
from timebell.model.routes import Routes, route_by_name
from timebell.store.sql import admission, jobs, limits, schedules

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
        self._pause = SHORTEST
        self._rounds = 0
        self._served: dict[tuple[str, int], tuple[int, str]] = {}

    @property
    def routes(self) -> Routes:
        """All that this node can take."""
        return self.hands[0].routes | self.hands[1].routes

    async def step(self) -> datetime | None:
        """Claim what is due and fits; when to look again (None: when poked)."""
        node = self.node
        free = [hands for hands in self._taking if hands.free > 0]
        if node.stopping or not free:
            return None
        if node.limited:
            await node.store.run(admission.let_go, node.clock.now())
        routes = free[0].routes if len(free) == 1 else self.routes
        lanes = await node.store.hot(jobs.lanes, routes, node.clock.now())
        now = node.clock.now()
        due, later = self._due(lanes, now)
        claimed, all_of_it = 0, not node.store.many_nodes  # else others claim too, by the server's clock
        self.claiming = True
        try:
            for at, lane in enumerate(due, 1):
                beside = 1 if at == len(due) else 1 + sum(other.priority == lane.priority for other in due[at:])
                for hands in free:
                    most = min(-(-hands.free // beside), node.options.batch)
                    count = await self._claim(lane, hands, most)
                    claimed += count
                    all_of_it = all_of_it and count < most and not (lane.limited or lane.crowded)
        finally:
            self.claiming = False
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
        lease_until = sent + node.options.lease
        started = [Held(attempt, lease_until, self.runner.completes) for attempt in attempts]
        for held in started:
            node.held[held.attempt.id] = held
        hands.free -= len(started)
        self._begin(started, hands)
        node.counters.started += len(started)
        return len(attempts) + put_back

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

    def _begin(self, started: Iterable[Held], hands: Hands) -> None:
        """Give each a task, but for those in a row that are likely over with their first step: they share one."""
        sharing: deque[Held] = deque()
        for held in started:
            held.lone = self.runner.lone(held.attempt)
            if held.lone is not None and held.lone.at_once:
                sharing.append(held)
                continue
            if sharing:
                self._start(sharing, hands)
                sharing = deque()
            self._start(deque((held,)), hands)
        if sharing:
            self._start(sharing, hands)

    def _start(self, waiting: deque[Held], hands: Hands) -> None:
        task = asyncio.get_running_loop().create_task(self._attempt(waiting, hands))
        self.tasks.add(task)
        for held in waiting:
            held.task = task

    async def _attempt(self, waiting: deque[Held], hands: Hands) -> None:
        """Attempts, from claim to the completer; a place is free as soon as the work is over.

        One that is not over with its first step keeps the task, and those behind it go on in others.
        """
        task, clean = asyncio.current_task(), copy_context()
        held: Held | None = None
        endings: list[Ending] = []
        try:
            try:
                if self.runner.at_once(waiting, clean, endings):
                    held = waiting.popleft()
                    if held.lone is not None:
                        held.lone.at_once = False  # nor are those behind it, perhaps: they get tasks of their own
            except BaseException:
                self._lose(waiting.popleft(), hands)
                raise
            finally:
                if endings:
                    self._free(len(endings), hands)
                    self.completer.put(*endings)
                if waiting:
                    clean.run(self._begin, waiting, hands)
            if held is None:
                return
            try:
                ending = await self.runner.run(held)
            except BaseException:
                self._lose(held, hands)
                raise
            self._free(1, hands)
            if ending is None:
                self.node.let_go(held.attempt.id, held.attempt.number)
            else:
                self.completer.put(ending)
        finally:
            if task is not None:
                self.tasks.discard(task)

    def _lose(self, held: Held, hands: Hands) -> None:
        self.node.let_go(held.attempt.id, held.attempt.number)  # its lease runs out, and it is taken back
        self._free(1, hands)

    def _free(self, count: int, hands: Hands) -> None:
        """Places are free again."""
        hands.free += count
        if 0 < hands.free <= count:  # none was: what is due for these hands was not looked at
            self.node.working.poke()
