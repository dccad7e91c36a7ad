"""What an outside queue lost is published again: jobs that reports are awaited of, and that their queue knows no more.

The leader asks all the time, so a Redis that was flushed has its jobs back within half a minute: those that were
missing at two looks in a row, as a worker that has one in hand may report it in between. They go out under the same id
and attempt, with the same token: a queue that still has one, or a worker that goes on with it, is not disturbed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

from timebell.alarm import Alarm
from timebell.engine.leader.repair import report
from timebell.engine.named_targets import Names
from timebell.engine.node import Node
from timebell.engine.runner import delivery_of
from timebell.errors import TimebellError
from timebell.model.job import Attempt
from timebell.model.payload import decode
from timebell.model.repair_report import Healed
from timebell.model.routes import route, route_by_name
from timebell.store.jobs import claim, external_reports
from timebell.targets.base import Delivery, Finds

log = logging.getLogger("timebell.healing")

EVERY = 10.0  # seconds
BATCH = 500  # jobs a question
AT_ONCE = 50  # messages published at the same time

Sent = tuple[Attempt, Delivery, dict[str, Any]]


class Reconciling:
    """The service; `as_leader` runs an operation if this node leads, and answers None if it does not."""

    def __init__(self, node: Node, as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self.alarm = Alarm(node.clock)
        self._as_leader = as_leader
        self._names = Names(node)
        self._missed: set[tuple[str, int]] = set()
        """What was missing at the last look: a worker may have it, and report it before the next one."""

    async def step(self) -> datetime | None:
        """A look at everything outside; when to look again, or None where no target could tell."""
        if not self._finding():
            return None
        report(self.node, await self.look())
        return self.node.clock.now() + timedelta(seconds=EVERY)

    async def look(self) -> Healed:
        """At every job that reports are awaited of, on a target of this node."""
        finding = self._finding()
        found, after = Healed(), ""
        before, self._missed = self._missed, set()
        while finding:
            outside: list[Attempt] = await self._as_leader(external_reports.outside, list(finding), after, BATCH) or []
            options = await asyncio.gather(*(self._options(attempt, finding) for attempt in outside))
            by_route: dict[str, list[Sent]] = defaultdict(list)
            for attempt, given in zip(outside, options, strict=True):
                delivery = delivery_of(self.node, attempt, self.node.clock.now())
                if given is None:
                    found += Healed({}, Counter(unanswered=1))
                else:
                    by_route[_route(attempt)].append((attempt, delivery, given))
            for at, sent in by_route.items():
                found += await self._heal(finding[at], sent, before)
            if len(outside) < BATCH:
                break
            after = outside[-1].id
        return found

    def _finding(self) -> dict[str, Finds]:
        """The targets of this node that can tell what their queue still has, by the route of the jobs for them."""
        own = {route("", {"kind": kind}): one for kind, one in self.node.targets.items()}
        own |= {route_by_name(kind): one for kind, one in self.node.named.items()}
        return {at: one for at, one in own.items() if isinstance(one, Finds)}

    async def _options(self, attempt: Attempt, finding: dict[str, Finds]) -> dict[str, Any] | None:
        """How it went out; None for a target under a name that is to be sent nothing now."""
        target = decode(attempt.target)
        if "name" not in target:
            options: dict[str, Any] = target["options"]
            return options
        found = await self._names.of(attempt.tenant_id, target["name"])
        if isinstance(found, TimebellError) or found.disabled is not None:
            return None
        try:
            return finding[_route(attempt)].check(found.options)
        except TimebellError:  # a secret was replaced, or the rules became stricter
            return None

    async def _heal(self, target: Finds, sent: list[Sent], before: set[tuple[str, int]]) -> Healed:
        """Publish again what is missing now and was `before`."""
        try:
            lost = await target.lost([(delivery, options) for _, delivery, options in sent])
        except Exception as failed:  # the queue is away, or refuses: what it has is found out when it is back
            log.info("target %s does not say what it still has: %s", target.kind, type(failed).__name__)
            return Healed({}, Counter(unanswered=len(sent)))
        if lost is None:
            return Healed({}, Counter(untold=len(sent)))
        missing = {(one.id, one.number) for one, _, _ in sent if one.id in lost}
        self._missed |= missing
        # A report may have come while the queue was asked.
        pairs = sorted(missing & before)
        still = {one.id for one in (await self._as_leader(claim.abandoned, pairs, self.node.clock.now()) or [])}
        gate = asyncio.Semaphore(AT_ONCE)

        async def publish(delivery: Delivery, options: dict[str, Any]) -> bool:
            async with gate:
                return (await target.deliver(delivery, options)).delivered

        again = [publish(delivery, options) for attempt, delivery, options in sent if attempt.id in still]
        healed = sum(await asyncio.gather(*again))
        if healed:
            log.warning("target %s had lost %d jobs; they are published again", target.kind, healed)
        skipped = {
            "known": len(sent) - len(missing), "missing": len(missing) - len(pairs),
            "reported": len(pairs) - len(again), "unanswered": len(again) - healed,
        }  # fmt: skip
        return Healed({"message": healed} if healed else {}, {word: many for word, many in skipped.items() if many})


def _route(attempt: Attempt) -> str:
    return route(attempt.topic, decode(attempt.target))
