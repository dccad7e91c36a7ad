"""`timebell user ...`: who signs in to the dashboard, straight on the database."""

from __future__ import annotations

from typing import Annotated

from timebell.cli import click_signatures
from timebell.cli.keys import Database, Output

user = click_signatures.Group("Who signs in to the dashboard, on the database itself.")
Name = Annotated[str, click_signatures.Argument(help="The name to sign in with.")]


@user.command("create")
def user_create(
    name: Name,
    role: Annotated[
        str, click_signatures.Option(metavar="ROLE", help="viewer, operator, editor, admin, or platform: all tenants.")
    ] = "viewer",
    tenant: Annotated[str, click_signatures.Option(help="Whose data is shown.")] = "default",
    database: Database = None,
) -> None:
    """Make a user. Asks for the password; without a terminal it is the first line of standard input."""
    from timebell.cli import accounts

    accounts.create(name, role, tenant, database)


@user.command("list")
def user_list(database: Database = None, output: Output = None) -> None:
    """List users, disabled ones too."""
    from timebell.cli import accounts

    accounts.show_all(database, output)


@user.command("password")
def user_password(name: Name, database: Database = None) -> None:
    """Set another password: whoever is signed in under this name has to sign in again."""
    from timebell.cli import accounts

    accounts.set_password(name, database)


@user.command("disable")
def user_disable(name: Name, database: Database = None) -> None:
    """Let nobody sign in under this name, or stay signed in."""
    from timebell.cli import accounts

    accounts.disable(name, database)
