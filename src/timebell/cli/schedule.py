"""`timebell schedule ...`: schedules of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import Format

if TYPE_CHECKING:
    from timebell.cli.remote import Remote

schedule = click_signatures.Group("Schedules: make, look, steer.")
Output = Annotated[Format | None, click_signatures.Option("--output", "-o", help="How to print.  [default: table]")]


def _names(incomplete: str) -> list[str]:
    """What a shell offers for the name of a schedule: none, if the server cannot be asked."""
    from timebell.errors import TimebellError

    try:
        names = [str(one["name"]) for one in remote_of().pages("/schedules", most=500)]
    except TimebellError:
        return []
    return [name for name in names if name.startswith(incomplete)]


Named = Annotated[str, click_signatures.Argument(metavar="SCHEDULE", help="Its name or id.", offer=_names)]
Zone = Annotated[
    str | None, click_signatures.Option("--timezone", "-z", "--tz", metavar="ZONE", help="IANA zone: Asia/Seoul.")
]
Cron = Annotated[str | None, click_signatures.Option(metavar="EXPR", help='Cron, e.g. "0 9 * * 1-5".')]
Every = Annotated[str | None, click_signatures.Option(metavar="D", help="An interval: PT90M, P1D.")]
Rrule = Annotated[str | None, click_signatures.Option(metavar="RULE", help="An RRULE.")]
Topic = Annotated[str | None, click_signatures.Option(metavar="TOPIC", help="What its jobs are about: reports.build.")]
Payload = Annotated[
    str | None, click_signatures.Option(metavar="JSON", help="Given to each job; @file reads it from there.")
]
Overlap = Annotated[
    str | None, click_signatures.Option(metavar="skip|queue|cancel_previous|allow", help="While one still runs.")
]
CatchUp = Annotated[
    str | None, click_signatures.Option("--catch-up", metavar="latest|all|skip", help="What was missed.")
]
Retries = Annotated[int | None, click_signatures.Option(help="Tries after the first.")]
Timeout = Annotated[float | None, click_signatures.Option(metavar="SECONDS", help="Of one try.")]
Queue = Annotated[str | None, click_signatures.Option(help="The queue of its jobs.")]
Priority = Annotated[int | None, click_signatures.Option(help="The lower, the sooner.")]
Condition = Annotated[
    str | None, click_signatures.Option(metavar="JSON", help='[{"field": ..., "op": ..., "value": ...}], or @file.')
]
Unless = Annotated[
    str | None,
    click_signatures.Option(metavar="JSON", help='Not if this finds something: {"source": ..., "query": ...}.'),
]
Target = Annotated[
    str | None, click_signatures.Option(metavar="NAME|URL|JSON", help="Where jobs go, if not to handlers.")
]
Calendar = Annotated[str | None, click_signatures.Option(help="Business days: the name of a calendar.")]
Label = Annotated[list[str] | None, click_signatures.Option(metavar="NAME=VALUE", help="May be given several times.")]
Description = Annotated[str | None, click_signatures.Option(help="What people should know.")]
Yes = Annotated[bool, click_signatures.Option("--yes", "-y", help="Do not ask.")]


def remote_of(output: Format | None = None) -> Remote:
    """The server of the settings, with this way to print."""
    from timebell.cli.remote import Remote
    from timebell.settings import load

    return Remote(load(output=output))


def target_of(text: str | None) -> Any:
    """A target of a flag: a URL, JSON, or a name. Raises InvalidInput."""
    from timebell.cli.inputs import json_of

    if text is not None and text.startswith(("http://", "https://")):
        return {"kind": "http", "url": text}
    return json_of(text, "--target") if text is None or text.startswith(("{", "@")) else text


def _body(**given: Any) -> dict[str, Any]:
    """The fields that flags give, by the names of the API. Raises InvalidInput."""
    from timebell.cli.inputs import json_of, pairs
    from timebell.recurrence import parse_interval
    from timebell.recurrence.instants import format_instant

    body: dict[str, Any] = {}
    if given["every"] is not None:
        every = parse_interval(given["every"])
        body["interval"] = {"every": every.duration}
        if every.anchor is not None:
            body["interval"]["anchor"] = format_instant(every.anchor)
    if given["catch_up"] is not None:
        body["catchUp"] = {"policy": given["catch_up"]}
    plain = {
        "cronExpression": given["cron"], "rrule": given["rrule"], "timezone": given["timezone"],
        "topic": given["topic"], "payload": json_of(given["payload"], "--payload"), "overlapPolicy": given["overlap"],
        "maxRetries": given["retries"], "timeoutSeconds": given["timeout"], "queue": given["queue"],
        "priority": given["priority"], "calendar": given["calendar"], "labels": pairs(given["label"], "--label"),
        "description": given["description"], "condition": json_of(given["condition"], "--condition"),
        "unless": json_of(given["unless"], "--unless"),
        "target": target_of(given["target"]),
    }  # fmt: skip
    return body | {name: value for name, value in plain.items() if value is not None}


@schedule.command()
def create(
    name: Annotated[str, click_signatures.Argument(help="Unique in the tenant.")],
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
    paused: Annotated[bool, click_signatures.Option("--paused", help="Make it, but fire nothing yet.")] = False,
    dry_run: Annotated[bool, click_signatures.Option("--dry-run", help="Show what it would do; make nothing.")] = False,
    output: Output = None,
) -> None:
    """Make a schedule."""
    from timebell.cli.schedule_views import preview, show_one
    from timebell.settings import load

    remote = remote_of(output)
    body = _body(
        topic=topic, cron=cron, every=every, rrule=rrule, timezone=timezone or load().default_timezone,
        payload=payload, overlap=overlap, catch_up=catch_up, retries=retries, timeout=timeout, queue=queue,
        priority=priority, target=target, calendar=calendar, label=label, description=description,
        condition=condition, unless=unless,
    )  # fmt: skip
    body |= {"name": name, "enabled": not paused}
    if dry_run:
        preview(remote.ask("POST", "/schedules/preview", body), remote.settings.output)
        return
    show_one(remote.ask("POST", "/schedules", body), remote.settings.output)


@schedule.command("list")
def list_(
    enabled: Annotated[bool | None, click_signatures.Option("--enabled/--paused", help="Only those.")] = None,
    topic: Topic = None,
    label: Label = None,
    limit: Annotated[int | None, click_signatures.Option(min=1, help="At most so many.")] = None,
    output: Output = None,
) -> None:
    """List schedules, newest first."""
    from timebell.cli.schedule_views import show_list

    remote = remote_of(output)
    params = {"enabled": enabled, "topic": topic, "label": label, "recent": 10}
    show_list(remote.pages("/schedules", params, limit), remote.settings.output)


@schedule.command()
def show(named: Named, output: Output = None) -> None:
    """Show a schedule, its last runs and its next ones."""
    from timebell.cli.schedule_views import show_one

    remote = remote_of(output)
    found = remote.schedule(named)
    runs = remote.ask("GET", f"/schedules/{found['id']}/executions", params={"limit": 5})["items"]
    fires = remote.ask("GET", f"/schedules/{found['id']}/next", params={"count": 5})["items"]
    show_one(found, remote.settings.output, runs, fires)


@schedule.command()
def edit(
    named: Named,
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
    revision: Annotated[
        int | None, click_signatures.Option(help="Only if it is still at this one.  [default: as it is]")
    ] = None,
    output: Output = None,
) -> None:
    """Change some of a schedule. An edit fires nothing and loses nothing."""
    from timebell.cli.schedule_views import show_one
    from timebell.errors import InvalidInput

    remote = remote_of(output)
    patch = _body(
        topic=topic, cron=cron, every=every, rrule=rrule, timezone=timezone, payload=payload, overlap=overlap,
        catch_up=catch_up, retries=retries, timeout=timeout, queue=queue, priority=priority, target=target,
        calendar=calendar, label=label, description=description,
        condition=condition, unless=unless,
    )  # fmt: skip
    if not patch:
        raise InvalidInput("Nothing says what to change.", code="NOTHING_TO_CHANGE", fix='E.g. --cron "0 3 * * *".')
    found = remote.schedule(named)
    match = f'"{revision or found["revision"]}"'
    show_one(remote.ask("PATCH", f"/schedules/{found['id']}", patch, match=match), remote.settings.output)


@schedule.command()
def pause(
    named: Named,
    reason: Annotated[str | None, click_signatures.Option("--reason", "-r", help="For those who ask later.")] = None,
    output: Output = None,
) -> None:
    """Fire nothing until it is resumed."""
    _steer(named, "pause", {} if reason is None else {"reason": reason}, output)


@schedule.command()
def resume(
    named: Named,
    catch_up: Annotated[
        bool, click_signatures.Option("--catch-up", help="Let its catch-up decide on what fell into the pause.")
    ] = False,
    output: Output = None,
) -> None:
    """Fire again; what fell into the pause is skipped."""
    _steer(named, "resume", {"catchUp": catch_up}, output)


@schedule.command("skip-next")
def skip_next(named: Named, output: Output = None) -> None:
    """Leave out the next occurrence."""
    _steer(named, "skip-next", None, output)


def _steer(named: str, verb: str, body: dict[str, Any] | None, output: Format | None) -> None:
    from timebell.cli.schedule_views import show_one

    remote = remote_of(output)
    done = remote.ask("POST", f"/schedules/{remote.schedule(named)['id']}/{verb}", body)
    show_one(done, remote.settings.output)


@schedule.command()
def trigger(named: Named, output: Output = None) -> None:
    """Run it once more, now. It obeys overlap and moves nothing."""
    from timebell.cli.job_views import show_job

    remote = remote_of(output)
    show_job(remote.ask("POST", f"/schedules/{remote.schedule(named)['id']}/trigger"), remote.settings.output)


@schedule.command()
def backfill(
    named: Named,
    start: Annotated[
        str, click_signatures.Option("--from", metavar="T", help="From this time, local in its zone or with Z.")
    ],
    end: Annotated[str, click_signatures.Option("--to", metavar="T", help="Up to this time.")],
    overlap: Overlap = None,
    dry_run: Annotated[bool, click_signatures.Option("--dry-run", help="Only say what would run.")] = False,
    yes: Yes = False,
    output: Output = None,
) -> None:
    """Run what was skipped or never was; never what has run."""
    from timebell.cli.inputs import confirmed
    from timebell.cli.output import emit_one, say
    from timebell.cli.schedule_views import absolute, plan

    remote = remote_of(output)
    found = remote.schedule(named)
    path = f"/schedules/{found['id']}/backfill"
    body = {"from": absolute(start, found["timezone"], "--from"), "to": absolute(end, found["timezone"], "--to")}
    body |= {} if overlap is None else {"overlapPolicy": overlap}
    planned = remote.ask("POST", path, body | {"dryRun": True})
    say(plan(planned, overlap or found["overlapPolicy"], found["timezone"]))
    if dry_run or not planned["instants"]:
        emit_one(planned, remote.settings.output) if remote.settings.output != "table" else None
        return
    if confirmed("Run them?", yes=yes):
        done = remote.ask("POST", path, body)
        emit_one(done, remote.settings.output) if remote.settings.output != "table" else say(f"{done['made']} made.")


@schedule.command()
def history(
    named: Named,
    status: Annotated[list[str] | None, click_signatures.Option(help="Only these: failed, skipped, ...")] = None,
    limit: Annotated[int, click_signatures.Option(min=1, help="At most so many.")] = 20,
    revisions: Annotated[
        bool, click_signatures.Option("--revisions", help="Its revisions instead of its runs.")
    ] = False,
    output: Output = None,
) -> None:
    """Show its runs, newest first."""
    from timebell.cli.schedule_views import show_revisions, show_runs

    remote = remote_of(output)
    found = remote.schedule(named)
    if revisions:
        items = remote.ask("GET", f"/schedules/{found['id']}/revisions")["items"]
        show_revisions(items, remote.settings.output)
        return
    runs = remote.pages(f"/schedules/{found['id']}/executions", {"status": status}, limit)
    show_runs(list(runs), found["timezone"], remote.settings.output)


@schedule.command()
def revert(
    named: Named,
    revision: Annotated[int, click_signatures.Argument(help="As shown by history --revisions.")],
    output: Output = None,
) -> None:
    """Make it again what it was at a revision."""
    _steer(named, "revert", {"revision": revision}, output)


@schedule.command()
def delete(named: Named, yes: Yes = False) -> None:
    """Forget it: jobs that wait are cancelled, history stays."""
    from timebell.cli.inputs import confirmed
    from timebell.cli.output import say

    remote = remote_of()
    found = remote.schedule(named)
    if confirmed(f"Delete {found['name']} ({found['summary']})?", yes=yes):
        swept = remote.ask("DELETE", f"/schedules/{found['id']}", match=f'"{found["revision"]}"')
        say(f"Deleted. {swept['prevented']} waiting jobs were cancelled, {swept['inFlight']} still run.")
