"""`timebell user ...`: dashboard users, directly in the database."""

from __future__ import annotations

from typing import Annotated

from timebell.cli import click_signatures
from timebell.cli.keys import Database, Output

user = click_signatures.Group("Dashboard users, directly in the database.")
UserName = Annotated[str, click_signatures.Argument(help="User name for the sign-in.")]


@user.command("create")
def user_create(
    name: UserName,
    role: Annotated[
        str, click_signatures.Option(metavar="ROLE", help="viewer, operator, editor, admin, or platform (all tenants).")
    ] = "viewer",
    tenant: Annotated[str, click_signatures.Option(help="Tenant of the user.")] = "default",
    database: Database = None,
) -> None:
    """Create a user. Asks for the password; without a terminal, reads one line of stdin."""
    from timebell.cli import accounts

    accounts.create_user(name, role, tenant, database)


@user.command("list")
def user_list(database: Database = None, output: Output = None) -> None:
    """List users, including disabled ones."""
    from timebell.cli import accounts

    accounts.list_users(database, output)


@user.command("password")
def user_password(name: UserName, database: Database = None) -> None:
    """Change the password and end all sessions of the user."""
    from timebell.cli import accounts

    accounts.set_password(name, database)


@user.command("disable")
def user_disable(name: UserName, database: Database = None) -> None:
    """Disable a user and end all their sessions."""
    from timebell.cli import accounts

    accounts.disable(name, database)
