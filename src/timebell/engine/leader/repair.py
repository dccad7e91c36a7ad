"""Repair lost work while the engine runs, not only at its start: a check each minute, with a report.

In-memory state cannot be lost for long: timers and wake-ups are set again at each heartbeat, leases are observed by
every node, and unhandled jobs by the leader. This module repairs the rest: holds, and schedules without a next time.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from timebell.engine.node import Node
from timebell.model.repair_report import RepairReport
from timebell.store.cluster import repair

log = logging.getLogger("timebell.repair")

REPAIR_INTERVAL_SECONDS = 60.0
REPAIR_BATCH_SIZE = 100  # schedules per transaction, to keep it short

RunQuery = Callable[..., Awaitable[Any]]


class Repair:
    """A chore of the leader. `run_as_leader` runs a store operation, or returns None if this node does not lead."""

    def __init__(self, node: Node, run_as_leader: RunQuery) -> None:
        self.node = node
        self._run_as_leader = run_as_leader
        self._last_run_at: float | None = None
        self._after_id: str | None = None

    def reset(self) -> None:
        """Check again at the next step."""
        self._last_run_at = None

    async def step(self) -> None:
        """If due, repair holds and schedules without a next time, and check the next batch of all schedules."""
        node, monotonic = self.node, self.node.clock.monotonic()
        if self._last_run_at is not None and monotonic - self._last_run_at < REPAIR_INTERVAL_SECONDS:
            return
        self._last_run_at = monotonic
        now = node.clock.now()
        since = repair.history_start(now, node.options.retention)
        report: RepairReport = await self._run_as_leader(repair.repair_holds) or RepairReport()
        report += await self._run_as_leader(repair.repair_missing_next, since, now, REPAIR_BATCH_SIZE) or RepairReport()
        checked = await self._run_as_leader(repair.repair_every_next, self._after_id, since, now, REPAIR_BATCH_SIZE)
        if checked is not None:
            report, self._after_id = report + checked[0], checked[1]
        record_repairs(node, report)


def record_repairs(node: Node, repairs: RepairReport) -> None:
    """Add a report to the node's totals; log what was repaired."""
    node.repair_report += repairs
    if repairs.repaired:
        log.info("%s", repairs)


async def repair_all(run: RunQuery, now: datetime, retention_seconds: float) -> RepairReport:
    """Repair all holds and schedules."""
    since = repair.history_start(now, retention_seconds)
    report: RepairReport = await run(repair.repair_holds)
    after: str | None = None
    while True:
        batch_report, after = await run(repair.repair_every_next, after, since, now, REPAIR_BATCH_SIZE)
        report += batch_report
        if after is None:
            return report
