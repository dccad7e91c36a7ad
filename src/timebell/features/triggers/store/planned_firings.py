"""Reconcile the jobs of triggers with the items of a source: create, move and cancel jobs.

Reconciling an item holds its row lock, so its firings change in one transaction at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select, update

from timebell.features.triggers.model.trigger import (
    MAX_FORMER_JOBS,
    UNREADABLE_KEY,
    ChangeSummary,
    ColumnStatus,
    Firing,
    FiringKey,
    FormerJob,
    NotFired,
    Trigger,
    epoch_micros,
    firing_job_key,
    reconcile,
)
from timebell.features.triggers.store.tables import firings, items
from timebell.ids import new_id
from timebell.model.job import CancelOutcome, Completion, JobState, Kind, NewJob
from timebell.model.payload import MAX_PAYLOAD_BYTES, decode, encode
from timebell.model.routes import route_for
from timebell.store.jobs.claim import bulk_load_keyed
from timebell.store.jobs.claim import insert_returning_ids as insert_jobs
from timebell.store.jobs.complete import complete_jobs
from timebell.store.jobs.repository import ensure_tenants
from timebell.store.schema import jobs
from timebell.store.transaction import Transaction

LATE_WINDOW = timedelta(days=1)
"""An instant that is known too late, and is older than this, counts as past."""
PAYLOAD_HEADROOM_BYTES = 4096
"""Added to the payload limit: a trigger's payload is validated with a short key and recipient, real ones are longer."""

NO_FIRING = Firing(at=None)
ItemFields = Mapping[str, Any] | None
PlannedFiringKey = tuple[str, str, FiringKey]
"""Trigger id, item key, firing key."""


def lock_items(tx: Transaction, source_id: str, keys: Sequence[str]) -> dict[str, tuple[int, dict[str, Any] | None]]:
    """Lock items until the transaction ends; return version and fields by key."""
    # Locked in key order, so that concurrent transactions cannot deadlock.
    query = select(items).where(items.c.source_id == source_id).order_by(items.c.key).with_for_update()
    rows = tx.execute(tx.dialect.match_keys(query, items.c.key, keys))
    return {row.key: (row.version, decode(row.fields)) for row in rows}


def reconcile_items(
    tx: Transaction,
    triggers: Sequence[Trigger],
    fields_by_key: Mapping[str, ItemFields],
    now: datetime,
    observed: ChangeSummary,
    *,
    bulk: bool = False,
) -> None:
    """Create, move and cancel jobs until they match the desired firings of these triggers for these locked items.

    Records why desired firings are not planned. Counts are added to `observed`. With `bulk`, which is only for
    `Store.run`, new rows are loaded by the bulk path of the database.
    """
    firings_by_item = load_firings(tx, [trigger.id for trigger in triggers], list(fields_by_key))
    plan = _Plan({trigger.id: trigger for trigger in triggers}, firings_by_item)
    for trigger in triggers:
        for item, fields in fields_by_key.items():
            current = firings_by_item[trigger.id, item]
            wanted, value, timezone = trigger.rule.desired_firings(fields)
            steps = reconcile(wanted, current, trigger.revision, now, trigger.rule.grace)
            observed.unreadable += value is ColumnStatus.UNREADABLE
            observed.late += len(steps.too_late)
            not_fired = {key: _describe_late(wanted[key], now) for key in steps.too_late}
            if value is ColumnStatus.UNREADABLE:
                not_fired[FiringKey(UNREADABLE_KEY)] = NotFired(
                    "unreadable", trigger.rule.describe_unreadable(fields or {})
                )
            for firing_key in steps.cancel:
                plan.cancel[trigger.id, item, firing_key] = current[firing_key]
            for firing_key, at in steps.create.items():
                plan.new[trigger.id, item, firing_key] = build_job(trigger, item, firing_key, at, now, timezone)
            for firing_key in {**current, **not_fired}:
                known = current[firing_key].not_fired if firing_key in current else None
                is_skipped = known is not None and known.reason == "skipped" and firing_key in wanted
                if known != not_fired.get(firing_key) and not is_skipped:
                    plan.not_fired[trigger.id, item, firing_key] = not_fired.get(firing_key)
    _apply_plan(tx, plan, now, observed, bulk=bulk)


