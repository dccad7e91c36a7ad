"""Commands from the signatures of functions: what a parameter's annotation says, click does."""

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
from click import BadParameter
from click.exceptions import Exit

__all__ = ["Argument", "BadParameter", "Exit", "Group", "Option", "run"]

Work = TypeVar("Work", bound=Callable[..., None])
Turn = Callable[[Any], Any]


class Option:
    """A flag: `count: Annotated[int, Option("--count", "-n", min=1, help="How many.")] = 5`.

    Without names it is called as the parameter; a `bool` can then also be said no to (`--no-reload`).
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
    """What has its place and no name. `offer` says what a shell may complete the beginning of one to."""

    def __init__(
        self, *, help: str = "", metavar: str | None = None, offer: Callable[[str], list[str]] | None = None
    ) -> None:
        self.help, self.metavar, self.offer = help, metavar, offer
        self.min: Any = None
        self.max: Any = None


class Group(click.Group):
    """Commands under a common word."""

    def __init__(self, help: str) -> None:
        super().__init__(help=help, no_args_is_help=True)

    def command(self, name: str | None = None) -> Callable[[Work], Work]:  # type: ignore[override]
        """Makes a function one of them, by the name given or its own."""

        def add(function: Work) -> Work:
            self.add_command(_Command(name or function.__name__.replace("_", "-"), function))
            return function

        return add

    def list_commands(self, ctx: click.Context) -> list[str]:
        """As they were made, groups last."""
        return sorted(self.commands, key=lambda name: isinstance(self.commands[name], click.Group))


def run(group: Group, program: str) -> None:
    """The program. Raises SystemExit, and KeyboardInterrupt for the caller to give its own exit code."""
    try:
        sys.exit(group.main(prog_name=program, standalone_mode=False))
    except click.ClickException as wrong:
        wrong.show()
        sys.exit(wrong.exit_code)
    except click.Abort as ended:
        if isinstance(ended.__cause__, KeyboardInterrupt):
            raise ended.__cause__ from None
        sys.exit(1)


class _Command(click.Command):
    """A function, whose signature is not read before it is called or asked for help."""

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        super().__init__(name, callback=self._call, help=inspect.getdoc(function))
        self._function = function

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        self.params = [parameter for parameter, _ in self._read]
        return super().get_params(ctx)

    @cached_property
    def _read(self) -> list[tuple[click.Parameter, Turn | None]]:
        hints = get_type_hints(self._function, include_extras=True)
        parameters = inspect.signature(self._function).parameters.values()
        return [_parameter(each.name, hints[each.name], each.default) for each in parameters]

    def _call(self, **given: Any) -> None:
        turns = {parameter.name: turn for parameter, turn in self._read}
        self._function(**{name: value if (turn := turns[name]) is None else turn(value)
                          for name, value in given.items()})  # fmt: skip


class _Argument(click.Argument):
    def make_metavar(self, ctx: click.Context) -> str:
        """In brackets where it may be left out, whether it has a name of its own or not."""
        name = self.metavar or self.name.upper()
        return name if self.required else f"[{name}]"


def _parameter(name: str, annotation: Any, default: Any) -> tuple[click.Parameter, Turn | None]:
    """The parameter, and what makes of click's value what the function takes."""
    hint, said = get_args(annotation)
    kind, several = _kind(hint)
    given: dict[str, Any] = {"required": default is inspect.Parameter.empty, "help": said.help, "metavar": said.metavar}
    if not given["required"] and not several:
        given["default"] = default
    if isinstance(said, Argument):
        offer = said.offer
        if offer is not None:
            given["shell_complete"] = lambda _context, _parameter, begun: offer(begun)
        return _Argument([name], type=_type(kind, said), **given), _turn(kind, default, several=several)
    flag = f"--{name.replace('_', '-')}"
    if kind is bool:
        return click.Option(
            [name, *(said.names or [f"{flag}/--no-{flag[2:]}"])], is_flag=True, show_default=True, **given
        ), None
    made = click.Option(
        [name, *(said.names or [flag])], type=_type(kind, said), multiple=several, show_default=True, **given
    )
    return made, _turn(kind, default, several=several)


def _kind(hint: Any) -> tuple[Any, bool]:
    """What one value is, and whether there may be several: of `list[str] | None`, str and True."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    return (get_args(hint)[0], True) if get_origin(hint) is list else (hint, False)


def _type(kind: Any, said: Option | Argument) -> click.ParamType[Any]:
    if kind is Path:
        return click.Path(path_type=Path)
    if issubclass(kind, Enum):
        return click.Choice([str(one.value) for one in kind])
    bounded = said.min is not None or said.max is not None
    if kind is int:
        return click.IntRange(said.min, said.max) if bounded else click.INT
    if kind is float:
        return click.FloatRange(said.min, said.max) if bounded else click.FLOAT
    return click.STRING


def _turn(kind: Any, default: Any, *, several: bool) -> Turn | None:
    if several:
        return lambda values: list(values) or default
    if issubclass(kind, Enum):
        return lambda value: None if value is None else kind(value)
    return None
