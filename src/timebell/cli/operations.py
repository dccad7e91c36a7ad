"""Follow a long operation of a server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from timebell.cli.output import FAILED, Format, print_message, print_record

if TYPE_CHECKING:
    from timebell.cli.remote import ServerClient

POLL_INTERVAL_SECONDS = 0.5  # between requests for the progress


def watch_operation(remote: ServerClient, operation: dict[str, Any]) -> None:
    """Print the progress of an operation until it ends. Ctrl-C does not stop it on the server."""
    from timebell.cli.progress import status_line

    def describe_interrupt() -> str:
        path = f"/operations/{operation['id']}"
        return (
            f"The operation continues on the server ({format_progress(operation)}); do not start it again.\n"
            f"  follow: timebell api GET {path}\n  stop:   timebell api POST {path}/cancel"
        )

    with status_line(describe_interrupt) as show:
        while operation["state"] == "running":
            show(format_progress(operation))
            time.sleep(POLL_INTERVAL_SECONDS)  # noqa: TID251 - a user waits here, in real time
            operation = remote.request("GET", f"/operations/{operation['id']}")
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
