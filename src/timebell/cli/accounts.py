"""The work of `timebell user`."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from typing import Any

from timebell.app import Timebell
from timebell.cli.inputs import listed
from timebell.cli.keyring import ACTOR, _form, _pages, _recorded, _run
from timebell.cli.output import say
from timebell.client.validation import text
from timebell.errors import InvalidInput, NotFound
from timebell.ids import new_id
from timebell.recurrence.instants import format_instant
from timebell.store.tenancy import users as rows
from timebell.store.transaction import Transaction
from timebell.tenancy import passwords
from timebell.tenancy.roles import Role
from timebell.tenancy.users import User


def create(name: str, role: str, tenant: str, database: str | None) -> None:
    """Write a user. Raises InvalidInput, Conflict (USER_EXISTS)."""
    app = Timebell(database)
    if role not in list(Role):
        raise InvalidInput(f"There is no role {role!r:.40}.", code="INVALID_ROLE", fix=f"Use {', '.join(Role)}.")
    tenant_id = None if role == Role.PLATFORM else text(tenant, "tenant_id")
    named, password = text(name, "name"), passwords.stored(_asked())

    async def write() -> User:
        await app.open()
        now = app.clock.now()
        made = User(id=new_id(now), tenant_id=tenant_id, name=named, role=Role(role), created_at=now, created_by=ACTOR)
        return await app.store.run(
            _recorded(app, "user.create", tenant_id, named, lambda tx: rows.create(tx, made, password))
        )

    made = _run(app, write)
    say(f"{made.name} may sign in to the dashboard as {made.role} of {made.tenant_id or 'the platform'}.")


def show_all(database: str | None, form: str | None) -> None:
    """List users."""
    app = Timebell(database)

    async def read() -> list[User]:
        await app.open()
        return [user async for user in _pages(app, rows.page)]

    found = [_shown(user) for user in _run(app, read)]
    listed(found, _form(app, form), ("NAME", "TENANT", "ROLE", "MADE", "LAST SIGNED IN", "STATE"), lambda one: (
        one["name"], one["tenantId"] or "(platform)", one["role"], one["createdAt"][:10],
        (one["lastUsedAt"] or "never")[:16], one["state"],
    ))  # fmt: skip


def set_password(name: str, database: str | None) -> None:
    """Set another password. Raises NotFound (USER_NOT_FOUND), InvalidInput (PASSWORD_UNFIT)."""
    password = passwords.stored(_asked())
    _change(name, database, "user.password", lambda tx, user: rows.set_password(tx, user.id, password))
    say(f"{name} has another password, and is signed out everywhere.")


def disable(name: str, database: str | None) -> None:
    """Disable a user. Raises NotFound (USER_NOT_FOUND)."""
    app = Timebell(database)
    _change(name, database, "user.disable", lambda tx, user: rows.disable(tx, user.id, app.clock.now()))
    say(f"{name} cannot sign in any more.")


def _change(name: str, database: str | None, action: str, change: Callable[[Transaction, User], None]) -> None:
    app = Timebell(database)

    async def write() -> None:
        await app.open()
        found = await app.store.run(rows.find, name)
        if found is None:
            raise NotFound(f"There is no user {name:.40}.", code="USER_NOT_FOUND", fix="timebell user list shows them.")
        await app.store.run(_recorded(app, action, found.tenant_id, name, lambda tx: change(tx, found)))

    _run(app, write)


def _asked() -> str:
    """The new password, typed twice on a terminal. Raises InvalidInput (PASSWORD_UNFIT, PASSWORDS_DIFFER)."""
    if not sys.stdin.isatty():
        return passwords.check(sys.stdin.readline().rstrip("\r\n"))
    first = passwords.check(getpass.getpass("Password: "))
    if getpass.getpass("The same again: ") != first:
        raise InvalidInput("These are two passwords.", code="PASSWORDS_DIFFER", fix="Try again.")
    return first


def _shown(user: User) -> dict[str, Any]:
    return {
        "name": user.name, "tenantId": user.tenant_id, "role": user.role.value,
        "createdAt": format_instant(user.created_at),
        "lastUsedAt": user.last_used_at and format_instant(user.last_used_at),
        "state": "disabled" if user.disabled_at else "usable",
    }  # fmt: skip
