"""Long work of a server, watched from here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from timebell.cli import click_signatures
from timebell.cli.output import FAILED, Format, emit_one, say

if TYPE_CHECKING:
    from timebell.cli.remote import Remote

LOOK = 0.5  # seconds between looks
TELL = 10.0  # seconds between lines where nobody watches


def watched(remote: Remote, operation: dict[str, Any]) -> None:
    """Tell how far an operation has come until it is over. Ctrl-C leaves it going on the server."""
    import sys

    told = 0.0
    waited = 0.0
    while operation["state"] == "running":
        if sys.stderr.isatty():
            print(f"\r{line(operation)}\x1b[K", end="", file=sys.stderr, flush=True)
        elif waited - told >= TELL:
            told = waited
            say(line(operation))
        time.sleep(LOOK)  # noqa: TID251 - a person waits here, on the wall's clock
        waited += LOOK
        operation = remote.ask("GET", f"/operations/{operation['id']}")
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if remote.settings.output != Format.TABLE:
        emit_one(operation, remote.settings.output)
    else:
        say(line(operation))
    if operation["state"] == "failed":
        raise click_signatures.Exit(FAILED)


def line(operation: dict[str, Any]) -> str:
    """How far it has come."""
    progress = operation["progress"]
    total = "" if progress["total"] is None else f" of {progress['total']:,}"
    failed = f", {progress['failed']:,} refused" if progress["failed"] else ""
    phase = operation["spec"].get("phase") if operation["state"] == "running" else None
    return (
        f"{operation['kind']} {operation['state']}{f', {phase}' if phase else ''}: {progress['done']:,}{total}{failed}"
    )
