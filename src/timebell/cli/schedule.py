"""`timebell schedule ...`: schedules of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option, timezone_option, yes_option

if TYPE_CHECKING:
    from timebell.cli.remote import ServerClient

schedule = Group("Schedules: create, inspect, manage.")


def _complete_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the schedule names a shell can complete to; none if the server does not answer."""
    from timebell.errors import TimebellError

    try:
        names = [str(schedule["name"]) for schedule in server_client().list_items("/schedules", max_items=500)]
    except TimebellError:
        return []
    return [name for name in names if name.startswith(incomplete)]


name_or_id_argument = click.argument(
    "name_or_id", metavar="SCHEDULE", shell_complete=_complete_names, help="Schedule name or id."
)
cron_option = click.option("--cron", metavar="EXPR", help='Cron expression, e.g. "0 9 * * 1-5".')
every_option = click.option("--every", metavar="D", help="Interval, e.g. PT90M or P1D.")
rrule_option = click.option("--rrule", metavar="RULE", help="RRULE (RFC 5545).")
topic_option = click.option("--topic", metavar="TOPIC", help="Topic of the jobs, e.g. reports.build.")
payload_option = click.option("--payload", metavar="JSON", help="Payload of each job; @file reads a file.")
overlap_option = click.option(
    "--overlap", metavar="skip|queue|cancel_previous|allow", help="Policy if the previous job is still live."
)
catch_up_option = click.option("--catch-up", metavar="latest|all|skip", help="Policy for missed occurrences.")
retries_option = click.option("--retries", type=int, help="Attempts after the first.")
timeout_option = click.option("--timeout", type=float, metavar="SECONDS", help="Timeout of one attempt.")
queue_option = click.option("--queue", help="Queue of the jobs.")
priority_option = click.option("--priority", type=int, help="Priority; lower numbers run first.")
condition_option = click.option(
    "--condition", metavar="JSON", help='[{"field": ..., "op": ..., "value": ...}], or @file.'
)
unless_option = click.option(
    "--unless", metavar="JSON", help='Skip if this query has a result: {"source": ..., "query": ...}.'
)
target_option = click.option("--target", metavar="NAME|URL|JSON", help="Destination of jobs.  [default: handlers]")
calendar_option = click.option("--calendar", help="Calendar of business days, by name.")
label_option = click.option("--label", multiple=True, metavar="NAME=VALUE", help="Label; repeatable.")
description_option = click.option("--description", help="Description for other users.")
DEFINITION_OPTIONS = (
    topic_option, cron_option, every_option, rrule_option, timezone_option, payload_option, overlap_option,
    catch_up_option, retries_option, timeout_option, queue_option, priority_option, condition_option, unless_option,
    target_option, calendar_option, label_option, description_option,
)  # fmt: skip
"""The options that define a schedule; `_request_body` takes their values."""


