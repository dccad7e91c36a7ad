"""What handlers did, written down by themselves, and what befell the nodes: nothing in here asks the engine."""

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
PAUSE = 2.0  # seconds between the tries
SNOOZE = 7.0
MOMENT = timedelta(microseconds=1)

BEGINS = {"cut": "mend", "freeze": "thaw", "away": "back"}


@dataclass(slots=True)
class Effect:
    """One call of a handler. `outcome` is done, failed, snoozed, cancelled or timeout; stopped otherwise, or while it
    goes on."""

    job_id: str
    schedule_id: str | None
    key: str
    scheduled_at: datetime
    attempt: int
    node: str | None
    plan: dict[str, Any]
    began: datetime
    beside: list[Effect] = field(default_factory=list)
    """Those that went on when it began."""
    ended: datetime | None = None
    outcome: str | None = None
    cut: timedelta | None = None
    """For how long its node was kept from the database by the end of it."""


class Ledger:
    """The handler, and all its calls in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.effects: list[Effect] = []
        self.of: dict[str, list[Effect]] = defaultdict(list)
        self.open: list[Effect] = []
        self.left: list[tuple[datetime, str]] = []
        """When nodes were asked to leave."""

    async def handle(self, event: Arrived) -> int:
        """Do what the payload says, and note it."""
        began, plan = self.world.now, event.payload
        effect = Effect(
            event.job_id, event.schedule_id, event.occurrence_key, event.scheduled_at, event.attempt,
            self.world.here(), plan, began,
        )  # fmt: skip
        effect.beside = list(self.open)
        self.effects.append(effect)
        self.of[event.job_id].append(effect)
        self.open.append(effect)
        effect.outcome = "stopped"
        try:
            if plan["takes"]:
                await asyncio.sleep(plan["takes"])
            await self._act(event, plan["do"], len(self.of[event.job_id]))
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
            effect.ended, effect.cut = self.world.now, self.since_cut(effect.node)
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
            raise Snooze(SNOOZE)
        elif do == "cancel":
            raise Cancel("as planned")

    def excused(self, effect: Effect, until: datetime) -> bool:
        """Whether anything befell the node of a call, from its beginning until an instant, that may end its attempt or
        keep its outcome from being known."""
        return self.befell(effect.node, effect.began, until)

    def befell(self, node: str | None, since: datetime, until: datetime) -> bool:
        """Whether anything befell a node, or all of them, in this time."""
        lasting: dict[tuple[str | None, str], datetime] = {}
        for one in self.world.befell:
            if one.at > until:
                break
            if one.name not in (None, node):
                continue
            if one.what in BEGINS:
                lasting[one.name, BEGINS[one.what]] = one.at
            else:
                lasting.pop((one.name, one.what), None)
            if one.at >= since:
                return True
        return bool(lasting) or any(since <= at <= until and name == node for at, name in self.left)

    def anything(self, since: datetime, until: datetime) -> bool:
        """Whether anything befell any node in this time."""
        return any(self.befell(name, since, until) for name in {one.name for one in self.world.befell})

    def since_cut(self, node: str | None) -> timedelta | None:
        """For how long a node has been kept from the database, but goes on."""
        since: datetime | None = None
        for one in self.world.befell:
            if one.name == node and one.what in ("cut", "freeze", "mend", "thaw", "crash"):
                since = None if one.what != "cut" else since or one.at
        return None if since is None else self.world.now - since
