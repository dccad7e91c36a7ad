"""Scans of triggers: operations that reconcile all items of a source; and retention of firings and items."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import delete, or_, select

from timebell.features.triggers.model.trigger import ChangeSummary
from timebell.features.triggers.store.planned_firings import ItemFields, reconcile_items, withdraw_jobs
from timebell.features.triggers.store.sources import count_items, count_rows_of_first_scan, find_triggers
from timebell.features.triggers.store.tables import firings, items
from timebell.model.operation import Operation, StepResult
from timebell.model.payload import decode
from timebell.store.schema import jobs
from timebell.store.transaction import Transaction

PROGRESS_POLL_SECONDS = 0.5
"""Interval at which a scan checks the progress of the source's first full scan."""
FIRING_RETENTION = timedelta(days=60)
"""Retention of past firings and of items that are gone; must exceed every grace."""


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
    reconcile_items(tx, [trigger], fields_by_key, now, observed, bulk=True)
    skipped = observed.unreadable + observed.late
    alive = sum(fields is not None for fields in fields_by_key.values())
    return StepResult(max(0, alive - skipped), 0, skipped, rows[-1].key if len(rows) == limit else None)


def _await_first_read(tx: Transaction, operation: Operation, source_id: str) -> StepResult:
    """Wait for the first full scan of a source; progress is the number of rows read so far.

    Items found after the trigger was created are reconciled as they arrive; the following phase handles the earlier
    ones.
    """
    if (rows := count_rows_of_first_scan(tx, source_id)) is not None:
        return StepResult(done=rows - operation.done, cursor="", wait_seconds=PROGRESS_POLL_SECONDS)
    total = count_items(tx, source_id)
    return StepResult(done=-operation.done, cursor="", spec=operation.spec | {"phase": "plan"}, total=total)


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
