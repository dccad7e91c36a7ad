"""Build click commands from function signatures: annotations declare arguments and options."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click import BadParameter, Command
from click.exceptions import Exit

__all__ = [
    "Argument", "BadParameter", "Command", "Exit", "Group", "Option", "build_command", "build_placeholder", "run",
]  # fmt: skip

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., None])
Converter = Callable[[Any], Any]


class Option:
    """An option: `count: Annotated[int, Option("--count", "-n", min=1, help="Number of fires.")] = 5`.

    Without `names` it is named after the parameter, and a `bool` also gets a negation (`--no-reload`). `min` and `max`
    are inclusive bounds of an `int` or `float`.
    """

    def __init__(
        self,
        *names: str,
        help: str | None = None,
        metavar: str | None = None,
        min: Any = None,
        max: Any = None,
    ) -> None:
        self.names, self.help, self.metavar, self.min, self.max = names, help, metavar, min, max


class Argument:
    """A positional argument. `complete` returns the shell completions of an incomplete value."""

    def __init__(
        self, *, help: str = "", metavar: str | None = None, complete: Callable[[str], list[str]] | None = None
    ) -> None:
        self.help, self.metavar, self.complete = help, metavar, complete
        self.min: Any = None
        self.max: Any = None


class Group(click.Group):
    """Commands under a common first word."""

    def __init__(self, help: str) -> None:
        super().__init__(help=help, no_args_is_help=True)

    def command(self, name: str | None = None) -> Callable[[CommandFunction], CommandFunction]:  # type: ignore[override]
        """Return a decorator that adds a function as a command, named `name` or after the function."""

        def add(function: CommandFunction) -> CommandFunction:
            self.add_command(_Command(name or function.__name__.replace("_", "-"), function))
            return function

        return add

    def add_deferred_command(self, name: str, load: Callable[[], Command]) -> None:
        """Add a command that `load` returns; it is called when the command is called or listed in the help."""
        self.add_command(_DeferredCommand(name, load))

    def get_command(self, ctx: click.Context, cmd_name: str) -> Command | None:
        """Return a command by name; a deferred one is loaded."""
        command = super().get_command(ctx, cmd_name)
        return command.load() if isinstance(command, _DeferredCommand) else command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List commands in the order they were added, groups last."""
        return sorted(self.commands, key=lambda name: isinstance(self.commands[name], click.Group))


def run(group: Group, program: str) -> None:
    """Run a program and exit. Raises SystemExit, or KeyboardInterrupt, whose exit code the caller chooses."""
    try:
        sys.exit(group.main(prog_name=program, standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort as aborted:
        if isinstance(aborted.__cause__, KeyboardInterrupt):
            raise aborted.__cause__ from None
        sys.exit(1)


def build_command(name: str, function: Callable[..., None]) -> Command:
    """Build a command from a function; its docstring is the help text."""
    return _Command(name, function)


def build_placeholder(name: str, help: str, call: Callable[[], None]) -> Command:
    """Build a command that accepts any arguments, --help included, ignores them and calls a function."""
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return Command(name, callback=call, help=help, add_help_option=False, context_settings=settings)


class _DeferredCommand(click.Command):
    """A command whose code is not loaded yet."""

    def __init__(self, name: str, load: Callable[[], Command]) -> None:
        super().__init__(name)
        self.load = load


class _Command(click.Command):
    """A command whose function signature is read only when it is called or its help is shown, for a fast start."""

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        super().__init__(name, callback=self._call, help=inspect.getdoc(function))
        self._function = function

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        self.params = [parameter for parameter, _ in self._bound_parameters]
        return super().get_params(ctx)

    @cached_property
    def _bound_parameters(self) -> list[tuple[click.Parameter, Converter | None]]:
        hints = get_type_hints(self._function, include_extras=True)
        parameters = inspect.signature(self._function).parameters.values()
        return [_build_parameter(each.name, hints[each.name], each.default) for each in parameters]

    def _call(self, **values: Any) -> None:
        converters = {parameter.name: convert for parameter, convert in self._bound_parameters}
        self._function(**{name: value if (convert := converters[name]) is None else convert(value)
                          for name, value in values.items()})  # fmt: skip


class _Argument(click.Argument):
    def make_metavar(self, ctx: click.Context) -> str:
        """Put an optional argument in brackets, also if it has its own metavar."""
        name = self.metavar or self.name.upper()
        return name if self.required else f"[{name}]"


def _build_parameter(name: str, annotation: Any, default: Any) -> tuple[click.Parameter, Converter | None]:
    """Return the click parameter, and the function that converts its value to the annotated type, if one is needed."""
    hint, spec = get_args(annotation)
    value_type, multiple = _value_type(hint)
    settings: dict[str, Any] = {
        "required": default is inspect.Parameter.empty,
        "help": spec.help,
        "metavar": spec.metavar,
    }
    if not settings["required"] and not multiple:
        settings["default"] = default
    if isinstance(spec, Argument):
        complete = spec.complete
        if complete is not None:
            settings["shell_complete"] = lambda _context, _parameter, incomplete: complete(incomplete)
        return _Argument([name], type=_click_type(value_type, spec), **settings), _converter_for(
            value_type, default, multiple=multiple
        )
    flag = f"--{name.replace('_', '-')}"
    if value_type is bool:
        return click.Option(
            [name, *(spec.names or [f"{flag}/--no-{flag[2:]}"])], is_flag=True, show_default=True, **settings
        ), None
    option = click.Option(
        [name, *(spec.names or [flag])],
        type=_click_type(value_type, spec),
        multiple=multiple,
        show_default=True,
        **settings,
    )
    return option, _converter_for(value_type, default, multiple=multiple)


def _value_type(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether the option repeats: `list[str] | None` is str and True."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (member for member in get_args(hint) if member is not NoneType)
    return (get_args(hint)[0], True) if get_origin(hint) is list else (hint, False)


def _click_type(value_type: Any, spec: Option | Argument) -> click.ParamType[Any]:
    if value_type is Path:
        return click.Path(path_type=Path)
    if issubclass(value_type, Enum):
        return click.Choice([str(member.value) for member in value_type])
    bounded = spec.min is not None or spec.max is not None
    if value_type is int:
        return click.IntRange(spec.min, spec.max) if bounded else click.INT
    if value_type is float:
        return click.FloatRange(spec.min, spec.max) if bounded else click.FLOAT
    return click.STRING


def _converter_for(value_type: Any, default: Any, *, multiple: bool) -> Converter | None:
    if multiple:
        return lambda values: list(values) or default
    if issubclass(value_type, Enum):
        return lambda value: None if value is None else value_type(value)
    return None
