"""Fixtures for the command line: `cli` runs a command in this process, `start` in its own process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.cli.process import Process
from timebell.cli.main import main


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Cli = Callable[..., CommandResult]
Start = Callable[..., Process]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Run `timebell ...` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*args: object, stdin: str = "") -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["timebell", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return CommandResult(code, out, err)

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `timebell ...` in an empty folder; the process is killed when the test ends."""
    started: list[Process] = []

    def run(*args: object, **environment: str) -> Process:
        process = Process(tmp_path, [str(each) for each in args], environment)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
