"""Reconcile the jobs of triggers with the items of a source: apply item changes, then create, move and cancel jobs.

Reconciling an item holds its row lock, so its firings change in one transaction at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import case, delete, or_, select, update

from timebell.errors import InvalidPayload
from timebell.features.triggers.model.trigger import (
    MAX_FORMER_JOBS,
    SOURCE_ROWS_REJECTED,
    UNREADABLE_KEY,
    ChangeSummary,
    ColumnStatus,
    Firing,
    FiringKey,
    FormerJob,
    ItemChange,
    NotFired,
    Source,
    Trigger,
    epoch_micros,
    firing_job_key,
    key_problem,
    reconcile,
)
from timebell.features.triggers.store.sources import (
    awaits_first_scan,
    count_items,
    find_triggers,
    list_triggers_of_source,
)
from timebell.features.triggers.store.tables import firings, items
from timebell.ids import new_id
from timebell.model.job import CancelOutcome, Completion, JobState, Kind, NewJob
from timebell.model.operation import Operation, StepResult
from timebell.model.payload import MAX_PAYLOAD_BYTES, decode, encode
from timebell.model.routes import route_for
from timebell.store.jobs.claim import insert_returning_ids as insert_jobs
from timebell.store.jobs.complete import complete_jobs
from timebell.store.schema import jobs, sources
from timebell.store.transaction import Transaction

MAX_KEYS_PER_STATEMENT = 500
LATE_WINDOW = timedelta(days=1)
"""An instant that is known too late, and is older than this, counts as past."""
PROGRESS_POLL_SECONDS = 0.5
"""Interval at which a scan checks the progress of the source's first full scan."""
PAYLOAD_HEADROOM_BYTES = 4096
"""Added to the payload limit: a trigger's payload is validated with a short key and recipient, real ones are longer."""

ItemFields = Mapping[str, Any] | None
PlannedFiringKey = tuple[str, str, FiringKey]
"""Trigger id, item key, firing key."""


def apply_changes(tx: Transaction, source: Source, changes: Sequence[ItemChange], now: datetime) -> ChangeSummary:
    """Apply item changes reported by a source and reconcile the affected jobs, all in one transaction.

    Changes that are not newer than the stored version are ignored. If the fields of a change cannot be stored, the
    item keeps its previous fields.
    """
    tx.execute(select(sources.c.id).where(sources.c.id == source.id).with_for_update(read=True))
    summary = ChangeSummary()
    newest: dict[str, ItemChange] = {}
    for change in changes:
        if (problem := key_problem(change.key)) is not None:
            if change.fields is not None:
                summary.rejected.append(problem)
            continue
        known = newest.get(change.key)
        if known is not None:
            summary.stale += 1
        if known is None or change.version is None or (known.version is not None and change.version > known.version):
            newest[change.key] = change
    keys = sorted(newest)
    ensure_items(tx, source, keys, now)
    changed_fields: dict[str, ItemFields] = {}
    rows = []
    for key, (version, old_fields) in lock_items(tx, source.id, keys).items():
        change = newest[key]
        new_version = max(epoch_micros(now), version + 1) if change.version is None else change.version
        if new_version <= version:
            summary.stale += 1
            continue
        new_fields, fields, problem = _encode_change(change, old_fields)
        if problem is not None:
            summary.rejected.append(f"{key!r:.60}: {problem}")
        rows.append({
            "source_id": source.id, "key": key, "tenant_id": source.tenant_id, "version": new_version,
            "fields": fields, "problem": problem, "updated_at": now,
        })  # fmt: skip
        if decode(fields) == old_fields and version >= 0:
            summary.unchanged += 1
        else:
            summary.changed += 1
            changed_fields[key] = new_fields
    if rows:
        tx.execute(tx.dialect.upsert(items, replace=("version", "fields", "problem", "updated_at")), rows)
    if changed_fields:
        reconcile_items(tx, list_triggers_of_source(tx, source), changed_fields, now, summary)
    return summary