def _describe_late(at: datetime, now: datetime) -> NotFired:
    reason = "late" if now - at < LATE_WINDOW else "past"
    return NotFired(reason, at.isoformat().replace("+00:00", "Z"))


@dataclass(slots=True)
class _Plan:
    """Changes to firings: new jobs, cancelled firings, and new reasons why nothing is planned (None: there is none)."""

    triggers: Mapping[str, Trigger]
    previous: Mapping[tuple[str, str], Mapping[FiringKey, Firing]]
    new: dict[PlannedFiringKey, NewJob] = field(default_factory=dict)
    cancel: dict[PlannedFiringKey, Firing] = field(default_factory=dict)
    not_fired: dict[PlannedFiringKey, NotFired | None] = field(default_factory=dict)


def _apply_plan(tx: Transaction, plan: _Plan, now: datetime, observed: ChangeSummary, *, bulk: bool) -> None:
    if not plan.new and not plan.cancel and not plan.not_fired:
        return
    replaced = {firing.job_id: plan.new.get(key) for key, firing in plan.cancel.items() if firing.job_id is not None}
    prevented = withdraw_jobs(tx, replaced, now)
    for id_ in prevented:
        if (job := replaced[id_]) is not None:
            job.replaces = id_
    observed.cancelled += len(prevented)
    inserted = _insert_jobs(tx, list(plan.new.values()), now, bulk=bulk) if plan.new else set()
    observed.created += len(inserted)
    rows, new_rows = list[dict[str, Any]](), list[dict[str, Any]]()
    for key in {**plan.cancel, **plan.new, **plan.not_fired}:
        known = plan.previous[key[0], key[1]].get(key[2])
        row = _build_row(plan, key, known or NO_FIRING, inserted, prevented, now)
        (new_rows if bulk and known is None else rows).append(row)
    if rows:
        changed = ("at", "job_id", "revision", "fired_at", "history", "not_fired", "detail", "not_fired_at")
        tx.execute(tx.dialect.upsert(firings, replace=changed), rows)
    if new_rows:
        _load_firings(tx, new_rows)


def _build_row(
    plan: _Plan, key: PlannedFiringKey, old: Firing, inserted: Set[str], prevented: Set[str], now: datetime
) -> dict[str, Any]:  # fmt: skip
    """Return the row of a firing once the plan is applied; `inserted` and `prevented` are ids of jobs."""
    trigger_id, item, firing_key = key
    trigger = plan.triggers[trigger_id]
    at, job_id, fired_at, history = old.at, old.job_id, old.fired_at, old.history
    if key in plan.cancel or key in plan.new:
        job = plan.new.get(key)
        planned = job if job is not None and job.id in inserted else None
        if old.at is not None:
            has_fired = old.job_id not in prevented
            fired_at = old.at if has_fired else fired_at
            former = FormerJob(old.job_id or "", epoch_micros(old.at), has_fired)
            history = (*history, former)[-MAX_FORMER_JOBS:]
        at, job_id = (None, None) if planned is None else (planned.scheduled_at, planned.id)
    not_fired = plan.not_fired.get(key, old.not_fired) if job_id is None else None
    return {
        "trigger_id": trigger_id, "item": item, "step": firing_key.offset, "recipient": firing_key.recipient,
        "tenant_id": trigger.tenant_id, "revision": trigger.revision, "at": at, "job_id": job_id,
        "fired_at": fired_at, "history": encode([list(job) for job in history], "history") if history else None,
        "not_fired": None if not_fired is None else not_fired.reason,
        "detail": None if not_fired is None else not_fired.detail,
        "not_fired_at": None if not_fired is None else now,
    }  # fmt: skip


def _insert_jobs(tx: Transaction, new_jobs: Sequence[NewJob], now: datetime, *, bulk: bool) -> set[str]:
    """Insert jobs of one tenant; return the ids of those inserted."""
    if not bulk:
        return insert_jobs(tx, new_jobs)
    return bulk_load_keyed(tx, new_jobs, shared=ensure_tenants(tx, {new_jobs[0].tenant_id}, now))


def _load_firings(tx: Transaction, rows: Sequence[dict[str, Any]]) -> None:
    to_db = tx.dialect.to_db
    for row in rows:
        row["at"], row["not_fired_at"] = to_db(row["at"]), to_db(row["not_fired_at"])
    tx.bulk_insert(firings.name, list(rows[0]), (tuple(row.values()) for row in rows))


