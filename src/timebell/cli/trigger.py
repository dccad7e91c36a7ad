"""`timebell trigger ...` and `timebell source ...`: dated rows elsewhere, and what fires at them, of a server."""

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
    remote_of,
)

trigger = click_signatures.Group("Triggers: fire at a column of somebody else's rows.")
source = click_signatures.Group("Sources: where dated rows are.")
Named = Annotated[str, click_signatures.Argument(metavar="NAME", help="Its name.")]


@trigger.command()
def create(
    name: Annotated[str, click_signatures.Argument(metavar="NAME", help="What it is called.")],
    of: Annotated[str, click_signatures.Option("--source", metavar="NAME", help="Where the rows are.")],
    column: Annotated[str, click_signatures.Option(metavar="FIELD", help="The instant it fires at.")],
    topic: Annotated[str, click_signatures.Option(metavar="TOPIC", help="What its jobs are about.")],
    offset: Annotated[
        list[str] | None, click_signatures.Option(metavar="-15m|0|+1d", help="From the column; several.")
    ] = None,
    timezone: Zone = None,
    recipients: Annotated[
        str | None, click_signatures.Option(metavar="FIELD", help="Whom it is for: one job a person.")
    ] = None,
    condition: Condition = None,
    unless: Annotated[
        str | None, click_signatures.Option(metavar="SQL", help="Not if this query finds something.")
    ] = None,
    grace: Annotated[float | None, click_signatures.Option(metavar="SECONDS", help="So late it still fires.")] = None,
    payload: Payload = None,
    target: Target = None,
    retries: Retries = None,
    timeout: Timeout = None,
    queue: Queue = None,
    priority: Priority = None,
    replace: Annotated[bool, click_signatures.Option("--replace", help="Change the one that there is.")] = False,
    no_wait: Annotated[bool, click_signatures.Option("--no-wait", help="Do not watch the scan.")] = False,
    output: Output = None,
) -> None:
    """Make a trigger, and plan for the rows that are there."""
    from timebell.cli.inputs import json_of
    from timebell.cli.schedule import target_of

    remote = remote_of(output)
    body = {
        "source": of, "column": column, "topic": topic, "offsets": offset or None, "timezone": timezone,
        "recipients": recipients, "condition": json_of(condition, "--condition"), "graceSeconds": grace,
        "unless": unless,
        "payload": json_of(payload, "--payload"), "target": target_of(target), "maxRetries": retries,
        "timeoutSeconds": timeout, "queue": queue, "priority": priority,
    }  # fmt: skip
    body = {field: value for field, value in body.items() if value is not None}
    if replace:
        made = remote.ask("PUT", f"/triggers/{_quoted(name)}", body, match="*")
    else:
        made = remote.ask("POST", "/triggers", {"name": name, **body})
    scan = made.pop("scan")
    _show(made, remote.settings.output)
    if scan is not None and not no_wait:
        _watch(remote, scan)


@trigger.command("list")
def list_(output: Output = None) -> None:
    """List triggers by name."""
    from timebell.cli.inputs import listed

    remote = remote_of(output)
    head = ("NAME", "SOURCE", "FIRES AT", "TOPIC", "STATE")
    listed(remote.pages("/triggers"), remote.settings.output, head, lambda row: (
        row["name"], row["source"], f"{row['column']} {', '.join(row['offsets'])}", row["topic"], _state(row),
    ))  # fmt: skip


@trigger.command()
def show(name: Named, output: Output = None) -> None:
    """Show one."""
    remote = remote_of(output)
    _show(remote.ask("GET", f"/triggers/{_quoted(name)}"), remote.settings.output)


@trigger.command()
def scan(
    name: Named,
    no_wait: Annotated[bool, click_signatures.Option("--no-wait", help="Do not watch it.")] = False,
    output: Output = None,
) -> None:
    """Go through every row once more, and plan what is missing."""
    remote = remote_of(output)
    begun = remote.ask("POST", f"/triggers/{_quoted(name)}/scan")
    if not no_wait:
        _watch(remote, begun)


@trigger.command()
def install(
    name: Annotated[str, click_signatures.Argument(metavar="SOURCE", help="A source that is a table.")],
) -> None:
    """Print the SQL with which the table of a source says what changes: review it, then run it."""
    from timebell.cli.output import show as line
    from timebell.model.target import secret_of
    from timebell.triggers.sql_table import SqlTable

    found = remote_of().ask("GET", f"/sources/{_quoted(name)}")
    options = found["options"]
    if secret_of(options.get("url")) is not None:
        options = {**options, "url": "postgresql://host/name"}
    line(SqlTable(options).install().rstrip())


@trigger.command()
def pause(
    name: Named,
    reason: Annotated[str | None, click_signatures.Option(help="Why.")] = None,
    output: Output = None,
) -> None:
    """Fire nothing: what becomes due is skipped until it is resumed."""
    remote = remote_of(output)
    body = None if reason is None else {"reason": reason}
    _show(remote.ask("POST", f"/triggers/{_quoted(name)}/pause", body), remote.settings.output)


@trigger.command()
def resume(name: Named, output: Output = None) -> None:
    """Fire again."""
    remote = remote_of(output)
    _show(remote.ask("POST", f"/triggers/{_quoted(name)}/resume"), remote.settings.output)