def _encode_change(change: ItemChange, old_fields: dict[str, Any] | None) -> tuple[ItemFields, str | None, str | None]:
    """Return the new fields of an item, their JSON, and the problem because of which these are the old ones, if any."""
    problem = change.problem
    if problem is None:
        try:
            return change.fields, None if change.fields is None else encode(change.fields, "fields"), None
        except InvalidPayload as error:
            problem = error.message[:300]
    return old_fields, None if old_fields is None else encode(old_fields, "fields"), problem


def ensure_items(tx: Transaction, source: Source, keys: Sequence[str], now: datetime) -> None:
    """Insert missing item rows, with version -1 and without fields."""
    if keys:
        common = {"source_id": source.id, "tenant_id": source.tenant_id, "version": -1, "updated_at": now}
        tx.execute(tx.dialect.insert_ignoring_duplicates(items), [{**common, "key": key} for key in keys])


def apply_poll_result(
    tx: Transaction, source: Source, changes: Sequence[ItemChange], cursor: str | None, now: datetime
) -> ChangeSummary:  # fmt: skip
    """Apply the changes found by a poll of a source, and store the cursor of the next poll."""
    if cursor is not None:
        # Update the source before its items: upgrading the lock later could deadlock with a transaction that shares it
        # and waits for one of the items.
        has_rejected_rows = sources.c.error_code == SOURCE_ROWS_REJECTED  # stays until the next full scan
        error_columns = {
            name: case((has_rejected_rows, sources.c[name]), else_=None) for name in ("error", "error_code")
        }
        tx.execute(update(sources).where(sources.c.id == source.id).values(cursor=cursor, **error_columns))
    return apply_changes(tx, source, changes, now) if changes else ChangeSummary()


def apply_scanned_page(
    tx: Transaction, source: Source, changes: Sequence[ItemChange], cursor: str, now: datetime, saves: bool
) -> ChangeSummary:  # fmt: skip
    """Apply those rows of a page that differ from the stored items; store the cursor if there are any, or `saves`.

    So a full scan of an unchanged table reads only. The version of an equal item stays older than this read, which
    matters only if a still older read with other values is applied later: the next read corrects it.
    """
    stored: dict[str, tuple[str | None, str | None]] = {}
    for start in range(0, len(changes), MAX_KEYS_PER_STATEMENT):
        keys = [change.key for change in changes[start : start + MAX_KEYS_PER_STATEMENT]]
        query = select(items.c.key, items.c.fields, items.c.problem).where(
            items.c.source_id == source.id, items.c.key.in_(keys)
        )
        stored |= {row.key: (row.fields, row.problem) for row in tx.execute(query)}
    differing = [change for change in changes if _differs(change, stored.get(change.key))]
    summary = apply_poll_result(tx, source, differing, cursor if differing or saves else None, now)
    known_problems = {change.key for change in changes if change.problem is not None} - {c.key for c in differing}
    summary.rejected += [f"{key!r:.60}: {stored[key][1]}" for key in sorted(known_problems)]
    summary.unchanged += len(changes) - len(differing)
    return summary


def _differs(change: ItemChange, stored: tuple[str | None, str | None] | None) -> bool:
    """Return whether a scanned row differs from the stored item."""
    if stored is None:
        return True
    if change.problem is not None or stored[1] is not None:
        return change.problem != stored[1]
    try:
        return stored != (orjson.dumps(change.fields).decode(), None)
    except (TypeError, ValueError):
        return True


def list_known_keys(tx: Transaction, source_id: str, after: str | None, limit: int) -> list[str]:
    """Return the keys of a source's items that are not gone, in key order."""
    query = select(items.c.key).where(items.c.source_id == source_id, items.c.fields.is_not(None))
    if after is not None:
        query = query.where(items.c.key > after)
    return list(tx.execute(query.order_by(items.c.key).limit(limit)).scalars())


def lock_items(tx: Transaction, source_id: str, keys: Sequence[str]) -> dict[str, tuple[int, dict[str, Any] | None]]:
    """Lock items until the transaction ends; return version and fields by key."""
    # Locked in key order, so that concurrent transactions cannot deadlock.
    query = select(items).where(items.c.source_id == source_id, items.c.key.in_(keys)).order_by(items.c.key)
    return {row.key: (row.version, decode(row.fields)) for row in tx.execute(query.with_for_update())}


