"""A connection: the tokens with which a tenant's sources are read (OAuth 2.0), and when they have to be renewed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

EARLY = timedelta(seconds=300)
"""So long before it ends a token is renewed; of one that lives shortly, in the last fifth of its life."""
LOST = "Token expired and refresh failed - re-authorization required"
TOKEN_URL = "https://auth.monday.com/oauth2/token"  # noqa: S105 - an address
AUTH_ERRORS = ("invalid_grant", "invalid_client", "unauthorized_client", "access_denied")
"""What a token endpoint answers (RFC 6749, section 5.2) when no further try will help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A connection as it is listed; its tokens are shown to nobody. `version` counts the tokens it has had.

    Instants are aware UTC. An `unauthorised` one needs new tokens from somebody; `fault` is why, or why it could not be
    renewed just now."""

    tenant_id: str
    name: str
    token_url: str
    client_id: str | None = None
    version: int = 1
    expires_at: datetime | None = None
    renewed_at: datetime
    unauthorised: bool = False
    fault: str | None = None
    renewing_until: datetime | None = None
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime

    @property
    def state(self) -> str:
        """`ready`, `failing` (it could not be renewed just now) or `reauthorise`."""
        return "reauthorise" if self.unauthorised else "failing" if self.fault is not None else "ready"

    def near_end(self, now: datetime) -> bool:
        """Whether its token is to be renewed."""
        if self.expires_at is None:
            return False
        return now >= self.expires_at - min(EARLY, (self.expires_at - self.renewed_at) / 5)

    def over(self, now: datetime) -> bool:
        """Whether its token has ended."""
        return self.expires_at is not None and now >= self.expires_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a connection keeps encrypted."""

    access: str = field(repr=False)
    refresh: str | None = field(default=None, repr=False)
    client_secret: str | None = field(default=None, repr=False)


def connection_of(value: Any) -> str | None:
    """The name of the connection that an option stands for, if it does."""
    if isinstance(value, Mapping) and value.keys() == {"connection"} and isinstance(value["connection"], str):
        return value["connection"]
    return None


def is_refused(status: int, said: Any) -> bool:
    """Whether a token endpoint says that no further try will help."""
    error = said.get("error") if isinstance(said, Mapping) else None
    return status in (401, 403) or (400 <= status < 500 and error in AUTH_ERRORS)
