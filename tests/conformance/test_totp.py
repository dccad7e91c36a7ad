"""Second step of sign-ins in the store, on every database."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import pytest
from sqlalchemy import select, update

from timebell.errors import Conflict, Refused
from timebell.ids import new_id
from timebell.store import schema
from timebell.store.tenancy import totp as rows
from timebell.store.tenancy import users
from timebell.store.tenancy.totp import CodeMatch
from timebell.tenancy import totp
from timebell.tenancy.roles import Role
from timebell.tenancy.secrets import Keyring
from timebell.tenancy.users import Session, User

from .helpers import T0, Store, stored

KEYRING = Keyring("a secret key of the tests, long enough")
HERE, STEP = "192.0.2.1", timedelta(seconds=totp.STEP_SECONDS)
RECOVERY_CODES = totp.generate_recovery_codes()


def _code(secret: str, at: datetime) -> str:
    return totp.generate_code(secret, totp.step_at(at))


async def _enroll(store: Store, name: str = "dana", tenant_id: str | None = "acme") -> tuple[User, str]:
    user = User(id=new_id(T0), tenant_id=tenant_id, name=name, role=Role.EDITOR, created_at=T0)
    await store.run(users.create_user, user, "a hash")
    secret = totp.generate_secret()
    await store.run(rows.begin_enrollment, KEYRING, user, secret, T0)
    assert await store.run(rows.find_unconfirmed_secret, KEYRING, user) == secret
    assert await store.run(rows.confirm_enrollment, KEYRING, user, _code(secret, T0), RECOVERY_CODES, T0)
    return user, secret


@stored
async def test_a_code_is_used_once_also_concurrently(store: Store) -> None:
    user, secret = await _enroll(store)
    use = (rows.use_code, KEYRING, user)
    assert await store.run(*use, _code(secret, T0), HERE, T0) is None  # it has confirmed the enrollment
    later = T0 + STEP
    results = await asyncio.gather(*(store.run(*use, _code(secret, later), HERE, later) for _ in range(4)))
    assert sorted(map(str, results)) == ["CodeMatch.APP", "None", "None", "None"]
    results = await asyncio.gather(*(store.run(*use, RECOVERY_CODES[0], HERE, later) for _ in range(4)))
    assert sorted(map(str, results)) == ["CodeMatch.RECOVERY", "None", "None", "None"]
    assert await store.run(rows.count_recovery_codes, KEYRING, user) == totp.RECOVERY_CODE_COUNT - 1


@stored
async def test_guesses_from_many_networks_block_codes_but_not_recovery_codes(store: Store) -> None:
    user, secret = await _enroll(store, tenant_id=None)
    for number in range(20):
        assert await store.run(rows.use_code, KEYRING, user, "nonsense", f"2001:db8:{number}::/64", T0) is None
    later = T0 + STEP / 2
    next_code = _code(secret, T0 + STEP)
    assert await store.run(rows.use_code, KEYRING, user, next_code, HERE, later) is None
    match = await store.run(rows.use_code, KEYRING, user, RECOVERY_CODES[3], HERE, later)
    assert match is CodeMatch.RECOVERY
    assert await store.run(rows.use_code, KEYRING, user, next_code, HERE, later) is CodeMatch.APP  # count begins anew


@stored
async def test_secrets_are_encrypted_and_bound_to_the_user(store: Store) -> None:
    user, secret = await _enroll(store)
    other, _ = await _enroll(store, "eve")
    stored_rows = await store.run(lambda tx: tx.execute(select(schema.users).order_by(schema.users.c.name)).all())
    assert secret not in str(stored_rows)
    assert totp.recovery_code_digest(RECOVERY_CODES[0]) not in str(stored_rows)
    copied = update(schema.users).where(schema.users.c.id == other.id).values(totp_secret=stored_rows[0].totp_secret)
    await store.run(lambda tx: tx.execute(copied) and None)
    with pytest.raises(Refused) as refused:
        await store.run(rows.use_code, KEYRING, other, _code(secret, T0 + STEP), HERE, T0 + STEP)
    assert refused.value.code == "SECRET_UNREADABLE"
    assert await store.run(rows.use_code, KEYRING, user, _code(secret, T0 + STEP), HERE, T0 + STEP) is CodeMatch.APP


@stored
async def test_enrolling_and_removing_end_sessions_and_those_that_await_a_code(store: Store) -> None:
    user, secret = await _enroll(store)

    async def sign_in(id_: str, *, awaits_code: bool) -> None:
        session = Session(id=id_ * 64, user_id=user.id, key_id=None, created_at=T0, seen_at=T0, awaits_code=awaits_code)
        await store.run(users.create_session, session, None)

    await sign_in("a", awaits_code=False)
    await sign_in("b", awaits_code=True)
    assert [one.id[0] for one in await store.run(users.list_sessions, user.id, T0)] == ["a"]
    assert await store.run(users.find_session, "b" * 64, T0) is None
    found = await store.run(lambda tx: users.find_session(tx, "b" * 64, T0, awaits_code=True))
    assert found is not None
    assert await store.run(lambda tx: users.find_session(tx, "a" * 64, T0, awaits_code=True)) is None
    late = T0 + timedelta(minutes=10)
    assert await store.run(lambda tx: users.find_session(tx, "b" * 64, late, awaits_code=True)) is None
    with pytest.raises(Conflict) as enabled:
        await store.run(rows.begin_enrollment, KEYRING, user, secret, T0)
    assert enabled.value.code == "TOTP_ENABLED"
    await store.run(rows.remove_totp, user.id)
    assert await store.run(users.list_sessions, user.id, T0) == []
    assert await store.run(rows.use_code, KEYRING, user, _code(secret, T0 + STEP), HERE, T0 + STEP) is None
