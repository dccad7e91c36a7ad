"""`/hooks/{sourceId}`: where systems say what has changed, in the words of Timebell or of monday.com."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from timebell.api.authentication import Unauthorized
from timebell.api.inbound_webhook_authentication import KNOWN, SIGNED
from timebell.api.route import Guarded, Let, changes, missing
from timebell.api.schemas import Body, Id, Shown, answer
from timebell.api.sources import ChangeIn, ChangesIn, ObservedOut, change, observe, observed
from timebell.client.validation import uuid_of
from timebell.errors import InvalidInput
from timebell.model.trigger import Observed, Source
from timebell.store.triggers import sources as rows
from timebell.store.triggers import webhook_changes
from timebell.tenancy.roles import Role
from timebell.triggers.monday_events import said

routes = APIRouter(route_class=Guarded, tags=["sources"])


class ChallengeIn(Body):
    """monday.com asks whether this is the right place."""

    challenge: Annotated[str, Field(max_length=1000)]


class EventIn(BaseModel):
    """An event of monday.com's: `pulseId`, and what there is of `boardId`, `columnId`, `value`, `triggerTime`."""

    model_config = ConfigDict(extra="allow")
    event: dict[str, Any]


class ChallengeOut(Shown):
    """It is."""

    challenge: str


@routes.post(
    "/hooks/{source}", response_model=ObservedOut | ChallengeOut, **changes("source.hook", Role.OPERATOR, signed=True)
)
async def hook(source: Id, body: ChangesIn | ChangeIn | ChallengeIn | EventIn, let: Let) -> Response:
    """As `/sources/{name}/items`, for systems that know the source's id, with one change or several; or what
    monday.com's webhooks send, for a source of that kind, signed or with the token of its address."""
    known = uuid_of(source)
    home: Source | None = None if known is None else await let.run(rows.by_id, known)
    if home is None or home.tenant_id != let.tenant_id:
        raise missing("source", source)
    let.subject = home.name
    if isinstance(body, ChallengeIn):
        let.dry = True
        return answer({"challenge": body.challenge})
    if isinstance(body, EventIn):
        return answer(observed(await _event(let, home, body.event)))
    if let.caller.key is None and let.caller.actor in (KNOWN, SIGNED):  # it speaks of events alone
        raise _unsigned()
    listed = body.items if isinstance(body, ChangesIn) else [body]
    return answer(observed(await observe(let, home.name, [change(one) for one in listed])))


async def _event(let: Let, home: Source, event: dict[str, Any]) -> Observed:
    if home.kind != "monday":
        raise InvalidInput(
            f"The source {home.name} is of kind {home.kind}, and takes no events of monday.com.", code="INVALID_ITEM",
            fix='Send {"key": ..., "version": ..., "fields": {...}}.',
        )  # fmt: skip
    if let.caller.key is None and let.caller.actor == KNOWN and "signingSecret" in home.options:
        raise _unsigned()
    heard = said(event, str(home.options.get("boardId")))
    if heard is None:
        return Observed()
    let.operates = True
    found: Observed = await let.run(webhook_changes.hear, home, [heard], let.now)
    if let.app.service is not None:
        let.app.service.node.counters.observed(found)
    return found


def _unsigned() -> Unauthorized:
    return Unauthorized("This is not signed.", fix="Sign it with the signing secret of the source, or send a key.")
