"""`/secrets`: what targets need and nobody is shown: made, replaced, listed without values, forgotten."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field, SecretStr

from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Body, Cursor, Id, Instant, Limit, Name, Shown, answer, paged, utc
from timebell.client.secrets import MOST
from timebell.model.target import Secret
from timebell.store.tenancy import secrets as rows
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["secrets"])
Value = Annotated[SecretStr, Field(min_length=1, max_length=MOST, description="Never shown again, to anyone.")]


class SecretIn(Body):
    """What makes a secret."""

    name: Name
    value: Value


class ValueIn(Body):
    """A new value."""

    value: Value


class SecretOut(Shown):
    """A secret; its value stays here."""

    name: str
    tenant_id: str
    version: Annotated[int, Field(description="How often it has had a value.")]
    created_at: Instant
    created_by: str | None
    updated_at: Instant


class SecretPage(Shown):
    """Secrets, by name."""

    items: list[SecretOut]
    next_cursor: str | None


@routes.post("/secrets", status_code=201, response_model=SecretOut, **changes("secret.create", Role.ADMIN))
async def create_secret(body: SecretIn, let: Let) -> Response:
    """Keep a value under a name, encrypted; targets refer to it as `{"secret": "name"}`."""
    let.subject = body.name
    made = await let.app.secrets.put(
        body.name, body.value.get_secret_value(), replace=False, tenant_id=let.tenant_id,
        created_by=let.caller.actor, connection=let.connection,
    )  # fmt: skip
    return answer(shown(made), 201, {"Location": f"/api/v1/secrets/{made.name}"})


@routes.get("/secrets", response_model=SecretPage, **reads(Role.EDITOR))
async def list_secrets(let: Let, limit: Limit = 50, cursor: Cursor = None) -> Response:
    """Secrets by name, without values."""
    page = await let.run(rows.page, let.tenant_id, limit, cursor)
    return paged(page, [shown(secret) for secret in page])


@routes.get("/secrets/{name}", response_model=SecretOut, **reads(Role.EDITOR))
async def get_secret(name: Id, let: Let) -> Response:
    """What is known of a secret."""
    return answer(shown(await _find(let, name)))


@routes.put("/secrets/{name}", response_model=SecretOut, **changes("secret.replace", Role.ADMIN))
async def replace_secret(name: Id, body: ValueIn, let: Let) -> Response:
    """Another value: what is delivered from now on carries it."""
    let.subject, let.before = name, shown(await _find(let, name))
    return answer(shown(await let.app.secrets.put(
        name, body.value.get_secret_value(), replace=True, tenant_id=let.tenant_id, connection=let.connection
    )))  # fmt: skip


@routes.delete("/secrets/{name}", response_model=SecretOut, **changes("secret.delete", Role.ADMIN))
async def delete_secret(name: Id, let: Let) -> Response:
    """Forget a secret that no target refers to."""
    let.subject, let.before = name, shown(await _find(let, name))
    return answer(shown(await let.app.secrets.delete(name, tenant_id=let.tenant_id, connection=let.connection)))


async def _find(let: Let, name: str) -> Secret:
    found: Secret | None = await let.run(rows.find, let.tenant_id, name)
    if found is None:
        raise missing("secret", name)
    return found


def shown(secret: Secret) -> dict[str, Any]:
    """A secret as it is answered."""
    return {
        "name": secret.name, "tenantId": secret.tenant_id, "version": secret.version,
        "createdAt": utc(secret.created_at), "createdBy": secret.created_by, "updatedAt": utc(secret.updated_at),
    }  # fmt: skip