def reconcile_items(
    tx: Transaction,
    triggers: Sequence[Trigger],
    fields_by_key: Mapping[str, ItemFields],
    now: datetime,
    observed: ChangeSummary,
) -> None:
    """Create, move and cancel jobs until they match the desired firings of these triggers for these locked items.

    Records why desired firings are not planned. Counts are added to `observed`.
    """
    firings_by_item = _firings_by_item(tx, [trigger.id for trigger in triggers], list(fields_by_key))
    plan = _Plan({trigger.id: trigger for trigger in triggers}, firings_by_item)
    for trigger in triggers:
        for item, fields in fields_by_key.items():
            current = firings_by_item[trigger.id, item]
            wanted, value = trigger.rule.desired_firings(fields)
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
                plan.new[trigger.id, item, firing_key] = build_job(trigger, item, firing_key, at, now)
            for firing_key in {**current, **not_fired}:
                known = current[firing_key].not_fired if firing_key in current else None
                is_skipped = known is not None and known.reason == "skipped" and firing_key in wanted
                if known != not_fired.get(firing_key) and not is_skipped:
                    plan.not_fired[trigger.id, item, firing_key] = not_fired.get(firing_key)
    _apply_plan(tx, plan, now, observed)


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


def _apply_plan(tx: Transaction, plan: _Plan, now: datetime, observed: ChangeSummary) -> None:
    if not plan.new and not plan.cancel and not plan.not_fired:
        return
    replaced = {firing.job_id: plan.new.get(key) for key, firing in plan.cancel.items() if firing.job_id is not None}
    prevented = withdraw_jobs(tx, replaced, now)
    for id_ in prevented:
        if (job := replaced[id_]) is not None:
            job.replaces = id_
    observed.cancelled += len(prevented)
    inserted = insert_jobs(tx, list(plan.new.values())) if plan.new else set()
    observed.created += len(inserted)
    rows = []
    for key in {**plan.cancel, **plan.new, **plan.not_fired}:
        trigger_id, item, firing_key = key
        trigger, old = plan.triggers[trigger_id], plan.previous[trigger_id, item].get(firing_key, Firing(at=None))
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
        rows.append({
            "trigger_id": trigger_id, "item": item, "step": firing_key.offset, "recipient": firing_key.recipient,
            "tenant_id": trigger.tenant_id, "revision": trigger.revision, "at": at, "job_id": job_id,
            "fired_at": fired_at, "history": encode([list(job) for job in history], "history") if history else None,
            "not_fired": None if not_fired is None else not_fired.reason,
            "detail": None if not_fired is None else not_fired.detail,
            "not_fired_at": None if not_fired is None else now,
        })  # fmt: skip
    changed = ("at", "job_id", "revision", "fired_at", "history", "not_fired", "detail", "not_fired_at")
    tx.execute(tx.dialect.upsert(firings, replace=changed), rows)


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


def _firings_by_item(
    tx: Transaction, trigger_ids: Sequence[str], keys: Sequence[str]
) -> dict[tuple[str, str], dict[FiringKey, Firing]]:  # fmt: skip
    by_item: dict[tuple[str, str], dict[FiringKey, Firing]] = defaultdict(dict)
    if not trigger_ids:
        return by_item
    matches = firings.c.trigger_id.in_(sorted(trigger_ids)) & firings.c.item.in_(keys)
    for row in tx.execute(select(firings).where(matches)):
        by_item[row.trigger_id, row.item][FiringKey(row.step, row.recipient)] = Firing(
            at=row.at, job_id=row.job_id, revision=row.revision, fired_at=row.fired_at,
            history=tuple(FormerJob(*entry) for entry in decode(row.history) or ()),
            not_fired=None if row.not_fired is None else NotFired(row.not_fired, row.detail or ""),
        )  # fmt: skip
    return by_item


