"""Groups of click commands."""

from __future__ import annotations

from collections.abc import Callable

import click


class Group(click.Group):
    """Commands under a common first word, listed in the order they were added, groups last."""

    def __init__(self, help: str) -> None:
        super().__init__(help=help)

    def add_deferred_command(self, name: str, load: Callable[[], click.Command]) -> None:
        """Add a command that `load` returns; it is called when the command is called or listed in the help."""
        self.add_command(_DeferredCommand(name, load))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name; a deferred one is loaded."""
        command = super().get_command(ctx, cmd_name)
        return command.load() if isinstance(command, _DeferredCommand) else command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of the commands."""
        return sorted(self.commands, key=lambda name: isinstance(self.commands[name], click.Group))


class _DeferredCommand(click.Command):
    """A command whose code is not loaded yet."""

    def __init__(self, name: str, load: Callable[[], click.Command]) -> None:
        super().__init__(name)
        self.load = load
