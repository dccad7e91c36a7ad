"""Follow a long operation of a server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from timebell.cli.output import FAILED, Format, print_message, print_record

if TYPE_CHECKING:
    from timebell.cli.remote import ServerClient

POLL_INTERVAL_SECONDS = 0.5  # between requests for the progress
PROGRESS_INTERVAL_SECONDS = 10.0  # between progress lines without a terminal


def watch_operation(remote: ServerClient, operation: dict[str, Any]) -> None:
    """Print the progress of an operation until it ends. Ctrl-C does not stop it on the server."""
    import sys

    last_printed = 0.0
    elapsed = 0.0
    while operation["state"] == "running":
        if sys.stderr.isatty():
            print(f"\r{format_progress(operation)}\x1b[K", end="", file=sys.stderr, flush=True)
        elif elapsed - last_printed >= PROGRESS_INTERVAL_SECONDS:
            last_printed = elapsed
            print_message(format_progress(operation))
        time.sleep(POLL_INTERVAL_SECONDS)  # noqa: TID251 - a user waits here, in real time
        elapsed += POLL_INTERVAL_SECONDS
        operation = remote.request("GET", f"/operations/{operation['id']}")
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if remote.settings.output != Format.TABLE:
        print_record(operation, remote.settings.output)
    else:
        print_message(format_progress(operation))
    if operation["state"] == "failed":
        raise click.exceptions.Exit(FAILED)


def format_progress(operation: dict[str, Any]) -> str:
    """Return the state and progress of an operation as one line."""
    progress = operation["progress"]
    total = "" if progress["total"] is None else f" of {progress['total']:,}"
    failed = f", {progress['failed']:,} refused" if progress["failed"] else ""
    phase = operation["spec"].get("phase") if operation["state"] == "running" else None
    return (
        f"{operation['kind']} {operation['state']}{f', {phase}' if phase else ''}: {progress['done']:,}{total}{failed}"
    )
