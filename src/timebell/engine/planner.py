"""The planner turns occurrences into jobs: it sleeps to the next due schedule, fires what is due, sleeps again.

Every node plans; none of them leads. Two that wake for the same instant lock different schedules, and the
cursor, moved in the same transaction as the job is written, lets each occurrence through once.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from timebell.engine.context import Known, Node
from timebell.ids import new_id
from timebell.model.gated import kept
from timebell.model.job import Hold, Kind, NewJob
from timebell.model.payload import encode
from timebell.model.policy import Lateness, Overlap
from timebell.model.routes import route
from timebell.model.schedule import Schedule
from timebell.store.sql import schedules

BATCH = 500
SHORTEST, LONGEST = 0.002, 0.25  # seconds to wait when what is due is another planner's just now


class Planner:
    """The service; `step` is one pass."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._pause = SHORTEST

    async def step(self) -> datetime | None:
        """Fire what is due; when to look again."""
        node = self.node
        now = node.clock.now()
        fired = await node.store.run(schedules.fire, self.build, now, BATCH)
        node.counters.fired += fired.jobs
        node.counters.skipped += fired.skips
        node.counters.left_out(fired.reasons)
        if fired.jobs:
            node.working.poke()
        if fired.stopping:
            node.beating.poke()
        following = fired.next_fire_at
        if fired.schedules or following is None or following > now:
            self._pause = SHORTEST
            if node.listening:
                return following
            look_again = now + timedelta(seconds=node.options.poll)  # nobody tells of schedules made elsewhere
            return look_again if following is None else min(following, look_again)
        self._pause = min(self._pause * 2, LONGEST)
        return now + timedelta(seconds=self._pause)

    def build(self, schedule: Schedule, at: datetime, hold: Hold | None, now: datetime) -> NewJob:
        """The job of one occurrence, remembering the recurrence for the event's `upcoming`."""
        known = Known(schedule.name, schedule.recurrence, schedule.policies.tolerance, schedule.policies.notify)
        self.node.known[schedule.id, schedule.revision] = known
        return job_of(schedule, at, hold, now)


def job_of(schedule: Schedule, at: datetime, hold: Hold | None, now: datetime) -> NewJob:
    """The job of one occurrence."""
    action = schedule.action
    lasts = action.expires_after
    if lasts is None and schedule.policies.lateness is Lateness.ANCHORED:
        lasts = schedule.policies.missed_after
    expires = None if lasts is None else at + timedelta(seconds=lasts)
    return NewJob(
        id=new_id(now), tenant_id=schedule.tenant_id, topic=action.topic, scheduled_at=at, run_at=at,
        timezone=schedule.timezone, created_at=now, payload=encode(action.payload),
        metadata=encode(action.metadata) if action.metadata else None, owner_id=action.owner_id,
        kind=Kind.PLANNED, schedule_id=schedule.id, revision=schedule.revision,
        target=encode(action.target) if action.target else None,
        route=route(action.topic, action.target), queue=action.queue,
        priority=action.priority, group=action.group, conditions=kept(action.condition, action.unless),
        retry=encode(action.retry.to_json()) if action.retry else None,
        timeout=action.timeout, expires_at=expires, hold=hold,
        serial=schedule.policies.overlap is not Overlap.ALLOW,
    )  # fmt: skip
