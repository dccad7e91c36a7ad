"""Client operations on secrets: stored encrypted, used by targets, never returned."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from timebell.client.validation import check_text
from timebell.clock import Clock
from timebell.errors import InvalidInput
from timebell.feature import Feature
from timebell.model import page
from timebell.model.page import Page
from timebell.model.target import Secret
from timebell.store.dialects.base import Store
from timebell.store.tenancy import secrets
from timebell.tenancy.secrets import Keyring

R = TypeVar("R")
MAX_VALUE_BYTES = 32_768
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


class Secrets:
    """Secret operations. A target refers to a secret with `{"secret": "name"}`.

    `ensure_open` opens the store if needed; `get_keyring` provides the keys for encryption; objects of `features` may
    refer to secrets.
    """

    def __init__(
        self, store: Store, clock: Clock, ensure_open: Callable[[], Any], get_keyring: Callable[[], Keyring],
        features: Sequence[Feature],
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._ensure_open = ensure_open
        self._get_keyring = get_keyring
        self._features = features

    async def put(
        self, name: str, value: str, *, replace: bool | None = None, tenant_id: str = "default",
        created_by: str | None = None, connection: Any = None,
    ) -> Secret:  # fmt: skip
        """Store a value under a name: only a new one (`replace=False`), only a replacement (True), or either (None).

        Deliveries use the new value from now on. Raises InvalidInput (INVALID_SECRET, INVALID_NAME), Conflict
        (SECRET_EXISTS), NotFound (SECRET_NOT_FOUND), Refused (SECRET_KEY_MISSING, SECRET_UNREADABLE).
        """
        name, value, tenant_id = check_name(name), check_value(value), check_text(tenant_id, "tenant_id")
        await self._ensure_open()
        call = (self._get_keyring(), tenant_id, name, value, self._clock.now(), created_by)
        return await self._run(connection, secrets.upsert_secret, *call, replace=replace)

    async def get(self, name: str, *, tenant_id: str = "default") -> Secret:
        """Return a secret without its value. Raises NotFound."""
        await self._ensure_open()
        secret = await self._store.run(secrets.find_secret, tenant_id, name)
        if secret is None:
            raise secrets.no_such_secret(name)
        return secret

    async def list(
        self, *, tenant_id: str = "default", limit: int = 50, cursor: str | None = None
    ) -> Page[Secret]:  # fmt: skip
        """Return a page of secrets in name order, without values. Raises InvalidInput."""
        page.validate_paging(limit, None)
        await self._ensure_open()
        return await self._store.run(secrets.list_secrets, tenant_id, limit, cursor)

    async def delete(self, name: str, *, tenant_id: str = "default", connection: Any = None) -> Secret:
        """Delete a secret. Raises NotFound, and Conflict (SECRET_IN_USE) while anything refers to it."""
        await self._ensure_open()
        deleted = await self._run(connection, secrets.delete_secret, tenant_id, name, self._features)
        if deleted is None:
            raise secrets.no_such_secret(name)
        return deleted

    async def _run(self, connection: Any, operation: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        if connection is None:
            return await self._store.run(operation, *args, **kwargs)
        return await self._store.join(connection, operation, *args, **kwargs)


def check_name(value: Any) -> str:
    """Return a name that is valid in URLs and on a command line. Raises InvalidInput (INVALID_NAME)."""
    if not isinstance(value, str) or not NAME_PATTERN.fullmatch(value):
        raise InvalidInput(
            f"name is {value!r:.60}.", code="INVALID_NAME",
            fix="Use up to 100 letters, digits, dots, dashes and underscores, starting with a letter or digit.",
        )  # fmt: skip
    return value


def check_value(value: Any) -> str:
    """Return a value that can be stored. Raises InvalidInput (INVALID_SECRET), without the value in its message."""
    if not isinstance(value, str) or not value or "\0" in value or not _fits(value):
        raise InvalidInput(
            "The value of the secret cannot be stored.", code="INVALID_SECRET",
            fix=f"Use text of 1 to {MAX_VALUE_BYTES:,} bytes, without NUL characters.",
        )  # fmt: skip
    return value


def _fits(value: str) -> bool:
    try:
        return len(value.encode()) <= MAX_VALUE_BYTES
    except UnicodeEncodeError:
        return False