@trigger.command()
def delete(name: Named, yes: Yes = False, output: Output = None) -> None:
    """Forget one, and cancel its jobs."""
    from timebell.cli.inputs import confirmed

    if not confirmed(f"Delete the trigger {name}, and cancel its jobs?", yes=yes):
        raise click_signatures.Exit(FAILED)
    remote = remote_of(output)
    _watch(remote, remote.ask("DELETE", f"/triggers/{_quoted(name)}"))


@source.command()
def add(
    name: Annotated[str, click_signatures.Argument(metavar="NAME", help="What triggers will call it.")],
    kind: Annotated[
        str, click_signatures.Option(metavar="webhook|sql|monday", help="How its rows come here.")
    ] = "webhook",
    options: Annotated[
        str | None, click_signatures.Option(metavar="JSON", help="Of kind sql: url, table, ...; @file.")
    ] = None,
    replace: Annotated[bool, click_signatures.Option("--replace", help="Change the one that there is.")] = False,
    output: Output = None,
) -> None:
    """Make a source: a database that is read, or systems say at its hook what has changed."""
    from timebell.cli.inputs import json_of

    remote = remote_of(output)
    body = {"kind": kind, "options": json_of(options, "--options") or {}}
    if replace:
        made = remote.ask("PUT", f"/sources/{_quoted(name)}", body, match="*")
    else:
        made = remote.ask("POST", "/sources", {"name": name, **body})
    if kind == "monday":  # its hook with the token is told to who asks
        made = remote.ask("GET", f"/sources/{_quoted(name)}")
    _show_source(made, remote.settings.output)


@source.command("list")
def list_sources(output: Output = None) -> None:
    """List sources by name."""
    from timebell.cli.inputs import listed

    remote = remote_of(output)
    listed(remote.pages("/sources"), remote.settings.output, ("NAME", "KIND", "STATE", "HOOK"), lambda row: (
        row["name"], row["kind"], _source_state(row), row["hook"],
    ))  # fmt: skip


@source.command("show")
def show_source(name: Named, output: Output = None) -> None:
    """Show one."""
    remote = remote_of(output)
    _show_source(remote.ask("GET", f"/sources/{_quoted(name)}"), remote.settings.output)


@source.command("items")
def items(name: Named, output: Output = None) -> None:
    """List its rows by key, as they were last heard of."""
    from timebell.cli.inputs import brief, listed

    remote = remote_of(output)
    rows = remote.pages(f"/sources/{_quoted(name)}/items")
    listed(rows, remote.settings.output, ("KEY", "VERSION", "FIELDS"), lambda row: (
        row["key"], str(row["version"]), "gone" if row["fields"] is None else brief(row["fields"]),
    ))  # fmt: skip


@source.command("delete")
def delete_source(name: Named, yes: Yes = False) -> None:
    """Forget one that has no trigger, and its rows."""
    from timebell.cli.inputs import confirmed
    from timebell.cli.output import say

    if not confirmed(f"Delete the source {name}?", yes=yes):
        raise click_signatures.Exit(FAILED)
    remote_of().ask("DELETE", f"/sources/{_quoted(name)}")
    say("Deleted.")


def _state(row: Mapping[str, Any]) -> str:
    return str(row["state"])


def _source_state(row: Mapping[str, Any]) -> str:
    return str(row["state"])


def _show(found: Mapping[str, Any], form: str) -> None:
    import sys

    from timebell.cli.inputs import brief
    from timebell.cli.output import Format, emit_one, paint
    from timebell.cli.output import show as line

    if form != Format.TABLE:
        emit_one(found, form)
        return
    line(f"{paint(found['name'], 'bold', sys.stdout)}  {_state(found)}  revision {found['revision']}")
    facts = {
        "source": found["source"], "fires at": f"{found['column']} {', '.join(found['offsets'])}",
        "timezone": found["timezone"], "recipients": found["recipients"], "condition": found["condition"] or None,
        "unless": found["unless"], "grace": f"{found['graceSeconds']:g} s", "topic": found["topic"],
        "payload": found["payload"],
        "target": found.get("target"), "queue": found["queue"], "paused": found["pauseReason"],
        "orphaned": found["orphanedReason"], "reauthorise": found["unauthorisedReason"],
    }  # fmt: skip
    for name, value in facts.items():
        if value is not None:
            line(f"  {name:<12}{brief(value, 100)}")


def _show_source(found: Mapping[str, Any], form: str) -> None:
    import sys

    from timebell.cli.output import Format, emit_one, paint
    from timebell.cli.output import show as line

    if form != Format.TABLE:
        emit_one(found, form)
        return
    line(f"{paint(found['name'], 'bold', sys.stdout)}  {_source_state(found)}")
    for name, value in (
        ("kind", found["kind"]), ("hook", found["hook"]), ("orphaned", found["orphanedReason"]),
        ("fault", found["fault"]),
    ):  # fmt: skip
        if value is not None:
            line(f"  {name:<12}{value}")


def _watch(remote: Any, begun: dict[str, Any]) -> None:
    from timebell.cli.operations import watched

    watched(remote, begun)


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
