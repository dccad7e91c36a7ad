"""`timebell trigger ...` and `timebell source ...`: triggers of a server and the sources of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import FAILED
from timebell.cli.schedule import (
    Condition,
    Output,
    Payload,
    Priority,
    Queue,
    Retries,
    Target,
    Timeout,
    Yes,
    Zone,
    server_client,
)

trigger = click_signatures.Group("Triggers: fire at a date column of external rows.")
source = click_signatures.Group("Sources: external systems with dated rows.")
Name = Annotated[str, click_signatures.Argument(metavar="NAME", help="Name.")]


@trigger.command()
def create(
    name: Annotated[str, click_signatures.Argument(metavar="NAME", help="Trigger name.")],
    source_name: Annotated[str, click_signatures.Option("--source", metavar="NAME", help="Source of the rows.")],
    column: Annotated[str, click_signatures.Option(metavar="FIELD", help="Column with the time to fire at.")],
    topic: Annotated[str, click_signatures.Option(metavar="TOPIC", help="Topic of the jobs.")],
    offset: Annotated[
        list[str] | None, click_signatures.Option(metavar="-15m|0|+1d", help="Offset from the column; repeatable.")
    ] = None,
    timezone: Zone = None,
    recipients: Annotated[
        str | None, click_signatures.Option(metavar="FIELD", help="Column of recipients; one job each.")
    ] = None,
    condition: Condition = None,
    unless: Annotated[
        str | None, click_signatures.Option(metavar="SQL", help="Skip if this query has a result.")
    ] = None,
    grace: Annotated[float | None, click_signatures.Option(metavar="SECONDS", help="Maximum lateness to fire.")] = None,
    payload: Payload = None,
    target: Target = None,
    retries: Retries = None,
    timeout: Timeout = None,
    queue: Queue = None,
    priority: Priority = None,
    replace: Annotated[bool, click_signatures.Option("--replace", help="Replace an existing trigger.")] = False,
    no_wait: Annotated[bool, click_signatures.Option("--no-wait", help="Do not wait for the scan.")] = False,
    output: Output = None,
) -> None:
    """Create a trigger and scan the existing rows."""
    from timebell.cli.inputs import parse_json
    from timebell.cli.schedule import parse_target

    remote = server_client(output)
    body = {
        "source": source_name, "column": column, "topic": topic, "offsets": offset or None, "timezone": timezone,
        "recipients": recipients, "condition": parse_json(condition, "--condition"), "graceSeconds": grace,
        "unless": unless,
        "payload": parse_json(payload, "--payload"), "target": parse_target(target), "maxRetries": retries,
        "timeoutSeconds": timeout, "queue": queue, "priority": priority,
    }  # fmt: skip
    body = {field: value for field, value in body.items() if value is not None}
    if replace:
        record = remote.request("PUT", f"/triggers/{_quote_segment(name)}", body, if_match="*")
    else:
        record = remote.request("POST", "/triggers", {"name": name, **body})
    scan = record.pop("scan")
    _print_trigger(record, remote.settings.output)
    if scan is not None and not no_wait:
        _watch_operation(remote, scan)


@trigger.command("list")
def list_(output: Output = None) -> None:
    """List triggers by name."""
    from timebell.cli.inputs import print_list

    remote = server_client(output)
    head = ("NAME", "SOURCE", "FIRES AT", "TOPIC", "STATE")
    print_list(remote.list_items("/triggers"), remote.settings.output, head, lambda row: (
        row["name"], row["source"], f"{row['column']} {', '.join(row['offsets'])}", row["topic"], _trigger_state(row),
    ))  # fmt: skip


@trigger.command()
def show(name: Name, output: Output = None) -> None:
    """Show a trigger."""
    remote = server_client(output)
    _print_trigger(remote.request("GET", f"/triggers/{_quote_segment(name)}"), remote.settings.output)


@trigger.command()
def scan(
    name: Name,
    no_wait: Annotated[bool, click_signatures.Option("--no-wait", help="Do not wait for the scan.")] = False,
    output: Output = None,
) -> None:
    """Scan all rows again, and plan missing firings."""
    remote = server_client(output)
    operation = remote.request("POST", f"/triggers/{_quote_segment(name)}/scan")
    if not no_wait:
        _watch_operation(remote, operation)


@trigger.command()
def install(
    name: Annotated[str, click_signatures.Argument(metavar="SOURCE", help="Source of a database table.")],
) -> None:
    """Print the SQL that makes a source's table report its changes: review it, then run it."""
    from timebell.cli.output import print_data as line
    from timebell.features.triggers.sources.sql_table import SqlTable
    from timebell.model.target import referenced_secret

    source = server_client().request("GET", f"/sources/{_quote_segment(name)}")
    options = source["options"]
    if referenced_secret(options.get("url")) is not None:
        options = {**options, "url": "postgresql://host/name"}
    line(SqlTable(options).install_sql().rstrip())


@trigger.command()
def pause(
    name: Name,
    reason: Annotated[str | None, click_signatures.Option(help="Reason, shown to other users.")] = None,
    output: Output = None,
) -> None:
    """Pause a trigger: firings that become due are skipped until it is resumed."""
    remote = server_client(output)
    body = None if reason is None else {"reason": reason}
    _print_trigger(remote.request("POST", f"/triggers/{_quote_segment(name)}/pause", body), remote.settings.output)