def definition_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add DEFINITION_OPTIONS to a command."""
    for option in reversed(DEFINITION_OPTIONS):
        command = option(command)
    return command


def server_client(output: str | None = None) -> ServerClient:
    """Return a client of the configured server; `output` overrides the output format."""
    from timebell.cli.remote import ServerClient
    from timebell.settings import load

    return ServerClient(load(output=output))


def parse_target(text: str | None) -> Any:
    """Parse the target of a flag: a URL, JSON, or a name. Raises InvalidInput."""
    from timebell.cli.inputs import parse_json

    if text is not None and text.startswith(("http://", "https://")):
        return {"kind": "http", "url": text}
    return parse_json(text, "--target") if text is None or text.startswith(("{", "@")) else text


def _request_body(**flags: Any) -> dict[str, Any]:
    """Convert flags to the fields of the API, without unset flags. Raises InvalidInput."""
    from timebell.cli.inputs import parse_json, parse_pairs
    from timebell.recurrence import parse_interval
    from timebell.recurrence.instants import format_instant

    body: dict[str, Any] = {}
    if flags["every"] is not None:
        interval = parse_interval(flags["every"])
        body["interval"] = {"every": interval.duration}
        if interval.anchor is not None:
            body["interval"]["anchor"] = format_instant(interval.anchor)
    if flags["catch_up"] is not None:
        body["catchUp"] = {"policy": flags["catch_up"]}
    fields = {
        "cronExpression": flags["cron"], "rrule": flags["rrule"], "timezone": flags["timezone"],
        "topic": flags["topic"], "payload": parse_json(flags["payload"], "--payload"),
        "overlapPolicy": flags["overlap"], "maxRetries": flags["retries"], "timeoutSeconds": flags["timeout"],
        "queue": flags["queue"],
        "priority": flags["priority"], "calendar": flags["calendar"], "labels": parse_pairs(flags["label"], "--label"),
        "description": flags["description"], "condition": parse_json(flags["condition"], "--condition"),
        "unless": parse_json(flags["unless"], "--unless"),
        "target": parse_target(flags["target"]),
    }  # fmt: skip
    return body | {name: value for name, value in fields.items() if value is not None}


@schedule.command()
@click.argument("name", help="Schedule name, unique in the tenant.")
@definition_options
@click.option("--paused", is_flag=True, help="Create it paused.")
@click.option("--dry-run", is_flag=True, help="Show its next fires; create nothing.")
@output_option
def create(name: str, paused: bool, dry_run: bool, output: str | None, **definition: Any) -> None:
    """Create a schedule."""
    from timebell.cli.schedule_views import print_preview, print_schedule

    remote = server_client(output)
    if definition["timezone"] is None:
        definition["timezone"] = remote.settings.default_timezone
    body = _request_body(**definition) | {"name": name, "enabled": not paused}
    if dry_run:
        print_preview(remote.request("POST", "/schedules/preview", body), remote.settings.output)
        return
    print_schedule(remote.request("POST", "/schedules", body), remote.settings.output)


@schedule.command("list")
@click.option("--enabled/--paused", default=None, help="Only enabled or only paused schedules.")
@topic_option
@label_option
@click.option("--limit", type=click.IntRange(min=1), help="Maximum number of rows.")
@output_option
def list_(
    enabled: bool | None, topic: str | None, label: tuple[str, ...], limit: int | None, output: str | None
) -> None:
    """List schedules, newest first."""
    from timebell.cli.schedule_views import print_schedules

    remote = server_client(output)
    params = {"enabled": enabled, "topic": topic, "label": label, "recent": 10}
    print_schedules(remote.list_items("/schedules", params, limit), remote.settings.output)


@schedule.command()
@name_or_id_argument
@output_option
def show(name_or_id: str, output: str | None) -> None:
    """Show a schedule with its last runs and next fires."""
    from timebell.cli.schedule_views import print_schedule

    remote = server_client(output)
    schedule = remote.get_schedule(name_or_id)
    runs = remote.request("GET", f"/schedules/{schedule['id']}/executions", params={"limit": 5})["items"]
    fires = remote.request("GET", f"/schedules/{schedule['id']}/next", params={"count": 5})["items"]
    print_schedule(schedule, remote.settings.output, runs, fires)


@schedule.command()
@name_or_id_argument
@definition_options
@click.option("--revision", type=int, help="Only if this is still the current revision.")
@output_option
def edit(name_or_id: str, revision: int | None, output: str | None, **definition: Any) -> None:
    """Change fields of a schedule. An edit neither fires nor loses an occurrence."""
    from timebell.cli.schedule_views import print_schedule
    from timebell.errors import InvalidInput

    remote = server_client(output)
    patch = _request_body(**definition)
    if not patch:
        raise InvalidInput(
            "No field to change was specified.", code="NOTHING_TO_CHANGE", fix='E.g. --cron "0 3 * * *".'
        )
    schedule = remote.get_schedule(name_or_id)
    match = schedule["etag"] if revision in (None, schedule["revision"]) else f'"{revision}"'
    print_schedule(
        remote.request("PATCH", f"/schedules/{schedule['id']}", patch, if_match=match), remote.settings.output
    )


@schedule.command()
@name_or_id_argument
@click.option("--reason", "-r", help="Reason, shown to other users.")
@output_option
def pause(name_or_id: str, reason: str | None, output: str | None) -> None:
    """Pause a schedule until it is resumed."""
    _post_action(name_or_id, "pause", {} if reason is None else {"reason": reason}, output)


@schedule.command()
@name_or_id_argument
@click.option("--catch-up", is_flag=True, help="Apply the catch-up policy to the pause.")
@output_option
def resume(name_or_id: str, catch_up: bool, output: str | None) -> None:
    """Resume a schedule. Occurrences during the pause are skipped, unless --catch-up is set."""
    _post_action(name_or_id, "resume", {"catchUp": catch_up}, output)


@schedule.command("skip-next")
@name_or_id_argument
@output_option
def skip_next(name_or_id: str, output: str | None) -> None:
    """Skip the next occurrence."""
    _post_action(name_or_id, "skip-next", None, output)


def _post_action(name_or_id: str, action: str, body: dict[str, Any] | None, output: str | None) -> None:
    from timebell.cli.schedule_views import print_schedule

    remote = server_client(output)
    updated = remote.request("POST", f"/schedules/{remote.get_schedule(name_or_id)['id']}/{action}", body)
    print_schedule(updated, remote.settings.output)


@schedule.command()
@name_or_id_argument
@output_option
def trigger(name_or_id: str, output: str | None) -> None:
    """Fire a schedule once, now. The overlap policy applies; the next occurrence is unchanged."""
    from timebell.cli.job_views import print_job

    remote = server_client(output)
    print_job(
        remote.request("POST", f"/schedules/{remote.get_schedule(name_or_id)['id']}/trigger"), remote.settings.output
    )


@schedule.command()
@name_or_id_argument
@click.option(
    "--from", "start", required=True, metavar="T", help="Start: local time of the schedule, or with an offset."
)
@click.option("--to", "end", required=True, metavar="T", help="End, in the same format.")
@overlap_option
@click.option("--dry-run", is_flag=True, help="Only show the occurrences.")
@yes_option
@output_option
def backfill(
    name_or_id: str, start: str, end: str, overlap: str | None, dry_run: bool, yes: bool, output: str | None
) -> None:
    """Run past occurrences that were skipped or never created; never one that has run."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message, print_record
    from timebell.cli.schedule_views import describe_backfill, to_utc_text

    remote = server_client(output)
    schedule = remote.get_schedule(name_or_id)
    path = f"/schedules/{schedule['id']}/backfill"
    body = {
        "from": to_utc_text(start, schedule["timezone"], "--from"),
        "to": to_utc_text(end, schedule["timezone"], "--to"),
    }
    body |= {} if overlap is None else {"overlapPolicy": overlap}
    planned = remote.request("POST", path, body | {"dryRun": True})
    print_message(describe_backfill(planned, overlap or schedule["overlapPolicy"], schedule["timezone"]))
    if dry_run or not planned["instants"]:
        print_record(planned, remote.settings.output) if remote.settings.output != "table" else None
        return
    if confirm("Run the backfill?", yes=yes):
        result = remote.request("POST", path, body)
        print_record(result, remote.settings.output) if remote.settings.output != "table" else print_message(
            f"{result['created']} jobs created."
        )


