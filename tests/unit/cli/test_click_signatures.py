"""Click commands built from the signatures of functions."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest

from timebell.cli import click_signatures
from timebell.cli.main import main, root


class Size(StrEnum):
    SMALL = "small"
    LARGE = "large"


Name = Annotated[str, click_signatures.Argument(metavar="NAME", help="Name of the shop.")]
calls: list[dict[str, Any]] = []
shop = click_signatures.Group("A shop.")
shelf = click_signatures.Group("Items on a shelf.")
shop.add_command(shelf, "shelf")


@shop.command()
def open_shop(
    name: Name,
    place: Annotated[Path | None, click_signatures.Argument(help="Where it is.")] = None,
    count: Annotated[int, click_signatures.Option("--count", "-n", min=1, max=9, help="How many.")] = 5,
    size: Annotated[Size | None, click_signatures.Option(help="How large.")] = None,
    label: Annotated[list[str] | None, click_signatures.Option(metavar="N=V", help="More than one.")] = None,
    light: Annotated[bool, click_signatures.Option(help="With light.")] = True,
    quiet: Annotated[bool, click_signatures.Option("--quiet", help="Say nothing.")] = False,
    system: Annotated[bool | None, click_signatures.Option("--system/--user", help="Whose.")] = None,
    within: Annotated[float | None, click_signatures.Option("--from", min=0.5, metavar="SECONDS", help="When.")] = None,
) -> None:
    """Open it.

    And keep it so."""
    calls.append(dict(locals()))


@shelf.command("list")
def list_(since: Annotated[str, click_signatures.Option("--since", metavar="T", help="From then.")]) -> None:
    """Show it."""
    raise click_signatures.Exit({"never": 3, "now": 0}[since])


@shelf.command()
def wait() -> None:
    """Wait until interrupted."""
    raise KeyboardInterrupt


def run_shop(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr("sys.argv", ["shop", *words])
        click_signatures.run(shop, "shop")
    return int(ended.value.code or 0)


def test_arguments_are_converted_to_the_annotated_types() -> None:
    calls.clear()
    assert run_shop("open-shop", "tea") == 0
    assert calls.pop() == {"name": "tea", "place": None, "count": 5, "size": None, "label": None, "light": True,
                          "quiet": False, "system": None, "within": None}  # fmt: skip
    words = ("open-shop", "tea", "/a", "-n", "9", "--size", "large", "--label", "a=b", "--label", "c=d", "--no-light",
             "--quiet", "--user", "--from", "0.5")  # fmt: skip
    assert run_shop(*words) == 0
    call = calls.pop()
    assert call == {"name": "tea", "place": Path("/a"), "count": 9, "size": Size.LARGE, "label": ["a=b", "c=d"],
                     "light": False, "quiet": True, "system": False, "within": 0.5}  # fmt: skip
    assert isinstance(call["size"], Size)


@pytest.mark.parametrize(
    ("words", "why"),
    [((), "Usage: shop"),
     (("open-shop",), "Missing argument 'NAME'"),
     (("shelf", "list"), "Missing option '--since'"),
     (("open-shop", "tea", "-n", "10"), "1<=x<=9"),
     (("open-shop", "tea", "--size", "huge"), "'small', 'large'"),
     (("open-shop", "tea", "--sise", "small"), "--size"),
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


def test_help_lists_arguments_options_defaults_and_groups_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_shop("open-shop", "--help") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Usage: shop open-shop [OPTIONS] NAME [PLACE] Open it. And keep it so." in printed
    assert "NAME Name of the shop." in printed
    assert "-n, --count INTEGER RANGE How many. [default: 5; 1<=x<=9]" in printed
    assert "--light / --no-light With light. [default: light]" in printed
    assert "--label N=V More than one." in printed
    assert run_shop("--help") == 0
    printed = capsys.readouterr().out
    assert printed.index("open-shop") < printed.index("shelf")


def test_exit_code_is_the_raised_one() -> None:
    assert run_shop("shelf", "list", "--since", "never") == 3
    assert run_shop("shelf", "list", "--since", "now") == 0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("sys.argv", ["shop", "shelf", "wait"])
        click_signatures.run(shop, "shop")


def test_interrupted_command_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["timebell", "version"])
    monkeypatch.setattr("timebell.cli.main.print_record", lambda *_: wait())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_every_command_has_help() -> None:
    def walk(group: Any, parent: Any, name: str) -> int:
        context = group.context_class(group, parent=parent, info_name=name)
        if hasattr(group, "commands"):
            assert group.help
            return sum(walk(group.get_command(context, each), context, each) for each in group.list_commands(context))
        assert group.help, name
        assert "Usage:" in group.get_help(context)
        return 1

    assert walk(root, None, "timebell") > 90
