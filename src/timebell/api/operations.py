"""`/operations`: progress and cancellation of long-running operations started by a request."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Json,
    Limit,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
)
from timebell.client.validation import parse_uuid
from timebell.ids import new_id
from timebell.model import page as pages
from timebell.model.operation import Operation, OperationKind, OperationState
from timebell.store.cluster import operations as rows
from timebell.store.types import from_micros
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["operations"])
FILTER_FIELDS = {
    "schedule_id": "scheduleId", "owner_id": "ownerId", "error_code": "errorCode", "start": "from", "end": "to",
}  # fmt: skip
Rate = Annotated[float | None, Field(ge=0.001, le=2000, description="Maximum number of items per second.")]


class Progress(ResponseBody):
    """Counts of processed items out of `total` (null if unknown). `rate` is the average number of items per second."""

    done: int
    total: int | None
    failed: int
    skipped: int
    rate: float | None
    eta_seconds: float | None


class OperationOut(ResponseBody):
    """Operation with its progress. `errors` are the errors of the first 100 rejected items."""

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


class OperationPage(ResponseBody):
    """Page of operations, newest first."""

    items: list[OperationOut]
    next_cursor: str | None


class DryRunCount(ResponseBody):
    """Number of items an operation would process. A dry run changes nothing."""

    dry_run: bool
    count: int


def render_operation(operation: Operation) -> dict[str, Any]:
    """Render an operation as JSON."""
    rate, eta = operation.rate(), operation.eta()
    return {
        "id": operation.id, "tenantId": operation.tenant_id, "kind": operation.kind.value,
        "state": operation.state.value,
        "spec": _render_spec(operation.spec),
        "progress": {
            "done": operation.done, "total": operation.total, "failed": operation.failed, "skipped": operation.skipped,
            "rate": None if rate is None else round(rate, 3), "etaSeconds": None if eta is None else round(eta, 1),
        },
        "errors": operation.errors, "createdAt": format_utc(operation.created_at), "createdBy": operation.created_by,
        "updatedAt": format_utc(operation.updated_at), "completedAt": format_utc(operation.finished_at),
    }  # fmt: skip


def _render_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Render the spec with the field names of the requests."""
    filters = spec.get("which", spec.get("equal"))
    rest = {name: value for name, value in spec.items() if name not in ("which", "equal")}
    if filters is None:
        return rest
    rendered = {
        FILTER_FIELDS.get(name, name): format_utc(from_micros(value)) if isinstance(value, int) else value
        for name, value in filters.items()
    }
    return {"filter": rendered, **rest}


def new_operation(
    ctx: Context, kind: OperationKind, spec: dict[str, Any], total: int | None, at: datetime
) -> Operation:
    """Build a new operation of the caller's tenant."""
    return Operation(
        id=new_id(at), tenant_id=ctx.tenant_id, kind=kind, spec=spec, total=total, created_at=at, updated_at=at,
        created_by=ctx.caller.actor,
    )  # fmt: skip


async def start_operation(ctx: Context, kind: OperationKind, spec: dict[str, Any], total: int | None) -> Response:
    """Create an operation in the transaction of the request; return it with status 202."""
    fields = {name: value for name, value in spec.items() if value is not None}
    operation = new_operation(ctx, kind, fields, total, ctx.now)
    await ctx.run(rows.create, operation)
    ctx.subject = operation.id
    return json_response(render_operation(operation), 202, {"Location": f"/api/v1/operations/{operation.id}"})


def dry_run_response(ctx: Context, count: int) -> Response:
    """Return the count of a dry run."""
    ctx.dry_run = True
    return json_response({"dryRun": True, "count": count})


@routes.get("/operations", response_model=OperationPage, **read_route())
async def list_operations(
    ctx: Context, limit: Limit = 50, cursor: Cursor = None, kind: Annotated[OperationKind | None, Query()] = None,
    state: Annotated[OperationState | None, Query()] = None,
) -> Response:  # fmt: skip
    """List operations, newest first."""
    equal = {name: value.value for name, value in (("kind", kind), ("state", state)) if value is not None}
    page = await ctx.run(rows.list_operations, ctx.tenant_id, limit, pages.validate_paging(limit, cursor), equal)
    return page_response(page, [render_operation(operation) for operation in page])


@routes.get("/operations/{id}", response_model=OperationOut, **read_route())
async def get_operation(id: Id, ctx: Context) -> Response:
    """Get an operation."""
    valid_id = parse_uuid(id)
    operation: Operation | None = (
        None if valid_id is None else await ctx.run(rows.find_operation, ctx.tenant_id, valid_id)
    )
    if operation is None:
        raise not_found("operation", id)
    return json_response(render_operation(operation))


@routes.post("/operations/{id}/cancel", response_model=OperationOut, **change_route("operation.cancel", Role.OPERATOR))
async def cancel_operation(id: Id, ctx: Context) -> Response:
    """Cancel an operation. Completed steps are not undone. No effect on a finished operation."""
    valid_id = parse_uuid(id)
    operation: Operation | None = (
        None if valid_id is None else await ctx.run(rows.cancel, ctx.tenant_id, valid_id, ctx.now)
    )
    if operation is None:
        raise not_found("operation", id)
    ctx.subject = operation.id
    return json_response(render_operation(operation))
