"""`/connections`: encrypted OAuth tokens for reading sources. Tokens are never returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import Field, SecretStr

from timebell.api.if_match import IfMatch, check_match, entity_tag
from timebell.api.route import ApiRoute, Context, change_route, not_found, read_route
from timebell.api.schemas import (
    Cursor,
    Id,
    Instant,
    Limit,
    Name,
    ObjectName,
    RequestBody,
    ResponseBody,
    format_utc,
    json_response,
    page_response,
)
from timebell.features.triggers.client.connections import MAX_LIFETIME_SECONDS, MAX_TOKEN_LENGTH
from timebell.features.triggers.model.connection import Connection
from timebell.features.triggers.store import connections as rows
from timebell.tenancy.roles import Role, require

routes = APIRouter(route_class=ApiRoute, tags=["connections"])
Token = Annotated[SecretStr, Field(min_length=1, max_length=MAX_TOKEN_LENGTH, description="Never returned.")]


class ConnectionTokensIn(RequestBody):
    """Tokens as issued by the authorization server."""

    access_token: Token
    refresh_token: Token | None = None
    expires_in_seconds: Annotated[
        float | None,
        Field(ge=0, lt=MAX_LIFETIME_SECONDS, description="If omitted, the tokens are renewed when they are rejected."),
    ] = None


class ConnectionIn(ConnectionTokensIn):
    """Fields of a new connection."""

    name: ObjectName
    token_url: Annotated[
        str | None, Field(max_length=2000, description="Token endpoint for renewals; defaults to monday.com.")
    ] = None
    client_id: Name | None = None
    client_secret: Token | None = None


class ConnectionOut(ResponseBody):
    """Connection, without its tokens."""

    name: str
    tenant_id: str
    token_url: str
    client_id: str | None
    version: Annotated[int, Field(description="Number of times its tokens were set.")]
    state: Literal["ready", "failing", "reauthorize"]
    error: str | None
    expires_at: Instant | None
    renewed_at: Instant
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class ConnectionPage(ResponseBody):
    """Page of connections, sorted by name."""

    items: list[ConnectionOut]
    next_cursor: str | None


@routes.post(
    "/connections", status_code=201, response_model=ConnectionOut, **change_route("connection.create", Role.ADMIN)
)
async def create_connection(body: ConnectionIn, ctx: Context) -> Response:
    """Store tokens encrypted. Sources refer to them as `{"connection": "name"}`."""
    if body.token_url is not None:
        require(ctx.caller.role, Role.PLATFORM)  # nodes send requests to this URL from inside the network
    ctx.subject = body.name
    secret = None if body.client_secret is None else body.client_secret.get_secret_value()
    created = await ctx.app.connections.put(
        body.name, **_token_arguments(body), token_url=body.token_url, client_id=body.client_id, client_secret=secret,
        replace=False, tenant_id=ctx.tenant_id, created_by=ctx.caller.actor, connection=ctx.connection,
    )  # fmt: skip
    return _connection_response(created, 201, {"Location": f"/api/v1/connections/{created.name}"})


@routes.get("/connections", response_model=ConnectionPage, **read_route(Role.EDITOR))
async def list_connections(ctx: Context, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """List connections without tokens, sorted by name."""
    page = await ctx.run(rows.list_connections, ctx.tenant_id, limit, cursor)
    return page_response(page, [render_connection(connection) for connection in page])


@routes.get("/connections/{name}", response_model=ConnectionOut, **read_route(Role.EDITOR))
async def get_connection(name: Id, ctx: Context) -> Response:
    """Get a connection without its tokens."""
    return _connection_response(await _find_connection(ctx, name))


@routes.post(
    "/connections/{name}/reauthorize",
    response_model=ConnectionOut,
    **change_route("connection.reauthorize", Role.ADMIN),
)
async def reauthorize_connection(
    name: Id, body: ConnectionTokensIn, ctx: Context, if_match: IfMatch = None
) -> Response:
    """Replace the tokens of a connection. Work that waited for them continues."""
    await _lock_for_change(ctx, name, if_match)
    return _connection_response(await ctx.app.connections.put(
        name, **_token_arguments(body), replace=True, tenant_id=ctx.tenant_id, connection=ctx.connection
    ))  # fmt: skip


@routes.delete("/connections/{name}", response_model=ConnectionOut, **change_route("connection.delete", Role.ADMIN))
async def delete_connection(name: Id, ctx: Context, if_match: IfMatch = None) -> Response:
    """Delete a connection that no source refers to, and its tokens."""
    await _lock_for_change(ctx, name, if_match)
    return json_response(
        render_connection(await ctx.app.connections.delete(name, tenant_id=ctx.tenant_id, connection=ctx.connection))
    )


def _token_arguments(body: ConnectionTokensIn) -> dict[str, Any]:
    refresh = body.refresh_token
    return {
        "access_token": body.access_token.get_secret_value(),
        "refresh_token": None if refresh is None else refresh.get_secret_value(),
        "expires_in": body.expires_in_seconds,
    }


async def _find_connection(ctx: Context, name: str, *, lock: bool = False) -> Connection:
    connection: Connection | None = await ctx.run(rows.find_connection, ctx.tenant_id, name, lock=lock)
    if connection is None:
        raise not_found("connection", name)
    return connection


async def _lock_for_change(ctx: Context, name: str, if_match: str | None) -> None:
    """Lock a connection, check If-Match, and record the audit subject. Raises NotFound, RevisionStale."""
    connection = await _find_connection(ctx, name, lock=True)
    check_match(if_match, etag(connection), f"The connection {name!r:.80}", name)
    ctx.subject, ctx.before = name, render_connection(connection)


def etag(connection: Connection) -> str:
    """Return the strong ETag of a connection. Replacing its tokens changes it, and so does their renewal."""
    return entity_tag(connection.version, connection.created_at)


def _connection_response(
    connection: Connection, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return json_response(render_connection(connection), status, {"ETag": etag(connection), **(headers or {})})


def render_connection(connection: Connection) -> dict[str, Any]:
    """Render a connection as JSON."""
    return {
        "name": connection.name, "tenantId": connection.tenant_id, "tokenUrl": connection.token_url,
        "clientId": connection.client_id,
        "version": connection.version, "state": connection.state, "error": connection.error,
        "expiresAt": format_utc(connection.expires_at),
        "renewedAt": format_utc(connection.renewed_at), "createdAt": format_utc(connection.created_at),
        "createdBy": connection.created_by,
        "updatedAt": format_utc(connection.updated_at),
    }  # fmt: skip
