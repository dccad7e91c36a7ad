"""Users that sign in at an identity provider: created once, found by issuer and subject, updated, refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from timebell.errors import Refused
from timebell.ids import new_id
from timebell.store.tenancy import identities, tenants, users
from timebell.tenancy.identities import Identity
from timebell.tenancy.roles import Role
from timebell.tenancy.users import Session

from .helpers import T0, Store, stored

DANA = Identity(
    issuer="https://login.example.com", subject="U-1", name="dana", role=Role.EDITOR, tenant_id="acme", expires_at=T0
)


async def _sign_in(store: Store, identity: Identity) -> identities.SignedIn:
    return await store.run(identities.sign_in_identity, identity, new_id(T0), T0)


@stored
async def test_a_user_is_created_by_the_first_sign_in_and_updated_by_the_next(store: Store) -> None:
    created = await _sign_in(store, DANA)
    user = created.user
    assert (user.name, user.role, user.tenant_id, user.issuer) == ("dana", Role.EDITOR, "acme", DANA.issuer)
    assert created.action == "user.create"
    assert await store.run(tenants.find_tenant, "acme") is not None
    assert await _sign_in(store, replace(DANA, name="renamed")) == (user, None)
    changed = await _sign_in(store, replace(DANA, role=Role.PLATFORM, tenant_id=None))
    assert changed == (replace(user, role=Role.PLATFORM, tenant_id=None), "user.update")
    assert await store.run(users.find_user, "dana") == changed.user


@stored
async def test_another_issuer_or_subject_is_another_user(store: Store) -> None:
    await _sign_in(store, DANA)
    others = (
        replace(DANA, subject="u-1"), replace(DANA, subject="U-1 "), replace(DANA, issuer="https://login.example.com/"),
    )  # fmt: skip
    for number, other in enumerate(others):
        with pytest.raises(Refused, match="'dana'") as taken:
            await _sign_in(store, other)
        assert taken.value.code == "USER_NAME_TAKEN"
        assert (await _sign_in(store, replace(other, name=f"dana-{number}"))).action == "user.create"
    assert len((await store.run(users.list_users, 10, None)).items) == 4


@stored
async def test_concurrent_first_sign_ins_create_one_user(store: Store) -> None:
    results = await asyncio.gather(*(_sign_in(store, DANA) for _ in range(6)))
    assert sorted(str(result.action) for result in results) == ["None"] * 5 + ["user.create"]
    assert len({result.user.id for result in results}) == 1


@stored
async def test_sessions_of_an_identity_end_and_a_disabled_one_is_refused(store: Store) -> None:
    user = (await _sign_in(store, DANA)).user
    for number in range(2):
        session = Session(id=f"{number}" * 64, user_id=user.id, key_id=None, created_at=T0, seen_at=T0)
        await store.run(users.create_session, session, None)
    assert await store.run(identities.end_sessions_of_identity, DANA.issuer, "another") == 0
    assert await store.run(identities.end_sessions_of_identity, DANA.issuer, DANA.subject) == 2
    await store.run(users.disable_user, user.id, T0)
    await store.run(users.create_session, session, None)  # of a sign-in that had begun before
    assert await store.run(users.find_session, session.id, T0) is None
    for operation in (
        identities.check_identity,
        lambda tx, identity: identities.sign_in_identity(tx, identity, "", T0),
    ):
        with pytest.raises(Refused) as refused:
            await store.run(operation, DANA)
        assert refused.value.code == "USER_DISABLED"
    assert (await store.run(users.record_sign_in_attempt, "acme/dana", "192.0.2.1", T0)) is None
    await store.run(users.enable_user, user.id, T0)
    account = await store.run(users.record_sign_in_attempt, "acme/dana", "192.0.2.1", T0)
    assert account is not None
    assert account[1] is None  # it has no password


@stored
async def test_a_name_is_taken_only_within_its_tenant(store: Store) -> None:
    user = (await _sign_in(store, DANA)).user
    namesake = (await _sign_in(store, replace(DANA, subject="U-2", tenant_id="globex"))).user
    assert namesake.id != user.id
    with pytest.raises(Refused) as taken:  # the provider moves one of them to the tenant of the other
        await _sign_in(store, replace(DANA, tenant_id="globex"))
    assert taken.value.code == "USER_NAME_TAKEN"
    moved = (await _sign_in(store, replace(DANA, tenant_id="initech"))).user
    assert (moved.id, moved.tenant_id) == (user.id, "initech")
    assert await store.run(users.find_user, "dana", "initech") == moved
    assert await store.run(users.find_user, "dana", "acme") is None
