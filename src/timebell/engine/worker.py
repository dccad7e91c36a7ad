"""The worker claims due jobs and starts them: it sleeps to the next due instant, claims, starts, looks again.

Claiming is starting. A node claims no more than it has hands free, and only what it can take.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from timebell.engine.completer import Completer
from timebell.engine.node import Held, Known, Node
from timebell.engine.queue_scanner import Looking
from timebell.engine.runner import Runner
from timebell.engine.upcoming_claims import Foresight
from timebell.model.job import Attempt, Ending
from timebell.model.routes import Routes, route_by_name
from timebell.store.jobs import claim as job_claim
from timebell.store.jobs import queue_limits, start_on_insert
from timebell.store.schedules import schedules
from timebell.store.tenancy import tenant_limits

log = logging.getLogger("timebell.worker")

AT_ONCE = 0.05  # seconds for which lanes with plenty to start are claimed from again before a new look
SHORTEST, LONGEST = 0.0005, 0.25  # seconds to wait when what is due is another node's just now


@dataclass(slots=True)
class Hands:
    """Places for attempts of one sort: on the event loop, or in threads."""

    routes: Routes
    free: int
    most: int
    """How many are claimed at once: not all, so that some run while others are claimed."""


class Taken(NamedTuple):
    """What one claim started, and how many it had to put back; the lease is to the monotonic second."""

    attempts: Sequence[Attempt]
    put_back: int = 0
    lease_until: float = 0.0


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
            Hands(routes, places, min(-(-places // 2), node.options.batch))
            for routes, places in (
                (node.handlers.routes(is_async=True) | delivered, node.options.slots),
                (node.handlers.routes(is_async=False), node.options.threads),
            )
        ]
        self._taking = [hands for hands in self.hands if hands.routes]
        self.tasks: set[asyncio.Task[None]] = set()
        self.claiming = False
        self.foresight = Foresight()
        self.looking = Looking(node)
        self.lent = 0
        """Places kept for what a planner may start."""
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
        return self.claiming or self.lent > 0

    @contextmanager
    def room(self) -> Iterator[start_on_insert.Room]:
        """Places that are kept for jobs which start as they are made: up to half of those that are free, as others may
        come due meanwhile, and who makes them may have to wait for somebody's lock; none while some wait for a place,
        or where only a claim can tell whether they may start."""
        hands, node = self.hands[0], self.node
        closed = self._behind or self.claiming or node.limited or not hands.routes
        most = 0 if closed else hands.free // 2
        hands.free -= most
        self.lent += most
        try:
            yield start_on_insert.Room(node.id, hands.routes, most)
        finally:
            self.lent -= most
            hands.free += most
            if 0 < hands.free <= most:  # none was, as in `_free`
                node.working.poke()

    async def step(self) -> datetime | None:
        """Claim what is due and fits; when to look again (None: when poked)."""
        node = self.node
        free = [hands for hands in self._taking if hands.free > 0]
        if node.stopping or not free:
            self._behind = True
            return None
        routes = free[0].routes if len(free) == 1 else self.routes
        looking = node.working.poked or bool(node.limited)
        if not looking and (foreseen := self.foresight.due(routes, node.clock.now())):
            return await self._claim_foreseen(foreseen, free)
        self.foresight.forget()
        if node.limited:
            await node.store.run(tenant_limits.let_go, node.clock.now())
        looked_at = node.clock.now()
        lanes = await self.looking.lanes(routes, looked_at)
        now = node.clock.now()
        due, later = self._due(lanes, now)
        claimed, all_of_it = await self._claim_all(due, free)
        all_of_it = all_of_it and not node.store.many_nodes  # else others claim too, by the server's clock
        if claimed and not all_of_it:
            return now
        look_by = None if node.listening else now + timedelta(seconds=node.options.poll)
        if due and not claimed:
            later.append(node.clock.now() + timedelta(seconds=self._pause))
            self._pause = min(self._pause * 2, LONGEST)
            node.counters.claim_conflicts += any(hands.free for hands in free)
        elif not node.limited:  # nothing is left that could start
            await self.foresight.learn(node.store, lanes, routes, looked_at, look_by)
            return self.foresight.next
        if node.limited:  # of those that wait for their minute to be over some may start
            later += [now + timedelta(seconds=1), *(lane.later for lane in due if lane.later is not None)]
        return min([*later, look_by] if look_by else later, default=None)

    async def _claim_foreseen(self, foreseen: list[job_claim.Lane], free: list[Hands]) -> datetime | None:
        """Claim, without a look, from the lanes in which so many are due; when to go on."""
        lanes = list({id(lane): lane for lane in foreseen}.values())
        try:
            claimed, all_of_it = await self._claim_all(self._in_order(lanes), free, foreseen=True)
        except BaseException:
            self.foresight.forget()  # it does not know of these any more
            raise
        if claimed < len(foreseen) or not all_of_it or not self.foresight.knows_more_of(lanes):
            self.foresight.forget()
            return self.node.clock.now()
        return self.foresight.next

    async def _claim_all(
        self, due: list[job_claim.Lane], free: list[Hands], *, foreseen: bool = False
    ) -> tuple[int, bool]:
        """Claim what fits from lanes in order; how many, and whether that was all."""
        claimed, behind = 0, False
        again_until = self.node.clock.monotonic() + AT_ONCE
        self.claiming = True
        try:
            for at, lane in enumerate(due, 1):
                beside = 1 if at == len(due) else 1 + sum(other.priority == lane.priority for other in due[at:])
                alone = sum(other.priority == lane.priority for other in due) == 1
                for hands in free:
                    count, more = await self._claim(
                        lane, hands, beside, again_until if alone else 0.0, foreseen=foreseen
                    )
                    claimed += count
                    behind = behind or more or lane.limited or lane.crowded
        finally:
            self.claiming, self._behind = False, behind
        if claimed:
            self.node.counters.found.observe(claimed)
            self._pause = SHORTEST
        return claimed, not behind

    def _due(self, lanes: Sequence[job_claim.Lane], now: datetime) -> tuple[list[job_claim.Lane], list[datetime]]:
        """The lanes with something to start, in order; and when something is to start in the others."""
        due: list[job_claim.Lane] = []
        later: list[datetime] = []
        for lane in lanes:
            if (starts_at := lane.starts_at) is not None:
                if starts_at <= now:
                    due.append(lane)
                else:
                    later.append(starts_at)
        return self._in_order(due), later

    def _in_order(self, due: list[job_claim.Lane]) -> list[job_claim.Lane]:
        """Those of one priority share the hands; who was served longest ago goes first, if they are too few for all."""
        if len(due) > 1:
            due.sort(key=lambda lane: (lane.priority, self._served.get((lane.queue, lane.priority), (0, ""))[0]))
        return due

    async def _claim(
        self, lane: job_claim.Lane, hands: Hands, beside: int, until: float, *, foreseen: bool
    ) -> tuple[int, bool]:
        """Claim and start jobs of a lane, one of so many that share the hands; how many, and whether there may be more.

        If it has plenty, then `until` that monotonic second the next are claimed while those before them run.
        """
        node, total = self.node, 0
        if lane.limited or lane.crowded or node.limited:
            until = 0.0
        most = min(-(-hands.free // beside), hands.most)
        taken = await self._take(lane, hands, most, unchanged=foreseen)
        while True:
            count = len(taken.attempts) + taken.put_back
            total += count
            hands.free -= len(taken.attempts)
            if count < most or min(count, hands.free) < 1 or node.clock.monotonic() >= until:
                self._begin(taken, hands)
                return total, count >= most
            most = min(hands.free, hands.most)
            taking = asyncio.create_task(self._take(lane, hands, most, unchanged=True))
            asyncio.get_running_loop().call_soon(self._begin, taken, hands)  # after its statement has gone off
            taken = await taking

    async def _take(self, lane: job_claim.Lane, hands: Hands, most: int, *, unchanged: bool) -> Taken:
        """Claim up to so many jobs of a lane; with `unchanged` only if it is as it was seen."""
        node = self.node
        if most < 1 or node.stopping:
            return Taken([])
        store, what = node.store, (lane, hands.routes, node.id, most)
        tenants = await self._turns(lane, most)
        sent = node.clock.monotonic()
        now, put_back = node.clock.now(), 0
        take = queue_limits.claim_limited if lane.limited else queue_limits.claim_shares
        if node.limited:
            claim = (take, *what, now, tenants)
            attempts, put_back = await store.run(tenant_limits.claim_admitted, node.limited, now, *claim)
        elif lane.limited or tenants:
            attempts = await store.run(take, *what, now, tenants)
        else:
            attempts = await store.hot(job_claim.claim, *what, now, unchanged=unchanged)
        await self._learn(attempts)
        return Taken(attempts, put_back, sent + node.options.lease)

    def start(self, attempts: Sequence[Attempt], sent: float) -> None:
        """Start what was made in `room`; leases are counted from before it was asked for."""
        hands = self.hands[0]
        hands.free -= len(attempts)
        self._begin(Taken(attempts, 0, sent + self.node.options.lease), hands)

    def _begin(self, taken: Taken, hands: Hands) -> None:
        """Hold what was claimed, and give it tasks."""
        node = self.node
        started = [Held(attempt, taken.lease_until, self.runner.completes) for attempt in taken.attempts]
        for held in started:
            node.held[held.attempt.id] = held
        self._give_tasks(started, hands)
        node.counters.started += len(started)

    async def _turns(self, lane: job_claim.Lane, most: int) -> list[str]:
        """The tenants that share a late lane, those first whose turn is next; none where nobody has to."""
        self._rounds += 1
        key = lane.queue, lane.priority
        tenants: list[str] = []
        after = self._served.get(key, (0, ""))[1]
        if lane.crowded:
            now = self.node.clock.now()
            tenants, after = await self.node.store.hot(queue_limits.turns_of, lane, after, most, now)
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

    def _give_tasks(self, started: Iterable[Held], hands: Hands) -> None:
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
        if not task.done():  # as it may be where tasks are eager
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
                    if held.lone is not None and held.call is not None:
                        held.lone.at_once = False  # nor are those behind it, perhaps: they get tasks of their own
            except BaseException:
                self._lose(waiting.popleft(), hands)
                raise
            finally:
                if endings:
                    self._free(len(endings), hands)
                    self.completer.put(*endings)
                if waiting:
                    clean.run(self._give_tasks, waiting, hands)
            if held is None:
                return
            held.task = task
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
