"""What stands between a job that is due and its delivery: is it still wanted, may it, and has its tenant room?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select

from timebell.model.condition import judge
from timebell.model.job import JobState, Kind, Reason
from timebell.model.trigger import Observed, Source, Trigger
from timebell.store.schema import firings
from timebell.store.sql import months
from timebell.store.sql.firings import locked, settle
from timebell.store.sql.sources import sources_by_id, triggers_by_id
from timebell.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class Asked:
    """An attempt that is about to be delivered."""

    id: str
    tenant_id: str
    kind: str
    replayed: bool


@dataclass(frozen=True, slots=True)
class Ruling:
    """Whether it may: `state` is what becomes of it if not. `verdict` is that of its condition, if it has one."""

    state: JobState | None = None
    reason: str | None = None
    code: str | None = None
    error: str | None = None
    verdict: dict[str, Any] | None = None


PASSES = Ruling()
WITHDRAWN = Ruling(JobState.CANCELLED, "withdrawn")


def rule(tx: Transaction, asked: Sequence[Asked], now: datetime) -> dict[str, Ruling]:
    """What is decided of attempts, by the id of their jobs; whoever passes is charged to its tenant's month."""
    rulings = dict.fromkeys((one.id for one in asked), PASSES)
    rulings |= _of_triggers(tx, [one.id for one in asked if one.kind == Kind.TRIGGER and not one.replayed], now)
    room: dict[str, list[str]] = defaultdict(list)
    for one in asked:
        if rulings[one.id].state is None:
            room[one.tenant_id].append(one.id)
    for id_, full in months.charge(tx, room, now).items():
        rulings[id_] = Ruling(
            JobState.SKIPPED, Reason.QUOTA, code="MONTHLY_LIMIT_REACHED", error=str(full), verdict=rulings[id_].verdict
        )
    return rulings


def _of_triggers(tx: Transaction, ids: Sequence[str], now: datetime) -> dict[str, Ruling]:
    if not ids:
        return {}
    planned = select(firings.c.trigger_id, firings.c.item).where(firings.c.job_id.in_(ids))
    wanted: dict[str, set[str]] = defaultdict(set)
    for row in tx.execute(planned):
        wanted[row.trigger_id].add(row.item)
    of = triggers_by_id(tx, wanted)
    by_source: dict[str, list[Trigger]] = defaultdict(list)
    for trigger in of.values():
        by_source[trigger.source_id].append(trigger)
    known: dict[tuple[str, str], dict[str, Any] | None] = {}
    for source_id in sorted(by_source):
        keys = sorted({key for trigger in by_source[source_id] for key in wanted[trigger.id]})
        found = {key: fields for key, (_, fields) in locked(tx, source_id, keys).items()}
        known |= {(source_id, key): found.get(key) for key in keys}
        for trigger in by_source[source_id]:
            settle(tx, [trigger], {key: found.get(key) for key in wanted[trigger.id]}, now, Observed())
    homes = sources_by_id(tx, by_source)
    rulings = dict.fromkeys(ids, WITHDRAWN)
    still = select(firings.c.trigger_id, firings.c.item, firings.c.job_id).where(firings.c.job_id.in_(ids))
    for row in tx.execute(still):
        if row.trigger_id in of:
            trigger = of[row.trigger_id]
            fields = known.get((trigger.source_id, row.item))
            rulings[row.job_id] = _ruling(trigger, homes[trigger.source_id], fields or {})
    return rulings


def _ruling(trigger: Trigger, source: Source, fields: dict[str, Any]) -> Ruling:
    if not trigger.enabled:
        return Ruling(JobState.SKIPPED, Reason.PAUSED)
    if source.orphaned_at is not None:
        return Ruling(JobState.SKIPPED, Reason.ORPHANED, code="ORPHANED", error=source.orphaned_reason)
    if not trigger.rule.condition:
        return PASSES
    verdict = judge(trigger.rule.condition, fields)
    if verdict.holds:
        return Ruling(verdict=verdict.to_json())
    return Ruling(JobState.SKIPPED, Reason.CONDITION, verdict=verdict.to_json())
