"""Input of commands: values of flags, files, confirmations; and lists of rows as output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from timebell.cli.output import Format, print_message, print_records, print_table
from timebell.clock import system_now
from timebell.durations import parse_duration
from timebell.errors import InvalidInput
from timebell.formatting import format_relative, to_local
from timebell.model.payload import read_json

Row = Mapping[str, Any]


def parse_json(text: str | None, name: str) -> Any:
    """Parse the JSON of a flag; `@path` reads a file, `@-` stdin. Raises InvalidInput."""
    if text is None:
        return None
    if text.startswith("@"):
        return read_json(read_file_or_stdin(text[1:]), name)
    return read_json(text.encode(), name)


def read_file_or_stdin(path: str) -> bytes:
    """Return the bytes of a file, or of stdin for `-`. Raises InvalidInput (FILE_UNREADABLE)."""
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as failed:
        raise InvalidInput(f"{path} cannot be read: {failed.strerror}.", code="FILE_UNREADABLE") from failed


def parse_pairs(texts: Sequence[str] | None, flag: str) -> dict[str, str] | None:
    """Parse `name=value` flags into a mapping. Raises InvalidInput."""
    if not texts:
        return None
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(f"{flag} is {text!r:.60}.", code="INVALID_LABELS", fix=f"Write {flag} team=billing.")
        pairs[name] = value
    return pairs


def parse_timestamp(text: str | None) -> datetime | None:
    """Convert RFC 3339 text of the server to an aware datetime in UTC."""
    return None if text is None else datetime.fromisoformat(text).astimezone(UTC)


def parse_time_ago(text: str) -> str:
    """Return a duration before now, such as `2h`, or RFC 3339 text, as an instant for the server."""
    ago = parse_duration(text)
    return text if ago is None else (system_now() - timedelta(seconds=ago)).isoformat().replace("+00:00", "Z")


def format_relative_time(text: str | None, timezone: str) -> str:
    """Format an instant as its distance from now and its local time in `timezone`."""
    at = parse_timestamp(text)
    if at is None:
        return "-"
    local = to_local(at, timezone)
    local_text = f"{local:%H:%M %Z}" if abs(at - system_now()) < timedelta(hours=20) else f"{local:%a %d %b %H:%M %Z}"
    return f"{format_relative(at - system_now())}  {local_text}"


def print_list(
    rows: Iterable[Row], output_format: str, header: Sequence[str], cells: Callable[[Row], Sequence[str]]
) -> None:
    """Print rows as a table of `cells`, or unchanged in a machine-readable format."""
    if output_format != Format.TABLE:
        print_records(list(rows), output_format)
        return
    table = [list(cells(row)) for row in rows]
    if table:
        print_table(table, header)
    else:
        print_message("None.")


def confirm(question: str, *, yes: bool) -> bool:
    """Ask for confirmation on a terminal; return whether the user agrees.

    Raises InvalidInput (CONFIRMATION_MISSING) without a terminal, unless `yes` is set.
    """
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidInput(f"{question}", code="CONFIRMATION_MISSING", fix="Add --yes.")
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("", "y", "yes")


def shorten(value: Any, max_length: int = 60) -> str:
    """Return a value as text of at most `max_length` characters, non-strings as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= max_length else text[: max_length - 1] + "…"
