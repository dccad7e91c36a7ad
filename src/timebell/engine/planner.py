"""The planner turns occurrences into jobs: it sleeps to the next due schedule, fires what is due, sleeps again.

Every node plans; none of them leads. Two that wake for the same instant lock different schedules, and the
cursor, moved in the same transaction as the job is written, lets each occurrence through once.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from timebell.engine.node import Known, Node
from timebell.engine.worker import Worker
from timebell.ids import new_id
from timebell.model.job import Hold, Kind, NewJob
from timebell.model.payload import encode
from timebell.model.policy import Lateness, Overlap
from timebell.model.preconditions import kept
from timebell.model.routes import route
from timebell.model.schedule import Action, Schedule
from timebell.store.schedules import schedules

BATCH = 250
REMEMBERED = 10_000  # schedules of which it knows what their jobs say
SHORTEST, LONGEST = 0.002, 0.25  # seconds to wait when what is due is another planner's just now


class Planner:
    """The service; `step` is one pass."""

    def __init__(self, node: Node, worker: Worker) -> None:
        self.node = node
        self.worker = worker
        self._pause = SHORTEST
        self._said: dict[str, tuple[Action, dict[str, Any]]] = {}

    async def step(self) -> datetime | None:
        """Fire what is due; when to look again."""
        node = self.node
        if node.stopping:
            return None
        with self.worker.room() as room:
            sent, now = node.clock.monotonic(), node.clock.now()
            fired = await node.store.run(schedules.fire, self.build, now, BATCH, room)
            self.worker.start(fired.started, sent)
        node.counters.fired += fired.jobs
        node.counters.skipped += fired.skips
        node.counters.left_out(fired.reasons)
        if fired.jobs > len(fired.started):
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
        key = schedule.id, schedule.revision
        known, recurrence = self.node.known.get(key), schedule.recurrence
        if known is None or known.recurrence is not recurrence:
            policies = schedule.policies
            self.node.known[key] = Known(schedule.name, recurrence, policies.tolerance, policies.notify)
        action, said = self._said.get(schedule.id, (None, None))
        if action is not schedule.action or said is None:  # the same object as long as its text is the same
            if len(self._said) >= REMEMBERED:
                self._said.clear()
            said = said_of(schedule.action)
            self._said[schedule.id] = schedule.action, said
        return job_of(schedule, at, hold, now, said)


def job_of(
    schedule: Schedule, at: datetime, hold: Hold | None, now: datetime, said: dict[str, Any] | None = None
) -> NewJob:
    """The job of one occurrence; `said` is what `said_of` says of its action, where that is known."""
    policies = schedule.policies
    lasts = schedule.action.expires_after
    if lasts is None and policies.lateness is Lateness.ANCHORED:
        lasts = policies.missed_after
    return NewJob(
        id=new_id(now), tenant_id=schedule.tenant_id, scheduled_at=at, run_at=at, timezone=schedule.recurrence.timezone,
        created_at=now, kind=Kind.PLANNED, schedule_id=schedule.id, revision=schedule.revision,
        expires_at=None if lasts is None else at + timedelta(seconds=lasts), hold=hold,
        serial=policies.overlap is not Overlap.ALLOW, **(said_of(schedule.action) if said is None else said),
    )  # fmt: skip


def said_of(action: Action) -> dict[str, Any]:
    """What all jobs of an action have in common, as fields of a NewJob."""
    return {
        "topic": action.topic, "payload": encode(action.payload),
        "metadata": encode(action.metadata) if action.metadata else None, "owner_id": action.owner_id,
        "target": encode(action.target) if action.target else None,
        "route": route(action.topic, action.target), "queue": action.queue, "priority": action.priority,
        "group": action.group, "conditions": kept(action.condition, action.unless),
        "retry": encode(action.retry.to_json()) if action.retry else None, "timeout": action.timeout,
    }  # fmt: skip
