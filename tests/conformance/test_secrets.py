"""Secrets in the store."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from timebell.errors import Refused
from timebell.store.schema import secrets as table
from timebell.store.tenancy import secrets
from timebell.tenancy.secrets import Keyring

from .helpers import T0, Store, execute, stored

KEYRING = Keyring("a secret key of the tests, long enough")


@stored
async def test_a_value_that_was_copied_to_another_row_or_version_is_refused(store: Store) -> None:
    async def put(name: str, value: str) -> str:
        await store.run(secrets.upsert_secret, KEYRING, "acme", name, value, T0, None, replace=None)
        (row,) = await execute(store, select(table.c.value).where(table.c.name == name))
        return str(row.value)

    old, other = await put("token", "leaked"), await put("other", "theirs")
    await put("token", "replaced")
    assert await store.run(secrets.decrypt_values, KEYRING, "acme", ["token"]) == {"token": "replaced"}
    for copied in (old, other):
        restored = update(table).where(table.c.name == "token").values(value=copied)
        await store.run(lambda tx, restored=restored: tx.execute(restored) and None)
        with pytest.raises(Refused) as refused:
            await store.run(secrets.decrypt_values, KEYRING, "acme", ["token"])
        assert refused.value.code == "SECRET_UNREADABLE"
