"""`/secrets`: encrypted values that targets refer to. Values are never returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field, SecretStr

from timebell.api.if_match import IfMatch, check_match, entity_tag
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Limit,
    ObjectName,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
)
from timebell.client.secrets import MAX_VALUE_BYTES
from timebell.model.target import Secret
from timebell.store.tenancy import secrets as rows
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=ApiRoute, tags=["secrets"])
Value = Annotated[SecretStr, Field(min_length=1, max_length=MAX_VALUE_BYTES, description="Never returned.")]


class SecretIn(RequestBody):
    """Fields of a new secret."""

    name: ObjectName
    value: Value


class SecretValueIn(RequestBody):
    """New value of a secret."""

    value: Value


class SecretOut(ResponseBody):
    """Secret, without its value."""

    name: str
    tenant_id: str
    version: Annotated[int, Field(description="Number of times its value was set.")]
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class SecretPage(ResponseBody):
    """Page of secrets, sorted by name."""

    items: list[SecretOut]
    next_cursor: str | None


@routes.post("/secrets", status_code=201, response_model=SecretOut, **change_route("secret.create", Role.ADMIN))
async def create_secret(body: SecretIn, ctx: Context) -> Response:
    """Store a value encrypted. Targets refer to it as `{"secret": "name"}`."""
    ctx.subject = body.name
    created = await ctx.app.secrets.put(
        body.name, body.value.get_secret_value(), replace=False, tenant_id=ctx.tenant_id,
        created_by=ctx.caller.actor, connection=ctx.connection,
    )  # fmt: skip
    return _secret_response(created, 201, {"Location": f"/api/v1/secrets/{created.name}"})


@routes.get("/secrets", response_model=SecretPage, **read_route(Role.EDITOR))
async def list_secrets(ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List secrets without values, sorted by name."""
    page = await ctx.run(rows.list_secrets, ctx.tenant_id, limit, cursor)
    return page_response(page, [render_secret(secret) for secret in page])


@routes.get("/secrets/{name}", response_model=SecretOut, **read_route(Role.EDITOR))
async def get_secret(name: Id, ctx: Context) -> Response:
    """Get a secret without its value."""
    return _secret_response(await _find_secret(ctx, name))


@routes.put("/secrets/{name}", response_model=SecretOut, **change_route("secret.replace", Role.ADMIN))
async def replace_secret(name: Id, body: SecretValueIn, ctx: Context, if_match: IfMatch = None) -> Response:
    """Replace the value of a secret. Deliveries use the new value from now on."""
    await _lock_for_change(ctx, name, if_match)
    return _secret_response(await ctx.app.secrets.put(
        name, body.value.get_secret_value(), replace=True, tenant_id=ctx.tenant_id, connection=ctx.connection
    ))  # fmt: skip


@routes.delete("/secrets/{name}", response_model=SecretOut, **change_route("secret.delete", Role.ADMIN))
async def delete_secret(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Delete a secret that no target refers to."""
    await _lock_for_change(ctx, name, if_match)
    return json_response(
        render_secret(await ctx.app.secrets.delete(name, tenant_id=ctx.tenant_id, connection=ctx.connection))
    )


async def _find_secret(ctx: Context, name: str, *, lock: bool = False) -> Secret:
    secret: Secret | None = await ctx.run(rows.find_secret, ctx.tenant_id, name, lock=lock)
    if secret is None:
        raise not_found("secret", name)
    return secret


async def _lock_for_change(ctx: Context, name: str, if_match: str | None) -> None:
    """Lock a secret, check If-Match, and record the audit subject. Raises NotFound, RevisionStale."""
    secret = await _find_secret(ctx, name, lock=True)
    check_match(if_match, etag(secret), f"The secret {name!r:.80}", name)
    ctx.subject, ctx.before = name, render_secret(secret)


def etag(secret: Secret) -> str:
    """Return the strong ETag of a secret: each new value changes it."""
    return entity_tag(secret.version, secret.created_at)


def _secret_response(secret: Secret, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(render_secret(secret), status, {"ETag": etag(secret), **(headers or {})})


def render_secret(secret: Secret) -> dict[str, Any]:
    """Render a secret as JSON."""
    return {
        "name": secret.name, "tenantId": secret.tenant_id, "version": secret.version,
        "createdAt": format_utc(secret.created_at), "createdBy": secret.created_by,
        "updatedAt": format_utc(secret.updated_at),
    }  # fmt: skip
