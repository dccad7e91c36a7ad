"""What stands between a job that is due and its delivery: is it still wanted, may it, and has its tenant room?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import select, tuple_

from timebell.model.condition import Comparison, judge, parameters_of
from timebell.model.job import JobState, Kind, Reason
from timebell.model.payload import decode
from timebell.model.preconditions import Gated, Unless
from timebell.model.trigger import Observed, Place, Source, Trigger
from timebell.store.tenancy import monthly_quota
from timebell.store.transaction import Transaction
from timebell.store.triggers.planned_firings import locked, settle
from timebell.store.triggers.sources import sources_by_id, triggers_by_id
from timebell.store.triggers.tables import firings, items

LONGEST = 8192  # bytes of a verdict


@dataclass(frozen=True, slots=True)
class Asked:
    """An attempt that is about to be delivered."""

    id: str
    tenant_id: str
    kind: str
    replayed: bool
    own: Gated | None = None
    """What the job asks itself."""

    @property
    def of_trigger(self) -> bool:
        """Whether its trigger is asked, too."""
        return self.kind == Kind.TRIGGER and not self.replayed

    @property
    def unless(self) -> Unless | None:
        """Its own query."""
        return None if self.own is None else self.own.unless


@dataclass(frozen=True, slots=True)
class Planned:
    """What a job was planned for."""

    job_id: str
    trigger: Trigger
    source: Source
    item: str
    place: Place
    fields: dict[str, Any] | None

    @property
    def parameters(self) -> dict[str, Any]:
        """What the query of its trigger names: of the item's fields, and which job it is."""
        said = {"item": self.item, "recipient": self.place.recipient or None, "offset": self.place.offset}
        given = {**(self.fields or {}), **said}
        return {name: given.get(name) for name in parameters_of(self.trigger.rule.unless or "")}


@dataclass(frozen=True, slots=True)
class Found:
    """What a query came to: whether it found anything, of which parameters."""

    anything: bool
    parameters: dict[str, Any]


def planned(tx: Transaction, ids: Sequence[str]) -> list[Planned]:
    """What these jobs were planned for, with their items as they are known."""
    rows = tx.execute(select(firings).where(firings.c.job_id.in_(ids))).all()
    of = triggers_by_id(tx, {row.trigger_id for row in rows})
    homes = sources_by_id(tx, {trigger.source_id for trigger in of.values()})
    wanted = [(of[row.trigger_id].source_id, row.item) for row in rows if row.trigger_id in of]
    known = {
        (row.source_id, row.key): decode(row.fields)
        for row in tx.execute(select(items).where(tuple_(items.c.source_id, items.c.key).in_(wanted)))
    } if wanted else {}  # fmt: skip
    return [
        Planned(
            row.job_id, of[row.trigger_id], homes[of[row.trigger_id].source_id], row.item,
            Place(row.step, row.recipient), known.get((of[row.trigger_id].source_id, row.item)),
        )
        for row in rows if row.trigger_id in of
    ]  # fmt: skip


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


def rule(
    tx: Transaction, asked: Sequence[Asked], now: datetime, found: Mapping[str, Found] | None = None
) -> dict[str, Ruling]:  # fmt: skip
    """What is decided of attempts, by the id of their jobs; whoever passes is charged to its tenant's month.

    `found` is what their queries, or those of their triggers, came to.
    """
    rulings = dict.fromkeys((one.id for one in asked), PASSES)
    rulings |= _of_triggers(tx, [one.id for one in asked if one.of_trigger], now, found or {})
    for one in asked:
        if one.own is not None and rulings[one.id].state is None:
            rulings[one.id] = _judged(one.own.condition, one.own.fields, (found or {}).get(one.id))
    room: dict[str, list[str]] = defaultdict(list)
    for one in asked:
        if rulings[one.id].state is None:
            room[one.tenant_id].append(one.id)
    for id_, full in monthly_quota.charge(tx, room, now).items():
        rulings[id_] = Ruling(
            JobState.SKIPPED, Reason.QUOTA, code="MONTHLY_LIMIT_REACHED", error=str(full), verdict=rulings[id_].verdict
        )
    return rulings


def _of_triggers(
    tx: Transaction, ids: Sequence[str], now: datetime, found_by: Mapping[str, Found]
) -> dict[str, Ruling]:  # fmt: skip
    if not ids:
        return {}
    places = select(firings.c.trigger_id, firings.c.item).where(firings.c.job_id.in_(ids))
    wanted: dict[str, set[str]] = defaultdict(set)
    for row in tx.execute(places):
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
            rulings[row.job_id] = _ruling(trigger, homes[trigger.source_id], fields or {}, found_by.get(row.job_id))
    return rulings


def _ruling(trigger: Trigger, source: Source, fields: dict[str, Any], found: Found | None) -> Ruling:
    if not trigger.enabled:
        return Ruling(JobState.SKIPPED, Reason.PAUSED)
    if source.orphaned_at is not None:
        return Ruling(JobState.SKIPPED, Reason.ORPHANED, code="ORPHANED", error=source.orphaned_reason)
    return _judged(trigger.rule.condition, fields, found)


def _judged(condition: Sequence[Comparison], fields: dict[str, Any], found: Found | None) -> Ruling:
    """The verdict, of comparisons and of what a query has found."""
    if not condition and found is None:
        return PASSES
    verdict = judge(condition, fields)
    said = verdict.to_json()
    if found is not None:
        said["unless"] = {"found": found.anything, "parameters": found.parameters}
    said["holds"] = verdict.holds and not (found is not None and found.anything)
    if len(orjson.dumps(said)) > LONGEST:
        said = {"holds": said["holds"], "failed": said["failed"], "inputs": "They are too long to be kept."}
    return Ruling(verdict=said) if said["holds"] else Ruling(JobState.SKIPPED, Reason.CONDITION, verdict=said)
