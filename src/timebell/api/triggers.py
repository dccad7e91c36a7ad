"""`/triggers`: fire at a column of somebody else's rows, plus an offset."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.conditions import ComparisonIn, ComparisonOut
from timebell.api.if_match import Match, expect
from timebell.api.operations import OperationOut
from timebell.api.operations import shown as operation_shown
from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Body, Cursor, Id, Instant, Json, Limit, Name, Shown, answer, paged, utc
from timebell.client.job_fields import labels_of, metadata_json, retry_of, target_json
from timebell.errors import InvalidInput, NotFound
from timebell.model.operation import Operation
from timebell.model.trigger import Trigger
from timebell.store.triggers import sources as rows
from timebell.store.triggers import triggers
from timebell.tenancy.roles import Role, require

routes = APIRouter(route_class=Guarded, tags=["triggers"])
Offsets = Annotated[
    list[Annotated[str, Field(max_length=20)]],
    Field(min_length=1, max_length=20, description="0, -15m, +1d: s, m, h elapse; d and w are of the calendar."),
]


class TriggerPut(Body):
    """What a trigger is."""

    source: Annotated[str, Field(min_length=1, max_length=100)]
    column: Name
    offsets: Offsets | None = None
    timezone: Annotated[str | None, Field(max_length=64, description="Of values without an offset from UTC.")] = None
    recipients: Annotated[Name | None, Field(description="A field: one job for each person in it.")] = None
    condition: Annotated[list[ComparisonIn] | None, Field(max_length=20)] = None
    unless: Annotated[
        str | None,
        Field(max_length=10_000, description="A query to a source of kind sql: what it finds speaks against firing."),
    ] = None
    grace_seconds: Annotated[
        float | None, Field(ge=0, lt=1e10, description="So late an instant still fires when it is learnt of.")
    ] = None
    topic: Name
    payload: Annotated[Json, Field(description="It is `action` in the payload of each job.")] = None
    max_retries: Annotated[int | None, Field(ge=0, le=999)] = None
    retry: dict[str, Json] | None = None
    timeout_seconds: Annotated[float | None, Field(gt=0, lt=1e10)] = None
    expires_after_seconds: Annotated[float | None, Field(gt=0, lt=1e10)] = None
    queue: Annotated[str | None, Field(min_length=1, max_length=100)] = None
    priority: Annotated[int | None, Field(ge=-32_768, le=32_767)] = None
    group: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    target: Annotated[dict[str, Json] | Name | None, Field(description="Or the name of a target.")] = None
    metadata: dict[str, Json] | None = None


class TriggerIn(TriggerPut):
    """What makes a trigger."""

    name: Annotated[str, Field(min_length=1, max_length=100)]


class PauseIn(Body):
    """Why."""

    reason: Annotated[str | None, Field(max_length=1000)] = None


class TriggerOut(Shown):
    """A trigger."""

    id: str
    name: str
    tenant_id: str
    source: str
    column: str
    offsets: list[str]
    timezone: str | None
    recipients: str | None
    condition: list[ComparisonOut]
    unless: str | None
    grace_seconds: float
    topic: str
    payload: Json
    retry: dict[str, Json] | None
    timeout_seconds: float | None
    expires_after_seconds: float | None
    queue: str
    priority: int
    group: str | None
    target: Json = None
    unheard: str | None = None
    metadata: dict[str, Json]
    state: Literal["ready", "paused", "orphaned", "reauthorise"]
    orphaned_reason: str | None
    unauthorised_reason: str | None
    enabled: bool
    pause_reason: str | None
    revision: int
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class TriggerMade(TriggerOut):
    """A trigger, and the operation that plans for the items there are; null if nothing was changed."""

    scan: OperationOut | None


class TriggerPage(Shown):
    """Triggers, by name."""

    items: list[TriggerOut]
    next_cursor: str | None


@routes.post("/triggers", status_code=201, response_model=TriggerMade, **changes("trigger.create", Role.EDITOR))
async def create_trigger(body: TriggerIn, let: Let) -> Response:
    """Make a trigger."""
    return await _put(let, body.name, body, replace=False)


@routes.get("/triggers", response_model=TriggerPage, **reads())
async def list_triggers(let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Triggers by name."""
    page = await let.run(rows.page_of_triggers, let.tenant_id, limit, cursor)
    return paged(page, [shown(trigger) for trigger in page])


@routes.get("/triggers/{name}", response_model=TriggerOut, **reads())
async def get_trigger(name: Id, let: Let) -> Response:
    """One trigger."""
    found = await _find(let, name)
    return answer(shown(found), headers={"ETag": etag(found)})


@routes.put("/triggers/{name}", response_model=TriggerMade, **changes("trigger.put", Role.EDITOR))
async def put_trigger(name: Id, body: TriggerPut, let: Let, if_match: Match = None) -> Response:
    """Make a trigger, or change the one there is: what is to come is planned again."""
    known: Trigger | None = await let.run(triggers.locked, let.tenant_id, name)
    if known is not None:
        let.before = shown(known)
        expect(if_match, etag(known), f"The trigger {name!r:.80}", known.id)
    return await _put(let, name, body, replace=True)


@routes.delete("/triggers/{name}", status_code=202, response_model=OperationOut,
               **changes("trigger.delete", Role.EDITOR))  # fmt: skip
