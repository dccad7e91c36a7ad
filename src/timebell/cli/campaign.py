"""`timebell campaign ...`: a push to many, of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import FAILED
from timebell.cli.schedule import Output, Yes, remote_of

campaign = click_signatures.Group("Campaigns: a push to many devices.")
Named = Annotated[str, click_signatures.Argument(metavar="ID", help="Its id.")]
Why = Annotated[str | None, click_signatures.Option("--reason", metavar="TEXT", help="Why, for the others.")]
OVER = ("completed", "stopped", "paused")
WATCHED = 1.0  # seconds between two looks


@campaign.command()
def create(
    message: Annotated[
        str | None,
        click_signatures.Argument(metavar="[JSON]", help="A body of POST /campaigns, or @file; - for stdin."),
    ] = None,
    title: Annotated[str | None, click_signatures.Option(metavar="TEXT")] = None,
    body: Annotated[str | None, click_signatures.Option(metavar="TEXT")] = None,
    data: Annotated[str | None, click_signatures.Option(metavar="JSON", help="What the app reads.")] = None,
    filters: Annotated[
        list[str] | None, click_signatures.Option("--filter", metavar="NAME=VALUE", help="Who: platform=ios; several.")
    ] = None,
    at: Annotated[str | None, click_signatures.Option(metavar="TIME", help="When.  [default: now]")] = None,
    timezone: Annotated[str | None, click_signatures.Option("--timezone", "--tz", metavar="ZONE")] = None,
    cron: Annotated[str | None, click_signatures.Option(metavar="EXPR", help="Again and again; needs --name.")] = None,
    name: Annotated[str | None, click_signatures.Option(metavar="NAME")] = None,
    output: Output = None,
) -> None:
    """Make a campaign, to be sent now, at a time, or by a cron expression."""
    from timebell.cli.inputs import json_of, pairs

    remote = remote_of(output)
    given = json_of("@-" if message == "-" else message, "campaign") or {}
    flags = {
        "title": title, "body": body, "data": json_of(data, "--data"), "sendAt": at, "timezone": timezone,
        "cronExpression": cron, "name": name,
    }  # fmt: skip
    given |= {field: value for field, value in flags.items() if value is not None}
    if filters:
        given["filters"] = {**given.get("filters", {}), **_typed(pairs(filters, "--filter") or {})}
    _show(remote.ask("POST", "/campaigns", given), remote.settings.output)


@campaign.command("list")
def list_(
    state: Annotated[str | None, click_signatures.Option(metavar="STATE", help="pending, running, paused, ...")] = None,
    limit: Annotated[int, click_signatures.Option(metavar="N")] = 50,
    output: Output = None,
) -> None:
    """List campaigns, newest first."""
    from timebell.cli.inputs import listed

    remote = remote_of(output)
    rows = remote.pages("/campaigns", {"state": state}, limit)
    listed(rows, remote.settings.output, ("ID", "NAME", "STATE", "SEND AT", "SENT"), lambda row: (
        row["id"], row["name"] or "-", row["state"], row["sendAt"], f"{row['totalSent']:,}",
    ))  # fmt: skip


@campaign.command()
def status(
    id: Named,
    watch: Annotated[bool, click_signatures.Option("--watch", "-w", help="Until it is over or pauses.")] = False,
    output: Output = None,
) -> None:
    """Show how far it is; with --watch exit 1 if it did not complete."""
    from threading import Event

    from timebell.cli.output import say

    remote = remote_of(output)
    found = remote.ask("GET", f"/campaigns/{id}")
    while watch and found["state"] not in OVER:
        say(_counts(found))
        Event().wait(WATCHED)
        found = remote.ask("GET", f"/campaigns/{id}")
    _show(found, remote.settings.output)
    if watch and found["state"] != "completed":
        raise click_signatures.Exit(FAILED)


@campaign.command()
def preview(id: Named, output: Output = None) -> None:
    """Show the JSON that a phone gets, and when each time zone gets it."""
    import json

    from timebell.cli.output import Format, emit_one
    from timebell.cli.output import show as line

    remote = remote_of(output)
    request = remote.ask("GET", f"/campaigns/{id}/preview")["request"]
    plan = remote.ask("GET", f"/campaigns/{id}/timetable")
    if remote.settings.output != Format.TABLE:
        emit_one({"request": request, "timetable": plan}, remote.settings.output)
        return
    line(json.dumps(request, indent=2, ensure_ascii=False))
    for row in plan["zones"]:
        line(f"{row['first']} to {row['last']}  {row['timezone']:<24} {row['recipients']:>12,}")
    for row in plan["leftOut"]:
        line(f"left out ({row['why']})  {row['timezone']:<24} {row['recipients']:>12,}")


@campaign.command("test")
def try_(
    id: Named,
    token: Annotated[list[str] | None, click_signatures.Option(metavar="TOKEN", help="A test device; several.")] = None,
    user: Annotated[
        list[str] | None, click_signatures.Option(metavar="ID", help="A person's devices; several.")
    ] = None,
    output: Output = None,
) -> None:
    """Send it now to test devices alone."""
    from timebell.cli.output import Format, emit_one
    from timebell.cli.output import show as line

    remote = remote_of(output)
    made = remote.ask("POST", f"/campaigns/{id}/test", {"tokens": token or [], "userIds": user or []})
    if remote.settings.output != Format.TABLE:
        emit_one(made, remote.settings.output)
    else:
        line(f"Job {made['jobId']} sends it: timebell job show {made['jobId']}")


@campaign.command()
def start(id: Named, output: Output = None) -> None:
    """Send it now, whatever time it was meant for."""
    _steer(id, "start", None, output)


@campaign.command()
def pause(id: Named, reason: Why = None, output: Output = None) -> None:
    """Begin no more chunks; it keeps its cursor."""
    _steer(id, "pause", {"reason": reason}, output)


@campaign.command()
def resume(id: Named, output: Output = None) -> None:
    """Go on where it paused."""
    _steer(id, "resume", None, output)


@campaign.command()
def approve(id: Named, output: Output = None) -> None:
    """Let one go on that a gate stopped; needs the role admin."""
    _steer(id, "approve", None, output)


@campaign.command()
def stop(id: Named, reason: Why = None, yes: Yes = False, output: Output = None) -> None:
    """Send to nobody else, for good."""
    from timebell.cli.inputs import confirmed

    if not confirmed(f"Stop the campaign {id} for good?", yes=yes):
        raise click_signatures.Exit(FAILED)
    _steer(id, "stop", {"reason": reason}, output)


@campaign.command()
def retry(
    id: Named,
    unknown: Annotated[bool, click_signatures.Option("--unknown", help="Also to those of whom nobody knows.")] = False,
    output: Output = None,
) -> None:
    """Once more to those who were not reached; never to those it was accepted for."""
    _steer(id, "retry", {"unknown": unknown}, output)


def _steer(id_: str, verb: str, body: Any, output: Any) -> None:
    remote = remote_of(output)
    _show(remote.ask("POST", f"/campaigns/{id_}/{verb}", body), remote.settings.output)


def _typed(given: Mapping[str, str]) -> dict[str, Any]:
    """Filters of flags: numbers and true as such; a name that no filter has is an attribute's."""
    from timebell.model.audience import FILTERS

    found: dict[str, Any] = {}
    for name, value in given.items():
        typed = int(value) if value.isdecimal() else {"true": True, "false": False}.get(value, value)
        if name in FILTERS:
            found[name] = typed
        else:
            found.setdefault("attributes", {})[name] = typed
    return found


def _counts(found: Mapping[str, Any]) -> str:
    said = ", ".join(f"{count:,} {state}" for state, count in found["counts"].items() if count)
    of = "" if found["expected"] is None else f" of {found['expected']:,}"
    return f"{found['state']}  {said or 'nobody yet'}{of}"


def _show(found: Mapping[str, Any], form: str) -> None:
    import sys

    from timebell.cli.inputs import brief
    from timebell.cli.output import Format, emit_one, paint
    from timebell.cli.output import show as line

    if form != Format.TABLE:
        emit_one(found, form)
        return
    line(f"{paint(found['id'], 'bold', sys.stdout)}  {_counts(found)}")
    facts = {
        "name": found["name"], "why": found["reason"], "title": found.get("title"),
        "send at": f"{found['sendAt']} ({found['timezone']})", "filters": found.get("filters") or None,
        "left out": ", ".join(f"{count:,} {why}" for why, count in found["leftOut"].items()) or None,
        "started": found["actualSendStart"], "ended": found["actualSendEnd"], "schedule": found["scheduleId"],
    }  # fmt: skip
    for name, value in facts.items():
        if value is not None:
            line(f"  {name:<12}{brief(value, 100)}")
