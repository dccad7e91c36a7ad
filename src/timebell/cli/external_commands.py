"""Commands of separate distributions, declared by entry points of the group `timebell.commands`."""

from __future__ import annotations

from functools import partial
from typing import cast

import click

from timebell.cli.groups import Group
from timebell.errors import InvalidInput

ENTRY_POINT_GROUP = "timebell.commands"
DISTRIBUTIONS = {"torture": "timebell-torture"}
"""The known commands, and the distributions that contain them."""


def add_external_commands(group: Group) -> None:
    """Add the known commands to a group. Entry points are read when a command is called or listed, not here."""
    for name in DISTRIBUTIONS:
        group.add_deferred_command(name, partial(load_command, name))


def load_command(name: str) -> click.Command:
    """Return a command, or a placeholder that fails with COMMAND_NOT_INSTALLED if its distribution is absent."""
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return cast(click.Command, entry_point.load())
    return click.Command(
        name,
        callback=partial(_report_missing, name),
        help=f"Not installed; requires {DISTRIBUTIONS[name]}.",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def _report_missing(name: str) -> None:
    distribution = DISTRIBUTIONS[name]
    raise InvalidInput(
        f"timebell {name} is not installed, because it belongs to a separate package.",
        code="COMMAND_NOT_INSTALLED",
        fix=f"Install {distribution}: pip install ./packages/{distribution}",
    )
