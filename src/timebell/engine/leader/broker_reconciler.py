"""Republish dispatched jobs that an external queue has lost.

The leader checks continuously, so a flushed Redis has its jobs back within half a minute. A job is republished if it is
missing in two successive checks, because a worker that holds it may report it in between. It is sent with the same id,
attempt and token, so a queue or worker that still has it is not disturbed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

from timebell.engine.delivery import build_delivery
from timebell.engine.leader.repair import record_repairs
from timebell.engine.named_targets import TargetResolver
from timebell.engine.node import Node
from timebell.errors import TimebellError
from timebell.model.job import Attempt
from timebell.model.payload import decode
from timebell.model.repair_report import RepairReport
from timebell.model.routes import named_target_route, route_for
from timebell.store.jobs import claim, external_reports
from timebell.targets.base import Delivery, ReconcilableTarget

log = logging.getLogger("timebell.repair")

RECONCILE_INTERVAL_SECONDS = 10.0
RECONCILE_BATCH_SIZE = 500  # jobs per query
MAX_CONCURRENT_PUBLISHES = 50

SentMessage = tuple[Attempt, Delivery, dict[str, Any]]


class BrokerReconciler:
    """The reconciler service. `run_as_leader` runs a store operation, or returns None if this node does not lead."""

    def __init__(self, node: Node, run_as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self._run_as_leader = run_as_leader
        self._resolver = TargetResolver(node)
        self._missing: set[tuple[str, int]] = set()
        """(Job id, attempt) pairs that were missing in the last check."""

    async def step(self) -> datetime | None:
        """Check all dispatched jobs; return when to check again, or None if no target supports it."""
        if not self._reconcilable_targets():
            return None
        record_repairs(self.node, await self.reconcile())
        return self.node.clock.now() + timedelta(seconds=RECONCILE_INTERVAL_SECONDS)

    async def reconcile(self) -> RepairReport:
        """Check every dispatched job whose target this node has, and republish lost ones."""
        targets = self._reconcilable_targets()
        report, after = RepairReport(), ""
        missing_before, self._missing = self._missing, set()
        while targets:
            dispatched: list[Attempt] = (
                await self._run_as_leader(external_reports.list_dispatched, list(targets), after, RECONCILE_BATCH_SIZE)
                or []
            )
            options = await asyncio.gather(*(self._options_for(attempt, targets) for attempt in dispatched))
            by_route: dict[str, list[SentMessage]] = defaultdict(list)
            for attempt, message_options in zip(dispatched, options, strict=True):
                delivery = build_delivery(self.node, attempt, self.node.clock.now())
                if message_options is None:
                    report += RepairReport({}, Counter(unanswered=1))
                else:
                    by_route[_route_of(attempt)].append((attempt, delivery, message_options))
            for route, messages in by_route.items():
                report += await self._republish_lost(targets[route], messages, missing_before)
            if len(dispatched) < RECONCILE_BATCH_SIZE:
                break
            after = dispatched[-1].id
        return report

    def _reconcilable_targets(self) -> dict[str, ReconcilableTarget]:
        """Return this node's targets that can list lost messages, by the route of their jobs."""
        targets = {route_for("", {"kind": kind}): target for kind, target in self.node.targets.items()}
        targets |= {named_target_route(kind): target for kind, target in self.node.named_targets.items()}
        return {route: target for route, target in targets.items() if isinstance(target, ReconcilableTarget)}

    async def _options_for(self, attempt: Attempt, targets: dict[str, ReconcilableTarget]) -> dict[str, Any] | None:
        """Return the target options of an attempt; None if its named target is disabled or unusable now."""
        target = decode(attempt.target)
        if "name" not in target:
            options: dict[str, Any] = target["options"]
            return options
        resolved = await self._resolver.resolve(attempt.tenant_id, target["name"])
        if isinstance(resolved, TimebellError) or resolved.disabled_reason is not None:
            return None
        try:
            return targets[_route_of(attempt)].check(resolved.options)
        except TimebellError:  # a secret was replaced, or the rules became stricter
            return None

    async def _republish_lost(
        self, target: ReconcilableTarget, sent: list[SentMessage], missing_before: set[tuple[str, int]]
    ) -> RepairReport:
        """Republish messages that are missing now and were in the previous check."""
        try:
            lost = await target.find_lost([(delivery, options) for _, delivery, options in sent])
        except Exception as error:  # the broker is unreachable or refuses: check again later
            log.info("target %s could not list its lost messages: %s", target.kind, type(error).__name__)
            return RepairReport({}, Counter(unanswered=len(sent)))
        if lost is None:
            return RepairReport({}, Counter(unsupported=len(sent)))
        missing = {(attempt.id, attempt.number) for attempt, _, _ in sent if attempt.id in lost}
        self._missing |= missing
        # A report may have arrived during the query.
        pairs = sorted(missing & missing_before)
        live_ids = {attempt.id for attempt, _ in (await self._run_as_leader(claim.load_live_attempts, pairs) or [])}
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_PUBLISHES)

        async def publish(delivery: Delivery, options: dict[str, Any]) -> bool:
            async with semaphore:
                return (await target.deliver(delivery, options)).delivered

        publishing = [publish(delivery, options) for attempt, delivery, options in sent if attempt.id in live_ids]
        republished = sum(await asyncio.gather(*publishing))
        if republished:
            log.warning("target %s had lost %d jobs; republished them", target.kind, republished)
        skipped = {
            "known": len(sent) - len(missing), "missing": len(missing) - len(pairs),
            "reported": len(pairs) - len(publishing), "unanswered": len(publishing) - republished,
        }  # fmt: skip
        return RepairReport(
            {"message": republished} if republished else {},
            {reason: count for reason, count in skipped.items() if count},
        )


def _route_of(attempt: Attempt) -> str:
    return route_for(attempt.topic, decode(attempt.target))
