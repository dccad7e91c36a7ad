"""`/sources`: where dated rows are, and what they are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import Field

from timebell.api.if_match import Match, expect
from timebell.api.inbound_webhook_authentication import HOOKS, token_part
from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Body, Cursor, Id, Instant, Json, Limit, Shown, answer, paged, utc
from timebell.errors import InvalidInput, NotFound
from timebell.model.target import MASK
from timebell.model.trigger import Item, Observed, Source, micros
from timebell.store.triggers import sources as rows
from timebell.tenancy.roles import Role, require

routes = APIRouter(route_class=Guarded, tags=["sources"])
MOST = 500
HIDDEN = ("token", "signingSecret")
Key = Annotated[str | int, Field(description="Of the row, in its source.")]


class SourcePut(Body):
    """What a source is."""

    kind: Annotated[str, Field(max_length=20)] = "webhook"
    options: dict[str, Json] | None = None


class SourceIn(SourcePut):
    """What makes a source."""

    name: Annotated[str, Field(min_length=1, max_length=100)]


class ChangeIn(Body):
    """What an item is now, or that it is gone."""

    key: Key
    version: Annotated[
        int | str | None,
        Field(description="Rises with each change: a number, or the instant of it. Without, it is newest."),
    ] = None
    fields: dict[str, Json] | None = None
    deleted: bool | None = None


class ChangesIn(Body):
    """Changes of items."""

    items: Annotated[list[ChangeIn], Field(max_length=MOST)]


class SourceOut(Shown):
    """A source. Systems say what has changed at `hook`."""

    id: str
    name: str
    tenant_id: str
    kind: str
    options: dict[str, Json]
    hook: str
    state: Literal["ready", "failing", "reauthorise", "orphaned"]
    synced_at: Instant | None
    fault: str | None
    orphaned_at: Instant | None
    orphaned_reason: str | None
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class SourcePage(Shown):
    """Sources, by name."""

    items: list[SourceOut]
    next_cursor: str | None


class ItemOut(Shown):
    """An item as it was last heard of; fields null: it is gone."""

    key: str
    version: int
    fields: dict[str, Json] | None
    updated_at: Instant


class ItemPage(Shown):
    """Items, by key."""

    items: list[ItemOut]
    next_cursor: str | None


class ObservedOut(Shown):
    """What changes came to."""

    changed: int
    same: Annotated[int, Field(description="Newer, and nothing else.")]
    stale: Annotated[int, Field(description="Something newer was known.")]
    made: Annotated[int, Field(description="Jobs. A move is one cancelled and one made.")]
    cancelled: int
    late: Annotated[int, Field(description="Past by more than the grace: no job.")]
    unreadable: Annotated[int, Field(description="A trigger can read no instant or recipient there.")]


@routes.post("/sources", status_code=201, response_model=SourceOut, **changes("source.create", Role.EDITOR))
async def create_source(body: SourceIn, let: Let) -> Response:
    """Make a source."""
    made = await _put(let, body.name, body, None, replace=False)
    return answer(shown(made), 201, {"ETag": etag(made), "Location": f"/api/v1/sources/{made.name}"})


@routes.get("/sources", response_model=SourcePage, **reads())
async def list_sources(let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Sources by name."""
    page = await let.run(rows.page, let.tenant_id, limit, cursor)
    return paged(page, [shown(source) for source in page])


@routes.get("/sources/{name}", response_model=SourceOut, **reads())
async def get_source(name: Id, let: Let) -> Response:
    """One source. To editors `hook` has the token with which a board's webhooks need no key."""
    found = await _find(let, name)
    said = shown(found)
    if found.kind == "monday" and let.caller.role.covers(Role.EDITOR):
        said["hook"] += token_part(let.app.settings.secret_key, found.id)
    return answer(said, headers={"ETag": etag(found)})


@routes.put("/sources/{name}", response_model=SourceOut, **changes("source.put", Role.EDITOR))
async def put_source(name: Id, body: SourcePut, let: Let, if_match: Match = None) -> Response:
    """Make a source, or give the one there is other options."""
    made = await _put(let, name, body, if_match, replace=True)
    return answer(shown(made), headers={"ETag": etag(made)})


