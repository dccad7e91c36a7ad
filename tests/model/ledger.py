"""Handler calls, recorded by the handlers themselves, and faults of nodes; independent of the engine."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import text

from timebell import Arrived, Cancel, Snooze
from timebell.sim.world import World

TIMEOUT = 40.0  # seconds; each plan but `hang` takes less
RETRIES = 3
RETRY_DELAY = 2.0  # seconds between attempts
SNOOZE_SECONDS = 7.0
ONE_MICROSECOND = timedelta(microseconds=1)

ENDING_EVENTS = {"cut": "mend", "freeze": "thaw", "away": "back"}


@dataclass(slots=True)
class Effect:
    """A handler call. `outcome` is done, failed, snoozed, cancelled, timeout, or stopped (also while it runs)."""

    job_id: str
    schedule_id: str | None
    key: str
    scheduled_at: datetime
    attempt: int
    node: str | None
    plan: dict[str, Any]
    began: datetime
    concurrent: list[Effect] = field(default_factory=list)
    """The calls in progress when it started."""
    ended: datetime | None = None
    outcome: str | None = None
    cut: timedelta | None = None
    """How long its node had been cut off from the database when it ended."""


class Ledger:
    """The handler and all its calls in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.effects: list[Effect] = []
        self.by_job: dict[str, list[Effect]] = defaultdict(list)
        self.open: list[Effect] = []
        self.drains: list[tuple[datetime, str]] = []
        """Drains of nodes: (instant, node)."""

    async def handle(self, event: Arrived) -> int:
        """Do what the payload specifies and record the call."""
        began, plan = self.world.now, event.payload
        effect = Effect(
            event.job_id, event.schedule_id, event.occurrence_key, event.scheduled_at, event.attempt,
            self.world.current_node_name(), plan, began,
        )  # fmt: skip
        effect.concurrent = list(self.open)
        self.effects.append(effect)
        self.by_job[event.job_id].append(effect)
        self.open.append(effect)
        effect.outcome = "stopped"
        try:
            if plan["takes"]:
                await asyncio.sleep(plan["takes"])
            await self._act(event, plan["do"], len(self.by_job[event.job_id]))
            effect.outcome = "done"
        except Snooze:
            effect.outcome = "snoozed"
            raise
        except Cancel:
            effect.outcome = "cancelled"
            raise
        except asyncio.CancelledError:
            if self.world.now >= began + timedelta(seconds=TIMEOUT):
                effect.outcome = "timeout"
            raise
        except Exception:
            effect.outcome = "failed"
            raise
        finally:
            effect.ended, effect.cut = self.world.now, self.cut_duration(effect.node)
            self.open.remove(effect)
        return event.attempt

    async def _act(self, event: Arrived, do: str, call: int) -> None:
        if do == "within":
            async with event.transaction() as connection:
                await connection.execute(text("INSERT INTO written VALUES (:job)"), {"job": event.job_id})
                event.result = event.attempt
        elif do == "fail" or (do == "flaky" and call == 1):
            raise RuntimeError("as planned")
        elif do == "snooze" and call == 1:
            raise Snooze(SNOOZE_SECONDS)
        elif do == "cancel":
            raise Cancel("as planned")

    def excused(self, effect: Effect, until: datetime) -> bool:
        """Return whether a fault until an instant may have ended the attempt or hidden its outcome."""
        return self.had_fault(effect.node, effect.began, until)

    def had_fault(self, node: str | None, since: datetime, until: datetime) -> bool:
        """Return whether a node had a fault in this period."""
        lasting: dict[tuple[str | None, str], datetime] = {}
        for one in self.world.fault_events:
            if one.at > until:
                break
            if one.name not in (None, node):
                continue
            if one.kind in ENDING_EVENTS:
                lasting[one.name, ENDING_EVENTS[one.kind]] = one.at
            else:
                lasting.pop((one.name, one.kind), None)
            if one.at >= since:
                return True
        return bool(lasting) or any(since <= at <= until and name == node for at, name in self.drains)

    def any_fault(self, since: datetime, until: datetime) -> bool:
        """Return whether any node had a fault in this period."""
        return any(self.had_fault(name, since, until) for name in {one.name for one in self.world.fault_events})

    def cut_duration(self, node: str | None) -> timedelta | None:
        """Return how long a running node has been cut off from the database; None if it is not."""
        since: datetime | None = None
        for one in self.world.fault_events:
            if one.name == node and one.kind in ("cut", "freeze", "mend", "thaw", "crash"):
                since = None if one.kind != "cut" else since or one.at
        return None if since is None else self.world.now - since
