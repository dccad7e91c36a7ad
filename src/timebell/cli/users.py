"""`timebell user ...`: dashboard users, directly in the database."""

from __future__ import annotations

import click

from timebell.cli.groups import Group
from timebell.cli.options import database_option, output_option

user = Group("Dashboard users, directly in the database.")
user_name_argument = click.argument("name", help="User name for the sign-in.")


@user.command("create")
@user_name_argument
@click.option(
    "--role",
    default="viewer",
    show_default=True,
    metavar="ROLE",
    help="viewer, operator, editor, admin, or platform (all tenants).",
)
@click.option("--tenant", default="default", show_default=True, help="Tenant of the user.")
@database_option
def user_create(name: str, role: str, tenant: str, database: str | None) -> None:
    """Create a user. Asks for the password; without a terminal, reads one line of stdin."""
    from timebell.cli import accounts

    accounts.create_user(name, role, tenant, database)


@user.command("list")
@database_option
@output_option
def user_list(database: str | None, output: str | None) -> None:
    """List users, including disabled ones."""
    from timebell.cli import accounts

    accounts.list_users(database, output)


@user.command("password")
@user_name_argument
@database_option
def user_password(name: str, database: str | None) -> None:
    """Change the password and end all sessions of the user."""
    from timebell.cli import accounts

    accounts.set_password(name, database)


@user.command("disable")
@user_name_argument
@database_option
def user_disable(name: str, database: str | None) -> None:
    """Disable a user and end all their sessions."""
    from timebell.cli import accounts

    accounts.disable(name, database)
