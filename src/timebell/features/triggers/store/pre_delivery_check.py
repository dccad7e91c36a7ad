"""Pre-delivery checks of the jobs of triggers: the trigger still plans the job, and its conditions hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select, tuple_

from timebell.features.triggers.model.trigger import ChangeSummary, FiringKey, Source, Trigger
from timebell.features.triggers.store.planned_firings import lock_items, reconcile_items
from timebell.features.triggers.store.sources import find_sources, find_triggers
from timebell.features.triggers.store.tables import firings, items
from timebell.model.condition import query_parameters
from timebell.model.job import JobState, Reason
from timebell.model.payload import decode
from timebell.store.jobs.pre_delivery_check import Decision, QueryResult, decide_condition
from timebell.store.transaction import Transaction

WITHDRAWN = Decision(JobState.CANCELLED, "withdrawn")


@dataclass(frozen=True, slots=True)
class PlannedFiring:
    """The firing for which a job was planned: trigger, source, item and place in the plan."""

    job_id: str
    trigger: Trigger
    source: Source
    item: str
    place: FiringKey
    fields: dict[str, Any] | None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters used by the query of its trigger: fields of the item, and the place of the job."""
        place = {"item": self.item, "recipient": self.place.recipient or None, "offset": self.place.offset}
        values = {**(self.fields or {}), **place}
        return {name: values.get(name) for name in query_parameters(self.trigger.rule.unless or "")}


def load_planned_firings(tx: Transaction, ids: Sequence[str]) -> list[PlannedFiring]:
    """Load the planned firings of jobs, with the fields of their items as stored."""
    rows = tx.execute(select(firings).where(firings.c.job_id.in_(ids))).all()
    triggers = find_triggers(tx, {row.trigger_id for row in rows})
    sources = find_sources(tx, {trigger.source_id for trigger in triggers.values()})
    item_keys = [(triggers[row.trigger_id].source_id, row.item) for row in rows if row.trigger_id in triggers]
    item_fields = {
        (row.source_id, row.key): decode(row.fields)
        for row in tx.execute(select(items).where(tuple_(items.c.source_id, items.c.key).in_(item_keys)))
    } if item_keys else {}  # fmt: skip
    return [
        PlannedFiring(
            row.job_id, triggers[row.trigger_id], sources[triggers[row.trigger_id].source_id], row.item,
            FiringKey(row.step, row.recipient), item_fields.get((triggers[row.trigger_id].source_id, row.item)),
        )
        for row in rows if row.trigger_id in triggers
    ]  # fmt: skip


def decide_planned_jobs(
    tx: Transaction, ids: Sequence[str], now: datetime, query_results: Mapping[str, QueryResult]
) -> dict[str, Decision]:  # fmt: skip
    """Decide whether jobs of triggers may be delivered; reconciles their items first."""
    if not ids:
        return {}
    query = select(firings.c.trigger_id, firings.c.item).where(firings.c.job_id.in_(ids))
    keys_by_trigger: dict[str, set[str]] = defaultdict(set)
    for row in tx.execute(query):
        keys_by_trigger[row.trigger_id].add(row.item)
    triggers = find_triggers(tx, keys_by_trigger)
    by_source: dict[str, list[Trigger]] = defaultdict(list)
    for trigger in triggers.values():
        by_source[trigger.source_id].append(trigger)
    known: dict[tuple[str, str], dict[str, Any] | None] = {}
    for source_id in sorted(by_source):
        keys = sorted({key for trigger in by_source[source_id] for key in keys_by_trigger[trigger.id]})
        item_fields = {key: fields for key, (_, fields) in lock_items(tx, source_id, keys).items()}
        known |= {(source_id, key): item_fields.get(key) for key in keys}
        for trigger in by_source[source_id]:
            reconcile_items(
                tx, [trigger], {key: item_fields.get(key) for key in keys_by_trigger[trigger.id]}, now, ChangeSummary()
            )
    sources = find_sources(tx, by_source)
    decisions = dict.fromkeys(ids, WITHDRAWN)
    remaining = select(firings.c.trigger_id, firings.c.item, firings.c.job_id).where(firings.c.job_id.in_(ids))
    for row in tx.execute(remaining):
        if row.trigger_id in triggers:
            trigger = triggers[row.trigger_id]
            fields = known.get((trigger.source_id, row.item))
            decisions[row.job_id] = _decide_firing(
                trigger, sources[trigger.source_id], fields or {}, query_results.get(row.job_id)
            )
    return decisions


def _decide_firing(
    trigger: Trigger, source: Source, fields: dict[str, Any], query_result: QueryResult | None
) -> Decision:
    if not trigger.enabled:
        return Decision(JobState.SKIPPED, Reason.PAUSED)
    if source.orphaned_at is not None:
        return Decision(JobState.SKIPPED, Reason.ORPHANED, code="ORPHANED", error=source.orphaned_reason)
    return decide_condition(trigger.rule.condition, fields, query_result)
