"""What commands that speak to a server have in common: values from flags, questions, lists."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from timebell.cli.output import Format, emit, say, table
from timebell.clock import wall
from timebell.errors import InvalidInput
from timebell.formatting import local, relative
from timebell.model.payload import read_json

Row = Mapping[str, Any]


def json_of(text: str | None, field: str) -> Any:
    """JSON from a flag; `@file` reads it from there, `@-` from stdin. Raises InvalidInput."""
    if text is None:
        return None
    if text.startswith("@"):
        return read_json(contents(text[1:]), field)
    return read_json(text.encode(), field)


def contents(path: str) -> bytes:
    """A file, or stdin for `-`. Raises InvalidInput (FILE_UNREADABLE)."""
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as failed:
        raise InvalidInput(f"{path} cannot be read: {failed.strerror}.", code="FILE_UNREADABLE") from failed


def pairs(texts: Sequence[str] | None, flag: str) -> dict[str, str] | None:
    """`name=value` flags as a mapping. Raises InvalidInput."""
    if not texts:
        return None
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(f"{flag} is {text!r:.60}.", code="INVALID_LABELS", fix=f"Write {flag} team=billing.")
        found[name] = value
    return found


def instant(text: str | None) -> datetime | None:
    """RFC 3339 text of the server as an aware datetime."""
    return None if text is None else datetime.fromisoformat(text).astimezone(UTC)


def sooner(text: str | None, timezone: str) -> str:
    """An instant as people read it: how far off, and the time there."""
    at = instant(text)
    if at is None:
        return "-"
    there = local(at, timezone)
    shown = f"{there:%H:%M %Z}" if abs(at - wall()) < timedelta(hours=20) else f"{there:%a %d %b %H:%M %Z}"
    return f"{relative(at - wall())}  {shown}"


def listed(rows: Iterable[Row], form: str, head: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> None:
    """Rows for machines as the server gave them, or for people as a table of these cells."""
    if form != Format.TABLE:
        emit(list(rows), form)
        return
    shown = [list(cells(row)) for row in rows]
    if shown:
        table(shown, head)
    else:
        say("None.")


def confirmed(question: str, *, yes: bool) -> bool:
    """Whether the person agrees; without a terminal only `--yes` does. Raises InvalidInput."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidInput(f"{question}", code="CONFIRMATION_MISSING", fix="Add --yes.")
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("", "y", "yes")


def brief(value: Any, most: int = 60) -> str:
    """A value in a cell."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 1] + "…"