def build_job(trigger: Trigger, item: str, firing_key: FiringKey, at: datetime, now: datetime) -> NewJob:
    """Return the job of a firing, due at an instant."""
    action = trigger.action
    return NewJob(
        id=new_id(now), tenant_id=trigger.tenant_id, topic=action.topic, scheduled_at=at, run_at=at,
        timezone=trigger.rule.timezone or "UTC", created_at=now, kind=Kind.TRIGGER,
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


def scan_batch(tx: Transaction, operation: Operation, limit: int, now: datetime) -> StepResult:
    """Reconcile the next `limit` items of a trigger's source, as a step of a scan operation.

    Counted as skipped: items with an unreadable date, and items whose firing is too late. For a deleted trigger,
    cancel the next of its jobs.
    """
    trigger = find_triggers(tx, [operation.spec["trigger"]]).get(operation.spec["trigger"])
    if trigger is None:
        return _clear_deleted_trigger(tx, operation.spec["trigger"], limit, now)
    if operation.spec.get("phase") == "read":
        return _await_first_read(tx, operation, trigger.source_id)
    query = select(items.c.key, items.c.fields).where(items.c.source_id == trigger.source_id)
    if operation.cursor is not None:
        query = query.where(items.c.key > operation.cursor)
    rows = tx.execute(query.order_by(items.c.key).limit(limit).with_for_update()).all()
    observed = ChangeSummary()
    fields_by_key: dict[str, ItemFields] = {row.key: decode(row.fields) for row in rows}
    reconcile_items(tx, [trigger], fields_by_key, now, observed)
    skipped = observed.unreadable + observed.late
    alive = sum(fields is not None for fields in fields_by_key.values())
    return StepResult(max(0, alive - skipped), 0, skipped, rows[-1].key if len(rows) == limit else None)


def _await_first_read(tx: Transaction, operation: Operation, source_id: str) -> StepResult:
    """Wait for the first full scan of a source; progress is the number of items found so far.

    Items found after the trigger was created are reconciled as they arrive; the following phase handles the earlier
    ones.
    """
    alive = count_items(tx, source_id)
    if awaits_first_scan(tx, source_id):
        return StepResult(done=alive - operation.done, cursor="", wait_seconds=PROGRESS_POLL_SECONDS)
    return StepResult(done=-operation.done, cursor="", spec=operation.spec | {"phase": "plan"}, total=alive)


FIRING_RETENTION = timedelta(days=60)
"""Retention of past firings and of items that are gone; must exceed every grace."""


def prune_firings_and_items(tx: Transaction, now: datetime, limit: int) -> int:
    """Delete up to `limit` past firings and up to `limit` gone items older than FIRING_RETENTION; return how many."""
    before = now - FIRING_RETENTION
    is_past = or_(firings.c.at < before, firings.c.at.is_(None)) & or_(
        firings.c.fired_at < before, firings.c.fired_at.is_(None)
    )
    is_past &= or_(firings.c.not_fired_at < before, firings.c.not_fired_at.is_(None))
    live = select(jobs.c.id).where(jobs.c.id == firings.c.job_id).exists()
    deleted = 0
    for row in tx.execute(select(firings).where(is_past, ~live).limit(limit)).all():
        same_row = (
            (firings.c.trigger_id == row.trigger_id) & (firings.c.item == row.item) & (firings.c.step == row.step)
        )
        deleted += tx.execute(delete(firings).where(same_row, firings.c.recipient == row.recipient)).rowcount
    gone = items.c.fields.is_(None) & (items.c.updated_at < before)
    for row in tx.execute(select(items.c.source_id, items.c.key).where(gone).limit(limit)).all():
        same_row = (items.c.source_id == row.source_id) & (items.c.key == row.key)
        deleted += tx.execute(delete(items).where(same_row, gone)).rowcount
    return deleted


def _clear_deleted_trigger(tx: Transaction, trigger_id: str, limit: int, now: datetime) -> StepResult:
    """Delete the next firings of a deleted trigger, and cancel their jobs."""
    of_trigger = firings.c.trigger_id == trigger_id
    rows = tx.execute(select(firings).where(of_trigger).limit(limit).with_for_update()).all()
    withdraw_jobs(tx, {row.job_id: None for row in rows if row.job_id is not None}, now)
    for row in rows:
        same_item = of_trigger & (firings.c.item == row.item) & (firings.c.step == row.step)
        tx.execute(delete(firings).where(same_item, firings.c.recipient == row.recipient))
    return StepResult(len(rows), 0, 0, "more" if len(rows) == limit else None)
