"""Operations: rows of long work, and the steps it is done in. A step and its progress are one transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, delete, insert, select, update

from timebell.model.job import NewJob
from timebell.model.operation import STALLED, Operation, OperationKind, OperationState, Step, allowance
from timebell.model.page import Page
from timebell.model.payload import decode, encode
from timebell.store.jobs import dead_letters, repository
from timebell.store.jobs.bind_targets import no_such_target, unknown
from timebell.store.schema import operations
from timebell.store.transaction import Transaction
from timebell.store.triggers import planned_firings

LISTED = 100  # errors that are kept
LONGEST = 256 * 1024

STEPS: dict[OperationKind, Callable[[Transaction, Operation, int, datetime], Step]] = {
    OperationKind.REPLAY: dead_letters.replay_some,
    OperationKind.DISCARD: dead_letters.discard_some,
    OperationKind.CANCEL: repository.cancel_some,
    OperationKind.SCAN: planned_firings.scan_some,
}


def create(tx: Transaction, made: Operation) -> None:
    """Write a new one; the leader goes on with it, or, an import, whoever reads it."""
    tx.execute(insert(operations).values(
        id=made.id, tenant_id=made.tenant_id, kind=made.kind.value, state=made.state.value, spec=encode(made.spec),
        total=made.total, created_at=made.created_at, created_by=made.created_by, updated_at=made.updated_at,
    ))  # fmt: skip


def find(tx: Transaction, tenant_id: str, id_: str) -> Operation | None:
    """One operation of a tenant."""
    row = tx.execute(select(operations).where(operations.c.id == id_, operations.c.tenant_id == tenant_id)).first()
    return None if row is None else read(row)


def page(
    tx: Transaction, tenant_id: str, limit: int, before: str | None, equal: Mapping[str, str]
) -> Page[Operation]:  # fmt: skip
    """Operations of a tenant, newest first."""
    query = select(operations).where(operations.c.tenant_id == tenant_id).order_by(operations.c.id.desc())
    query = query.where(*(operations.c[name] == value for name, value in equal.items()))
    if before is not None:
        query = query.where(operations.c.id < before)
    found = [read(row) for row in tx.execute(query.limit(limit + 1))]
    return Page(found[:limit], found[limit - 1].id if len(found) > limit else None)


def cancel(tx: Transaction, tenant_id: str, id_: str, now: datetime) -> Operation | None:
    """Go no further with it; what is done stays done. One that is over stays as it ended. None for an unknown id."""
    found = running_one(tx, id_, tenant_id)
    if found is not None:
        finish(tx, id_, OperationState.CANCELLED, now)
    return find(tx, tenant_id, id_)


def running(tx: Transaction) -> list[str]:
    """The operations that somebody has to go on with, oldest first."""
    query = select(operations.c.id).where(operations.c.state == OperationState.RUNNING.value)
    return list(tx.execute(query.order_by(operations.c.id)).scalars())


def advance(tx: Transaction, id_: str, now: datetime) -> datetime | None:
    """One step of an operation; when the next one is due, None when it is over."""
    found = running_one(tx, id_)
    if found is None:
        return None
    if found.kind is OperationKind.IMPORT:  # whoever reads its lines goes on with it
        if now - found.updated_at < STALLED:
            return found.updated_at + STALLED
        finish(tx, id_, OperationState.FAILED, now, "The process that read the lines is gone.")
        return None
    most, at = allowance(found.spec.get("rate"), found.updated_at, now)
    if most == 0:
        return at
    step = STEPS[found.kind](tx, found, most, now)
    progress(tx, found, step, at)
    if step.cursor is None:
        finish(tx, id_, OperationState.COMPLETED, now)
        return None
    return now + timedelta(seconds=step.wait)


def progress(tx: Transaction, found: Operation, step: Step, at: datetime) -> None:
    """Add a step to what is done, in its transaction."""
    values: dict[str, Any] = {
        "done": operations.c.done + step.done, "failed": operations.c.failed + step.failed,
        "skipped": operations.c.skipped + step.skipped, "cursor": step.cursor, "updated_at": at,
    }  # fmt: skip
    if step.spec is not None:
        values |= {"spec": encode(step.spec), "total": step.total}
    if step.errors and len(found.errors) < LISTED:
        found.errors = [*found.errors, *step.errors][:LISTED]
        values["errors"] = encode(found.errors, "errors", limit=LONGEST)
    tx.execute(update(operations).where(operations.c.id == found.id).values(**values))


def take_in(
    tx: Transaction, id_: str, new: Sequence[NewJob], lines: Sequence[int], soon: datetime, skipped: int, cursor: str,
    errors: Sequence[dict[str, Any]], at: datetime,
) -> bool:  # fmt: skip
    """A batch of an import: its jobs, of which those that were there already are kept and those for an unknown target
    are refused, and its progress. `lines` are those of the jobs, `cursor` is the last of all.
    False, and nothing done, when the operation was cancelled."""
    found = running_one(tx, id_)
    if found is None:
        return False
    if nowhere := unknown(tx, new):
        errors = [*errors, *({"line": line, "code": "TARGET_NOT_FOUND", "detail": str(no_such_target(str(job.named)))}
                             for job, line in zip(new, lines, strict=True) if job.id in nowhere)]  # fmt: skip
        new = [job for job in new if job.id not in nowhere]
    kept = len(repository.create(tx, new, "keep", soon)) if new else 0
    step = Step(len(new) - kept, len(errors), skipped + kept, cursor, tuple(errors))
    progress(tx, found, step, at)
    return True


def finish(tx: Transaction, id_: str, state: OperationState, now: datetime, why: str | None = None) -> None:
    """It is over; `why` is the last of its errors."""
    row = tx.execute(select(operations.c.errors, operations.c.state).where(operations.c.id == id_)
                     .with_for_update()).first()  # fmt: skip
    if row is None or row.state != OperationState.RUNNING.value:
        return
    values: dict[str, Any] = {"state": state.value, "finished_at": now, "updated_at": now}
    if state is OperationState.COMPLETED:  # now it is known
        values["total"] = operations.c.done + operations.c.failed + operations.c.skipped
    if why is not None:
        values["errors"] = encode([*(decode(row.errors) or []), {"detail": why[:1000]}], "errors", limit=LONGEST)
    tx.execute(update(operations).where(operations.c.id == id_).values(**values))


def prune(tx: Transaction, before: datetime) -> int:
    """Forget those that ended before an instant; how many."""
    return tx.execute(delete(operations).where(operations.c.finished_at < before)).rowcount


def running_one(tx: Transaction, id_: str, tenant_id: str | None = None) -> Operation | None:
    mine = (operations.c.id == id_) & (operations.c.state == OperationState.RUNNING.value)
    if tenant_id is not None:
        mine &= operations.c.tenant_id == tenant_id
    row = tx.execute(select(operations).where(mine).with_for_update()).first()
    return None if row is None else read(row)


def read(row: Row[Any]) -> Operation:
    """A row as an Operation."""
    return Operation(
        id=row.id, tenant_id=row.tenant_id, kind=OperationKind(row.kind), state=OperationState(row.state),
        spec=decode(row.spec), cursor=row.cursor, total=row.total, done=row.done, failed=row.failed,
        skipped=row.skipped, errors=decode(row.errors) or [], created_at=row.created_at, created_by=row.created_by,
        updated_at=row.updated_at, finished_at=row.finished_at,
    )  # fmt: skip
