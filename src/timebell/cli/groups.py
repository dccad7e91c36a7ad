"""Groups of click commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import click


class Group(click.Group):
    """Commands under a common first word, listed in the order they were added, groups last.

    With `sections`, the help lists the commands by heading instead; those in no section are under `other_heading`.
    """

    def __init__(
        self, help: str, sections: Mapping[str, Sequence[str]] | None = None, other_heading: str = "Other"
    ) -> None:
        super().__init__(help=help)
        self.sections, self.other_heading = sections or {}, other_heading

    def add_deferred_command(self, name: str, load: Callable[[], click.Command]) -> None:
        """Add a command that `load` returns; it is called when the command is called or listed in the help."""
        self.add_command(_DeferredCommand(name, load))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name; a deferred one is loaded."""
        command = super().get_command(ctx, cmd_name)
        return command.load() if isinstance(command, _DeferredCommand) else command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their short help, by section."""
        if not self.sections:
            super().format_commands(ctx, formatter)
            return
        sectioned = {name for names in self.sections.values() for name in names}
        others = [name for name in self.list_commands(ctx) if name not in sectioned]
        width = max(map(len, self.commands))
        limit = formatter.width - 6 - width
        for heading, names in (*self.sections.items(), (self.other_heading, others)):
            commands = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(f"{name:<{width}}", command.get_short_help_str(limit)) for name, command in commands if command]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of the commands."""
        return sorted(self.commands, key=lambda name: isinstance(self.commands[name], click.Group))


class _DeferredCommand(click.Command):
    """A command whose code is not loaded yet."""

    def __init__(self, name: str, load: Callable[[], click.Command]) -> None:
        super().__init__(name)
        self.load = load
