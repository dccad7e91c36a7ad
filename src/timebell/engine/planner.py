"""The planner turns occurrences into jobs: sleep until the next schedule is due, fire all due schedules, sleep again.

Every node plans; no leader is needed. Nodes that wake at the same time lock different schedules (SKIP LOCKED), and each
occurrence fires once, because the schedule's cursor advances in the transaction that inserts the job.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

from timebell.engine.node import CachedRevision, Node
from timebell.engine.worker import Worker
from timebell.model.job import Hold, NewJob
from timebell.model.planned_job import build_job, job_template
from timebell.model.schedule import Action, Schedule
from timebell.store.schedules import schedules

MIN_BATCH_SIZE, PLAN_BATCH_SIZE = 50, 250
CONCURRENT_BATCHES = 2  # if more schedules are due than one batch
MAX_STEP_SECONDS = 1.0
MAX_CACHED_TEMPLATES = 10_000  # schedules whose job template is cached
# Pause when all due schedules are locked by other planners; doubled up to the maximum.
MIN_CONFLICT_PAUSE_SECONDS, MAX_CONFLICT_PAUSE_SECONDS = 0.002, 0.25


class Planner:
    """The planner service; each `step` fires the due schedules in batches, each in a transaction."""

    def __init__(self, node: Node, worker: Worker) -> None:
        self.node = node
        self.worker = worker
        self._conflict_pause = MIN_CONFLICT_PAUSE_SECONDS
        self._job_templates: dict[str, tuple[Action, dict[str, Any]]] = {}

    async def step(self) -> datetime | None:
        """Fire due schedules; return when to run again (None: on the next wake-up)."""
        node = self.node
        if node.stopping:
            return None
        now = node.clock.now()
        fired = await self._fire_batch()
        next_fire_at = await self._fire_concurrently() if fired.has_more else fired.next_fire_at
        if fired.schedules or next_fire_at is None or next_fire_at > now:
            self._conflict_pause = MIN_CONFLICT_PAUSE_SECONDS
            poll_at = node.next_poll_at(now)
            return min((at for at in (next_fire_at, poll_at) if at is not None), default=None)
        self._conflict_pause = min(self._conflict_pause * 2, MAX_CONFLICT_PAUSE_SECONDS)
        return now + timedelta(seconds=self._conflict_pause)

    async def _fire_concurrently(self) -> datetime | None:
        """Fire the remaining batches; return when the next schedule is due.

        While the database processes one batch, this node plans the other one and runs the jobs of the previous one.
        """
        until = self.node.clock.monotonic() + MAX_STEP_SECONDS
        batches = (self._fire_batches(until) for _ in range(CONCURRENT_BATCHES))
        instants = []
        for result in await asyncio.gather(*batches, return_exceptions=True):  # raise only when all have ended
            if isinstance(result, BaseException):
                raise result
            instants.append(result)
        return min((at for at in instants if at is not None), default=None)

    async def _fire_batches(self, until: float) -> datetime | None:
        """Fire batches until none is left, or until a monotonic time; return when the next schedule is due."""
        node = self.node
        while (fired := await self._fire_batch()).has_more and not node.stopping and node.clock.monotonic() < until:
            pass
        return fired.next_fire_at

    async def _fire_batch(self) -> schedules.FireResult:
        """Fire one batch in a transaction, and start its jobs."""
        node = self.node
        with self.worker.reserve_slots() as reservation:
            sent_at, now = node.clock.monotonic(), node.clock.now()
            # Jobs that find no slot have to be claimed later, which costs more than a smaller batch.
            fits = MIN_BATCH_SIZE <= reservation.max_jobs < PLAN_BATCH_SIZE
            limit = reservation.max_jobs if fits else PLAN_BATCH_SIZE
            fired = await node.store.run(schedules.fire_due_schedules, self.build, now, limit, reservation)
            self.worker.start_inserted(fired.started_attempts, sent_at)
        node.counters.fired += fired.jobs
        node.counters.skipped += fired.skips
        node.counters.record_skipped(fired.skips_by_reason)
        if fired.started_attempts:  # most end in their first step: then the next batch finds their slots free
            await asyncio.sleep(0)  # noqa: TID251 - an iteration, not a time
        return fired

    def build(self, schedule: Schedule, at: datetime, hold: Hold | None, now: datetime) -> NewJob:
        """Build the job of one occurrence, and cache its schedule revision for the event's `upcoming`."""
        key = schedule.id, schedule.revision
        cached, recurrence = self.node.revision_cache.get(key), schedule.recurrence
        if cached is None or cached.recurrence is not recurrence:
            policies = schedule.policies
            self.node.revision_cache[key] = CachedRevision(
                schedule.name, recurrence, policies.tolerance, policies.notify
            )
        action, template = self._job_templates.get(schedule.id, (None, None))
        if action is not schedule.action or template is None:  # same object as long as the stored text is unchanged
            if len(self._job_templates) >= MAX_CACHED_TEMPLATES:
                self._job_templates.clear()
            template = job_template(schedule.action)
            self._job_templates[schedule.id] = schedule.action, template
        return build_job(schedule, at, hold, now, template)
