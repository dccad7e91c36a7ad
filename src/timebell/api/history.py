"""History of an object: its changes in the audit log, for everyone who may read the object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Response
from pydantic import Field

from timebell.api.route import RequestContext
from timebell.api.schemas import Instant, Json, ResponseBody, format_utc, page_response
from timebell.model import page
from timebell.model.page import Page
from timebell.store.audit import audit_log
from timebell.store.audit.audit_log import AuditRecord, render_changes


class FieldChange(ResponseBody):
    """A changed field."""

    field: Annotated[str, Field(description="JSON pointer.")]
    before: Annotated[Json, Field(description="Secrets are `***`; payloads and other content are not recorded.")]
    after: Json


class HistoryEntry(ResponseBody):
    """One change of the object."""

    id: str
    at: Instant
    actor: Annotated[str, Field(description="Name of the user or key; `timebell` is the engine.")]
    actor_kind: Annotated[str, Field(description="`user`, `key`, `source`, `local`, `cli` or `engine`.")]
    action: str
    changes: list[FieldChange]


class HistoryPage(ResponseBody):
    """Page of changes, newest first."""

    items: list[HistoryEntry]
    next_cursor: str | None


async def history_response(
    ctx: RequestContext, kind: str, subject: str, limit: int, cursor: str | None,
    require_object: Callable[[], Awaitable[Any]],
) -> Response:  # fmt: skip
    """Return the history of an object, also of a deleted one.

    `require_object` raises NotFound; it is called if there are no changes. Changes by the library are not recorded.
    """
    arguments = (ctx.tenant_id, kind, subject, limit, page.validate_paging(limit, cursor))
    found: Page[AuditRecord] = await ctx.run(audit_log.list_history, *arguments)
    if not found.items and cursor is None:
        await require_object()
    return page_response(found, [_render_entry(record) for record in found])


def _render_entry(record: AuditRecord) -> dict[str, Any]:
    return {
        "id": record.id, "at": format_utc(record.at), "actor": record.actor, "actorKind": record.actor_kind,
        "action": record.action, "changes": render_changes(record),
    }  # fmt: skip