@trigger.command()
def resume(name: Name, output: Output = None) -> None:
    """Resume a trigger."""
    remote = server_client(output)
    _print_trigger(remote.request("POST", f"/triggers/{_quote_segment(name)}/resume"), remote.settings.output)


@trigger.command()
def delete(name: Name, yes: Yes = False, output: Output = None) -> None:
    """Delete a trigger, and cancel its jobs."""
    from timebell.cli.inputs import confirm

    if not confirm(f"Delete trigger {name}, and cancel its jobs?", yes=yes):
        raise click_signatures.Exit(FAILED)
    remote = server_client(output)
    _watch_operation(remote, remote.request("DELETE", f"/triggers/{_quote_segment(name)}"))


@source.command("create")
def create_source(
    name: Annotated[str, click_signatures.Argument(metavar="NAME", help="Name that triggers refer to.")],
    kind: Annotated[str, click_signatures.Option(metavar="webhook|sql|monday", help="Kind of the source.")] = "webhook",
    options: Annotated[
        str | None,
        click_signatures.Option(metavar="JSON", help="Options of the kind, e.g. url and table for sql; @file."),
    ] = None,
    replace: Annotated[bool, click_signatures.Option("--replace", help="Replace an existing source.")] = False,
    output: Output = None,
) -> None:
    """Create a source: a database that is polled, or a webhook that receives changes."""
    from timebell.cli.inputs import parse_json

    remote = server_client(output)
    body = {"kind": kind, "options": parse_json(options, "--options") or {}}
    if replace:
        record = remote.request("PUT", f"/sources/{_quote_segment(name)}", body, if_match="*")
    else:
        record = remote.request("POST", "/sources", {"name": name, **body})
    if kind == "monday":  # only GET returns the hook URL with its token
        record = remote.request("GET", f"/sources/{_quote_segment(name)}")
    _print_source(record, remote.settings.output)


@source.command("list")
def list_sources(output: Output = None) -> None:
    """List sources by name."""
    from timebell.cli.inputs import print_list

    remote = server_client(output)
    print_list(remote.list_items("/sources"), remote.settings.output, ("NAME", "KIND", "STATE", "HOOK"), lambda row: (
        row["name"], row["kind"], _source_state(row), row["hook"],
    ))  # fmt: skip


@source.command("show")
def show_source(name: Name, output: Output = None) -> None:
    """Show a source."""
    remote = server_client(output)
    _print_source(remote.request("GET", f"/sources/{_quote_segment(name)}"), remote.settings.output)


@source.command("items")
def items(name: Name, output: Output = None) -> None:
    """List the rows of a source by key, in their last known version."""
    from timebell.cli.inputs import print_list, shorten

    remote = server_client(output)
    rows = remote.list_items(f"/sources/{_quote_segment(name)}/items")
    print_list(rows, remote.settings.output, ("KEY", "VERSION", "FIELDS"), lambda row: (
        row["key"], str(row["version"]), "deleted" if row["fields"] is None else shorten(row["fields"]),
    ))  # fmt: skip


@source.command("delete")
def delete_source(name: Name, yes: Yes = False) -> None:
    """Delete a source without triggers, and its rows."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message

    if not confirm(f"Delete source {name}?", yes=yes):
        raise click_signatures.Exit(FAILED)
    server_client().request("DELETE", f"/sources/{_quote_segment(name)}")
    print_message("Deleted.")


def _trigger_state(row: Mapping[str, Any]) -> str:
    return str(row["state"])


def _source_state(row: Mapping[str, Any]) -> str:
    return str(row["state"])


def _print_trigger(record: Mapping[str, Any], output_format: str) -> None:
    import sys

    from timebell.cli.inputs import shorten
    from timebell.cli.output import Format, colorize, print_record
    from timebell.cli.output import print_data as line

    if output_format != Format.TABLE:
        print_record(record, output_format)
        return
    line(f"{colorize(record['name'], 'bold', sys.stdout)}  {_trigger_state(record)}  revision {record['revision']}")
    facts = {
        "source": record["source"], "fires at": f"{record['column']} {', '.join(record['offsets'])}",
        "timezone": record["timezone"], "recipients": record["recipients"], "condition": record["condition"] or None,
        "unless": record["unless"], "grace": f"{record['graceSeconds']:g} s", "topic": record["topic"],
        "payload": record["payload"],
        "target": record.get("target"), "queue": record["queue"], "paused": record["pauseReason"],
        "orphaned": record["orphanedReason"], "reauthorize": record["unauthorizedReason"],
    }  # fmt: skip
    for name, value in facts.items():
        if value is not None:
            line(f"  {name:<12}{shorten(value, 100)}")


def _print_source(record: Mapping[str, Any], output_format: str) -> None:
    import sys

    from timebell.cli.output import Format, colorize, print_record
    from timebell.cli.output import print_data as line

    if output_format != Format.TABLE:
        print_record(record, output_format)
        return
    line(f"{colorize(record['name'], 'bold', sys.stdout)}  {_source_state(record)}")
    for name, value in (
        ("kind", record["kind"]), ("hook", record["hook"]), ("orphaned", record["orphanedReason"]),
        ("error", record["error"]),
    ):  # fmt: skip
        if value is not None:
            line(f"  {name:<12}{value}")


def _watch_operation(remote: Any, operation: dict[str, Any]) -> None:
    from timebell.cli.operations import watch_operation

    watch_operation(remote, operation)


def _quote_segment(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
