"""Users and sessions of the dashboard as rows."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, delete, insert, select, update

from timebell.errors import Conflict
from timebell.model.page import Page
from timebell.store.jobs.repository import make_tenants
from timebell.store.schema import sessions, users
from timebell.store.transaction import Transaction
from timebell.tenancy.roles import Role
from timebell.tenancy.users import LONGEST, Session, User, lock_after

SEEN_EVERY = timedelta(minutes=1)


def create(tx: Transaction, user: User, password: str) -> User:
    """Write a user. Raises Conflict (USER_EXISTS)."""
    if find(tx, user.name) is not None:
        raise Conflict(f"There is a user {user.name} already.", code="USER_EXISTS", fix="Choose another name.")
    if user.tenant_id is not None:
        make_tenants(tx, {user.tenant_id}, user.created_at)
    tx.execute(insert(users).values(
        id=user.id, tenant_id=user.tenant_id, name=user.name, role=user.role.value, password=password,
        created_at=user.created_at, created_by=user.created_by,
    ))  # fmt: skip
    return user


def find(tx: Transaction, name: str) -> User | None:
    """The user with this name."""
    row = tx.execute(select(users).where(users.c.name == name)).first()
    return None if row is None else _read(row)


def page(tx: Transaction, limit: int, after: str | None) -> Page[User]:
    """Users by name."""
    query = select(users).order_by(users.c.name).limit(limit + 1)
    if after is not None:
        query = query.where(users.c.name > after)
    found = [_read(row) for row in tx.execute(query)]
    return Page(found[:limit], found[limit - 1].name if len(found) > limit else None)


def trying(tx: Transaction, name: str, now: datetime) -> tuple[User, str] | None:
    """Count a try before it is looked at, so that tries at once count too. The user and what is kept of the
    password; None for an unknown, disabled or locked one."""
    row = tx.execute(select(users).where(users.c.name == name).with_for_update()).first()
    if row is None or row.disabled_at is not None or (row.locked_until is not None and row.locked_until > now):
        return None
    failures = row.failures + 1
    lock = lock_after(failures)
    tx.execute(update(users).where(users.c.id == row.id).values(
        failures=failures, locked_until=None if lock is None else now + lock
    ))  # fmt: skip
    return _read(row), row.password


def set_password(tx: Transaction, id_: str, password: str) -> None:
    """Another password: whoever is signed in with the old one no longer is."""
    tx.execute(update(users).where(users.c.id == id_).values(password=password, failures=0, locked_until=None))
    tx.execute(delete(sessions).where(sessions.c.user_id == id_))


def disable(tx: Transaction, id_: str, now: datetime) -> None:
    """Nobody signs in or stays signed in under this name."""
    tx.execute(update(users).where(users.c.id == id_, users.c.disabled_at.is_(None)).values(disabled_at=now))
    tx.execute(delete(sessions).where(sessions.c.user_id == id_))


def begin(tx: Transaction, session: Session, before: str | None) -> None:
    """Write a session in place of the one this browser had, and forget those that are over."""
    tx.execute(delete(sessions).where(sessions.c.created_at < session.created_at - LONGEST))
    if before is not None:
        end(tx, before)
    tx.execute(insert(sessions).values(
        id=session.id, user_id=session.user_id, key_id=session.key_id, created_at=session.created_at,
        seen_at=session.seen_at,
    ))  # fmt: skip
    if session.user_id is not None:
        right = {"failures": 0, "locked_until": None, "last_used_at": session.created_at}
        tx.execute(update(users).where(users.c.id == session.user_id).values(**right))


def end(tx: Transaction, id_: str) -> None:
    """Nobody is signed in by it any more."""
    tx.execute(delete(sessions).where(sessions.c.id == id_))


def who(tx: Transaction, id_: str, now: datetime, *, look: bool = False) -> tuple[Session, User | None] | None:
    """The session with this id that is not over, and its user; it was seen now, to the minute, unless this is but a
    look."""
    row = tx.execute(select(sessions).where(sessions.c.id == id_)).first()
    if row is None:
        return None
    session = Session(**row._mapping)
    if session.over(now):
        end(tx, id_)
        return None
    if not look and now - session.seen_at >= SEEN_EVERY:
        tx.execute(update(sessions).where(sessions.c.id == id_).values(seen_at=now))
    if session.user_id is None:
        return session, None
    found = tx.execute(select(users).where(users.c.id == session.user_id, users.c.disabled_at.is_(None))).first()
    return None if found is None else (session, _read(found))


def _read(row: Row[Any]) -> User:
    return User(
        id=row.id, tenant_id=row.tenant_id, name=row.name, role=Role(row.role), created_at=row.created_at,
        created_by=row.created_by, last_used_at=row.last_used_at, disabled_at=row.disabled_at,
        locked_until=row.locked_until,
    )  # fmt: skip
