"""`/connections`: the tokens with which sources are read: given, given anew, listed without them, forgotten."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import Field, SecretStr

from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Body, Cursor, Id, Instant, Limit, Name, Shown, answer, paged, utc
from timebell.client.connections import LONGEST, MOST
from timebell.model.connection import Connection
from timebell.store.triggers import connections as rows
from timebell.tenancy.roles import Role, require

routes = APIRouter(route_class=Guarded, tags=["connections"])
Token = Annotated[SecretStr, Field(min_length=1, max_length=MOST, description="Never shown again, to anyone.")]


class TokensIn(Body):
    """Tokens, as whoever authorises gives them out."""

    access_token: Token
    refresh_token: Token | None = None
    expires_in_seconds: Annotated[
        float | None, Field(ge=0, lt=LONGEST, description="Without, they are renewed when they are refused.")
    ] = None


class ConnectionIn(TokensIn):
    """What makes a connection."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    token_url: Annotated[str | None, Field(max_length=2000, description="Where they are renewed: monday.com's.")] = None
    client_id: Name | None = None
    client_secret: Token | None = None


class ConnectionOut(Shown):
    """A connection; its tokens stay here."""

    name: str
    tenant_id: str
    token_url: str
    client_id: str | None
    version: Annotated[int, Field(description="How often it has had tokens.")]
    state: Literal["ready", "failing", "reauthorise"]
    fault: str | None
    expires_at: Instant | None
    renewed_at: Instant
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class ConnectionPage(Shown):
    """Connections, by name."""

    items: list[ConnectionOut]
    next_cursor: str | None


@routes.post("/connections", status_code=201, response_model=ConnectionOut, **changes("connection.create", Role.ADMIN))
async def create_connection(body: ConnectionIn, let: Let) -> Response:
    """Keep tokens, encrypted; sources refer to them as `{"connection": "name"}`."""
    if body.token_url is not None:
        require(let.caller.role, Role.PLATFORM)  # an address is asked from where the nodes are
    let.subject = body.name
    secret = None if body.client_secret is None else body.client_secret.get_secret_value()
    made = await let.app.connections.put(
        body.name, **_tokens(body), token_url=body.token_url, client_id=body.client_id, client_secret=secret,
        replace=False, tenant_id=let.tenant_id, created_by=let.caller.actor, connection=let.connection,
    )  # fmt: skip
    return answer(shown(made), 201, {"Location": f"/api/v1/connections/{made.name}"})


@routes.get("/connections", response_model=ConnectionPage, **reads(Role.EDITOR))
async def list_connections(let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Connections by name, without tokens."""
    page = await let.run(rows.page, let.tenant_id, limit, cursor)
    return paged(page, [shown(one) for one in page])


@routes.get("/connections/{name}", response_model=ConnectionOut, **reads(Role.EDITOR))
async def get_connection(name: Id, let: Let) -> Response:
    """What is known of a connection."""
    return answer(shown(await _find(let, name)))


@routes.post(
    "/connections/{name}/reauthorize", response_model=ConnectionOut, **changes("connection.reauthorize", Role.ADMIN)
)
async def reauthorize_connection(name: Id, body: TokensIn, let: Let) -> Response:
    """Give it new tokens: what waited for them goes on."""
    let.subject, let.before = name, shown(await _find(let, name))
    let.operates = True
    return answer(shown(await let.app.connections.put(
        name, **_tokens(body), replace=True, tenant_id=let.tenant_id, connection=let.connection
    )))  # fmt: skip


@routes.delete("/connections/{name}", response_model=ConnectionOut, **changes("connection.delete", Role.ADMIN))
async def delete_connection(name: Id, let: Let) -> Response:
    """Forget a connection that no source refers to, and its tokens."""
    let.subject, let.before = name, shown(await _find(let, name))
    return answer(shown(await let.app.connections.delete(name, tenant_id=let.tenant_id, connection=let.connection)))


def _tokens(body: TokensIn) -> dict[str, Any]:
    refresh = body.refresh_token
    return {
        "access_token": body.access_token.get_secret_value(),
        "refresh_token": None if refresh is None else refresh.get_secret_value(),
        "expires_in": body.expires_in_seconds,
    }


async def _find(let: Let, name: str) -> Connection:
    found: Connection | None = await let.run(rows.find, let.tenant_id, name)
    if found is None:
        raise missing("connection", name)
    return found


def shown(found: Connection) -> dict[str, Any]:
    """A connection as it is answered."""
    return {
        "name": found.name, "tenantId": found.tenant_id, "tokenUrl": found.token_url, "clientId": found.client_id,
        "version": found.version, "state": found.state, "fault": found.fault, "expiresAt": utc(found.expires_at),
        "renewedAt": utc(found.renewed_at), "createdAt": utc(found.created_at), "createdBy": found.created_by,
        "updatedAt": utc(found.updated_at),
    }  # fmt: skip
