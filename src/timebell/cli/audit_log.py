"""`timebell audit-log ...`: changes and refused requests of a server, with their actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option
from timebell.cli.schedule import server_client

audit_log = Group("Audit log: who changed what, and refused requests.")
FILTER_OPTIONS = (
    click.option("--actor", help="Name of the user or key."),
    click.option("--action", help="Action, such as schedule.pause, or a prefix: 'schedule.*'."),
    click.option("--subject", help="Id or name of the object."),
    click.option("--outcome", type=click.Choice(["done", "refused"]), help="Only changes, or only refused requests."),
    click.option("--since", metavar="T|D", help="Start: an instant, or a duration before now such as 24h."),
    click.option("--until", metavar="T|D", help="End (exclusive)."),
)


def filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of FILTER_OPTIONS to a command."""
    for option in reversed(FILTER_OPTIONS):
        command = option(command)
    return command


@audit_log.command("list")
@filter_options
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of rows.")
@output_option
def list_(
    actor: str | None, action: str | None, subject: str | None, outcome: str | None, since: str | None,
    until: str | None, limit: int, output: str | None,
) -> None:  # fmt: skip
    """List the newest records. Requires a key with the role admin."""
    from timebell.cli.inputs import print_list, shorten

    remote = server_client(output)
    records = remote.list_items("/audit-log", _query(actor, action, subject, outcome, since, until), limit)
    head = ("TIME", "ACTOR", "ADDRESS", "ACTION", "SUBJECT", "CHANGES")
    print_list(records, remote.settings.output, head, lambda row: (
        row["at"][:19] + "Z", row["actor"], row["address"] or "", row["action"],
        row["subjectName"] or row["subject"] or "", shorten(_summarize(row)),
    ))  # fmt: skip


@audit_log.command()
@filter_options
def export(
    actor: str | None, action: str | None, subject: str | None, outcome: str | None, since: str | None,
    until: str | None,
) -> None:  # fmt: skip
    """Print all records as JSON lines, oldest first: timebell audit-log export > audit.ndjson."""
    from timebell.cli.output import print_data

    query = _query(actor, action, subject, outcome, since, until)
    for line in server_client().stream_lines("/audit-log/export", query):
        print_data(line)


def _query(
    actor: str | None, action: str | None, subject: str | None, outcome: str | None, since: str | None,
    until: str | None,
) -> dict[str, str | None]:  # fmt: skip
    return {
        "actor": actor, "action": action, "subject": subject, "outcome": outcome, "from": _parse_time(since),
        "to": _parse_time(until),
    }  # fmt: skip


def _parse_time(text: str | None) -> str | None:
    from datetime import timedelta

    from timebell.clock import system_now
    from timebell.durations import parse_duration
    from timebell.recurrence.instants import format_instant

    seconds = None if text is None else parse_duration(text)
    return text if seconds is None else format_instant(system_now() - timedelta(seconds=seconds))


def _summarize(record: Mapping[str, Any]) -> str:
    if record["outcome"] == "refused":
        more = f" (+{record['suppressed']})" if record["suppressed"] else ""
        return f"refused: {record['code']}{more}"
    return ", ".join(f"{change['field'][1:]}: {change['before']} -> {change['after']}" for change in record["changes"])
