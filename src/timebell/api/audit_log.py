"""`/audit-log`: changes, refused requests and failed sign-ins with their actors, for admins of a tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from timebell.api.history import FieldChange
from timebell.api.route import API_PREFIX, ApiRoute, Context, RequestContext, read_route
from timebell.api.schemas import Cursor, Instant, Limit, ResponseBody, page_response, parse_timestamp
from timebell.model import page
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditFilter, AuditRecord, render_record
from timebell.tenancy.keys import SCOPES
from timebell.tenancy.roles import Role

EXPORT_BATCH_SIZE = 500  # records per query
NDJSON = "application/x-ndjson"
routes = APIRouter(route_class=ApiRoute, tags=["audit log"])
Text = Annotated[str | None, Query(max_length=200)]
Subject = Annotated[str | None, Query(max_length=200, description="Id or name of the object.")]
Action = Annotated[
    str | None, Query(max_length=200, description="Action; with `*` at the end a prefix, such as `schedule.*`.")
]
Outcome = Annotated[Literal["done", "refused"] | None, Query()]
From = Annotated[Instant | None, Query(alias="from")]
To = Annotated[Instant | None, Query()]
Tenant = Annotated[str | None, Query(max_length=200, description="Tenant to list; requires a platform key.")]


class AuditLogEntry(ResponseBody):
    """Record of one change, or of a refused request."""

    id: str
    tenant_id: str
    at: Instant
    actor: Annotated[str, Field(description="Name of the user or key; `timebell` is the engine.")]
    actor_kind: Annotated[str, Field(description="`user`, `key`, `source`, `local`, `cli` or `engine`.")]
    key_id: str | None
    address: str | None
    action: str
    subject: Annotated[str | None, Field(description="Id or name of the object.")]
    subject_name: Annotated[str | None, Field(description="Name of the object at that time.")]
    url: Annotated[str | None, Field(description="Path of the object, if it has one of its own.")]
    outcome: Annotated[str, Field(description="`done` or `refused`.")]
    code: Annotated[str | None, Field(description="Error code of a refused request.")]
    suppressed: Annotated[int, Field(description="Refusals like this one since its previous record, not recorded.")]
    changes: list[FieldChange]
    request_id: str | None


class AuditLogPage(ResponseBody):
    """Page of records, newest first."""

    items: list[AuditLogEntry]
    next_cursor: str | None


@routes.get("/audit-log", response_model=AuditLogPage, **read_route(Role.ADMIN))
async def list_audit_log(
    ctx: Context, limit: Limit = 50, cursor: Cursor = None, subject: Subject = None, action: Action = None,
    actor: Text = None, outcome: Outcome = None, from_: From = None, to: To = None, tenant: Tenant = None,
) -> Response:  # fmt: skip
    """List changes, refused requests and failed sign-ins of the tenant, newest first.

    Filters are combined with AND. `from` is inclusive, `to` exclusive.
    """
    wanted = _parse_filter(subject, action, actor, outcome, from_, to)
    records = await ctx.run(
        audit_log.list_records, ctx.tenant_id, limit, page.validate_paging(limit, cursor), wanted
    )  # fmt: skip
    return page_response(records, [_render_record(record) for record in records])


@routes.get(
    "/audit-log/export", response_class=StreamingResponse, **read_route(Role.ADMIN),
    responses={200: {"description": "One JSON object per line, as in the list.", "content": {
        NDJSON: {"schema": {"type": "string"}}}}},
)  # fmt: skip
async def export_audit_log(
    ctx: Context, subject: Subject = None, action: Action = None, actor: Text = None, outcome: Outcome = None,
    from_: From = None, to: To = None, tenant: Tenant = None,
) -> Response:  # fmt: skip
    """Download all records that match the filters as JSON lines, oldest first."""
    wanted = _parse_filter(subject, action, actor, outcome, from_, to)
    file_name = f"timebell-audit-log-{ctx.now:%Y-%m-%dT%H%MZ}.ndjson"
    return StreamingResponse(
        _stream_records(ctx, wanted), media_type=NDJSON,
        headers={"Content-Disposition": f'attachment; filename="{file_name}"'},
    )  # fmt: skip


async def _stream_records(ctx: RequestContext, wanted: AuditFilter) -> AsyncIterator[bytes]:
    after: str | None = None
    while True:
        records: list[AuditRecord] = await ctx.app.store.run(
            audit_log.list_records_after, after, EXPORT_BATCH_SIZE, ctx.tenant_id, wanted
        )
        yield b"".join(orjson.dumps(_render_record(record)) + b"\n" for record in records)
        if len(records) < EXPORT_BATCH_SIZE:
            return
        after = records[-1].id


def _parse_filter(
    subject: str | None, action: str | None, actor: str | None, outcome: str | None, from_: str | None, to: str | None
) -> AuditFilter:
    return AuditFilter(
        subject=subject, action=action, actor=actor, outcome=outcome,
        start=None if from_ is None else parse_timestamp(from_, "from"),
        end=None if to is None else parse_timestamp(to, "to"),
    )  # fmt: skip


def _render_record(record: AuditRecord) -> dict[str, Any]:
    return {**render_record(record), "url": _object_url(record)}


def _object_url(record: AuditRecord) -> str | None:
    """Return the path of the object in the API: an action `schedule.pause` is one of an object in `/schedules`."""
    collection = record.action.partition(".")[0] + "s"
    if record.subject is None or collection not in SCOPES or collection == "nodes":
        return None
    return f"{API_PREFIX}/{collection}/{quote(record.subject, safe='')}"
