"""`/keys`: made and shown once, listed, revoked. A key makes none that may do more than itself."""

from __future__ import annotations

import dataclasses
import ipaddress
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import Field

from timebell.api.authentication import Caller
from timebell.api.route import Guarded, Let, changes, missing, reads
from timebell.api.schemas import Body, Cursor, Id, Instant, Limit, Name, Shown, answer, aware, paged, utc
from timebell.client.validation import text
from timebell.errors import InThePast, Refused
from timebell.store.tenancy import api_keys as rows
from timebell.tenancy import keys
from timebell.tenancy.keys import SCOPES, Key, check_networks, check_scopes
from timebell.tenancy.roles import Role

routes = APIRouter(route_class=Guarded, tags=["keys"])


class KeyIn(Body):
    """What makes a key. What is left out is as wide as the key that makes it."""

    name: Name
    role: Role
    scopes: Annotated[
        list[str] | None, Field(min_length=1, max_length=len(SCOPES), description=f"Some of {', '.join(SCOPES)}.")
    ] = None
    networks: Annotated[
        list[Annotated[str, Field(max_length=64)]] | None,
        Field(min_length=1, max_length=32, description="From where it may be used: 192.0.2.0/24."),
    ] = None
    expires_at: Instant | None = None


class KeyOut(Shown):
    """A key; its secret is not kept. `tenantId` is null for keys of the platform."""

    id: str
    tenant_id: str | None
    name: str
    role: str
    scopes: list[str] | None
    networks: list[str] | None
    created_at: Instant
    created_by: str | None
    expires_at: Instant | None
    last_used_at: Annotated[Instant | None, Field(description="To the minute.")]
    revoked_at: Instant | None


class KeyMade(KeyOut):
    """A new key."""

    key: Annotated[str | None, Field(description="Shown this once; null when a repeated request is answered.")]


class KeyPage(Shown):
    """Keys, by id."""

    items: list[KeyOut]
    next_cursor: str | None


@routes.post("/keys", status_code=201, response_model=KeyMade, **changes("key.create", Role.ADMIN))
async def create_key(body: KeyIn, let: Let) -> Response:
    """Make a key. One of role `platform` is of no tenant; all others are of the caller's."""
    tenant_id = None if body.role is Role.PLATFORM else let.tenant_id
    id_, made = keys.mint()
    wanted = Key(
        id=id_, tenant_id=tenant_id, name=text(body.name, "name"), role=body.role, scopes=check_scopes(body.scopes),
        networks=check_networks(body.networks), created_at=let.now, created_by=let.caller.actor,
        expires_at=None if body.expires_at is None else _later(body.expires_at, let.now),
    )  # fmt: skip
    key = within(wanted, let.caller)
    await let.run(rows.create, key, keys.digest(let.app.settings.secret_key, made))
    let.subject = id_
    let.kept = {**shown(key), "key": None}
    return answer({**shown(key), "key": made}, 201, {"Location": f"/api/v1/keys/{id_}"})


@routes.get("/keys", response_model=KeyPage, **reads(Role.ADMIN))
async def list_keys(
    let: Let, limit: Limit = 50, cursor: Cursor = None,
    tenant: Annotated[str | None, Query(max_length=200, description="For keys of the platform.")] = None,
) -> Response:  # fmt: skip
    """Keys of the tenant, revoked ones too; the platform sees all, or those of the tenant it names."""
    page = await let.run(rows.page, whose(let), limit, cursor)
    return paged(page, [shown(key) for key in page])


@routes.get("/keys/{id}", response_model=KeyOut, **reads(Role.ADMIN))
async def get_key(id: Id, let: Let) -> Response:
    """One key."""
    found = await let.run(rows.find, id)
    if found is None or whose(let) not in (None, found[0].tenant_id):
        raise missing("key", id)
    return answer(shown(found[0]))


@routes.delete("/keys/{id}", response_model=KeyOut, **changes("key.revoke", Role.ADMIN))
async def revoke_key(id: Id, let: Let) -> Response:
    """Make a key useless, within 5 s on every node. Asking again changes nothing."""
    let.subject = id
    revoked = await let.run(rows.revoke, whose(let), id, let.now)
    if revoked is None:
        raise missing("key", id)
    return answer(shown(revoked))


def whose(let: Let) -> str | None:
    """The tenant whose keys the caller deals with; None: all, and those of the platform."""
    return None if let.caller.everywhere and not let.caller.named else let.tenant_id


def within(wanted: Key, caller: Caller) -> Key:
    """The key, as narrow as that of the caller where it says nothing. Raises Refused (KEY_TOO_STRONG)."""
    if not caller.role.covers(wanted.role):
        raise _too_strong(f"the role {wanted.role}, and yours is {caller.role}")
    own = caller.key
    if own is None:
        return wanted
    scopes, networks, expires_at = wanted.scopes or own.scopes, wanted.networks or own.networks, wanted.expires_at
    if own.scopes is not None and not set(scopes or ()) <= set(own.scopes):
        raise _too_strong(f"other scopes than {', '.join(own.scopes)}")
    if own.networks is not None and not all(_inside(one, own.networks) for one in networks or ()):
        raise _too_strong(f"networks outside {', '.join(own.networks)}")
    if own.expires_at is not None:
        expires_at = expires_at or own.expires_at
        if expires_at > own.expires_at:
            raise _too_strong("an end after that of your own")
    return dataclasses.replace(wanted, scopes=scopes, networks=networks, expires_at=expires_at)


def shown(key: Key) -> dict[str, Any]:
    """A key as it is answered."""
    return {
        "id": key.id, "tenantId": key.tenant_id, "name": key.name, "role": key.role.value, "scopes": key.scopes,
        "networks": key.networks, "createdAt": utc(key.created_at), "createdBy": key.created_by,
        "expiresAt": utc(key.expires_at), "lastUsedAt": utc(key.last_used_at), "revokedAt": utc(key.revoked_at),
    }  # fmt: skip


def _later(given: str, now: datetime) -> datetime:
    found = aware(given, "expiresAt")
    if found <= now:
        raise InThePast(f"expiresAt is {given}, which has passed.", fix="Give a later one.")
    return found


def _inside(network: str, outer: tuple[str, ...]) -> bool:
    inner = ipaddress.ip_network(network)
    return any(
        inner.version == one.version and inner.subnet_of(one)  # type: ignore[arg-type]  # of the same version
        for one in map(ipaddress.ip_network, outer)
    )


def _too_strong(what: str) -> Refused:
    return Refused(
        f"The new key would have {what}: a key makes none that may do more than itself.", code="KEY_TOO_STRONG",
        fix="Ask for less, or use a stronger key.",
    )  # fmt: skip