def withdraw_jobs(tx: Transaction, successors: Mapping[str, NewJob | None], now: datetime) -> set[str]:
    """Cancel pending jobs, each replaced by its successor, if any; return the ids of the cancelled jobs.

    A running job is not cancelled: its pre-delivery check decides. Its key is cleared, so that a successor can use it.
    """
    if not successors:
        return set()
    query = select(jobs.c.id, jobs.c.state, jobs.c.attempt, jobs.c.errors).where(jobs.c.id.in_(sorted(successors)))
    rows = tx.execute(query.order_by(jobs.c.id).with_for_update()).all()
    completions = []
    for row in rows:
        if row.state == JobState.PENDING:
            job = successors[row.id]
            completions.append(Completion(
                row.id, row.attempt, JobState.CANCELLED, now, expected_state=JobState.PENDING, uses_attempt=False,
                errors=row.errors, reason="withdrawn" if job is None else "rescheduled",
                cancel=CancelOutcome.PREVENTED, replaced_by=None if job is None else job.id,
            ))  # fmt: skip
    prevented = {str(row["id"]) for row in complete_jobs(tx, completions)} if completions else set()
    if started := [row.id for row in rows if row.id not in prevented]:
        tx.execute(update(jobs).where(jobs.c.id.in_(started)).values(key=None))
    return prevented


def load_firings(
    tx: Transaction, trigger_ids: Sequence[str], keys: Sequence[str]
) -> dict[tuple[str, str], dict[FiringKey, Firing]]:  # fmt: skip
    """Return the recorded firings by trigger and item."""
    by_item: dict[tuple[str, str], dict[FiringKey, Firing]] = defaultdict(dict)
    if not trigger_ids:
        return by_item
    query = select(firings).where(firings.c.trigger_id.in_(sorted(trigger_ids)))
    for row in tx.execute(tx.dialect.match_keys(query, firings.c.item, keys)):
        by_item[row.trigger_id, row.item][FiringKey(row.step, row.recipient)] = Firing(
            at=row.at, job_id=row.job_id, revision=row.revision, fired_at=row.fired_at,
            history=tuple(FormerJob(*entry) for entry in decode(row.history) or ()),
            not_fired=None if row.not_fired is None else NotFired(row.not_fired, row.detail or ""),
        )  # fmt: skip
    return by_item


def build_job(
    trigger: Trigger, item: str, firing_key: FiringKey, at: datetime, now: datetime, timezone: str
) -> NewJob:  # fmt: skip
    """Return the job of a firing, due at an instant."""
    action = trigger.action
    return NewJob(
        id=new_id(now), tenant_id=trigger.tenant_id, topic=action.topic, scheduled_at=at, run_at=at,
        timezone=timezone, created_at=now, kind=Kind.TRIGGER,
        payload=encode(build_payload(trigger, item, firing_key, at), limit=MAX_PAYLOAD_BYTES + PAYLOAD_HEADROOM_BYTES),
        metadata=encode(action.metadata, "metadata") if action.metadata else None,
        owner_id=firing_key.recipient or action.owner_id, key=firing_job_key(trigger.id, item, firing_key),
        target=encode(action.target, "target") if action.target else None, route=route_for(action.topic, action.target),
        queue=action.queue, priority=action.priority, group=action.group,
        retry=None if action.retry is None else encode(action.retry.to_json()), timeout=action.timeout,
        expires_at=None if action.expires_after is None else at + timedelta(seconds=action.expires_after),
    )  # fmt: skip


def build_payload(trigger: Trigger, item: str, firing_key: FiringKey, at: datetime) -> dict[str, Any]:
    """Return the payload of a trigger's job; `action` is the payload configured in the trigger."""
    payload = {
        "triggerId": trigger.id, "itemId": item, "boardId": trigger.source_label, "tenantId": trigger.tenant_id,
        "action": trigger.action.payload, "scheduledAt": at.isoformat().replace("+00:00", "Z"),
        "offset": firing_key.offset,
    }  # fmt: skip
    return {**payload, "recipient": firing_key.recipient} if firing_key.recipient else payload
