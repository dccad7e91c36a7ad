"""Replan schedules and jobs on the leader after a tzdata update."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from timebell.engine.node import Node
from timebell.model.tzdata_change import OffsetChange
from timebell.recurrence import installed_release
from timebell.store.schedules import tzdata_replan

log = logging.getLogger("timebell.tzdata")

CHECK_INTERVAL_SECONDS = 3600.0  # repeated, because clients without an engine may write with older zone data
MIXED_CHECK_INTERVAL_SECONDS = 60.0  # while nodes have different zone data
STEP_BUDGET_SECONDS = 1.0  # limits the delay of the leader's other chores
BATCH_SIZE = 500


class TzdataReplan:
    """A chore of the leader. `run_as_leader` runs a store operation, or returns None if this node does not lead."""

    def __init__(self, node: Node, run_as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self._run_as_leader = run_as_leader
        self._versions: set[str] = set()
        self._last_check_at: float | None = None
        self._after_id: str | None = None

    def reset(self) -> None:
        """Check everything again from the start."""
        self._last_check_at, self._after_id = None, None

    def set_live_versions(self, versions: set[str]) -> None:
        """Set the tzdata releases of the live nodes; log a warning if they differ."""
        if versions == self._versions:
            return
        self._versions = versions
        self.reset()
        if self.versions_differ:
            log.warning(
                "nodes have different zone data (%s): upgrade all of them to the newest", ", ".join(sorted(versions))
            )

    @property
    def versions_differ(self) -> bool:
        """True if live nodes have different releases."""
        return len(self._versions) > 1

    async def step(self) -> None:
        """Continue the current check for `STEP_BUDGET_SECONDS`, or start one if it is due."""
        now = self.node.clock.monotonic()
        if self._last_check_at is not None and now - self._last_check_at < (
            MIXED_CHECK_INTERVAL_SECONDS if self.versions_differ else CHECK_INTERVAL_SECONDS
        ):
            return
        changes_before = await self.node.store.run(tzdata_replan.list_changes, installed_release().version)
        if await self._replan(now + STEP_BUDGET_SECONDS):
            self._last_check_at = now
        await self._log_changes(changes_before)

    async def _replan(self, deadline: float) -> bool:
        """Replan until `deadline` (monotonic seconds); return whether everything is done."""
        clock, release = self.node.clock, installed_release()
        while True:
            self._after_id = await self._run_as_leader(
                tzdata_replan.replan_schedules, release, self._after_id, clock.now(), BATCH_SIZE
            )  # fmt: skip
            if self._after_id is None:
                break
            if clock.monotonic() >= deadline:
                return False
        while await self._run_as_leader(tzdata_replan.replan_jobs, release, clock.now(), BATCH_SIZE):
            if clock.monotonic() >= deadline:
                return False
        return True

    async def _log_changes(self, changes_before: list[OffsetChange]) -> None:
        """Log the changes that were recorded since `changes_before` was read."""
        version = installed_release().version
        changes_after = await self.node.store.run(tzdata_replan.list_changes, version)
        examined = sum(change.examined for change in changes_after) - sum(change.examined for change in changes_before)
        if examined:
            log.info("zone data %s: checked %d schedules and jobs", version, examined)
        for change in changes_after:
            if change.has_effect and change not in changes_before:
                log.warning("zone data %s: %s", version, change.describe("moved"))
