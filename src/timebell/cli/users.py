"""`timebell user ...`: dashboard users, directly in the database."""

from __future__ import annotations

import click

from timebell.cli.groups import Group
from timebell.cli.options import database_option, output_option, yes_option

user = Group("Dashboard users, directly in the database.")
user_name_argument = click.argument("name", help="User name for the sign-in; of a tenant: acme/dana.")


@user.command("create")
@click.argument("name", help="User name; unique in its tenant.")
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


@user.command("reset-totp")
@user_name_argument
@database_option
def user_reset_totp(name: str, database: str | None) -> None:
    """Let a user who has lost the authenticator app sign in with the password alone, and end all their sessions."""
    from timebell.cli import accounts

    accounts.reset_totp(name, database)


@user.command("disable")
@user_name_argument
@database_option
def user_disable(name: str, database: str | None) -> None:
    """Disable a user and end all their sessions."""
    from timebell.cli import accounts

    accounts.disable(name, database)


@user.command("enable")
@user_name_argument
@database_option
def user_enable(name: str, database: str | None) -> None:
    """Enable a disabled user."""
    from timebell.cli import accounts

    accounts.enable(name, database)


@user.command("role")
@user_name_argument
@click.argument("role", help="viewer, operator, editor or admin.")
@database_option
def user_role(name: str, role: str, database: str | None) -> None:
    """Change the role of a user, also for open sessions."""
    from timebell.cli import accounts

    accounts.set_role(name, role, database)


@user.command("delete")
@user_name_argument
@yes_option
@database_option
def user_delete(name: str, yes: bool, database: str | None) -> None:
    """Delete a user and end all their sessions."""
    from timebell.cli import accounts

    accounts.delete(name, database, yes=yes)


@user.command("sessions")
@user_name_argument
@click.option("--end", is_flag=True, help="End all of them.")
@database_option
@output_option
def user_sessions(name: str, end: bool, database: str | None, output: str | None) -> None:
    """List the sessions of a user, newest first, or end them."""
    from timebell.cli import accounts

    if end:
        accounts.end_sessions(name, database)
    else:
        accounts.list_sessions(name, database, output)
