"""Authentication of inbound webhooks at `/hooks/{sourceId}`.

Clients send an API key. monday.com cannot send one and authenticates by signature or URL token instead. If the source
has a signing secret, monday.com signs requests with a JSON Web Token in Authorization. Otherwise the webhook URL
contains a token (`sources/webhook_url.py`).
"""

from __future__ import annotations

from fastapi import Request

from timebell.api.authentication import Authenticator, Caller
from timebell.api.client_address import client_network
from timebell.api.route import ApiRoute
from timebell.client.validation import parse_uuid
from timebell.errors import TimebellError
from timebell.features.triggers.model.trigger import Source
from timebell.features.triggers.sources.monday_events import is_valid_token
from timebell.features.triggers.sources.webhook_url import HOOKS_PATH, TOKEN_PARAMETER, is_url_token
from timebell.features.triggers.store import sources
from timebell.model.target import referenced_secret
from timebell.store.tenancy import secrets
from timebell.tenancy.roles import Role
from timebell.tenancy.secrets import keyring

SIGNED_ACTOR, UNSIGNED_ACTOR = "monday.com", "monday.com (unsigned)"
"""Actors in the audit log: authenticated by signature, or by the token in the URL."""


class SignedWebhookRoute(ApiRoute):
    """Route that also accepts webhooks authenticated by a signature or URL token instead of an API key."""

    common_parameters = ApiRoute.common_parameters | {TOKEN_PARAMETER}

    async def authenticate(self, request: Request, authenticator: Authenticator) -> Caller:
        return await authenticate(request, authenticator)


async def authenticate(request: Request, authenticator: Authenticator) -> Caller:
    """Return the caller. Raises Unauthorized, Refused, InvalidInput."""
    authorization, token = request.headers.get("authorization", ""), request.query_params.get(TOKEN_PARAMETER)
    scheme, _, rest = authorization.partition(" ")
    if token is None and (not authorization or rest.startswith("tb_")):
        return await authenticator.authenticate(request)
    address = request.client.host if request.client else ""
    # Few per client at a time: invented ids and tokens must not occupy the connections to the database.
    async with authenticator.capacity.lookups.hold(client_network(address)):
        source, secret = await _find_source(authenticator, parse_uuid(request.url.path.rpartition("/")[2]))
    if source is not None:
        signature = rest if scheme.lower() == "bearer" else authorization
        if secret is not None and is_valid_token(
            signature.strip(), secret, authenticator.app.clock.now(), f"{HOOKS_PATH}/{source.id}"
        ):
            return Caller(SIGNED_ACTOR, source.tenant_id, Role.OPERATOR, address, kind="source")
        if token is not None and is_url_token(token, authenticator.app.settings.secret_key, source.id):
            return Caller(UNSIGNED_ACTOR, source.tenant_id, Role.OPERATOR, address, kind="source")
    raise authenticator.reject("wrong_signature", address)


async def _find_source(authenticator: Authenticator, id_: str | None) -> tuple[Source | None, str | None]:
    """Return a source that accepts webhooks without a key, and its signing secret, if it has one."""
    source: Source | None = None if id_ is None else await authenticator.app.store.run(sources.find_source_by_id, id_)
    if source is None or source.kind != "monday":
        return None, None
    return source, await _signing_secret(authenticator, source)


async def _signing_secret(authenticator: Authenticator, source: Source) -> str | None:
    """Return the signing secret of a source, or None if it has none or it cannot be read."""
    option = source.options.get("signingSecret")
    name = referenced_secret(option)
    if name is None:
        return option if isinstance(option, str) else None
    try:
        ring = keyring(authenticator.app.settings.secret_key)
        values: dict[str, str] = await authenticator.app.store.run(
            secrets.decrypt_values, ring, source.tenant_id, {name}
        )
    except TimebellError as error:
        if error.code.startswith("SECRET"):
            return None
        raise
    return values[name]
