"""Groups of commands: order and help of commands, and the exit codes of the program."""

from __future__ import annotations

import inspect
from typing import Any

import click
import pytest

from timebell.cli import main
from timebell.cli.groups import Group
from timebell.cli.schedule import definition_options
from timebell.cli.target_options import request_options

calls: list[str] = []
shop = Group("A shop.")
shelf = Group("Items on a shelf.")
shop.add_command(shelf, "shelf")


@shop.command()
@click.argument("name", metavar="NAME", help="Name of the shop.")
@click.option("--count", "-n", type=click.IntRange(min=1, max=9), default=5, show_default=True, help="How many.")
def open_shop(name: str, count: int) -> None:
    """Open it."""
    calls.append(f"{name} {count}")


@shelf.command("list")
@click.option("--since", required=True, metavar="T", help="From then.")
def list_(since: str) -> None:
    """Show it."""
    raise click.exceptions.Exit({"never": 3, "now": 0}[since])


@shelf.command()
def wait() -> None:
    """Wait until interrupted."""
    raise KeyboardInterrupt


def run_shop(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr("sys.argv", ["shop", *words])
        patch.setattr(main, "root", shop)
        main.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("words", "why"),
    [((), "Usage: timebell"),
     (("open-shop",), "Missing argument 'NAME'"),
     (("shelf", "list"), "Missing option '--since'"),
     (("open-shop", "tea", "-n", "10"), "1<=x<=9"),
     (("open-shop", "tea", "--cont", "3"), "--count"),
     (("shelve",), "shelf"),
     (("shelf",), "Show it.")],
)  # fmt: skip
def test_invalid_arguments_are_refused_with_the_accepted_ones(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.clear()
    assert run_shop(*words) == 2
    out, err = capsys.readouterr()
    assert (out, why in err) == ("", True), err
    assert calls == []


def test_help_lists_arguments_and_defaults_and_groups_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_shop("open-shop", "--help") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Usage: timebell open-shop [OPTIONS] NAME Open it." in printed
    assert "NAME Name of the shop." in printed
    assert "-n, --count INTEGER RANGE How many. [default: 5; 1<=x<=9]" in printed
    assert run_shop("--help") == 0
    printed = capsys.readouterr().out
    assert printed.index("open-shop") < printed.index("shelf")


def test_exit_code_is_the_raised_one() -> None:
    assert run_shop("open-shop", "tea") == 0
    assert run_shop("shelf", "list", "--since", "never") == 3
    assert run_shop("shelf", "list", "--since", "now") == 0


def test_interrupted_command_exits_with_130() -> None:
    assert run_shop("shelf", "wait") == 130


KEYWORD_OPTIONS = {"definition": definition_options, "request_flags": request_options}
"""Decorators of the options that a keyword parameter takes, by its name."""


def taken_parameters(callback: Any) -> set[str | None]:
    """Return the names of the parameters of a command, with the options that its keyword parameter takes."""
    parameters = inspect.signature(callback).parameters
    names: set[str | None] = {name for name in parameters if name not in KEYWORD_OPTIONS}
    for name in parameters.keys() & KEYWORD_OPTIONS.keys():
        assert parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        names |= {each.name for each in click.command("any")(KEYWORD_OPTIONS[name](lambda: None)).params}
    return names


def test_every_command_has_help_and_takes_its_declared_parameters() -> None:
    def walk(group: Any, parent: Any, name: str) -> int:
        context = group.context_class(group, parent=parent, info_name=name)
        if hasattr(group, "commands"):
            assert group.help
            return sum(walk(group.get_command(context, each), context, each) for each in group.list_commands(context))
        assert group.help, name
        assert "Usage:" in group.get_help(context)
        assert {each.name for each in group.params} == taken_parameters(group.callback), name
        return 1

    assert walk(main.root, None, "timebell") > 90
