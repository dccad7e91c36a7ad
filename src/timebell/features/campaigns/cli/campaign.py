"""`timebell campaign ...`: push campaigns of a server."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option, yes_option
from timebell.cli.output import FAILED
from timebell.cli.schedule import server_client

if TYPE_CHECKING:
    from timebell.cli.remote import ServerClient

campaign = Group("Campaigns: one push to many devices.")
campaign_id_argument = click.argument("id", metavar="ID", help="Campaign id.")
reason_option = click.option("--reason", metavar="TEXT", help="Reason, shown to other users.")
WATCH_END_STATES = ("completed", "partly_sent", "failed", "stopped", "paused")
POLL_INTERVAL_SECONDS = 1.0  # of the status, with --watch
RECONNECT_INTERVAL_SECONDS = 2.0
MAX_OUTAGE_SECONDS = 600.0  # of the server, with --watch


@campaign.command()
@click.argument("message", required=False, metavar="[[JSON]]", help="Body of POST /campaigns, or @file; - for stdin.")
@click.option("--title", metavar="TEXT")
@click.option("--body", metavar="TEXT")
@click.option("--data", metavar="JSON", help="Data for the app.")
@click.option(
    "--filter", "filters", multiple=True, metavar="NAME=VALUE", help="Recipients, e.g. platform=ios; repeatable."
)
@click.option("--at", metavar="TIME", help="Send time.  [default: now]")
@click.option("--timezone", "--tz", metavar="ZONE")
@click.option("--cron", metavar="EXPR", help="Send repeatedly; requires --name.")
@click.option("--recipient-zones", is_flag=True, help="The times of --cron are local times of each recipient.")
@click.option("--name", metavar="NAME")
@output_option
def create(
    message: str | None,
    title: str | None,
    body: str | None,
    data: str | None,
    filters: tuple[str, ...],
    at: str | None,
    timezone: str | None,
    cron: str | None,
    recipient_zones: bool,
    name: str | None,
    output: str | None,
) -> None:
    """Create a campaign that is sent now, at a time, or by a cron expression."""
    from timebell.cli.inputs import parse_json, parse_pairs

    remote = server_client(output)
    fields = parse_json("@-" if message == "-" else message, "campaign") or {}
    flags = {
        "title": title, "body": body, "data": parse_json(data, "--data"), "sendAt": at, "timezone": timezone,
        "cronExpression": cron, "name": name, "inRecipientZones": recipient_zones or None,
    }  # fmt: skip
    fields |= {field: value for field, value in flags.items() if value is not None}
    if filters:
        fields["filters"] = {**fields.get("filters", {}), **parse_filters(parse_pairs(filters, "--filter") or {})}
    _print_campaign(remote.request("POST", "/campaigns", fields), remote.settings.output)


@campaign.command("list")
@click.option("--state", metavar="STATE", help="pending, running, paused, ...")
@click.option("--archived", is_flag=True, help="Only archived campaigns, instead of the others.")
@click.option("--since", metavar="T", help="Send time since: 2h, 1d, or RFC 3339.")
@click.option("--until", metavar="T", help="Send time before: 2h, 1d, or RFC 3339.")
@click.option("--limit", type=int, default=50, show_default=True, metavar="N")
@output_option
def list_(
    state: str | None, archived: bool, since: str | None, until: str | None, limit: int, output: str | None
) -> None:
    """List campaigns, newest first."""
    from timebell.cli.inputs import parse_time_ago, print_list

    remote = server_client(output)
    period = {"from": since and parse_time_ago(since), "to": until and parse_time_ago(until)}
    rows = remote.list_items("/campaigns", {"state": state, "archived": archived, **period}, limit)
    print_list(rows, remote.settings.output, ("ID", "NAME", "STATE", "SEND AT", "SENT"), lambda row: (
        row["id"], row["name"] or "-", row["state"], row["sendAt"], f"{row['totalSent']:,}",
    ))  # fmt: skip


@campaign.command()
@campaign_id_argument
@click.option("--watch", "-w", is_flag=True, help="Wait until it finishes or pauses.")
@output_option
def status(id: str, watch: bool, output: str | None) -> None:
    """Show the progress of a campaign; with --watch exit 1 if it did not complete.

    --watch survives a restart of the server.
    """
    from threading import Event

    from timebell.cli.output import print_message

    remote = server_client(output)
    record = remote.request("GET", f"/campaigns/{id}")
    while watch and record["state"] not in WATCH_END_STATES:
        print_message(_format_progress(record))
        Event().wait(POLL_INTERVAL_SECONDS)
        record = _request_patiently(remote, f"/campaigns/{id}")
    _print_campaign(record, remote.settings.output)
    if watch and record["state"] != "completed":
        raise click.exceptions.Exit(FAILED)


def _request_patiently(remote: ServerClient, path: str) -> dict[str, Any]:
    """GET a record, and repeat it while the server restarts. Raises ServerUnreachable, ServerError in the end."""
    from threading import Event

    from timebell.cli.output import print_message
    from timebell.errors import ServerError, ServerUnreachable

    for failures in itertools.count(1):
        try:
            record: dict[str, Any] = remote.request("GET", path)
            return record
        except (ServerUnreachable, ServerError) as error:
            if failures * RECONNECT_INTERVAL_SECONDS >= MAX_OUTAGE_SECONDS:
                raise
            if failures == 1:
                print_message(f"{error} Trying again.")
        Event().wait(RECONNECT_INTERVAL_SECONDS)
    raise AssertionError


@campaign.command()
@campaign_id_argument
@click.option("--user", metavar="ID", help="As the first device of this user gets it.  [default: an example]")
@click.option("--variant", metavar="NAME", help="This variant of an A/B test.  [default: that of the user]")
@output_option
def preview(id: str, user: str | None, variant: str | None, output: str | None) -> None:
    """Show the JSON sent to a device, and the send time of each time zone."""
    import json

    from timebell.cli.output import Format, print_record
    from timebell.cli.output import print_data as line

    remote = server_client(output)
    params = {name: value for name, value in (("userId", user), ("variant", variant)) if value is not None}
    request = remote.request("GET", f"/campaigns/{id}/preview", params=params)["request"]
    plan = remote.request("GET", f"/campaigns/{id}/timetable")
    if remote.settings.output != Format.TABLE:
        print_record({"request": request, "timetable": plan}, remote.settings.output)
        return
    line(json.dumps(request, indent=2, ensure_ascii=False))
    for row in plan["zones"]:
        line(f"{row['first']} to {row['last']}  {row['timezone']:<24} {row['recipients']:>12,}")
    for row in plan["excluded"]:
        line(f"left out ({row['why']})  {row['timezone']:<24} {row['recipients']:>12,}")


@campaign.command("test")
@campaign_id_argument
@click.option("--token", multiple=True, metavar="TOKEN", help="Device token; repeatable.")
@click.option("--user", multiple=True, metavar="ID", help="All devices of a user; repeatable.")
@output_option
def send_test(id: str, token: tuple[str, ...], user: tuple[str, ...], output: str | None) -> None:
    """Send a campaign now, only to test devices."""
    from timebell.cli.output import Format, print_record
    from timebell.cli.output import print_data as line

    remote = server_client(output)
    sent = remote.request("POST", f"/campaigns/{id}/test", {"tokens": token, "userIds": user})
    if remote.settings.output != Format.TABLE:
        print_record(sent, remote.settings.output)
    else:
        line(f"Sent by job {sent['jobId']}: timebell job show {sent['jobId']}")


@campaign.command()
@campaign_id_argument
@output_option
def start(id: str, output: str | None) -> None:
    """Start a campaign now, regardless of its send time."""
    _post_action(id, "start", None, output)


@campaign.command()
@campaign_id_argument
@reason_option
@output_option
def pause(id: str, reason: str | None, output: str | None) -> None:
    """Pause a campaign: no further chunk is started, and its position is kept."""
    _post_action(id, "pause", {"reason": reason}, output)


@campaign.command()
@campaign_id_argument
@output_option
def resume(id: str, output: str | None) -> None:
    """Resume a paused campaign at its position."""
    _post_action(id, "resume", None, output)


@campaign.command()
@campaign_id_argument
@output_option
def approve(id: str, output: str | None) -> None:
    """Approve and resume a campaign that waits for approval; requires the role admin."""
    _post_action(id, "approve", None, output)


@campaign.command()
@campaign_id_argument
@reason_option
@yes_option
@output_option
def stop(id: str, reason: str | None, yes: bool, output: str | None) -> None:
    """Stop a campaign permanently; no further recipient is sent to."""
    from timebell.cli.inputs import confirm

    if not confirm(f"Permanently stop campaign {id}?", yes=yes):
        raise click.exceptions.Exit(FAILED)
    _post_action(id, "stop", {"reason": reason}, output)


@campaign.command()
@campaign_id_argument
@output_option
def archive(id: str, output: str | None) -> None:
    """Hide a campaign that has ended from lists."""
    _post_action(id, "archive", None, output)


@campaign.command()
@campaign_id_argument
@output_option
def unarchive(id: str, output: str | None) -> None:
    """Show an archived campaign in lists again."""
    _post_action(id, "unarchive", None, output)


@campaign.command()
@campaign_id_argument
@yes_option
def delete(id: str, yes: bool) -> None:
    """Delete a campaign that is not being sent, and its results."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message

    if not confirm(f"Delete campaign {id} and its results?", yes=yes):
        raise click.exceptions.Exit(FAILED)
    server_client(None).request("DELETE", f"/campaigns/{id}")
    print_message(f"Deleted campaign {id}.")


