"""Repository of dashboard users and sessions."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Row, delete, insert, select, update

from timebell.errors import Conflict
from timebell.model.page import Page
from timebell.store.jobs.repository import ensure_tenants
from timebell.store.schema import sessions, sign_in_failures, users
from timebell.store.transaction import Transaction
from timebell.tenancy.roles import Role
from timebell.tenancy.users import (
    DEFAULT_TENANT,
    FAILURES_BEFORE_LOCK,
    SESSION_MAX_AGE,
    Session,
    User,
    lock_duration,
    parse_sign_in_name,
)

LAST_SEEN_RESOLUTION = timedelta(minutes=1)
ID_LENGTH = 36  # of a UUID as text
SIGN_IN_FAILURE_RETENTION = timedelta(days=1)


def create_user(tx: Transaction, user: User, password: str) -> User:
    """Insert a user with a hashed `password`. Raises Conflict (USER_EXISTS)."""
    if find_user(tx, user.name, user.tenant_id) is not None:
        raise Conflict(f"A user named {user.name} already exists.", code="USER_EXISTS", fix="Choose another name.")
    if user.tenant_id is not None:
        ensure_tenants(tx, {user.tenant_id}, user.created_at)
    tx.execute(insert(users).values(
        id=user.id, tenant_id=user.tenant_id, name_tenant_id=user.tenant_id or DEFAULT_TENANT, name=user.name,
        role=user.role.value, password=password, created_at=user.created_at, created_by=user.created_by,
    ))  # fmt: skip
    return user


def find_user(tx: Transaction, name: str, tenant_id: str | None = None, *, lock: bool = False) -> User | None:
    """Return the user with this name of a tenant, or of the platform if that is `default` or None."""
    query = select(users).where(is_named(name, tenant_id))
    row = tx.execute(query.with_for_update() if lock else query).first()
    return None if row is None else user_from_row(row)


def is_named(name: str, tenant_id: str | None) -> ColumnElement[bool]:
    """Select the user with this name of a tenant."""
    return (users.c.name_tenant_id == (tenant_id or DEFAULT_TENANT)) & (users.c.name == name)


def list_users(tx: Transaction, limit: int, after: str | None, tenant_id: str | None = None) -> Page[User]:
    """Return a page of users in name order: of a tenant, or of all tenants and the platform.

    The cursor is the id and the name of the last user, because a name is unique only within a tenant.
    """
    query = select(users).order_by(users.c.name, users.c.id).limit(limit + 1)
    if tenant_id is not None:
        query = query.where(users.c.tenant_id == tenant_id)
    if after is not None:
        id_, name = after[:ID_LENGTH], after[ID_LENGTH:]
        query = query.where((users.c.name > name) | ((users.c.name == name) & (users.c.id > id_)))
    page = [user_from_row(row) for row in tx.execute(query)]
    return Page(page[:limit], page[limit - 1].id + page[limit - 1].name if len(page) > limit else None)


def record_sign_in_attempt(
    tx: Transaction, sign_in_name: str, network: str, now: datetime
) -> tuple[User, str | None] | None:
    """Count a sign-in attempt as failed before its password is checked, so that concurrent attempts are counted too.

    Returns the user and the password hash, if the user has one; None for an unknown or disabled user, or one that is
    locked for this client network. A successful sign-in deletes the count, in `delete_sign_in_failures`.
    """
    tenant_id, name = parse_sign_in_name(sign_in_name)
    row = tx.execute(select(users).where(is_named(name, tenant_id)).with_for_update()).first()
    if row is None or row.disabled_at is not None:
        return None
    is_counted = count_sign_in_failure(tx, row.id, "password", network, now, FAILURES_BEFORE_LOCK)
    return (user_from_row(row), row.password) if is_counted else None


def count_sign_in_failure(
    tx: Transaction, user_id: str, credential: str, network: str, now: datetime, failures_before_lock: int
) -> bool:
    """Count a failure of a user, whose row is locked; return False while attempts from the network are rejected."""
    here = _failures_of(user_id, credential, network)
    previous = tx.execute(select(sign_in_failures).where(here)).first()
    if previous is not None and previous.locked_until is not None and previous.locked_until > now:
        return False
    failures = 1 if previous is None else previous.failures + 1
    lock = lock_duration(failures, failures_before_lock)
    values = {"failures": failures, "last_failed_at": now, "locked_until": None if lock is None else now + lock}
    if previous is None:
        identity = {"user_id": user_id, "credential": credential, "network": network}
        tx.execute(insert(sign_in_failures).values(**identity, **values))
    else:
        tx.execute(update(sign_in_failures).where(here).values(**values))
    return True


def delete_sign_in_failures(tx: Transaction, user_id: str, credential: str, network: str, now: datetime) -> None:
    """Delete the failures of a user from a client network, and those of everybody that are too old to matter."""
    is_old = sign_in_failures.c.last_failed_at < now - SIGN_IN_FAILURE_RETENTION
    tx.execute(delete(sign_in_failures).where(_failures_of(user_id, credential, network) | is_old))


def _failures_of(user_id: str, credential: str, network: str) -> ColumnElement[bool]:
    columns = sign_in_failures.c
    return (columns.user_id == user_id) & (columns.credential == credential) & (columns.network == network)


def set_password(tx: Transaction, id_: str, password: str) -> None:
    """Set a user's hashed password and delete the user's sessions."""
    tx.execute(update(users).where(users.c.id == id_).values(password=password))
    tx.execute(delete(sign_in_failures).where(sign_in_failures.c.user_id == id_))
    tx.execute(delete(sessions).where(sessions.c.user_id == id_))


def set_role(tx: Transaction, id_: str, role: Role) -> None:
    """Change the role of a user, also for open sessions."""
    tx.execute(update(users).where(users.c.id == id_).values(role=role.value))


def enable_user(tx: Transaction, id_: str, now: datetime) -> None:
    """Enable a disabled user."""
    tx.execute(update(users).where(users.c.id == id_).values(disabled_at=None))


def delete_user(tx: Transaction, id_: str) -> None:
    """Delete a user and the user's sessions."""
    for table in (sessions, sign_in_failures):
        tx.execute(delete(table).where(table.c.user_id == id_))
    tx.execute(delete(users).where(users.c.id == id_))


