"""Client operations on connections: OAuth tokens to read sources, stored encrypted and renewed before they expire."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from timebell.client.secrets import check_name
from timebell.client.validation import check_text
from timebell.clock import Clock
from timebell.durations import Duration
from timebell.errors import InvalidInput
from timebell.features.triggers.model.connection import TOKEN_URL, Connection, Tokens
from timebell.features.triggers.store import connections
from timebell.model import page
from timebell.model.page import Page
from timebell.model.policy import parse_seconds
from timebell.store.dialects.base import Store
from timebell.tenancy.secrets import Keyring

R = TypeVar("R")
MAX_TOKEN_LENGTH = 32_768
MAX_LIFETIME_SECONDS = 10 * 366 * 86_400.0


class Connections:
    """Connection operations. A source refers to a connection with `{"connection": "name"}` as its token."""

    def __init__(
        self, store: Store, clock: Clock, ensure_open: Callable[[], Any], get_keyring: Callable[[], Keyring],
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open
        self._get_keyring = get_keyring

    async def put(
        self, name: str, access_token: str, refresh_token: str | None = None, *, expires_in: Duration | None = None,
        token_url: str | None = None, client_id: str | None = None, client_secret: str | None = None,
        replace: bool | None = None, tenant_id: str = "default", created_by: str | None = None,
        connection: Any = None,
    ) -> Connection:  # fmt: skip
        """Store tokens under a name: only new ones (`replace=False`), only replacements (True), or either (None).

        Replacing tokens resumes the jobs that waited for them. `expires_in` is a duration (numbers are seconds);
        without it the tokens are renewed when they are rejected. Without a `refresh_token` they are never renewed.
        `token_url` (default: monday.com), `client_id` and `client_secret` are used for the renewal; `replace=True`
        keeps the stored URL and client id. Raises InvalidInput (INVALID_CONNECTION, INVALID_NAME), Conflict
        (CONNECTION_EXISTS), NotFound (CONNECTION_NOT_FOUND), Refused (SECRET_KEY_MISSING, SECRET_UNREADABLE).
        """
        now = self._clock.now()
        lifetime_seconds = (
            None if expires_in is None else min(parse_seconds(expires_in, "expires_in"), MAX_LIFETIME_SECONDS)
        )
        new_connection = Connection(
            tenant_id=check_text(tenant_id, "tenant_id"), name=check_name(name),
            token_url=_check_url(token_url or TOKEN_URL),
            client_id=None if client_id is None else _check_header_text(client_id, "client_id", 200),
            expires_at=None if lifetime_seconds is None else now + timedelta(seconds=lifetime_seconds),
            renewed_at=now, created_at=now, created_by=created_by, updated_at=now,
        )  # fmt: skip
        tokens = Tokens(
            access=_check_header_text(access_token, "access_token"),
            refresh=None if refresh_token is None else _check_header_text(refresh_token, "refresh_token"),
            client_secret=None if client_secret is None else _check_header_text(client_secret, "client_secret"),
        )
        await self._ensure_open()
        stored = await self._run(
            connection, connections.upsert_connection, self._get_keyring(), new_connection, tokens, now, replace=replace
        )
        return stored

    async def get(self, name: str, *, tenant_id: str = "default") -> Connection:
        """Return a connection without its tokens. Raises NotFound."""
        await self._ensure_open()
        stored = await self._store.run(connections.find_connection, tenant_id, name)
        if stored is None:
            raise connections.no_such_connection(name)
        return stored

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[Connection]:  # fmt: skip
        """Return a page of connections in name order, without tokens. Raises InvalidInput."""
        page.validate_paging(limit, None)
        await self._ensure_open()
        return await self._store.run(connections.list_connections, tenant_id, limit, cursor)

    async def delete(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Connection:
        """Delete a connection. Raises NotFound, and Conflict (CONNECTION_IN_USE) while a source refers to it."""
        await self._ensure_open()
        deleted = await self._run(connection, connections.delete_connection, tenant_id, name)
        if deleted is None:
            raise connections.no_such_connection(name)
        return deleted

    async def _run(self, connection: Any, operation: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        if connection is None:
            return await self._store.run(operation, *args, **kwargs)
        return await self._store.join(connection, operation, *args, **kwargs)


def _check_header_text(value: Any, field: str, max_length: int = MAX_TOKEN_LENGTH) -> str:
    """Return text that is valid in an HTTP header. The error does not contain the value, which may be a secret."""
    fits = isinstance(value, str) and 0 < len(value) <= max_length and value.isascii() and value.isprintable()
    if not fits:
        raise InvalidInput(
            f"{field} is not valid in an HTTP header.", code="INVALID_CONNECTION",
            fix=f"Use 1 to {max_length:,} printable ASCII characters.",
        )  # fmt: skip
    return str(value)


def _check_url(value: Any) -> str:
    try:
        parts = urlsplit(value) if isinstance(value, str) and len(value) <= 2000 else None
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in ("https", "http") or not parts.hostname:
        raise InvalidInput(
            f"token_url is {value!r:.60}.", code="INVALID_CONNECTION", fix=f"Specify a URL such as {TOKEN_URL}."
        )
    return str(value)