@campaign.command()
@campaign_id_argument
@click.option("--unknown", is_flag=True, help="Also retry recipients with an unknown outcome.")
@output_option
def retry(id: str, unknown: bool, output: str | None) -> None:
    """Retry recipients that were not reached; never those whose message was accepted."""
    _post_action(id, "retry", {"unknown": unknown}, output)


@campaign.command()
@campaign_id_argument
@click.option("--format", "file_type", type=click.Choice(["csv", "ndjson"]), default="csv", show_default=True)
@click.option("--state", metavar="STATE", help="accepted, refused, unknown, ...  [default: all]")
def export(id: str, file_type: str, state: str | None) -> None:
    """Print all recipients with their results: timebell campaign export ID > recipients.csv."""
    import sys

    for block in server_client().download(f"/campaigns/{id}/deliveries/export", {"format": file_type, "state": state}):
        sys.stdout.buffer.write(block)
    sys.stdout.flush()


def _post_action(id_: str, action: str, body: Any, output: Any) -> None:
    remote = server_client(output)
    _print_campaign(remote.request("POST", f"/campaigns/{id_}/{action}", body), remote.settings.output)


def parse_filters(filters: Mapping[str, str]) -> dict[str, Any]:
    """Convert `--filter` flags: digits, true/false and JSON are typed; an unknown name is a device attribute."""
    from timebell.features.campaigns.model.filters import FILTER_NAMES
    from timebell.model.payload import read_json

    parsed: dict[str, Any] = {}
    for name, value in filters.items():
        typed = int(value) if value.isdecimal() else {"true": True, "false": False}.get(value, value)
        if value.startswith(("[", "{")):
            typed = read_json(value.encode(), name)
        if name in FILTER_NAMES:
            parsed[name] = typed
        else:
            parsed.setdefault("attributes", {})[name] = typed
    return parsed