def list_sessions(tx: Transaction, user_id: str, now: datetime) -> list[Session]:
    """Return the unexpired sessions of a user, newest first."""
    of_user = (sessions.c.user_id == user_id) & ~sessions.c.awaits_code
    rows = tx.execute(select(sessions).where(of_user).order_by(sessions.c.created_at.desc()))
    found = [Session(**row._mapping) for row in rows]
    return [session for session in found if not session.is_expired(now)]


def end_sessions(tx: Transaction, user_id: str) -> int:
    """Delete all sessions of a user; return their number."""
    return tx.execute(delete(sessions).where(sessions.c.user_id == user_id)).rowcount


def disable_user(tx: Transaction, id_: str, now: datetime) -> None:
    """Disable a user and delete the user's sessions."""
    tx.execute(update(users).where(users.c.id == id_, users.c.disabled_at.is_(None)).values(disabled_at=now))
    tx.execute(delete(sessions).where(sessions.c.user_id == id_))


def create_session(tx: Transaction, session: Session, previous_session_id: str | None) -> None:
    """Insert a session in place of the browser's previous one, and delete expired sessions."""
    tx.execute(delete(sessions).where(sessions.c.created_at < session.created_at - SESSION_MAX_AGE))
    if previous_session_id is not None:
        delete_session(tx, previous_session_id)
    tx.execute(insert(sessions).values(
        id=session.id, user_id=session.user_id, key_id=session.key_id, awaits_code=session.awaits_code,
        created_at=session.created_at, seen_at=session.seen_at,
    ))  # fmt: skip
    if session.user_id is not None and not session.awaits_code:
        tx.execute(update(users).where(users.c.id == session.user_id).values(last_used_at=session.created_at))


def delete_session(tx: Transaction, id_: str) -> None:
    """Delete a session."""
    tx.execute(delete(sessions).where(sessions.c.id == id_))


def find_session(
    tx: Transaction, id_: str, now: datetime, *, peek: bool = False, awaits_code: bool = False
) -> tuple[Session, User | None] | None:
    """Return a session and its user, if it has one; None if unknown, expired, or if the user is disabled.

    A session that awaits a code is only found with `awaits_code`. Updates `seen_at`, at most once per minute, unless
    `peek`.
    """
    here = (sessions.c.id == id_) & (sessions.c.awaits_code == awaits_code)
    row = tx.execute(select(sessions).where(here)).first()
    if row is None:
        return None
    session = Session(**row._mapping)
    if session.is_expired(now):
        delete_session(tx, id_)
        return None
    if not peek and now - session.seen_at >= LAST_SEEN_RESOLUTION:
        tx.execute(update(sessions).where(sessions.c.id == id_).values(seen_at=now))
    if session.user_id is None:
        return session, None
    user_row = tx.execute(select(users).where(users.c.id == session.user_id, users.c.disabled_at.is_(None))).first()
    return None if user_row is None else (session, user_from_row(user_row))


def user_from_row(row: Row[Any]) -> User:
    """Return the user of a row, without the password."""
    return User(
        id=row.id, tenant_id=row.tenant_id, name=row.name, role=Role(row.role), created_at=row.created_at,
        created_by=row.created_by, last_used_at=row.last_used_at, disabled_at=row.disabled_at, issuer=row.issuer,
        subject=row.subject, totp_enabled_at=row.totp_enabled_at,
    )  # fmt: skip
