"""Pre-delivery checks of started jobs: trigger still plans it, conditions hold, monthly quota not exhausted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import select, tuple_

from timebell.model.condition import Comparison, evaluate, query_parameters
from timebell.model.job import JobState, Kind, Reason
from timebell.model.payload import decode
from timebell.model.preconditions import Preconditions, UnlessQuery
from timebell.model.trigger import ChangeSummary, FiringKey, Source, Trigger
from timebell.store.tenancy import monthly_quota
from timebell.store.transaction import Transaction
from timebell.store.triggers.planned_firings import lock_items, reconcile_items
from timebell.store.triggers.sources import find_sources, find_triggers
from timebell.store.triggers.tables import firings, items

MAX_VERDICT_BYTES = 8192  # of a stored verdict, as JSON


@dataclass(frozen=True, slots=True)
class DeliveryCheck:
    """An attempt to check before its delivery."""

    id: str
    tenant_id: str
    kind: str
    is_manual_retry: bool
    preconditions: Preconditions | None = None
    """The preconditions of the job itself."""

    @property
    def checks_trigger(self) -> bool:
        """Return whether its trigger is checked, too."""
        return self.kind == Kind.TRIGGER and not self.is_manual_retry

    @property
    def unless(self) -> UnlessQuery | None:
        """The query of its own preconditions."""
        return None if self.preconditions is None else self.preconditions.unless


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


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of an `unless` query: whether it found rows, and the parameters it was run with."""

    found_rows: bool
    parameters: dict[str, Any]


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


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about an attempt: it may be delivered if `state` is None, else `state` is final for the job.

    `verdict` is the JSON verdict of its condition, if it has one.
    """

    state: JobState | None = None
    reason: str | None = None
    code: str | None = None
    error: str | None = None
    verdict: dict[str, Any] | None = None


ALLOWED = Decision()
WITHDRAWN = Decision(JobState.CANCELLED, "withdrawn")


def decide(
    tx: Transaction, checks: Sequence[DeliveryCheck], now: datetime,
    query_results: Mapping[str, QueryResult] | None = None,
) -> dict[str, Decision]:  # fmt: skip
    """Decide whether attempts may be delivered; return the decisions by job id.

    Allowed jobs are charged to the monthly quota of their tenants. `query_results` are the results of the `unless`
    queries of the jobs or their triggers, by job id.
    """
    decisions = dict.fromkeys((check.id for check in checks), ALLOWED)
    decisions |= _decide_triggers(tx, [check.id for check in checks if check.checks_trigger], now, query_results or {})
    for check in checks:
        if check.preconditions is not None and decisions[check.id].state is None:
            decisions[check.id] = _decide_condition(
                check.preconditions.condition, check.preconditions.fields, (query_results or {}).get(check.id)
            )
    allowed: dict[str, list[str]] = defaultdict(list)
    for check in checks:
        if decisions[check.id].state is None:
            allowed[check.tenant_id].append(check.id)
    for id_, error in monthly_quota.charge_jobs(tx, allowed, now).items():
        decisions[id_] = Decision(
            JobState.SKIPPED,
            Reason.QUOTA,
            code="MONTHLY_LIMIT_REACHED",
            error=str(error),
            verdict=decisions[id_].verdict,
        )
    return decisions


def _decide_triggers(
    tx: Transaction, ids: Sequence[str], now: datetime, query_results: Mapping[str, QueryResult]
) -> dict[str, Decision]:  # fmt: skip
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
    return _decide_condition(trigger.rule.condition, fields, query_result)


def _decide_condition(
    condition: Sequence[Comparison], fields: dict[str, Any], query_result: QueryResult | None
) -> Decision:
    """Evaluate comparisons and the result of a query."""
    if not condition and query_result is None:
        return ALLOWED
    verdict = evaluate(condition, fields)
    result = verdict.to_json()
    if query_result is not None:
        result["unless"] = {"found": query_result.found_rows, "parameters": query_result.parameters}
    result["holds"] = verdict.holds and not (query_result is not None and query_result.found_rows)
    if len(orjson.dumps(result)) > MAX_VERDICT_BYTES:
        result = {
            "holds": result["holds"],
            "failed": result["failed"],
            "inputs": "The inputs are too long to be stored.",
        }
    return Decision(verdict=result) if result["holds"] else Decision(JobState.SKIPPED, Reason.CONDITION, verdict=result)
