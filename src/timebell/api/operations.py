"""`/operations`: long work that one request started, with its progress."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Cursor, Id, Instant, Json, Limit, Shown, answer, paged, utc
from timebell.client.validation import uuid_of
from timebell.ids import new_id
from timebell.model import page as pages
from timebell.model.operation import Operation, OperationKind, OperationState
from timebell.store.cluster import operations as rows
from timebell.store.types import from_micros
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["operations"])
WORDS = {
    "schedule_id": "scheduleId", "owner_id": "ownerId", "error_code": "errorCode", "start": "from", "end": "to",
}  # fmt: skip
Rate = Annotated[float | None, Field(gt=0, le=2000, description="At most so many a second.")]


class Progress(Shown):
    """`done`, `failed` and `skipped` of `total` (null: not known). `rate` is items a second so far."""

    done: int
    total: int | None
    failed: int
    skipped: int
    rate: float | None
    eta_seconds: float | None


class OperationOut(Shown):
    """An operation; `errors` are the first 100 items that were refused, and why."""

    id: str
    tenant_id: str
    kind: str
    state: str
    spec: dict[str, Json]
    progress: Progress
    errors: list[dict[str, Json]]
    created_at: Instant
    created_by: str | None
    updated_at: Instant
    completed_at: Instant | None


class OperationPage(Shown):
    """Operations, newest first."""

    items: list[OperationOut]
    next_cursor: str | None


class Counted(Shown):
    """What an operation would deal with: nothing is written."""

    dry_run: bool
    count: int


def shown(found: Operation) -> dict[str, Any]:
    """An operation as it is answered."""
    rate, eta = found.rate(), found.eta()
    return {
        "id": found.id, "tenantId": found.tenant_id, "kind": found.kind.value, "state": found.state.value,
        "spec": _said(found.spec),
        "progress": {
            "done": found.done, "total": found.total, "failed": found.failed, "skipped": found.skipped,
            "rate": None if rate is None else round(rate, 3), "etaSeconds": None if eta is None else round(eta, 1),
        },
        "errors": found.errors, "createdAt": utc(found.created_at), "createdBy": found.created_by,
        "updatedAt": utc(found.updated_at), "completedAt": utc(found.finished_at),
    }  # fmt: skip


def _said(spec: dict[str, Any]) -> dict[str, Any]:
    """What it is of, in the words of the requests."""
    given = spec.get("which", spec.get("equal"))
    rest = {name: value for name, value in spec.items() if name not in ("which", "equal")}
    if given is None:
        return rest
    said = {WORDS.get(name, name): utc(from_micros(v)) if isinstance(v, int) else v for name, v in given.items()}
    return {"filter": said, **rest}


def new(let: Let, kind: OperationKind, spec: dict[str, Any], total: int | None, at: datetime) -> Operation:
    """One that begins now."""
    return Operation(
        id=new_id(at), tenant_id=let.tenant_id, kind=kind, spec=spec, total=total, created_at=at, updated_at=at,
        created_by=let.caller.actor,
    )  # fmt: skip


async def begin(let: Let, kind: OperationKind, spec: dict[str, Any], total: int | None) -> Response:
    """Start one, in the transaction of the request: 202."""
    made = new(let, kind, {name: value for name, value in spec.items() if value is not None}, total, let.now)
    await let.run(rows.create, made)
    let.subject, let.operates = made.id, True
    return answer(shown(made), 202, {"Location": f"/api/v1/operations/{made.id}"})


def counted(let: Let, count: int) -> Response:
    """What a dry run found."""
    let.dry = True
    return answer({"dryRun": True, "count": count})


@routes.get("/operations", response_model=OperationPage, **reads())
async def list_operations(
    let: Let, limit: Limit = 50, cursor: Cursor = None, kind: Annotated[OperationKind | None, Query()] = None,
    state: Annotated[OperationState | None, Query()] = None,
) -> Response:  # fmt: skip
    """A page of operations, newest first."""
    equal = {name: value.value for name, value in (("kind", kind), ("state", state)) if value is not None}
    page = await let.run(rows.page, let.tenant_id, limit, pages.check(limit, cursor), equal)
    return paged(page, [shown(found) for found in page])


@routes.get("/operations/{id}", response_model=OperationOut, **reads())
async def get_operation(id: Id, let: Let) -> Response:
    """One operation."""
    known = uuid_of(id)
    found: Operation | None = None if known is None else await let.run(rows.find, let.tenant_id, known)
    if found is None:
        raise missing("operation", id)
    return answer(shown(found))


@routes.post("/operations/{id}/cancel", response_model=OperationOut, **changes("operation.cancel", Role.OPERATOR))
async def cancel_operation(id: Id, let: Let) -> Response:
    """Go no further with it: what is done stays done. One that is over stays as it ended."""
    known = uuid_of(id)
    found: Operation | None = None if known is None else await let.run(rows.cancel, let.tenant_id, known, let.now)
    if found is None:
        raise missing("operation", id)
    let.subject = found.id
    return answer(shown(found))