async def delete_trigger(name: Id, let: Let) -> Response:
    """Forget a trigger: nothing of it is delivered any more, and the operation cancels its jobs."""
    let.subject, let.before = name, shown(await _find(let, name))
    begun = await let.app.triggers.delete(
        name, tenant_id=let.tenant_id, created_by=let.caller.actor, connection=let.connection
    )
    return _operating(let, begun)


@routes.post("/triggers/{name}/pause", response_model=TriggerOut, **changes("trigger.pause", Role.OPERATOR))
async def pause_trigger(name: Id, let: Let, body: PauseIn | None = None) -> Response:
    """Deliver nothing: what becomes due is skipped until it is resumed."""
    let.subject, let.before = name, shown(await _find(let, name))
    reason = None if body is None else body.reason
    return answer(shown(
        await let.app.triggers.pause(name, reason, tenant_id=let.tenant_id, connection=let.connection)
    ))  # fmt: skip


@routes.post("/triggers/{name}/resume", response_model=TriggerOut, **changes("trigger.resume", Role.OPERATOR))
async def resume_trigger(name: Id, let: Let) -> Response:
    """Deliver again."""
    let.subject, let.before = name, shown(await _find(let, name))
    return answer(shown(await let.app.triggers.resume(name, tenant_id=let.tenant_id, connection=let.connection)))


@routes.post("/triggers/{name}/scan", status_code=202, response_model=OperationOut,
             **changes("trigger.scan", Role.OPERATOR))  # fmt: skip
async def scan_trigger(name: Id, let: Let) -> Response:
    """Go through every item once more, and plan what is missing."""
    await _find(let, name)
    let.subject = name
    begun = await let.app.triggers.scan(
        name, tenant_id=let.tenant_id, created_by=let.caller.actor, connection=let.connection
    )
    return _operating(let, begun)


async def _put(let: Let, name: str, body: TriggerPut, *, replace: bool) -> Response:
    let.subject = name
    if body.unless is not None:
        require(let.caller.role, Role.PLATFORM)  # as its source: it is run on somebody's database
    given = {field: value for field, value in body.given().items() if value is not None and field != "name"}
    if "max_retries" in given and "retry" in given:
        raise InvalidInput("retry and maxRetries say the same: give one.", code="INVALID_RETRY")
    retry = given.pop("max_retries", given.pop("retry", None))
    options = {_RENAMED.get(field, field): value for field, value in given.items()}
    labels = labels_of(options.pop("metadata", {}))
    if labels.keys() - {"owner_id", "metadata"}:
        raise InvalidInput("A trigger's metadata says nothing of single jobs.", code="INVALID_METADATA")
    if retry is not None:
        options["retry"] = retry_of(retry)
    made, begun = await let.app.triggers.put(
        name, replace=replace, tenant_id=let.tenant_id, created_by=let.caller.actor, connection=let.connection,
        **options, **labels,
    )  # fmt: skip
    let.operates = begun is not None
    said = {**shown(made), "scan": None if begun is None else operation_shown(begun)}
    new = begun is not None and made.revision == 1
    headers = {"ETag": etag(made)} | ({"Location": f"/api/v1/triggers/{made.name}"} if new else {})
    return answer(said, 201 if new and not replace else 200, headers)


_RENAMED = {"grace_seconds": "grace", "timeout_seconds": "timeout", "expires_after_seconds": "expires_after"}


async def _find(let: Let, name: str) -> Trigger:
    try:
        return await let.app.triggers.get(name, tenant_id=let.tenant_id, connection=let.connection)
    except NotFound:
        raise missing("trigger", name) from None


def _operating(let: Let, begun: Operation) -> Response:
    let.operates = True
    return answer(operation_shown(begun), 202, {"Location": f"/api/v1/operations/{begun.id}"})


def etag(trigger: Trigger) -> str:
    """The strong ETag of a trigger: its revision."""
    return f'"{trigger.revision}"'


def shown(trigger: Trigger) -> dict[str, Any]:
    """A trigger as it is answered."""
    rule, action = trigger.rule, trigger.action
    metadata = {**action.metadata, **({"owner_id": action.owner_id} if action.owner_id else {})}
    return {
        "id": trigger.id, "name": trigger.name, "tenantId": trigger.tenant_id, "source": trigger.source,
        "column": rule.column, "offsets": [str(one) for one in rule.offsets], "timezone": rule.timezone,
        "recipients": rule.recipients, "condition": [one.to_json() for one in rule.condition],
        "unless": rule.unless, "graceSeconds": rule.grace, "topic": action.topic, "payload": action.payload,
        "retry": None if action.retry is None else action.retry.to_json(), "timeoutSeconds": action.timeout,
        "expiresAfterSeconds": action.expires_after, "queue": action.queue, "priority": action.priority,
        "group": action.group, **target_json(action.target), "metadata": metadata_json(metadata),
        "state": trigger.state,
        "orphanedReason": trigger.orphaned, "unauthorisedReason": trigger.unauthorised, "enabled": trigger.enabled,
        "pauseReason": trigger.pause_reason, "revision": trigger.revision,
        "createdAt": utc(trigger.created_at), "createdBy": trigger.created_by, "updatedAt": utc(trigger.updated_at),
    }  # fmt: skip
