"""Long-running operations, executed in steps. A step and its progress are written in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, delete, insert, select, update

from timebell.feature import Feature
from timebell.model.job import NewJob
from timebell.model.operation import STALL_TIMEOUT, Operation, OperationKind, OperationState, StepResult, allowance
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.store.cluster.operation_steps import cancel_step, discard_step, retry_step
from timebell.store.jobs import repository
from timebell.store.jobs.bind_targets import find_unbound, target_not_found
from timebell.store.schema import operations
from timebell.store.transaction import OPERATIONS, Transaction

MAX_STORED_ERRORS = 100  # per operation
MAX_ERRORS_BYTES = 256 * 1024

Step = Callable[[Transaction, Operation, int, datetime], StepResult]
"""A step of an operation: (transaction, operation, maximum number of items, now) -> its result."""
STEPS: Mapping[OperationKind, Step] = {
    OperationKind.RETRY: retry_step,
    OperationKind.DISCARD: discard_step,
    OperationKind.CANCEL: cancel_step,
}


def create(tx: Transaction, operation: Operation) -> None:
    """Insert a new operation. The leader executes it; an import is executed by the process that reads its lines."""
    tx.execute(insert(operations).values(
        id=operation.id, tenant_id=operation.tenant_id, kind=operation.kind.value, state=operation.state.value,
        spec=encode(operation.spec), total=operation.total, created_at=operation.created_at,
        created_by=operation.created_by, updated_at=operation.updated_at,
    ))  # fmt: skip
    tx.notify(OPERATIONS)


def find_operation(tx: Transaction, tenant_id: str, id_: str) -> Operation | None:
    """Find an operation of a tenant."""
    row = tx.execute(select(operations).where(operations.c.id == id_, operations.c.tenant_id == tenant_id)).first()
    return None if row is None else operation_from_row(row)


def list_operations(
    tx: Transaction, tenant_id: str, limit: int, before: str | None, filters: Mapping[str, str]
) -> Page[Operation]:  # fmt: skip
    """Return a page of operations of a tenant, newest first."""
    query = select(operations).where(operations.c.tenant_id == tenant_id).order_by(operations.c.id.desc())
    query = query.where(*(operations.c[name] == value for name, value in filters.items()))
    if before is not None:
        query = query.where(operations.c.id < before)
    page = [operation_from_row(row) for row in tx.execute(query.limit(limit + 1))]
    return Page(page[:limit], page[limit - 1].id if len(page) > limit else None)


def cancel(tx: Transaction, tenant_id: str, id_: str, now: datetime) -> Operation | None:
    """Cancel an operation; return it, or None for an unknown id.

    Completed steps are not undone. A finished operation is left unchanged.
    """
    operation = lock_running(tx, id_, tenant_id)
    if operation is not None:
        finish(tx, id_, OperationState.CANCELLED, now)
    return find_operation(tx, tenant_id, id_)


_RUNNING_IDS = (
    select(operations.c.id).where(operations.c.state == OperationState.RUNNING.value).order_by(operations.c.id)
)


def list_running(tx: Transaction) -> list[str]:
    """Return the ids of running operations, oldest first."""
    return list(tx.execute(_RUNNING_IDS).scalars())


def advance(tx: Transaction, id_: str, now: datetime, features: Sequence[Feature]) -> datetime | None:
    """Execute one step of an operation; return when the next one is due, or None if it is finished.

    `features` execute the kinds that the core does not know.
    """
    operation = lock_running(tx, id_)
    if operation is None:
        return None
    if operation.kind is OperationKind.IMPORT:  # executed by the process that reads its lines
        if now - operation.updated_at < STALL_TIMEOUT:
            return operation.updated_at + STALL_TIMEOUT
        finish(tx, id_, OperationState.FAILED, now, "The process that read the lines has stopped.")
        return None
    limit, at = allowance(operation.spec.get("rate"), operation.updated_at, now)
    if limit == 0:
        return at
    steps = dict(STEPS)
    for feature in features:
        steps |= feature.operation_steps()
    result = steps[operation.kind](tx, operation, limit, now)
    record_progress(tx, operation, result, at)
    if result.cursor is None:
        finish(tx, id_, OperationState.COMPLETED, now)
        return None
    return now + timedelta(seconds=result.wait_seconds)


def record_progress(tx: Transaction, operation: Operation, step: StepResult, at: datetime) -> None:
    """Add the result of a step to the progress of its operation, in the transaction of the step."""
    values: dict[str, Any] = {
        "done": operations.c.done + step.done, "failed": operations.c.failed + step.failed,
        "skipped": operations.c.skipped + step.skipped, "cursor": step.cursor, "updated_at": at,
    }  # fmt: skip
    if step.spec is not None:
        values |= {"spec": encode(step.spec), "total": step.total}
    if step.errors and len(operation.errors) < MAX_STORED_ERRORS:
        operation.errors = [*operation.errors, *step.errors][:MAX_STORED_ERRORS]
        values["errors"] = encode(operation.errors, "errors", limit=MAX_ERRORS_BYTES)
    tx.execute(update(operations).where(operations.c.id == operation.id).values(**values))


def import_batch(
    tx: Transaction, id_: str, new_jobs: Sequence[NewJob], lines: Sequence[int], skipped: int,
    cursor: str, errors: Sequence[dict[str, Any]], at: datetime,
) -> bool:  # fmt: skip
    """Import a batch of jobs and record the progress; return False, without any effect, if it was cancelled.

    Existing jobs are kept and count as skipped. Jobs with an unknown target are rejected. `lines` are the line numbers
    of the jobs, `cursor` is the last line of the batch.
    """
    operation = lock_running(tx, id_)
    if operation is None:
        return False
    if unbound := find_unbound(tx, new_jobs):
        errors = [*errors, *(
            {"line": line, "code": "TARGET_NOT_FOUND", "detail": str(target_not_found(str(job.target_name)))}
            for job, line in zip(new_jobs, lines, strict=True) if job.id in unbound
        )]  # fmt: skip
        new_jobs = [job for job in new_jobs if job.id not in unbound]
    existing = len(repository.create(tx, new_jobs, "keep")) if new_jobs else 0
    result = StepResult(len(new_jobs) - existing, len(errors), skipped + existing, cursor, tuple(errors))
    record_progress(tx, operation, result, at)
    return True


def finish(tx: Transaction, id_: str, state: OperationState, now: datetime, reason: str | None = None) -> None:
    """Finish a running operation; `reason` is appended to its errors."""
    row = tx.execute(select(operations.c.errors, operations.c.state).where(operations.c.id == id_)
                     .with_for_update()).first()  # fmt: skip
    if row is None or row.state != OperationState.RUNNING.value:
        return
    values: dict[str, Any] = {"state": state.value, "finished_at": now, "updated_at": now}
    if state is OperationState.COMPLETED:  # now the total is known
        values["total"] = operations.c.done + operations.c.failed + operations.c.skipped
    if reason is not None:
        values["errors"] = encode(
            [*(decode(row.errors) or []), {"detail": reason[:1000]}], "errors", limit=MAX_ERRORS_BYTES
        )
    tx.execute(update(operations).where(operations.c.id == id_).values(**values))


def prune(tx: Transaction, before: datetime) -> int:
    """Delete operations that finished before an instant; return how many."""
    return tx.execute(delete(operations).where(operations.c.finished_at < before)).rowcount


def lock_running(tx: Transaction, id_: str, tenant_id: str | None = None) -> Operation | None:
    """Return a running operation and lock its row; None if it is unknown or finished."""
    matches = (operations.c.id == id_) & (operations.c.state == OperationState.RUNNING.value)
    if tenant_id is not None:
        matches &= operations.c.tenant_id == tenant_id
    row = tx.execute(select(operations).where(matches).with_for_update()).first()
    return None if row is None else operation_from_row(row)


def operation_from_row(row: Row[Any]) -> Operation:
    """Convert a row to an Operation."""
    return Operation(
        id=row.id, tenant_id=row.tenant_id, kind=OperationKind(row.kind), state=OperationState(row.state),
        spec=decode(row.spec), cursor=row.cursor, total=row.total, done=row.done, failed=row.failed,
        skipped=row.skipped, errors=decode(row.errors) or [], created_at=row.created_at, created_by=row.created_by,
        updated_at=row.updated_at, finished_at=row.finished_at,
    )  # fmt: skip
