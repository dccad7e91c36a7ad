"""Steps of the operations that retry, discard or cancel many jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Row, and_, delete, insert, or_, select, update

from timebell.errors import Conflict
from timebell.model.operation import Operation, StepResult
from timebell.store.jobs import dead_letters, repository
from timebell.store.schema import finished, jobs
from timebell.store.time_cursor import decode_time_cursor, encode_time_cursor
from timebell.store.transaction import JOBS, Transaction


def cancel_step(tx: Transaction, operation: Operation, limit: int, now: datetime) -> StepResult:
    """Cancel the next jobs of an operation; jobs created after its start are not included.

    Jobs prevented from starting count as done, jobs in flight as skipped.
    """
    equal = {**operation.spec["equal"], "tenant_id": operation.tenant_id}
    swept, after = repository.cancel_matching(tx, equal, now, operation.cursor, limit, before=operation.id)
    return StepResult(swept.prevented, 0, swept.in_flight, after)


def retry_step(tx: Transaction, operation: Operation, limit: int, now: datetime) -> StepResult:
    """Retry the next dead letters of an operation, oldest first.

    Dead letters that failed after the start of the operation are not included.
    """
    rows = _next_batch(tx, operation, limit)
    simple = [row for row in rows if row.key is None and not row.serial]
    if simple:
        tx.execute(delete(finished).where(finished.c.id.in_([row.id for row in simple]), dead_letters.IS_DEAD_LETTER))
        tx.execute(insert(jobs), [dead_letters.pending_row(row, None, now, operation.created_by) for row in simple])
        tx.notify(JOBS)
    done, errors = len(simple), []
    for row in rows:
        if row.key is None and not row.serial:
            continue
        try:
            dead_letters.retry(tx, operation.tenant_id, row.id, now, operation.created_by)
            done += 1
        except Conflict as error:
            errors.append({"jobId": row.id, "code": error.code, "detail": error.message})
    return StepResult(
        done,
        len(errors),
        0,
        encode_time_cursor(rows[-1].finished_at, rows[-1].id) if len(rows) == limit else None,
        tuple(errors),
    )


def discard_step(tx: Transaction, operation: Operation, limit: int, now: datetime) -> StepResult:
    """Discard the next dead letters of an operation, oldest first."""
    rows = _next_batch(tx, operation, limit)
    if rows:
        tx.execute(
            update(finished)
            .where(finished.c.id.in_([row.id for row in rows]), dead_letters.IS_DEAD_LETTER)
            .values(reason=dead_letters.DISCARDED)
        )
    return StepResult(
        len(rows), 0, 0, encode_time_cursor(rows[-1].finished_at, rows[-1].id) if len(rows) == limit else None
    )


def _next_batch(tx: Transaction, operation: Operation, limit: int) -> list[Row[Any]]:
    filters = dead_letters.DeadLetterFilter.from_json(operation.spec["which"])
    query = select(finished).where(filters.where(operation.tenant_id), finished.c.finished_at <= operation.created_at)
    if operation.cursor is not None:
        at, id_ = decode_time_cursor(operation.cursor)
        later = and_(finished.c.finished_at == at, finished.c.id > id_)
        query = query.where(finished.c.finished_at >= at, or_(finished.c.finished_at > at, later))
    query = query.order_by(finished.c.finished_at, finished.c.id).limit(limit).with_for_update()
    return list(tx.execute(query).all())
