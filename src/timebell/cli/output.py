"""Output of commands: data on stdout, messages on stderr, errors with fix and code, stable exit codes.

Rich would add four packages of 6 MB to the installation for the table and the five colors here.
"""

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
from timebell.settings import colors_disabled

OK, FAILED, USAGE, NOT_FOUND, REFUSED, CONFLICT, UNREACHABLE, DIFFERENT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 7, 130
EXIT_CODES: tuple[tuple[type[TimebellError], int], ...] = (
    (InvalidInput, USAGE), (NotFound, NOT_FOUND), (Refused, REFUSED), (Conflict, CONFLICT), (StoreInUse, CONFLICT),
    (StoreUnreachable, UNREACHABLE), (ServerUnreachable, UNREACHABLE),
)  # fmt: skip
COLORS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "dim": 2, "bold": 1}
STATE_COLORS = {
    **dict.fromkeys(("completed", "healthy", "alive", "leader", "active", "sent", "delivered", "enabled"), "green"),
    **dict.fromkeys(("failed", "failing", "errored", "missed", "unresponsive", "disabled", "lost", "unhandled"), "red"),
    **dict.fromkeys(("paused", "skipped", "held", "cancelled", "stopped", "reauthorize", "orphaned"), "yellow"),
    "retrying": "yellow",
    **dict.fromkeys(("running", "dispatched"), "blue"),
}
"""The color of a state, by its first word. States that need no attention, such as `pending`, have none."""
STATE_COLUMNS = ("STATE", "STATUS")


class Format(StrEnum):
    """Output format of data."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


def exit_code(error: TimebellError) -> int:
    """Return the exit code of a command that failed with `error`."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), FAILED)


def print_error(error: TimebellError) -> None:
    """Print an error on stderr: message, fix and code."""
    print_message(colorize("error: ", "red", sys.stderr) + error.message)
    if error.fix:
        print_message(f"  fix:  {error.fix}")
    print_message(f"  code: {error.code}")


def print_message(text: str = "") -> None:
    """Print a message line on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_data(text: str = "") -> None:
    """Print a data line on stdout, flushed immediately also when piped."""
    print(text, flush=True)


def colorize(text: str, color: str, stream: TextIO) -> str:
    """Color text if `stream` is a terminal and NO_COLOR is not set."""
    if colors_disabled() or not stream.isatty():
        return text
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m"


def colorize_state(text: str, stream: TextIO) -> str:
    """Color a state by its first word."""
    color = STATE_COLORS.get(text.split(maxsplit=1)[0] if text.strip() else "")
    return text if color is None else colorize(text, color, stream)


def print_records(records: Sequence[Mapping[str, Any]], output_format: str) -> None:
    """Print rows as a list in JSON, YAML or CSV."""
    if output_format == Format.JSON:
        print_data(json.dumps(list(records), indent=2))
    elif output_format == Format.YAML:
        print_data("\n".join(map(_format_yaml, records)) or "[]")
    else:
        import csv

        writer = csv.DictWriter(sys.stdout, list(records[0]) if records else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _format_cell(value) for name, value in row.items()} for row in records)


def print_record(record: Mapping[str, Any], output_format: str) -> None:
    """Print one object: a table of names and values, or JSON, YAML or CSV without a list around it."""
    if output_format == Format.JSON:
        print_data(json.dumps(dict(record), indent=2))
    elif output_format == Format.YAML:
        print_data(_format_yaml(record).replace("\n  ", "\n")[2:])
    elif output_format == Format.CSV:
        print_records([record], output_format)
    else:
        width = max(map(len, record), default=0)
        for name, value in record.items():
            print_data(f"{name:<{width}}  {_format_cell(value)}")


def print_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Print aligned columns, two spaces apart; columns of states are colored. Nothing is cut or wrapped."""
    widths = [max(len(cell) for cell in column) for column in zip(*([header] if header else []), *rows, strict=True)]
    is_state = [name in STATE_COLUMNS for name in header] or [False] * len(widths)
    if header:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(header, widths, strict=True)).rstrip()
        print_data(colorize(line, "dim", sys.stdout))
    for row in rows:
        padded = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        padded[-1] = padded[-1].rstrip()
        pairs = zip(padded, is_state, strict=True)
        cells = [colorize_state(cell, sys.stdout) if colored else cell for cell, colored in pairs]
        print_data("  ".join(cells).rstrip())


def _format_yaml(record: Mapping[str, Any]) -> str:
    """Return a flat row as YAML: JSON scalars are YAML scalars, so no YAML library is imported."""
    lines = [f"{name}: {json.dumps(value)}" for name, value in record.items()]
    return "- " + "\n  ".join(lines) if lines else "- {}"


def _format_cell(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, dict | list | bool) else value