@routes.delete("/sources/{name}", response_model=SourceOut, **changes("source.delete", Role.EDITOR))
async def delete_source(name: Id, let: Let) -> Response:
    """Forget a source that has no trigger, and its items."""
    let.subject, let.before = name, shown(await _find(let, name))
    return answer(shown(await let.app.triggers.delete_source(name, tenant_id=let.tenant_id, connection=let.connection)))


@routes.get("/sources/{name}/items", response_model=ItemPage, **reads())
async def list_items(name: Id, let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Items of a source as they were last heard of, by key."""
    home = await _find(let, name)
    page = await let.run(rows.page_of_items, home.id, limit, cursor)
    return paged(page, [_item(item) for item in page])


@routes.post("/sources/{name}/items", response_model=ObservedOut, **changes("source.items", Role.OPERATOR))
async def put_items(name: Id, body: ChangesIn, let: Let) -> Response:
    """Say of up to 500 items what they are now: their jobs follow, all of them or none."""
    home = await _find(let, name)
    let.subject = home.name
    return answer(observed(await observe(let, home.name, [change(one) for one in body.items])))


async def _put(let: Let, name: str, body: SourcePut, match: str | None, *, replace: bool) -> Source:
    let.subject = name
    if body.kind != "webhook":
        # Whoever says where a secret goes can read it there; and an address is asked from where the nodes are.
        own = body.kind == "monday" and "url" not in (body.options or {})
        require(let.caller.role, Role.ADMIN if own else Role.PLATFORM)
    if plain := [name for name in HIDDEN if isinstance((body.options or {}).get(name), str)]:
        raise InvalidInput(
            f"{plain[0]} is given as it is, and everybody who reads the source would see it.",
            code="SOURCE_OPTIONS_INVALID", fix='Put it into a secret, and give {"secret": "its name"}.',
        )  # fmt: skip
    let.operates = True
    known: Source | None = await let.run(rows.locked, let.tenant_id, name)
    if known is not None:
        let.before = shown(known)
        if replace:
            expect(match, etag(known), f"The source {name!r:.80}", known.id)
    made: Source = await let.app.triggers.put_source(
        name, body.kind, body.options, replace=replace, tenant_id=let.tenant_id, created_by=let.caller.actor,
        connection=let.connection,
    )  # fmt: skip
    return made


async def _find(let: Let, name: str) -> Source:
    try:
        return await let.app.triggers.source(name, tenant_id=let.tenant_id, connection=let.connection)
    except NotFound:
        raise missing("source", name) from None


async def observe(let: Let, name: str, items: list[dict[str, Any]]) -> Observed:
    """Take in what a system says of items. Raises InvalidInput (INVALID_ITEM)."""
    if not items:
        raise InvalidInput("There is no item.", code="INVALID_ITEM", fix="Give at least one.")
    found = await let.app.triggers.put_items(name, items, tenant_id=let.tenant_id, connection=let.connection)
    if let.app.service is not None:
        let.app.service.node.counters.observed(found)
    return found


def change(body: ChangeIn) -> dict[str, Any]:
    """A change as the verbs take it."""
    return body.given()


def etag(source: Source) -> str:
    """The strong ETag of a source: when its options were changed."""
    return f'"{micros(source.updated_at)}"'


def shown(source: Source) -> dict[str, Any]:
    """A source as it is answered. A token that a program put into it is shown to nobody."""
    hidden = {name: MASK for name in HIDDEN if isinstance(source.options.get(name), str)}
    return {
        "id": source.id, "name": source.name, "tenantId": source.tenant_id, "kind": source.kind,
        "options": {**source.options, **hidden}, "hook": f"{HOOKS}/{source.id}", "state": source.state,
        "syncedAt": utc(source.synced_at), "fault": source.fault, "orphanedAt": utc(source.orphaned_at),
        "orphanedReason": source.orphaned_reason, "createdAt": utc(source.created_at),
        "createdBy": source.created_by, "updatedAt": utc(source.updated_at),
    }  # fmt: skip


def _item(item: Item) -> dict[str, Any]:
    return {"key": item.key, "version": item.version, "fields": item.fields, "updatedAt": utc(item.updated_at)}


def observed(found: Observed) -> dict[str, int]:
    """What changes came to, as it is answered."""
    return {name: getattr(found, name) for name in ObservedOut.model_fields}
