"""The verbs for secrets: kept encrypted, used by targets, shown to nobody."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from timebell.client.validation import text
from timebell.clock import Clock
from timebell.errors import InvalidInput
from timebell.model import page
from timebell.model.page import Page
from timebell.model.target import Secret
from timebell.store.dialects.base import Store
from timebell.store.tenancy import secrets
from timebell.tenancy.secrets import Keyring

R = TypeVar("R")
MOST = 32_768
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


class Secrets:
    """The verbs. A target refers to a secret by `{"secret": "name"}`. `opened` makes sure that the store is open."""

    def __init__(
        self, store: Store, clock: Clock, opened: Callable[[], Any], ring: Callable[[], Keyring]
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._opened = opened
        self._ring = ring

    async def put(
        self, name: str, value: str, *, replace: bool | None = None, tenant_id: str = "default",
        created_by: str | None = None, connection: Any = None,
    ) -> Secret:  # fmt: skip
        """Keep a value under a name: with `replace=False` only a new one, with True only in place of another.

        What is delivered from now on carries it. Raises InvalidInput (INVALID_SECRET, INVALID_NAME), Conflict
        (SECRET_EXISTS), NotFound (SECRET_NOT_FOUND), Refused (SECRET_KEY_MISSING, SECRET_UNREADABLE).
        """
        name, value, tenant_id = named(name), checked(value), text(tenant_id, "tenant_id")
        await self._opened()
        call = (self._ring(), tenant_id, name, value, self._clock.now(), created_by)
        return await self._run(connection, secrets.put, *call, replace=replace)

    async def get(self, name: str, *, tenant_id: str = "default") -> Secret:
        """What is known of a secret, its value left out. Raises NotFound."""
        await self._opened()
        found = await self._store.run(secrets.find, tenant_id, name)
        if found is None:
            raise secrets.no_such_secret(name)
        return found

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[Secret]:  # fmt: skip
        """A page of secrets by name, without values. Raises InvalidInput."""
        page.check(limit, None)
        await self._opened()
        return await self._store.run(secrets.page, tenant_id, limit, cursor)

    async def delete(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Secret:
        """Forget it. Raises NotFound, and Conflict (SECRET_IN_USE) while anything refers to it."""
        await self._opened()
        found = await self._run(connection, secrets.remove, tenant_id, name)
        if found is None:
            raise secrets.no_such_secret(name)
        return found

    async def _run(self, connection: Any, operation: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        if connection is None:
            return await self._store.run(operation, *args, **kwargs)
        return await self._store.join(connection, operation, *args, **kwargs)


def named(value: Any) -> str:
    """A name that fits into a URL and on a command line. Raises InvalidInput (INVALID_NAME)."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise InvalidInput(
            f"name is {value!r:.60}.", code="INVALID_NAME",
            fix="Up to 100 letters, digits, dots, dashes and underscores, a letter or digit first.",
        )  # fmt: skip
    return value


def checked(value: Any) -> str:
    """A value that can be kept. Raises InvalidInput (INVALID_SECRET), which does not say what it was."""
    if not isinstance(value, str) or not value or "\0" in value or not _encodes(value):
        raise InvalidInput(
            "The value of a secret is no text that can be kept.", code="INVALID_SECRET",
            fix=f"Give text of at most {MOST:,} bytes.",
        )  # fmt: skip
    return value


def _encodes(value: str) -> bool:
    try:
        return len(value.encode()) <= MOST
    except UnicodeEncodeError:
        return False
