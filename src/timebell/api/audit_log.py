"""`/audit-log`: changes and their actors, for admins of a tenant."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.route import ApiRoute, Context, read_route
from timebell.api.schemas import Cursor, Instant, Limit, ResponseBody, format_utc, page_response, parse_timestamp
from timebell.model import page
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["audit log"])
Text = Annotated[str | None, Query(max_length=200)]
OptionalInstant = Annotated[str | None, Query(max_length=64)]


class AuditLogEntry(ResponseBody):
    """Record of one change."""

    id: str
    tenant_id: str
    at: Instant
    actor: Annotated[str, Field(description="Name of the key; `local` without a key, `command line` for the CLI.")]
    key_id: str | None
    address: str | None
    action: str
    subject: Annotated[str | None, Field(description="Id or name of the changed object.")]
    before: Annotated[str | None, Field(description="SHA-256 of the previous state.")]
    after: Annotated[str | None, Field(description="SHA-256 of the response.")]
    request_id: str | None


class AuditLogPage(ResponseBody):
    """Page of changes, newest first."""

    items: list[AuditLogEntry]
    next_cursor: str | None


@routes.get("/audit-log", response_model=AuditLogPage, **read_route(Role.ADMIN))
async def list_audit_log(
    ctx: Context, limit: Limit = 50, cursor: Cursor = None, subject: Text = None, action: Text = None,
    actor: Text = None, from_: Annotated[OptionalInstant, Query(alias="from")] = None, to: OptionalInstant = None,
    tenant: Annotated[Text, Query(description="Tenant to list; requires a platform key.")] = None,
) -> Response:  # fmt: skip
    """List changes in the tenant, newest first.

    Filters are combined with AND. `from` is inclusive, `to` exclusive.
    """
    records = await ctx.run(
        audit_log.list_records, ctx.tenant_id, limit, page.validate_paging(limit, cursor), subject=subject,
        action=action, actor=actor,
        start=None if from_ is None else parse_timestamp(from_, "from"),
        end=None if to is None else parse_timestamp(to, "to"),
    )  # fmt: skip
    return page_response(records, [_render_record(record) for record in records])


def _render_record(record: AuditRecord) -> dict[str, Any]:
    return {
        "id": record.id, "tenantId": record.tenant_id, "at": format_utc(record.at), "actor": record.actor,
        "keyId": record.key_id, "address": record.address, "action": record.action, "subject": record.subject,
        "before": record.before, "after": record.after, "requestId": record.request_id,
    }  # fmt: skip