@schedule.command()
@name_or_id_argument
@click.option("--status", multiple=True, help="Only this status: failed, skipped, ...; repeatable.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of rows.")
@click.option("--revisions", is_flag=True, help="List revisions instead of runs.")
@output_option
def history(name_or_id: str, status: tuple[str, ...], limit: int, revisions: bool, output: str | None) -> None:
    """List the runs of a schedule, newest first."""
    from timebell.cli.schedule_views import print_revisions, print_runs

    remote = server_client(output)
    schedule = remote.get_schedule(name_or_id)
    if revisions:
        items = remote.request("GET", f"/schedules/{schedule['id']}/revisions")["items"]
        print_revisions(items, remote.settings.output)
        return
    runs = remote.list_items(f"/schedules/{schedule['id']}/executions", {"status": status}, limit)
    print_runs(list(runs), schedule["timezone"], remote.settings.output)


@schedule.command()
@name_or_id_argument
@click.argument("revision", type=int, help="Revision number, as listed by history --revisions.")
@output_option
def revert(name_or_id: str, revision: int, output: str | None) -> None:
    """Restore a schedule to an earlier revision."""
    _post_action(name_or_id, "revert", {"revision": revision}, output)


@schedule.command()
@yes_option
def prune(yes: bool) -> None:
    """Delete the schedules that were removed from the code of their program."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message
    from timebell.store.schedules.deployments import REMOVED_FROM_CODE

    remote = server_client()
    paused = remote.list_items("/schedules", {"enabled": False})
    removed = [each for each in paused if each["pauseReason"] == REMOVED_FROM_CODE]
    if not removed:
        print_message("No schedule was removed from the code.")
    elif confirm(f"Delete {', '.join(each['name'] for each in removed)}?", yes=yes):
        for each in removed:
            remote.request("DELETE", f"/schedules/{each['id']}", if_match=each["etag"])
        print_message(f"Deleted {len(removed)}.")


@schedule.command()
@name_or_id_argument
@yes_option
def delete(name_or_id: str, yes: bool) -> None:
    """Delete a schedule: pending jobs are cancelled, the history remains."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message

    remote = server_client()
    schedule = remote.get_schedule(name_or_id)
    if confirm(f"Delete {schedule['name']} ({schedule['summary']})?", yes=yes):
        result = remote.request("DELETE", f"/schedules/{schedule['id']}", if_match=schedule["etag"])
        print_message(
            f"Deleted. {result['prevented']} pending jobs were cancelled, {result['inFlight']} are still running."
        )
