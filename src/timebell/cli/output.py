"""What commands say: data on stdout, talk on stderr, errors with what, fix and code, exit codes that are stable."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TextIO

from timebell.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    Refused,
    ServerUnreachable,
    StoreInUse,
    StoreUnreachable,
    TimebellError,
)
from timebell.settings import colourless

OK, FAILED, USAGE, NOT_FOUND, REFUSED, CONFLICT, UNREACHABLE, DIFFERENT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 7, 130
EXITS: tuple[tuple[type[TimebellError], int], ...] = (
    (InvalidInput, USAGE), (NotFound, NOT_FOUND), (Refused, REFUSED), (Conflict, CONFLICT), (StoreInUse, CONFLICT),
    (StoreUnreachable, UNREACHABLE), (ServerUnreachable, UNREACHABLE),
)  # fmt: skip
COLOURS = {"red": 31, "green": 32, "yellow": 33, "dim": 2, "bold": 1}


class Format(StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


def exit_code(error: TimebellError) -> int:
    """The exit code of a command that ended with this error."""
    return next((code for kind, code in EXITS if isinstance(error, kind)), FAILED)


def complain(error: TimebellError) -> None:
    """An error as a person reads it, on stderr."""
    say(paint("error: ", "red", sys.stderr) + error.message)
    if error.fix:
        say(f"  fix:  {error.fix}")
    say(f"  code: {error.code}")


def say(text: str = "") -> None:
    """A line of talk, on stderr."""
    print(text, file=sys.stderr, flush=True)


def show(text: str = "") -> None:
    """A line of data, on stdout, at once even when piped."""
    print(text, flush=True)


def paint(text: str, colour: str, stream: TextIO) -> str:
    """Coloured on a terminal, unless NO_COLOR says otherwise."""
    if colourless() or not stream.isatty():
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def emit(rows: Sequence[Mapping[str, Any]], form: str) -> None:
    """Rows for machines, as a list in JSON, YAML or CSV."""
    if form == Format.JSON:
        show(json.dumps(list(rows), indent=2))
    elif form == Format.YAML:
        show("\n".join(map(_yaml, rows)) or "[]")
    else:
        import csv

        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def emit_one(facts: Mapping[str, Any], form: str) -> None:
    """One object: a table of names and values, or as `emit` but not in a list."""
    if form == Format.JSON:
        show(json.dumps(dict(facts), indent=2))
    elif form == Format.YAML:
        show(_yaml(facts).replace("\n  ", "\n")[2:])
    elif form == Format.CSV:
        emit([facts], form)
    else:
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            show(f"{name:<{width}}  {_cell(value)}")


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> None:
    """Aligned columns, two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(*([head] if head else []), *rows, strict=True)]
    if head:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(head, widths, strict=True)).rstrip()
        show(paint(line, "dim", sys.stdout))
    for row in rows:
        show("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _yaml(row: Mapping[str, Any]) -> str:
    """JSON scalars are YAML scalars, so no library is needed for flat rows."""
    lines = [f"{name}: {json.dumps(value)}" for name, value in row.items()]
    return "- " + "\n  ".join(lines) if lines else "- {}"


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, dict | list | bool) else value
