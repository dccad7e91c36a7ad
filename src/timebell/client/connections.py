"""The verbs for connections: the tokens with which sources are read, kept encrypted and renewed before they end."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

from timebell.client.secrets import named
from timebell.client.validation import text
from timebell.clock import Clock
from timebell.errors import InvalidInput
from timebell.model import page
from timebell.model.connection import TOKEN_URL, Connection, Tokens
from timebell.model.page import Page
from timebell.model.policy import seconds
from timebell.store.dialects.base import Store
from timebell.store.triggers import connections
from timebell.tenancy.secrets import Keyring

R = TypeVar("R")
MOST = 32_768
LONGEST = 10 * 366 * 86_400.0  # seconds


class Connections:
    """The verbs. A source refers to a connection by `{"connection": "name"}` as its token. `operate` says that a source
    may be read again."""

    def __init__(
        self, store: Store, clock: Clock, opened: Callable[[], Any], ring: Callable[[], Keyring],
        operate: Callable[[], None],
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._opened = opened
        self._ring = ring
        self._operate = operate

    async def put(
        self, name: str, access_token: str, refresh_token: str | None = None, *, expires_in: float | None = None,
        token_url: str | None = None, client_id: str | None = None, client_secret: str | None = None,
        replace: bool | None = None, tenant_id: str = "default", created_by: str | None = None,
        connection: Any = None,
    ) -> Connection:  # fmt: skip
        """Keep tokens under a name: with `replace=False` only new ones, with True only in place of others, so after
        somebody has authorised anew. What waited for them goes on.

        `expires_in` is in seconds; without it they are renewed when they are refused, without a `refresh_token` never.
        `token_url` is where (monday.com's), as `client_id` with `client_secret`; with `replace=True` these stay as
        they were. Raises InvalidInput (INVALID_CONNECTION, INVALID_NAME), Conflict (CONNECTION_EXISTS), NotFound
        (CONNECTION_NOT_FOUND), Refused (SECRET_KEY_MISSING, SECRET_UNREADABLE).
        """
        now = self._clock.now()
        lasts = None if expires_in is None else min(seconds(expires_in, "expires_in"), LONGEST)
        wanted = Connection(
            tenant_id=text(tenant_id, "tenant_id"), name=named(name), token_url=_url(token_url or TOKEN_URL),
            client_id=None if client_id is None else _sendable(client_id, "client_id", 200),
            expires_at=None if lasts is None else now + timedelta(seconds=lasts), renewed_at=now, created_at=now,
            created_by=created_by, updated_at=now,
        )  # fmt: skip
        tokens = Tokens(
            access=_sendable(access_token, "access_token"),
            refresh=None if refresh_token is None else _sendable(refresh_token, "refresh_token"),
            client_secret=None if client_secret is None else _sendable(client_secret, "client_secret"),
        )
        await self._opened()
        made = await self._run(connection, connections.put, self._ring(), wanted, tokens, now, replace=replace)
        if connection is None:
            self._operate()
        return made

    async def get(self, name: str, *, tenant_id: str = "default") -> Connection:
        """What is known of one, its tokens left out. Raises NotFound."""
        await self._opened()
        found = await self._store.run(connections.find, tenant_id, name)
        if found is None:
            raise connections.no_such_connection(name)
        return found

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[Connection]:  # fmt: skip
        """A page of connections by name, without tokens. Raises InvalidInput."""
        page.check(limit, None)
        await self._opened()
        return await self._store.run(connections.page, tenant_id, limit, cursor)

    async def delete(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Connection:
        """Forget it and its tokens. Raises NotFound, and Conflict (CONNECTION_IN_USE) while a source refers to it."""
        await self._opened()
        found = await self._run(connection, connections.remove, tenant_id, name)
        if found is None:
            raise connections.no_such_connection(name)
        return found

    async def _run(self, connection: Any, operation: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        if connection is None:
            return await self._store.run(operation, *args, **kwargs)
        return await self._store.join(connection, operation, *args, **kwargs)


def _sendable(value: Any, what: str, most: int = MOST) -> str:
    """Text that fits into a header. The error does not say what it was."""
    fits = isinstance(value, str) and 0 < len(value) <= most and value.isascii() and value.isprintable()
    if not fits:
        raise InvalidInput(
            f"{what} is no text that can be sent.", code="INVALID_CONNECTION",
            fix=f"Give 1 to {most:,} printable ASCII characters.",
        )  # fmt: skip
    return str(value)


def _url(value: Any) -> str:
    try:
        parts = urlsplit(value) if isinstance(value, str) and len(value) <= 2000 else None
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in ("https", "http") or not parts.hostname:
        raise InvalidInput(
            f"token_url is {value!r:.60}.", code="INVALID_CONNECTION", fix=f"Give a URL such as {TOKEN_URL}."
        )
    return str(value)