def _format_progress(record: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count:,} {state}" for state, count in record["counts"].items() if count)
    total = "" if record["expected"] is None else f" of {record['expected']:,}"
    return f"{record['state']}  {counts or 'none sent yet'}{total}{_format_forecast(record.get('forecast') or {})}"


def _format_forecast(forecast: Mapping[str, Any]) -> str:
    text = ""
    if forecast.get("waitingUntil"):
        zone = f" for {forecast['waitingForZone']}" if forecast["waitingForZone"] else ""
        text += f", waiting until {forecast['waitingUntil']}{zone}"
    elif forecast.get("rate"):
        text += f", {forecast['rate']:,.{0 if forecast['rate'] >= 1 else 1}f} per second"
    return f"{text}, ends about {forecast['endsAt']}" if forecast.get("endsAt") else text


def _print_campaign(record: Mapping[str, Any], output_format: str) -> None:
    import sys

    from timebell.cli.inputs import shorten
    from timebell.cli.output import Format, colorize, print_record
    from timebell.cli.output import print_data as line

    if output_format != Format.TABLE:
        print_record(record, output_format)
        return
    line(f"{colorize(record['id'], 'bold', sys.stdout)}  {_format_progress(record)}")
    facts = {
        "name": record["name"], "why": record["reason"], "title": record.get("title"),
        "send at": f"{record['sendAt']} ({record['timezone']})", "filters": record.get("filters") or None,
        "left out": ", ".join(f"{count:,} {why}" for why, count in record["excluded"].items()) or None,
        "errors": ", ".join(f"{count:,} {code}" for code, count in record["errors"].items()) or None,
        "maybe twice": f"{twice:,} recipients" if (twice := record["possibleDuplicates"]) else None,
        "started": record["actualSendStart"], "ended": record["actualSendEnd"], "schedule": record["scheduleId"],
    }  # fmt: skip
    for name, value in facts.items():
        if value is not None:
            line(f"  {name:<12}{shorten(value, 100)}")
