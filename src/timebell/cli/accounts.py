"""Implementation of `timebell user`, on the database itself."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click

from timebell.api.users import render_user
from timebell.app import Timebell
from timebell.cli.inputs import confirm, print_list
from timebell.cli.keyring import ACTOR, iterate_pages, resolve_format, run_and_close, with_audit_record
from timebell.cli.output import FAILED, print_message
from timebell.client.validation import check_text
from timebell.errors import InvalidInput, NotFound
from timebell.ids import new_id
from timebell.recurrence.instants import format_instant
from timebell.store.tenancy import totp
from timebell.store.tenancy import users as rows
from timebell.store.transaction import Transaction
from timebell.tenancy import passwords
from timebell.tenancy.roles import Role
from timebell.tenancy.users import (
    Session,
    User,
    check_managed_here,
    check_role_change,
    check_user_name,
    parse_sign_in_name,
)


def create_user(name: str, role: str, tenant: str, database: str | None) -> None:
    """Create a user. Raises InvalidInput, Conflict (USER_EXISTS)."""
    app, user_role = Timebell(database), _parse_role(role)
    tenant_id = None if user_role is Role.PLATFORM else check_text(tenant, "tenant_id")
    user_name, password = check_user_name(check_text(name, "name")), passwords.hash_password(_read_password())

    async def write() -> User:
        await app.open()
        now = app.clock.now()
        user = User(
            id=new_id(now), tenant_id=tenant_id, name=user_name, role=user_role, created_at=now, created_by=ACTOR
        )  # fmt: skip
        return await app.store.run(with_audit_record(
            app, "user.create", tenant_id, user_name, lambda tx: rows.create_user(tx, user, password), _state_of(user)
        ))  # fmt: skip

    user = run_and_close(app, write)
    tenant_label = user.tenant_id or "the platform"
    print_message(f"{user.sign_in_name} can sign in to the dashboard as {user.role} of {tenant_label}.")


def list_users(database: str | None, output_format: str | None) -> None:
    """Print the users of all tenants."""
    app = Timebell(database)

    async def read() -> list[User]:
        await app.open()
        return [user async for user in iterate_pages(app, rows.list_users)]

    users = [_user_facts(user) for user in run_and_close(app, read)]
    head = ("NAME", "TENANT", "ROLE", "SIGNS IN", "CREATED", "LAST SIGNED IN", "STATE")
    print_list(users, resolve_format(app, output_format), head, lambda row: (
        row["name"], row["tenantId"] or "(platform)", row["role"],
        row["issuer"] or ("with password and code" if row["totpEnabledAt"] else "with a password"),
        row["createdAt"][:10],
        (row["lastUsedAt"] or "never")[:16], row["state"],
    ))  # fmt: skip


def set_password(name: str, database: str | None) -> None:
    """Change a password and end all sessions of the user.

    Raises NotFound (USER_NOT_FOUND), InvalidInput (INVALID_PASSWORD), Refused (MANAGED_BY_PROVIDER).
    """
    password = passwords.hash_password(_read_password())

    def change(tx: Transaction, user: User) -> None:
        check_managed_here(user)
        rows.set_password(tx, user.id, password)

    _change_user(name, database, "user.password", change)
    print_message(f"Password of {name} changed; all their sessions are ended.")


def reset_totp(name: str, database: str | None) -> None:
    """Remove the second step of a user and end all sessions. Raises NotFound (USER_NOT_FOUND)."""
    _change_user(name, database, "user.reset_totp", lambda tx, user: totp.remove_totp(tx, user.id))
    print_message(f"{name} signs in with the password alone now; all their sessions are ended.")


def disable(name: str, database: str | None) -> None:
    """Disable a user and end all sessions. Raises NotFound (USER_NOT_FOUND)."""
    app = Timebell(database)
    _change_user(name, database, "user.disable", lambda tx, user: rows.disable_user(tx, user.id, app.clock.now()))
    print_message(f"User {name} disabled.")


def enable(name: str, database: str | None) -> None:
    """Enable a disabled user. Raises NotFound (USER_NOT_FOUND)."""
    app = Timebell(database)
    _change_user(name, database, "user.enable", lambda tx, user: rows.enable_user(tx, user.id, app.clock.now()))
    print_message(f"User {name} enabled.")


def set_role(name: str, role: str, database: str | None) -> None:
    """Change the role of a user.

    Raises NotFound (USER_NOT_FOUND), InvalidInput (INVALID_ROLE), Refused (ROLE_FIXED, MANAGED_BY_PROVIDER).
    """
    new_role = _parse_role(role)

    def change(tx: Transaction, user: User) -> None:
        check_role_change(user, new_role)
        rows.set_role(tx, user.id, new_role)

    _change_user(name, database, "user.update", change)
    print_message(f"{name} is {new_role} now.")


def delete(name: str, database: str | None, *, yes: bool) -> None:
    """Delete a user after confirmation. Raises NotFound (USER_NOT_FOUND)."""
    if not confirm(f"Delete user {name}, and end all their sessions?", yes=yes):
        raise click.exceptions.Exit(FAILED)
    _change_user(name, database, "user.delete", lambda tx, user: rows.delete_user(tx, user.id))
    print_message(f"User {name} deleted.")


def list_sessions(name: str, database: str | None, output_format: str | None) -> None:
    """Print the sessions of a user, newest first. Raises NotFound (USER_NOT_FOUND)."""
    app = Timebell(database)

    async def read() -> list[Session]:
        await app.open()
        user = await app.store.run(_find_user, name)
        return await app.store.run(rows.list_sessions, user.id, app.clock.now())

    sessions = [
        {"createdAt": format_instant(session.created_at), "lastUsedAt": format_instant(session.seen_at)}
        for session in run_and_close(app, read)
    ]
    print_list(sessions, resolve_format(app, output_format), ("SIGNED IN", "LAST USED"), lambda row: (
        row["createdAt"][:16], row["lastUsedAt"][:16],
    ))  # fmt: skip


def end_sessions(name: str, database: str | None) -> None:
    """End all sessions of a user. Raises NotFound (USER_NOT_FOUND)."""
    _change_user(name, database, "user.end_sessions", lambda tx, user: rows.end_sessions(tx, user.id))
    print_message(f"All sessions of {name} are ended.")


def _parse_role(role: str) -> Role:
    if role not in list(Role):
        raise InvalidInput(f"There is no role {role!r:.40}.", code="INVALID_ROLE", fix=f"Use {', '.join(Role)}.")
    return Role(role)


def _find_user(tx: Transaction, sign_in_name: str) -> User:
    """Return the user with this sign-in name. Raises NotFound (USER_NOT_FOUND)."""
    tenant_id, name = parse_sign_in_name(sign_in_name)
    user = rows.find_user(tx, name, tenant_id) or rows.find_user(tx, sign_in_name)  # a provider may send slashes
    if user is None:
        raise NotFound(
            f"There is no user {sign_in_name:.80}.", code="USER_NOT_FOUND",
            fix="Try: timebell user list. A user of a tenant is written acme/dana.",
        )  # fmt: skip
    return user


def _change_user(name: str, database: str | None, action: str, change: Callable[[Transaction, User], object]) -> None:
    app = Timebell(database)

    async def write() -> None:
        await app.open()
        user = await app.store.run(_find_user, name)
        await app.store.run(with_audit_record(
            app, action, user.tenant_id, user.name, lambda tx: change(tx, user), _state_of(user)
        ))  # fmt: skip

    run_and_close(app, write)


def _state_of(user: User) -> Callable[[Transaction], Mapping[str, Any] | None]:
    def read(tx: Transaction) -> Mapping[str, Any] | None:
        found = rows.find_user(tx, user.name, user.tenant_id)
        return None if found is None else render_user(found)

    return read


def _read_password() -> str:
    """Read a new password: twice on a terminal, else the first line of stdin.

    Raises InvalidInput (INVALID_PASSWORD, PASSWORDS_DIFFER).
    """
    if not sys.stdin.isatty():
        return passwords.check_length(sys.stdin.readline().rstrip("\r\n"))
    first = passwords.check_length(getpass.getpass("Password: "))
    if getpass.getpass("Repeat password: ") != first:
        raise InvalidInput("The two passwords differ.", code="PASSWORDS_DIFFER", fix="Type the same password twice.")
    return first


def _user_facts(user: User) -> dict[str, Any]:
    return {
        "name": user.name, "tenantId": user.tenant_id, "role": user.role.value, "issuer": user.issuer,
        "totpEnabledAt": user.totp_enabled_at and format_instant(user.totp_enabled_at),
        "createdAt": format_instant(user.created_at),
        "lastUsedAt": user.last_used_at and format_instant(user.last_used_at),
        "state": "disabled" if user.disabled_at else "usable",
    }  # fmt: skip
