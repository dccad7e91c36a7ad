"""Who is let in at `/hooks/{sourceId}`: whoever has a key, and monday.com, which cannot send one.

With a signing secret its requests are signed by a JSON Web Token in Authorization. Without, the address that it was
given has a token: an HMAC-SHA-256 of the source's id under the installation's secret key, which any node can check.
"""

from __future__ import annotations

import hmac
from urllib.parse import quote

from fastapi import Request

from timebell.api.authentication import Caller, Door
from timebell.client.validation import uuid_of
from timebell.errors import TimebellError
from timebell.model.target import secret_of
from timebell.model.trigger import Source
from timebell.store.tenancy import secrets
from timebell.store.triggers import sources
from timebell.tenancy.keys import digests
from timebell.tenancy.roles import Role
from timebell.tenancy.secrets import keyring
from timebell.triggers.monday_events import signed

HOOKS = "/api/v1/hooks"
SIGNED, KNOWN = "monday.com", "monday.com (unsigned)"
"""The actors: its signature was right, or it knew the address."""


async def admit(request: Request, door: Door) -> Caller:
    """The caller. Raises Unauthorized, TooManyWrongKeys, Refused, InvalidInput."""
    authorization, token = request.headers.get("authorization", ""), request.query_params.get("token")
    scheme, _, rest = authorization.partition(" ")
    if token is None and (not authorization or rest.startswith("tb_")):
        return await door.admit(request)
    address = request.client.host if request.client else ""
    known = uuid_of(request.url.path.rpartition("/")[2])
    source: Source | None = None if known is None else await door.app.store.run(sources.by_id, known)
    if source is not None and source.kind == "monday":
        given = rest if scheme.lower() == "bearer" else authorization
        secret = await _secret(door, source)
        if secret is not None and signed(given.strip(), secret, door.app.clock.now(), f"{HOOKS}/{source.id}"):
            return Caller(SIGNED, source.tenant_id, Role.OPERATOR, address)
        if token is not None and _knows(token, door.app.settings.secret_key, source.id):
            return Caller(KNOWN, source.tenant_id, Role.OPERATOR, address)
    raise door.wrong(address)


async def _secret(door: Door, source: Source) -> str | None:
    """The signing secret of a source, if it has one and it can be read."""
    given = source.options.get("signingSecret")
    name = secret_of(given)
    if name is None:
        return given if isinstance(given, str) else None
    try:
        ring = keyring(door.app.settings.secret_key)
        found: dict[str, str] = await door.app.store.run(secrets.values, ring, source.tenant_id, {name})
    except TimebellError as failed:
        if failed.code.startswith("SECRET"):
            return None
        raise
    return found[name]


def token_part(secret_key: str | None, source_id: str) -> str:
    """What an address has at its end so that whoever knows it needs no key; empty without a secret key."""
    return "".join(f"?token={quote(one)}" for one in _tokens(secret_key, source_id)[:1])


def _tokens(secret_key: str | None, source_id: str) -> list[str]:
    return [one[:40] for one in digests(secret_key, f"hook {source_id}")]


def _knows(token: str, secret_key: str | None, source_id: str) -> bool:
    given = token.encode(errors="replace")
    return any(hmac.compare_digest(one.encode(), given) for one in _tokens(secret_key, source_id))
