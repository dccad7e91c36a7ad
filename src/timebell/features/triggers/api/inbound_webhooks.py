"""`/hooks/{sourceId}`: inbound webhooks about changed items, in the format of Timebell or of monday.com."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from timebell.api.authentication import Unauthorized
from timebell.api.route import Context, change_route, not_found
from timebell.api.schemas import Id, RequestBody, ResponseBody, json_response
from timebell.client.validation import parse_uuid
from timebell.errors import InvalidInput
from timebell.features.triggers.api.inbound_webhook_authentication import (
    SIGNED_ACTOR,
    UNSIGNED_ACTOR,
    SignedWebhookRoute,
)
from timebell.features.triggers.api.sources import (
    ItemChangeIn,
    ItemChangesIn,
    ItemsSummary,
    apply_changes,
    change_arguments,
    render_summary,
)
from timebell.features.triggers.metrics import record_changes
from timebell.features.triggers.model.trigger import ChangeSummary, Source
from timebell.features.triggers.sources.monday_events import parse_event
from timebell.features.triggers.store import sources as rows
from timebell.features.triggers.store import webhook_changes
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=SignedWebhookRoute, tags=["sources"])


class ChallengeIn(RequestBody):
    """Challenge that monday.com sends to verify the URL of a webhook."""

    challenge: Annotated[str, Field(max_length=1000)]


class EventIn(BaseModel):
    """Event of monday.com: `pulseId`, and optionally `boardId`, `columnId`, `value`, `triggerTime`."""

    model_config = ConfigDict(extra="allow")
    event: dict[str, Any]


class ChallengeOut(ResponseBody):
    """Response to a challenge."""

    challenge: str


@routes.post(
    "/hooks/{source}",
    response_model=ItemsSummary | ChallengeOut,
    **change_route("source.hook", Role.OPERATOR),
)
async def receive_webhook(
    source: Id, body: ItemChangesIn | ItemChangeIn | ChallengeIn | EventIn, ctx: Context
) -> Response:
    """Apply item changes, like `/sources/{name}/items`, addressed by source id.

    The body is one change or several. For sources of kind monday it is a webhook event of monday.com, authenticated by
    its signature or by the token in the URL.
    """
    valid_id = parse_uuid(source)
    found: Source | None = None if valid_id is None else await ctx.run(rows.find_source_by_id, valid_id)
    if found is None or found.tenant_id != ctx.tenant_id:
        raise not_found("source", source)
    ctx.subject = found.name
    if isinstance(body, ChallengeIn):
        ctx.dry_run = True
        return json_response({"challenge": body.challenge})
    if isinstance(body, EventIn):
        return json_response(render_summary(await _apply_event(ctx, found, body.event)))
    if ctx.caller.key is None and ctx.caller.actor in (
        UNSIGNED_ACTOR,
        SIGNED_ACTOR,
    ):  # without a key, only monday.com events are accepted
        raise _signature_missing()
    changes = body.items if isinstance(body, ItemChangesIn) else [body]
    return json_response(
        render_summary(await apply_changes(ctx, found.name, [change_arguments(change) for change in changes]))
    )


async def _apply_event(ctx: Context, source: Source, event: dict[str, Any]) -> ChangeSummary:
    if source.kind != "monday":
        raise InvalidInput(
            f"The source {source.name} is of kind {source.kind} and accepts no monday.com events.", code="INVALID_ITEM",
            fix='Send {"key": ..., "version": ..., "fields": {...}}.',
        )  # fmt: skip
    if ctx.caller.key is None and ctx.caller.actor == UNSIGNED_ACTOR and "signingSecret" in source.options:
        raise _signature_missing()
    change = parse_event(event, str(source.options.get("boardId")))
    if change is None:
        return ChangeSummary()
    summary: ChangeSummary = await ctx.run(webhook_changes.apply_webhook_changes, source, [change], ctx.now)
    if ctx.app.service is not None:
        record_changes(ctx.app.service.node.counters, summary)
    return summary


def _signature_missing() -> Unauthorized:
    return Unauthorized(
        "The request is not signed.", fix="Sign it with the signing secret of the source, or send a key."
    )
