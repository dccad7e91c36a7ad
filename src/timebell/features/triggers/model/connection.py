"""A connection: the OAuth 2.0 tokens for reading a tenant's sources, and when to renew them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

RENEWAL_LEAD_TIME = timedelta(seconds=300)
"""A token is renewed this long before it expires, or in the last fifth of its lifetime if that is shorter."""
REAUTHORIZATION_MESSAGE = "Token expired and refresh failed - re-authorization required"
TOKEN_URL = "https://auth.monday.com/oauth2/token"  # noqa: S105 - an address
PERMANENT_OAUTH_ERRORS = ("invalid_grant", "invalid_client", "unauthorized_client", "access_denied")
"""Errors of a token endpoint (RFC 6749, section 5.2) that a retry cannot resolve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection without its tokens, which are never returned. Instants are aware UTC.

    `version` increases with each new token. An `unauthorized` connection needs new tokens from a user. `error` is the
    reason for that, or for the latest failed renewal.
    """

    tenant_id: str
    name: str
    token_url: str
    client_id: str | None = None
    version: int = 1
    expires_at: datetime | None = None
    renewed_at: datetime
    unauthorized: bool = False
    error: str | None = None
    renewing_until: datetime | None = None
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime

    @property
    def state(self) -> str:
        """`ready`, `failing` (the latest renewal failed) or `reauthorize`."""
        return "reauthorize" if self.unauthorized else "failing" if self.error is not None else "ready"

    def needs_renewal(self, now: datetime) -> bool:
        """Return whether the token is due for renewal."""
        if self.expires_at is None:
            return False
        return now >= self.expires_at - min(RENEWAL_LEAD_TIME, (self.expires_at - self.renewed_at) / 5)

    def is_expired(self, now: datetime) -> bool:
        """Return whether the token has expired."""
        return self.expires_at is not None and now >= self.expires_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The credentials of a connection, which are stored encrypted."""

    access: str = field(repr=False)
    refresh: str | None = field(default=None, repr=False)
    client_secret: str | None = field(default=None, repr=False)


def connection_name(value: Any) -> str | None:
    """Return the name in a `{"connection": "name"}` option; None for any other value."""
    if isinstance(value, Mapping) and value.keys() == {"connection"} and isinstance(value["connection"], str):
        return value["connection"]
    return None


def is_permanent_refusal(status: int, answer: Any) -> bool:
    """Return whether a token endpoint's response means that retrying cannot succeed."""
    error = answer.get("error") if isinstance(answer, Mapping) else None
    return status in (401, 403) or (400 <= status < 500 and error in PERMANENT_OAUTH_ERRORS)
