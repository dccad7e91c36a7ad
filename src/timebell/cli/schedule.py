"""`timebell schedule ...`: schedules of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import Format

if TYPE_CHECKING:
    from timebell.cli.remote import ServerClient

schedule = click_signatures.Group("Schedules: create, inspect, manage.")
Output = Annotated[Format | None, click_signatures.Option("--output", "-o", help="Output format.  [default: table]")]


def _complete_names(incomplete: str) -> list[str]:
    """Return the schedule names a shell can complete to; none if the server does not answer."""
    from timebell.errors import TimebellError

    try:
        names = [str(schedule["name"]) for schedule in server_client().list_items("/schedules", max_items=500)]
    except TimebellError:
        return []
    return [name for name in names if name.startswith(incomplete)]


NameOrId = Annotated[
    str, click_signatures.Argument(metavar="SCHEDULE", help="Schedule name or id.", complete=_complete_names)
]
Zone = Annotated[
    str | None, click_signatures.Option("--timezone", "-z", "--tz", metavar="ZONE", help="IANA zone: Asia/Seoul.")
]
Cron = Annotated[str | None, click_signatures.Option(metavar="EXPR", help='Cron expression, e.g. "0 9 * * 1-5".')]
Every = Annotated[str | None, click_signatures.Option(metavar="D", help="Interval, e.g. PT90M or P1D.")]
Rrule = Annotated[str | None, click_signatures.Option(metavar="RULE", help="RRULE (RFC 5545).")]
Topic = Annotated[str | None, click_signatures.Option(metavar="TOPIC", help="Topic of the jobs, e.g. reports.build.")]
Payload = Annotated[
    str | None, click_signatures.Option(metavar="JSON", help="Payload of each job; @file reads a file.")
]
Overlap = Annotated[
    str | None,
    click_signatures.Option(
        metavar="skip|queue|cancel_previous|allow", help="Policy if the previous job is still live."
    ),
]
CatchUp = Annotated[
    str | None, click_signatures.Option("--catch-up", metavar="latest|all|skip", help="Policy for missed occurrences.")
]
Retries = Annotated[int | None, click_signatures.Option(help="Attempts after the first.")]
Timeout = Annotated[float | None, click_signatures.Option(metavar="SECONDS", help="Timeout of one attempt.")]
Queue = Annotated[str | None, click_signatures.Option(help="Queue of the jobs.")]
Priority = Annotated[int | None, click_signatures.Option(help="Priority; lower numbers run first.")]
Condition = Annotated[
    str | None, click_signatures.Option(metavar="JSON", help='[{"field": ..., "op": ..., "value": ...}], or @file.')
]
Unless = Annotated[
    str | None,
    click_signatures.Option(metavar="JSON", help='Skip if this query has a result: {"source": ..., "query": ...}.'),
]
Target = Annotated[
    str | None, click_signatures.Option(metavar="NAME|URL|JSON", help="Destination of jobs.  [default: handlers]")
]
Calendar = Annotated[str | None, click_signatures.Option(help="Calendar of business days, by name.")]
Label = Annotated[list[str] | None, click_signatures.Option(metavar="NAME=VALUE", help="Label; repeatable.")]
Description = Annotated[str | None, click_signatures.Option(help="Description for other users.")]
Yes = Annotated[bool, click_signatures.Option("--yes", "-y", help="Do not ask for confirmation.")]


def server_client(output: Format | None = None) -> ServerClient:
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
def create(
    name: Annotated[str, click_signatures.Argument(help="Schedule name, unique in the tenant.")],
    topic: Topic = None,
    cron: Cron = None,
    every: Every = None,
    rrule: Rrule = None,
    timezone: Zone = None,
    payload: Payload = None,
    overlap: Overlap = None,
    catch_up: CatchUp = None,
    retries: Retries = None,
    timeout: Timeout = None,
    queue: Queue = None,
    priority: Priority = None,
    condition: Condition = None,
    unless: Unless = None,
    target: Target = None,
    calendar: Calendar = None,
    label: Label = None,
    description: Description = None,
    paused: Annotated[bool, click_signatures.Option("--paused", help="Create it paused.")] = False,
    dry_run: Annotated[bool, click_signatures.Option("--dry-run", help="Show its next fires; create nothing.")] = False,
    output: Output = None,
) -> None:
    """Create a schedule."""
    from timebell.cli.schedule_views import print_preview, print_schedule
    from timebell.settings import load

    remote = server_client(output)
    body = _request_body(
        topic=topic, cron=cron, every=every, rrule=rrule, timezone=timezone or load().default_timezone,
        payload=payload, overlap=overlap, catch_up=catch_up, retries=retries, timeout=timeout, queue=queue,
        priority=priority, target=target, calendar=calendar, label=label, description=description,
        condition=condition, unless=unless,
    )  # fmt: skip
    body |= {"name": name, "enabled": not paused}
    if dry_run:
        print_preview(remote.request("POST", "/schedules/preview", body), remote.settings.output)
        return
    print_schedule(remote.request("POST", "/schedules", body), remote.settings.output)


@schedule.command("list")
def list_(
    enabled: Annotated[
        bool | None, click_signatures.Option("--enabled/--paused", help="Only enabled or only paused schedules.")
    ] = None,
    topic: Topic = None,
    label: Label = None,
    limit: Annotated[int | None, click_signatures.Option(min=1, help="Maximum number of rows.")] = None,
    output: Output = None,
) -> None:
    """List schedules, newest first."""
    from timebell.cli.schedule_views import print_schedules

    remote = server_client(output)
    params = {"enabled": enabled, "topic": topic, "label": label, "recent": 10}
    print_schedules(remote.list_items("/schedules", params, limit), remote.settings.output)


@schedule.command()
def show(name_or_id: NameOrId, output: Output = None) -> None:
    """Show a schedule with its last runs and next fires."""
    from timebell.cli.schedule_views import print_schedule

    remote = server_client(output)
    schedule = remote.get_schedule(name_or_id)
    runs = remote.request("GET", f"/schedules/{schedule['id']}/executions", params={"limit": 5})["items"]
    fires = remote.request("GET", f"/schedules/{schedule['id']}/next", params={"count": 5})["items"]
    print_schedule(schedule, remote.settings.output, runs, fires)


@schedule.command()
def edit(
    name_or_id: NameOrId,
    topic: Topic = None,
    cron: Cron = None,
    every: Every = None,
    rrule: Rrule = None,
    timezone: Zone = None,
    payload: Payload = None,
    overlap: Overlap = None,
    catch_up: CatchUp = None,
    retries: Retries = None,
    timeout: Timeout = None,
    queue: Queue = None,
    priority: Priority = None,
    condition: Condition = None,
    unless: Unless = None,
    target: Target = None,
    calendar: Calendar = None,
    label: Label = None,
    description: Description = None,
    revision: Annotated[int | None, click_signatures.Option(help="Only if this is still the current revision.")] = None,
    output: Output = None,
) -> None:
    """Change fields of a schedule. An edit neither fires nor loses an occurrence."""
    from timebell.cli.schedule_views import print_schedule
    from timebell.errors import InvalidInput

    remote = server_client(output)
    patch = _request_body(
        topic=topic, cron=cron, every=every, rrule=rrule, timezone=timezone, payload=payload, overlap=overlap,
        catch_up=catch_up, retries=retries, timeout=timeout, queue=queue, priority=priority, target=target,
        calendar=calendar, label=label, description=description,
        condition=condition, unless=unless,
    )  # fmt: skip
    if not patch:
        raise InvalidInput(
            "No field to change was specified.", code="NOTHING_TO_CHANGE", fix='E.g. --cron "0 3 * * *".'
        )
    schedule = remote.get_schedule(name_or_id)
    match = f'"{revision or schedule["revision"]}"'
    print_schedule(
        remote.request("PATCH", f"/schedules/{schedule['id']}", patch, if_match=match), remote.settings.output
    )


@schedule.command()
def pause(
    name_or_id: NameOrId,
    reason: Annotated[
        str | None, click_signatures.Option("--reason", "-r", help="Reason, shown to other users.")
    ] = None,
    output: Output = None,
) -> None:
    """Pause a schedule until it is resumed."""
    _post_action(name_or_id, "pause", {} if reason is None else {"reason": reason}, output)


@schedule.command()
def resume(
    name_or_id: NameOrId,
    catch_up: Annotated[
        bool, click_signatures.Option("--catch-up", help="Apply the catch-up policy to the pause.")
    ] = False,
    output: Output = None,
) -> None:
    """Resume a schedule. Occurrences during the pause are skipped, unless --catch-up is set."""
    _post_action(name_or_id, "resume", {"catchUp": catch_up}, output)


@schedule.command("skip-next")
def skip_next(name_or_id: NameOrId, output: Output = None) -> None:
    """Skip the next occurrence."""
    _post_action(name_or_id, "skip-next", None, output)


def _post_action(name_or_id: str, action: str, body: dict[str, Any] | None, output: Format | None) -> None:
    from timebell.cli.schedule_views import print_schedule

    remote = server_client(output)
    updated = remote.request("POST", f"/schedules/{remote.get_schedule(name_or_id)['id']}/{action}", body)
    print_schedule(updated, remote.settings.output)


@schedule.command()
def trigger(name_or_id: NameOrId, output: Output = None) -> None:
    """Fire a schedule once, now. The overlap policy applies; the next occurrence is unchanged."""
    from timebell.cli.job_views import print_job

    remote = server_client(output)
    print_job(
        remote.request("POST", f"/schedules/{remote.get_schedule(name_or_id)['id']}/trigger"), remote.settings.output
    )


@schedule.command()
def backfill(
    name_or_id: NameOrId,
    start: Annotated[
        str,
        click_signatures.Option("--from", metavar="T", help="Start: local time of the schedule, or with an offset."),
    ],
    end: Annotated[str, click_signatures.Option("--to", metavar="T", help="End, in the same format.")],
    overlap: Overlap = None,
    dry_run: Annotated[bool, click_signatures.Option("--dry-run", help="Only show the occurrences.")] = False,
    yes: Yes = False,
    output: Output = None,
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
def history(
    name_or_id: NameOrId,
    status: Annotated[
        list[str] | None, click_signatures.Option(help="Only this status: failed, skipped, ...; repeatable.")
    ] = None,
    limit: Annotated[int, click_signatures.Option(min=1, help="Maximum number of rows.")] = 20,
    revisions: Annotated[bool, click_signatures.Option("--revisions", help="List revisions instead of runs.")] = False,
    output: Output = None,
) -> None:
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
def revert(
    name_or_id: NameOrId,
    revision: Annotated[int, click_signatures.Argument(help="Revision number, as listed by history --revisions.")],
    output: Output = None,
) -> None:
    """Restore a schedule to an earlier revision."""
    _post_action(name_or_id, "revert", {"revision": revision}, output)


@schedule.command()
def delete(name_or_id: NameOrId, yes: Yes = False) -> None:
    """Delete a schedule: pending jobs are cancelled, the history remains."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message

    remote = server_client()
    schedule = remote.get_schedule(name_or_id)
    if confirm(f"Delete {schedule['name']} ({schedule['summary']})?", yes=yes):
        result = remote.request("DELETE", f"/schedules/{schedule['id']}", if_match=f'"{schedule["revision"]}"')
        print_message(
            f"Deleted. {result['prevented']} pending jobs were cancelled, {result['inFlight']} are still running."
        )
