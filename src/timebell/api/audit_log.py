"""`/audit-log`: who changed what, for the admins of a tenant."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.route import Guarded, Let, reads
from timebell.api.schemas import Cursor, Instant, Limit, Shown, aware, paged, utc
from timebell.model import page
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["audit log"])
Text = Annotated[str | None, Query(max_length=200)]
At = Annotated[str | None, Query(max_length=64)]


class AuditOut(Shown):
    """One change."""

    id: str
    tenant_id: str
    at: Instant
    actor: Annotated[str, Field(description="The name of the key; `local` without one, `command line` from there.")]
    key_id: str | None
    address: str | None
    action: str
    subject: Annotated[str | None, Field(description="What was changed: an id or a name.")]
    before: Annotated[str | None, Field(description="SHA-256 of what it was.")]
    after: Annotated[str | None, Field(description="SHA-256 of what was answered.")]
    request_id: str | None


class AuditPage(Shown):
    """Changes, newest first."""

    items: list[AuditOut]
    next_cursor: str | None


@routes.get("/audit-log", response_model=AuditPage, **reads(Role.ADMIN))
async def list_audit_log(
    let: Let, limit: Limit = 50, cursor: Cursor = None, subject: Text = None, action: Text = None,
    actor: Text = None, from_: Annotated[At, Query(alias="from")] = None, to: At = None,
    tenant: Annotated[Text, Query(description="For keys of the platform.")] = None,
) -> Response:  # fmt: skip
    """Changes in the tenant, newest first: all that is given must fit, `from` inclusive and `to` exclusive."""
    found = await let.run(
        audit_log.page, let.tenant_id, limit, page.check(limit, cursor), subject=subject, action=action, actor=actor,
        start=None if from_ is None else aware(from_, "from"), end=None if to is None else aware(to, "to"),
    )  # fmt: skip
    return paged(found, [_shown(record) for record in found])


def _shown(record: AuditRecord) -> dict[str, Any]:
    return {
        "id": record.id, "tenantId": record.tenant_id, "at": utc(record.at), "actor": record.actor,
        "keyId": record.key_id, "address": record.address, "action": record.action, "subject": record.subject,
        "before": record.before, "after": record.after, "requestId": record.request_id,
    }  # fmt: skip
