"""`timebell torture` comes from the distribution timebell-torture; the core knows only its name."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from importlib.metadata import EntryPoints

import pytest

from tests.unit.cli.conftest import Cli


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the distribution timebell-torture appear absent."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: EntryPoints())


def test_the_installed_command_has_its_options(cli: Cli) -> None:
    done = cli("torture", "--help")
    assert done.code == 0, done.err
    assert "--selftest" in done.out
    done = cli("torture", "--faults", "earthquake")
    assert done.code == 2
    assert "code: INVALID_TORTURE" in done.err


def test_the_help_lists_the_installed_command(cli: Cli) -> None:
    done = cli("--help")
    assert done.code == 0
    assert "torture     Inject faults" in done.out


@pytest.mark.parametrize("args", [(), ("--help",), ("--minutes", "3", "--store", "sqlite"), ("--selftest",)])
@pytest.mark.usefixtures("absent")
def test_an_absent_command_is_an_error_with_a_fix(cli: Cli, args: tuple[str, ...]) -> None:
    done = cli("torture", *args)
    assert done.code == 2
    assert done.out == ""
    assert "error: timebell torture is not installed" in done.err
    assert "fix:  Install timebell-torture: pip install ./packages/timebell-torture" in done.err
    assert "code: COMMAND_NOT_INSTALLED" in done.err


@pytest.mark.usefixtures("absent")
def test_the_help_lists_an_absent_command_as_not_installed(cli: Cli) -> None:
    done = cli("--help")
    assert done.code == 0
    assert "torture     Not installed; requires timebell-torture." in done.out


def test_other_commands_do_not_load_entry_points() -> None:
    code = """
import importlib.metadata, sys
importlib.metadata.entry_points = lambda **_: sys.exit("entry points were loaded")
from timebell.cli.main import main
sys.argv = ["timebell", "next", "@daily", "--timezone", "UTC"]
try:
    main()
finally:
    assert not any(name.startswith("timebell_torture") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
