"""Repository of users that sign in at an identity provider."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Select, select, update

from timebell.errors import Refused
from timebell.store.jobs.repository import ensure_tenants
from timebell.store.schema import users
from timebell.store.tenancy.users import end_sessions, find_user, user_from_row
from timebell.store.transaction import Transaction
from timebell.tenancy.identities import Identity
from timebell.tenancy.users import DEFAULT_TENANT, User

CREATED_BY = "identity provider"


class SignedIn(NamedTuple):
    """The user of an identity; `action` is what the sign-in did to it, for the audit log, or None."""

    user: User
    action: str | None


def check_identity(tx: Transaction, identity: Identity) -> User | None:
    """Return the user of an identity, or None if it never signed in.

    Raises Refused: USER_DISABLED, or USER_NAME_TAKEN if another user of the tenant has the name, because the audit log
    names users.
    """
    user = _find_user(tx, _of_identity(identity.issuer, identity.subject))
    if user is not None and user.disabled_at is not None:
        raise Refused(f"The user {user.name} is disabled.", code="USER_DISABLED", fix="Ask an admin to enable it.")
    name = identity.name if user is None else user.name
    namesake = find_user(tx, name, identity.tenant_id)
    if namesake is not None and (user is None or namesake.id != user.id):
        raise _name_taken(name)
    return user


def sign_in_identity(tx: Transaction, identity: Identity, id_: str, now: datetime) -> SignedIn:
    """Create the user of an identity with this id, or update role and tenant. The name stays that of the first sign-in.

    Raises Refused (USER_DISABLED, USER_NAME_TAKEN).
    """
    if identity.tenant_id is not None:
        ensure_tenants(tx, {identity.tenant_id}, now)
    user = check_identity(tx, identity)
    if user is None:
        row = {
            "id": id_, "tenant_id": identity.tenant_id, "name_tenant_id": identity.tenant_id or DEFAULT_TENANT,
            "name": identity.name, "role": identity.role.value,
            "created_at": now, "created_by": CREATED_BY, "issuer": identity.issuer, "subject": identity.subject,
        }  # fmt: skip
        tx.execute(tx.dialect.insert_ignoring_duplicates(users), [row])
        user = _find_user(tx, _of_identity(identity.issuer, identity.subject))
        if user is None:  # another sign-in took the name at this moment
            raise _name_taken(identity.name)
        return SignedIn(user, "user.create" if user.id == id_ else None)
    if (user.role, user.tenant_id) == (identity.role, identity.tenant_id):
        return SignedIn(user, None)
    values = {
        "role": identity.role.value, "tenant_id": identity.tenant_id,
        "name_tenant_id": identity.tenant_id or DEFAULT_TENANT,
    }  # fmt: skip
    tx.execute(update(users).where(users.c.id == user.id).values(**values))
    changed = _find_user(tx, select(users).where(users.c.id == user.id))
    assert changed is not None
    return SignedIn(changed, "user.update")


def end_sessions_of_identity(tx: Transaction, issuer: str, subject: str) -> int:
    """End all sessions of the user of an identity; return their number."""
    user = _find_user(tx, _of_identity(issuer, subject))
    return 0 if user is None else end_sessions(tx, user.id)


def _of_identity(issuer: str, subject: str) -> Select[Sequence[object]]:
    return select(users).where(users.c.issuer == issuer, users.c.subject == subject)


def _find_user(tx: Transaction, query: Select[Sequence[object]]) -> User | None:
    row = tx.execute(query).first()
    return None if row is None else user_from_row(row)


def _name_taken(name: str) -> Refused:
    return Refused(
        f"Another user has the name {name!r:.60}.", code="USER_NAME_TAKEN",
        fix="Delete that user, or change the name at the identity provider.",
    )  # fmt: skip
