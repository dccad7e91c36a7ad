"""`timebell trigger ...` and `timebell source ...`: triggers of a server and the sources of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option, timezone_option, yes_option
from timebell.cli.output import FAILED
from timebell.cli.schedule import (
    condition_option,
    payload_option,
    priority_option,
    queue_option,
    retries_option,
    server_client,
    target_option,
    timeout_option,
)

trigger = Group("Triggers: fire at a date column of external rows.")
source = Group("Sources: external systems with dated rows.")
name_argument = click.argument("name", metavar="NAME", help="Name.")


@trigger.command()
@click.argument("name", metavar="NAME", help="Trigger name.")
@click.option("--source", "source_name", required=True, metavar="NAME", help="Source of the rows.")
@click.option("--column", required=True, metavar="FIELD", help="Column with the time to fire at.")
@click.option("--topic", required=True, metavar="TOPIC", help="Topic of the jobs.")
@click.option("--offset", multiple=True, metavar="-15m|0|+1d", help="Offset from the column; repeatable.")
@timezone_option
@click.option("--zone-column", metavar="FIELD", help="Column with the time zone of the row.")
@click.option("--edge", metavar="start|end", help="Edge of a range that fires.")
@click.option("--recipients", metavar="FIELD", help="Column of recipients; one job each.")
@condition_option
@click.option("--unless", metavar="SQL", help="Skip if this query has a result.")
@click.option("--grace", type=float, metavar="SECONDS", help="Maximum lateness to fire.")
@payload_option
@target_option
@retries_option
@timeout_option
@queue_option
@priority_option
@click.option("--replace", is_flag=True, help="Replace an existing trigger.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the scan.")
@output_option
def create(
    name: str,
    source_name: str,
    column: str,
    topic: str,
    offset: tuple[str, ...],
    timezone: str | None,
    zone_column: str | None,
    edge: str | None,
    recipients: str | None,
    condition: str | None,
    unless: str | None,
    grace: float | None,
    payload: str | None,
    target: str | None,
    retries: int | None,
    timeout: float | None,
    queue: str | None,
    priority: int | None,
    replace: bool,
    no_wait: bool,
    output: str | None,
) -> None:
    """Create a trigger and scan the existing rows."""
    from timebell.cli.inputs import parse_json
    from timebell.cli.schedule import parse_target

    remote = server_client(output)
    body = {
        "source": source_name, "column": column, "topic": topic, "offsets": offset or None, "timezone": timezone,
        "zoneColumn": zone_column, "edge": edge,
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
@output_option
def list_(output: str | None) -> None:
    """List triggers by name."""
    from timebell.cli.inputs import print_list

    remote = server_client(output)
    head = ("NAME", "SOURCE", "FIRES AT", "TOPIC", "STATE")
    print_list(remote.list_items("/triggers"), remote.settings.output, head, lambda row: (
        row["name"], row["source"], f"{row['column']} {', '.join(row['offsets'])}", row["topic"], _trigger_state(row),
    ))  # fmt: skip


@trigger.command()
@name_argument
@output_option
def show(name: str, output: str | None) -> None:
    """Show a trigger."""
    remote = server_client(output)
    _print_trigger(remote.request("GET", f"/triggers/{_quote_segment(name)}"), remote.settings.output)


@trigger.command()
@name_argument
@click.option("--no-wait", is_flag=True, help="Do not wait for the scan.")
@output_option
def scan(name: str, no_wait: bool, output: str | None) -> None:
    """Scan all rows again, and plan missing firings."""
    remote = server_client(output)
    operation = remote.request("POST", f"/triggers/{_quote_segment(name)}/scan")
    if not no_wait:
        _watch_operation(remote, operation)


@trigger.command()
@name_argument
@click.argument("key", metavar="KEY", help="Key of the item.")
@output_option
def item(name: str, key: str, output: str | None) -> None:
    """Show why an item fired, or did not: its firings and its latest jobs."""
    from timebell.cli.output import Format, print_record
    from timebell.cli.output import print_data as line

    remote = server_client(output)
    record = remote.request("GET", f"/triggers/{_quote_segment(name)}/why?item={_quote_segment(key)}")
    if remote.settings.output != Format.TABLE:
        print_record(record, remote.settings.output)
        return
    line(f"{record['key']}  {'deleted' if record['fields'] is None else record['fields']}")
    if record["problem"]:
        line(f"  rejected: {record['problem']}")
    ended = {job["id"] for job in record["jobs"] if job["completedAt"] is not None}
    for firing in record["firings"]:
        if firing["jobId"] not in ended:
            line(f"  {' '.join(filter(None, (firing['offset'], firing['recipient'])))}: {_describe_firing(firing)}")
    for job in record["jobs"]:
        reason = f" ({job['reason']})" if job["reason"] else ""
        line(f"  job {job['id']} for {job['scheduledAt']}: {job['status']}{reason}")


@trigger.command()
@name_argument
@click.argument("key", metavar="KEY", help="Key of the item.")
def why(name: str, key: str) -> None:
    """Explain why an item fired, will fire, or did not."""
    from timebell.cli.output import print_data as line

    path = f"/triggers/{_quote_segment(name)}/why?item={_quote_segment(key)}"
    for sentence in server_client().request("GET", path)["explanation"]:
        line(sentence)


@trigger.command()
@name_argument
@click.option("--from", "from_", required=True, metavar="TIME", help="Begin, e.g. 2027-03-14T00:00Z.")
@click.option("--to", required=True, metavar="TIME", help="End; the last minute is excluded.")
@output_option
def audit(name: str, from_: str, to: str, output: str | None) -> None:
    """Compare the times in the rows with the recorded firings; exits 7 if they differ."""
    from timebell.cli.output import DIFFERENT, Format, print_record
    from timebell.cli.output import print_data as line

    remote = server_client(output)
    report = remote.request("GET", f"/triggers/{_quote_segment(name)}/audit", params={"from": from_, "to": to})
    if remote.settings.output != Format.TABLE:
        print_record(report, remote.settings.output)
    else:
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(report["outcomes"].items()))
        line(f"{report['expected']:,} expected: {outcomes or 'none'}; {len(report['differences']):,} differences")
        for each in report["differences"]:
            line(f"  {each['kind']:<10}{each['item']} {each['offset']} {each['recipient'] or ''} {each['at']}")
    if report["differences"]:
        raise click.exceptions.Exit(DIFFERENT)


@trigger.command("not-fired")
@name_argument
@output_option
def not_fired(name: str, output: str | None) -> None:
    """List firings that did not become jobs, with the reason: late, past, unreadable, skipped."""
    from timebell.cli.inputs import print_list

    remote = server_client(output)
    rows = remote.list_items(f"/triggers/{_quote_segment(name)}/not-fired")
    head = ("ITEM", "OFFSET", "RECIPIENT", "REASON", "DETAIL", "NOTICED")
    print_list(rows, remote.settings.output, head, lambda row: (
        row["item"], row["offset"], row["recipient"] or "", row["reason"], row["detail"], row["noticedAt"],
    ))  # fmt: skip


@trigger.command()
@name_argument
@click.argument("key", metavar="KEY", help="Key of the item.")
def fire(name: str, key: str) -> None:
    """Fire an item now; what is planned stays planned."""
    from timebell.cli.output import print_data as line

    for job in server_client().request("POST", f"/triggers/{_quote_segment(name)}/fire", {"item": key})["items"]:
        line(job["id"])


@trigger.command()
@name_argument
@click.argument("key", metavar="KEY", help="Key of the item.")
def skip(name: str, key: str) -> None:
    """Skip the planned firings of an item; a new date fires again."""
    from timebell.cli.output import print_data as line

    for firing in server_client().request("POST", f"/triggers/{_quote_segment(name)}/skip", {"item": key})["items"]:
        line(f"{firing['offset']} {firing['recipient'] or ''} {firing['at']}")


@trigger.command()
@name_argument
@click.argument("rows", metavar="ROWS", help="Rows as a JSON list, or @file.")
@output_option
def preview(name: str, rows: str, output: str | None) -> None:
    """Show when given rows would fire; nothing is stored."""
    from timebell.cli.inputs import parse_json
    from timebell.cli.output import Format, print_record
    from timebell.cli.output import print_data as line

    remote = server_client(output)
    result = remote.request("POST", f"/triggers/{_quote_segment(name)}/preview", {"rows": parse_json(rows, "ROWS")})
    if remote.settings.output != Format.TABLE:
        print_record(result, remote.settings.output)
        return
    for number, row in enumerate(result["rows"], 1):
        condition = "" if row["holds"] else "  the condition does not hold now"
        line(f"row {number}: {row['problem'] or 'local times in ' + row['timezone']}{condition}")
        for firing in row["firings"]:
            line(f"  {firing['offset']:<10} {firing['at']}  {firing['recipient'] or ''}")
        if not row["firings"] and row["problem"] is None:
            line("  no date, so nothing fires")


def _describe_firing(firing: Mapping[str, Any]) -> str:
    if firing["jobId"] is not None:
        return f"planned for {firing['at']}"
    if firing["reason"] is not None:
        return f"not fired, {firing['reason']}: {firing['detail']}"
    return "nothing planned" if firing["firedAt"] is None else f"fired for {firing['firedAt']}"


source_argument = click.argument("name", metavar="SOURCE", help="Source of a PostgreSQL table.")
database_option = click.option("--database-url", metavar="URL", help="Database of the table, with its owner as user.")
print_option = click.option("--print", "only_print", is_flag=True, help="Print the SQL for review, and run nothing.")


@trigger.command()
@source_argument
@database_option
@print_option
def install(name: str, database_url: str | None, only_print: bool) -> None:
    """Create the outbox of a source: a table, and triggers that record the keys of changed rows in it."""
    _run_outbox_sql(name, database_url, "install_sql", only_print=only_print)


@trigger.command()
@source_argument
@database_option
@print_option
def uninstall(name: str, database_url: str | None, only_print: bool) -> None:
    """Remove the outbox of a source and its triggers."""
    _run_outbox_sql(name, database_url, "uninstall_sql", only_print=only_print)


def _run_outbox_sql(name: str, database_url: str | None, kind: str, *, only_print: bool) -> None:
    import asyncio

    from timebell.cli.output import print_data, print_message
    from timebell.features.triggers.sources.outbox import run_sql
    from timebell.features.triggers.sources.sql_table import SqlTable
    from timebell.model.target import referenced_secret

    options = server_client().request("GET", f"/sources/{_quote_segment(name)}")["options"]
    if is_secret := referenced_secret(options.get("url")) is not None:
        options = {**options, "url": "postgresql://host/name"}
    sql: str = getattr(SqlTable(options), kind)()
    if only_print:
        print_data(sql.rstrip())
        return
    if database_url is None and is_secret:
        raise click.UsageError("The url of the source is a secret. Specify --database-url, or --print.")
    asyncio.run(run_sql(database_url or options["url"], sql))
    print_message("Done.")


@trigger.command()
@name_argument
@click.option("--reason", help="Reason, shown to other users.")
@output_option
def pause(name: str, reason: str | None, output: str | None) -> None:
    """Pause a trigger: firings that become due are skipped until it is resumed."""
    remote = server_client(output)
    body = None if reason is None else {"reason": reason}
    _print_trigger(remote.request("POST", f"/triggers/{_quote_segment(name)}/pause", body), remote.settings.output)


@trigger.command()
@name_argument
@output_option
def resume(name: str, output: str | None) -> None:
    """Resume a trigger."""
    remote = server_client(output)
    _print_trigger(remote.request("POST", f"/triggers/{_quote_segment(name)}/resume"), remote.settings.output)


@trigger.command()
@name_argument
@yes_option
@output_option
def delete(name: str, yes: bool, output: str | None) -> None:
    """Delete a trigger, and cancel its jobs."""
    from timebell.cli.inputs import confirm

    if not confirm(f"Delete trigger {name}, and cancel its jobs?", yes=yes):
        raise click.exceptions.Exit(FAILED)
    remote = server_client(output)
    _watch_operation(remote, remote.request("DELETE", f"/triggers/{_quote_segment(name)}"))


@source.command("create")
@click.argument("name", metavar="NAME", help="Name that triggers refer to.")
@click.option("--kind", default="webhook", show_default=True, metavar="webhook|sql|monday", help="Kind of the source.")
@click.option("--options", metavar="JSON", help="Options of the kind, e.g. url and table for sql; @file.")
@click.option("--replace", is_flag=True, help="Replace an existing source.")
@click.option("--dry-run", is_flag=True, help="Check the source and show its calls a day; store nothing.")
@output_option
def create_source(
    name: str, kind: str, options: str | None, replace: bool, dry_run: bool, output: str | None
) -> None:  # fmt: skip
    """Create a source: a database that is polled, or a webhook that receives changes."""
    from timebell.cli.inputs import parse_json

    remote = server_client(output)
    body = {"kind": kind, "options": parse_json(options, "--options") or {}}
    if dry_run:
        record = remote.request("PUT", f"/sources/{_quote_segment(name)}", {**body, "dryRun": True})
    elif replace:
        record = remote.request("PUT", f"/sources/{_quote_segment(name)}", body, if_match="*")
    else:
        record = remote.request("POST", "/sources", {"name": name, **body})
    if kind == "monday" and not dry_run:  # only GET returns the hook URL with its token
        record = remote.request("GET", f"/sources/{_quote_segment(name)}")
    _print_source(record, remote.settings.output)


@source.command("list")
@output_option
def list_sources(output: str | None) -> None:
    """List sources by name."""
    from timebell.cli.inputs import print_list

    remote = server_client(output)
    print_list(remote.list_items("/sources"), remote.settings.output, ("NAME", "KIND", "STATE", "HOOK"), lambda row: (
        row["name"], row["kind"], _source_state(row), row["hook"],
    ))  # fmt: skip


@source.command("show")
@name_argument
@output_option
def show_source(name: str, output: str | None) -> None:
    """Show a source."""
    remote = server_client(output)
    _print_source(remote.request("GET", f"/sources/{_quote_segment(name)}"), remote.settings.output)


@source.command("items")
@name_argument
@click.option("--rejected", is_flag=True, help="Only rows that cannot be used, with the reason.")
@output_option
def items(name: str, rejected: bool, output: str | None) -> None:
    """List the rows of a source by key, in their last known version."""
    from timebell.cli.inputs import print_list, shorten

    remote = server_client(output)
    rows = remote.list_items(f"/sources/{_quote_segment(name)}/items{'?rejected=true' if rejected else ''}")
    print_list(rows, remote.settings.output, ("KEY", "VERSION", "PROBLEM", "FIELDS"), lambda row: (
        row["key"], str(row["version"]), shorten(row["problem"] or "", 60),
        "deleted" if row["fields"] is None else shorten(row["fields"]),
    ))  # fmt: skip


@source.command("delete")
@name_argument
@yes_option
def delete_source(name: str, yes: bool) -> None:
    """Delete a source without triggers, and its rows."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message

    if not confirm(f"Delete source {name}?", yes=yes):
        raise click.exceptions.Exit(FAILED)
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
        "timezone": record["timezone"], "zone column": record["zoneColumn"],
        "edge": None if record["edge"] == "start" else record["edge"],
        "recipients": record["recipients"], "condition": record["condition"] or None,
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
        ("kind", record["kind"]), ("hook", record["hook"]), ("calls", describe_calls(record["calls"])),
        ("orphaned", record["orphanedReason"]),
        ("error", record["error"]),
    ):  # fmt: skip
        if value is not None:
            line(f"  {name:<12}{value}")


def describe_calls(calls: Mapping[str, Any] | None) -> str | None:
    """Describe the calls a day of a source whose API limits them."""
    if calls is None:
        return None
    return (
        f"{calls['fullReads']:,} of {calls['limit']:,} a day for full reads (per 500 items, every"
        f" {calls['intervalSeconds']:g} s); the others when items change or are due"
    )


def _watch_operation(remote: Any, operation: dict[str, Any]) -> None:
    from timebell.cli.operations import watch_operation

    watch_operation(remote, operation)


def _quote_segment(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
