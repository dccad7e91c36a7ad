"""`/keys`: create, list and revoke API keys. A key cannot create a key with more permissions than its own."""

from __future__ import annotations

import dataclasses
import ipaddress
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.authentication import Caller
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Limit,
    Name,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
    parse_timestamp,
)
from timebell.client.validation import check_text
from timebell.errors import InThePast, Refused
from timebell.store.tenancy import api_keys as rows
from timebell.tenancy import keys
from timebell.tenancy.keys import SCOPES, Key, check_networks, check_scopes
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["keys"])


class KeyIn(RequestBody):
    """Fields of a new key. Omitted restrictions are those of the key that creates it."""

    name: Name
    role: Role
    scopes: Annotated[
        list[Annotated[str, Field(json_schema_extra={"enum": list(SCOPES)})]] | None,
        Field(min_length=1, max_length=len(SCOPES), description=f"Subset of {', '.join(SCOPES)}."),
    ] = None
    networks: Annotated[
        list[Annotated[str, Field(max_length=64)]] | None,
        Field(
            min_length=1, max_length=32, description="Networks from which the key may be used, such as 192.0.2.0/24."
        ),
    ] = None
    expires_at: Instant | None = None


class KeyOut(ResponseBody):
    """API key without its secret, which is not stored. `tenantId` is null for platform keys."""

    id: str
    tenant_id: str | None
    name: str
    role: str
    scopes: list[str] | None
    networks: list[str] | None
    created_at: Instant
    created_by: str | None
    expires_at: Instant | None
    last_used_at: Annotated[Instant | None, Field(description="Accurate to the minute.")]
    revoked_at: Instant | None


class KeyCreated(KeyOut):
    """New key with its text."""

    key: Annotated[
        str | None,
        Field(description="Text of the key, returned only once; null in the response to a repeated request."),
    ]


class KeyPage(ResponseBody):
    """Page of keys, sorted by id."""

    items: list[KeyOut]
    next_cursor: str | None


@routes.post("/keys", status_code=201, response_model=KeyCreated, **change_route("key.create", Role.ADMIN))
async def create_key(body: KeyIn, ctx: Context) -> Response:
    """Create a key. Keys with the role `platform` belong to no tenant, all others to the caller's tenant."""
    tenant_id = None if body.role is Role.PLATFORM else ctx.tenant_id
    id_, text = keys.generate_key()
    requested = Key(
        id=id_, tenant_id=tenant_id, name=check_text(body.name, "name"), role=body.role,
        scopes=check_scopes(body.scopes),
        networks=check_networks(body.networks), created_at=ctx.now, created_by=ctx.caller.actor,
        expires_at=None if body.expires_at is None else _parse_future(body.expires_at, ctx.now),
    )  # fmt: skip
    key = restrict_to_caller(requested, ctx.caller)
    await ctx.run(rows.create_key, key, keys.digest(ctx.app.settings.secret_key, text))
    ctx.subject = id_
    ctx.replay_body = {**render_key(key), "key": None}
    return json_response({**render_key(key), "key": text}, 201, {"Location": f"/api/v1/keys/{id_}"})


@routes.get("/keys", response_model=KeyPage, **read_route(Role.ADMIN))
async def list_keys(
    ctx: Context, limit: Limit = 50, cursor: Cursor = None,
    tenant: Annotated[str | None, Query(max_length=200, description="Tenant to list; requires a platform key.")] = None,
) -> Response:  # fmt: skip
    """List the keys of the tenant, including revoked ones.

    Platform keys list all keys, or those of the specified tenant.
    """
    page = await ctx.run(rows.list_keys, visible_tenant(ctx), limit, cursor)
    return page_response(page, [render_key(key) for key in page])


@routes.get("/keys/{id}", response_model=KeyOut, **read_route(Role.ADMIN))
async def get_key(id: Id, ctx: Context) -> Response:
    """Get a key."""
    found = await ctx.run(rows.find_key, id)
    if found is None or visible_tenant(ctx) not in (None, found[0].tenant_id):
        raise not_found("key", id)
    return json_response(render_key(found[0]))


@routes.delete("/keys/{id}", response_model=KeyOut, **change_route("key.revoke", Role.ADMIN))
async def revoke_key(id: Id, ctx: Context) -> Response:
    """Revoke a key, within 5 s on every node. Idempotent."""
    ctx.subject = id
    revoked = await ctx.run(rows.revoke_key, visible_tenant(ctx), id, ctx.now)
    if revoked is None:
        raise not_found("key", id)
    return json_response(render_key(revoked))


def visible_tenant(ctx: Context) -> str | None:
    """Return the tenant whose keys the caller may access; None means all keys, including platform keys."""
    return None if ctx.caller.is_platform and not ctx.caller.specifies_tenant else ctx.tenant_id


def restrict_to_caller(requested: Key, caller: Caller) -> Key:
    """Return the requested key with the caller's restrictions as defaults. Raises Refused (KEY_EXCEEDS_CALLER)."""
    if not caller.role.covers(requested.role):
        raise _too_strong(f"the role {requested.role}, but yours is {caller.role}")
    own = caller.key
    if own is None:
        return requested
    scopes, networks, expires_at = (
        requested.scopes or own.scopes,
        requested.networks or own.networks,
        requested.expires_at,
    )
    if own.scopes is not None and not set(scopes or ()) <= set(own.scopes):
        raise _too_strong(f"other scopes than {', '.join(own.scopes)}")
    if own.networks is not None and not all(_is_inside(network, own.networks) for network in networks or ()):
        raise _too_strong(f"networks outside {', '.join(own.networks)}")
    if own.expires_at is not None:
        expires_at = expires_at or own.expires_at
        if expires_at > own.expires_at:
            raise _too_strong("a later expiry than your key")
    return dataclasses.replace(requested, scopes=scopes, networks=networks, expires_at=expires_at)


def render_key(key: Key) -> dict[str, Any]:
    """Render a key as JSON."""
    return {
        "id": key.id, "tenantId": key.tenant_id, "name": key.name, "role": key.role.value, "scopes": key.scopes,
        "networks": key.networks, "createdAt": format_utc(key.created_at), "createdBy": key.created_by,
        "expiresAt": format_utc(key.expires_at), "lastUsedAt": format_utc(key.last_used_at),
        "revokedAt": format_utc(key.revoked_at),
    }  # fmt: skip


def _parse_future(value: str, now: datetime) -> datetime:
    instant = parse_timestamp(value, "expiresAt")
    if instant <= now:
        raise InThePast(
            f"expiresAt is {value}, which has passed.", code="KEY_EXPIRY_IN_THE_PAST", fix="Specify a future time."
        )
    return instant


def _is_inside(network: str, allowed: tuple[str, ...]) -> bool:
    inner = ipaddress.ip_network(network)
    return any(
        inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]  # the versions are equal
        for outer in map(ipaddress.ip_network, allowed)
    )


def _too_strong(excess: str) -> Refused:
    return Refused(
        f"The new key would have {excess}: a key cannot create a key with more permissions.", code="KEY_EXCEEDS_CALLER",
        fix="Request fewer permissions, or use a key with more.",
    )  # fmt: skip
