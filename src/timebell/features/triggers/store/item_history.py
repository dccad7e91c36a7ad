"""History of the items of a trigger: what was planned, what fired, and why something did not; fire or skip an item."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any

from sqlalchemy import Row, select, update

from timebell.errors import NotFound
from timebell.features.triggers.model.item_history import FiringRecord, ItemHistory
from timebell.features.triggers.model.trigger import (
    MAX_FORMER_JOBS,
    FiringKey,
    FormerJob,
    Item,
    Trigger,
    epoch_micros,
)
from timebell.features.triggers.store.planned_firings import build_job, lock_items, withdraw_jobs
from timebell.features.triggers.store.tables import firings, items
from timebell.ids import new_id
from timebell.model.job import Kind
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.store.jobs.claim import insert_returning_ids
from timebell.store.jobs.repository import find_job
from timebell.store.transaction import Transaction

MANUAL = "manual"
"""In place of an offset: the record of the jobs with which a user fired an item."""
MAX_JOBS = 100  # of an item's history


def list_not_fired(
    tx: Transaction, trigger: Trigger, limit: int, after: str | None, start: datetime | None = None,
    end: datetime | None = None,
) -> Page[FiringRecord]:  # fmt: skip
    """Return a page of the firings for which nothing is planned, noticed in [start, end), in the order of items."""
    query = select(firings).where(firings.c.trigger_id == trigger.id, firings.c.not_fired.is_not(None))
    if start is not None:
        query = query.where(firings.c.not_fired_at >= start)
    if end is not None:
        query = query.where(firings.c.not_fired_at < end)
    if after is not None:
        query = query.where(firings.c.item > after)
    rows = tx.execute(query.order_by(firings.c.item, firings.c.step, firings.c.recipient).limit(limit + 1)).all()
    if len(rows) <= limit:
        return Page([_to_record(row) for row in rows], None)
    last = rows[limit].item  # a page ends with a whole item, unless one item fills it
    whole = [row for row in rows if row.item != last] or rows[:limit]
    return Page([_to_record(row) for row in whole], whole[-1].item)


def find_item_history(tx: Transaction, trigger: Trigger, key: str) -> ItemHistory | None:
    """Return the history of an item; None for an unknown one."""
    row = tx.execute(select(items).where(items.c.source_id == trigger.source_id, items.c.key == key)).first()
    if row is None:
        return None
    rows = tx.execute(
        select(firings)
        .where(firings.c.trigger_id == trigger.id, firings.c.item == key)
        .order_by(firings.c.step, firings.c.recipient)
    ).all()
    ids = {
        id_ for each in rows
        for id_ in (each.job_id, *(FormerJob(*former).id for former in decode(each.history) or ())) if id_
    }  # fmt: skip
    jobs = [find_job(tx, trigger.tenant_id, id_) for id_ in sorted(ids, reverse=True)[:MAX_JOBS]]
    return ItemHistory(
        item=Item(
            key=row.key, version=row.version, fields=decode(row.fields), problem=row.problem, updated_at=row.updated_at
        ),
        firings=[_to_record(each) for each in rows], jobs=[job for job in jobs if job is not None],
    )  # fmt: skip


def fire_item(tx: Transaction, trigger: Trigger, key: str, now: datetime) -> list[str]:
    """Create a job for each recipient of an item, due now; planned firings are unchanged. Returns the job ids.

    Raises NotFound (ITEM_NOT_FOUND).
    """
    fields = lock_items(tx, trigger.source_id, [key]).get(key, (0, None))[1]
    if fields is None:
        raise no_such_item(key)
    desired = trigger.rule.desired_firings(fields)
    recipients = sorted({place.recipient for place in desired.instants}) or [""]
    jobs = []
    for recipient in recipients:
        # Without a key and of the kind `manual`: the job is not a firing, so no change of the item withdraws it.
        job = build_job(trigger, key, FiringKey("0", recipient), now, now, desired.timezone)
        jobs.append(dataclasses.replace(job, id=new_id(now), key=None, kind=Kind.MANUAL))
    inserted = insert_returning_ids(tx, jobs)
    of_item = (firings.c.trigger_id == trigger.id) & (firings.c.item == key) & (firings.c.step == MANUAL)
    known = select(firings.c.recipient, firings.c.history).where(of_item)
    former = {row.recipient: row.history for row in tx.execute(known)}
    tx.execute(tx.dialect.upsert(firings, replace=("fired_at", "history")), [
        {
            "trigger_id": trigger.id, "item": key, "step": MANUAL, "recipient": recipient,
            "tenant_id": trigger.tenant_id, "revision": trigger.revision, "fired_at": now,
            "history": _extend_history(former.get(recipient), FormerJob(job.id, epoch_micros(now), fired=True)),
        }
        for recipient, job in zip(recipients, jobs, strict=True)
    ])  # fmt: skip
    return [job.id for job in jobs if job.id in inserted]


def skip_item(tx: Transaction, trigger: Trigger, key: str, now: datetime) -> list[FiringRecord]:
    """Cancel the planned jobs of an item; their instants do not fire, others do. Returns the skipped firings.

    Raises NotFound (ITEM_NOT_FOUND).
    """
    if key not in lock_items(tx, trigger.source_id, [key]):
        raise no_such_item(key)
    of_item = (firings.c.trigger_id == trigger.id) & (firings.c.item == key)
    rows = tx.execute(select(firings).where(of_item, firings.c.job_id.is_not(None))).all()
    prevented = withdraw_jobs(tx, {row.job_id: None for row in rows}, now)
    skipped = [row for row in rows if row.job_id in prevented]
    for row in skipped:
        same = of_item & (firings.c.step == row.step) & (firings.c.recipient == row.recipient)
        detail = row.at.isoformat().replace("+00:00", "Z")
        tx.execute(update(firings).where(same).values(
            job_id=None, at=None, fired_at=row.at, not_fired="skipped", detail=detail, not_fired_at=now,
            history=_extend_history(row.history, FormerJob(row.job_id, epoch_micros(row.at), fired=False)),
        ))  # fmt: skip
    return [_to_record(row) for row in skipped]


def _extend_history(history: str | None, job: FormerJob) -> str:
    jobs = [*(decode(history) or ()), list(job)]
    return encode(jobs[-MAX_FORMER_JOBS:], "history")


def no_such_item(key: str) -> NotFound:
    """Return the error for an item that does not exist."""
    return NotFound(f"There is no item {key!r:.80}.", code="ITEM_NOT_FOUND")


def _to_record(row: Row[Any]) -> FiringRecord:
    return FiringRecord(
        item=row.item, offset=row.step, recipient=row.recipient, at=row.at, job_id=row.job_id, fired_at=row.fired_at,
        reason=row.not_fired, detail=row.detail, noticed_at=row.not_fired_at,
    )  # fmt: skip
