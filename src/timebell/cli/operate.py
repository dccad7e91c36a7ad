"""`timebell calendar`, `node`, `config` and `api`: a look at what comes, at who runs, at settings; and raw calls."""

from __future__ import annotations

import json
from typing import Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import Format, emit, show
from timebell.cli.schedule import Output, remote_of

node = click_signatures.Group("Nodes: the processes that run.")
config = click_signatures.Group("Settings.")


@node.command("list")
def node_list(output: Output = None) -> None:
    """List nodes, and who leads since when."""
    from timebell.cli.inputs import listed, sooner

    remote = remote_of(output)
    listed(remote.pages("/nodes"), remote.settings.output, ("NAME", "STATE", "VERSION", "ZONE DATA", "STARTED"),
           lambda one: (
               one["name"], "leads" if one["leader"] else "alive" if one["alive"] else "silent", one["version"],
               one["tzdata"], sooner(one["startedAt"], "UTC"),
           ))  # fmt: skip


@node.command("drain")
def node_drain(named: Annotated[str, click_signatures.Argument(metavar="NODE", help="Its name or id.")]) -> None:
    """Ask a node to finish what runs there, and leave. Within a heartbeat it claims nothing more."""
    from timebell.cli.output import say
    from timebell.errors import NotFound

    remote = remote_of()
    ids = [one["id"] for one in remote.pages("/nodes") if named in (one["id"], one["name"])]
    if not ids:
        raise NotFound(f"There is no node {named!r:.80}.", code="NODE_NOT_FOUND", fix="timebell node list shows them.")
    for id_ in ids:
        remote.ask("POST", f"/nodes/{id_}/drain")
    say(f"{named} was asked to drain.")


def calendar(
    days: Annotated[int, click_signatures.Option(min=1, max=366, help="So many days from now.")] = 7,
    ics: Annotated[bool, click_signatures.Option("--ics", help="As iCalendar, for a calendar program.")] = False,
    topic: Annotated[str | None, click_signatures.Option(help="Only of this topic.")] = None,
    limit: Annotated[int, click_signatures.Option(min=1, max=1000, help="At most so many of a schedule.")] = 100,
    output: Output = None,
) -> None:
    """Show what fires in the coming days, across all schedules."""
    from datetime import timedelta

    from timebell.cli.calendars import ics_of, show_days
    from timebell.cli.inputs import instant
    from timebell.clock import wall

    remote = remote_of(output)
    end = wall() + timedelta(days=days)
    fires: list[dict[str, Any]] = []
    for one in remote.pages("/schedules", {"enabled": True, "topic": topic}):
        if one["nextFireAt"] is None:
            continue
        found = remote.ask("GET", f"/schedules/{one['id']}/next", params={"count": limit})["items"]
        fires += [
            {"schedule": one["name"], "topic": one["topic"], "timezone": one["timezone"], "id": one["id"], **fire}
            for fire in found
            if (instant(fire["utc"]) or end) < end
        ]
    fires.sort(key=lambda fire: (fire["utc"], fire["schedule"]))
    if ics:
        show(ics_of(fires).rstrip())
    elif remote.settings.output != Format.TABLE:
        emit(fires, remote.settings.output)
    else:
        show_days(fires)


@config.command("show")
def config_show(
    origin: Annotated[bool, click_signatures.Option("--origin", help="Where each value comes from.")] = False,
    output: Output = None,
) -> None:
    """Show the settings; secrets are not shown."""
    from timebell.cli.inputs import listed
    from timebell.settings import explained, load

    rows = [
        {"setting": name, "value": value} | ({"origin": where} if origin else {}) for name, value, where in explained()
    ]
    head = ("SETTING", "VALUE", *(("ORIGIN",) if origin else ()))
    listed(rows, load(output=output).output, head, lambda row: [
        "" if value is None else str(value) for value in row.values()
    ])  # fmt: skip


def api(
    method: Annotated[str, click_signatures.Argument(help="GET, POST, ...")],
    path: Annotated[str, click_signatures.Argument(help="Under /api/v1: /schedules?limit=2")],
    data: Annotated[
        str | None, click_signatures.Option("--data", "-d", metavar="JSON", help="The body; @file reads it.")
    ] = None,
    match: Annotated[str | None, click_signatures.Option("--if-match", help="The ETag of what is changed.")] = None,
) -> None:
    """Call the API with your key, and print the answer."""
    from timebell.cli.inputs import json_of

    remote = remote_of()
    path = path.removeprefix("/api/v1")
    found = remote.ask(
        method.upper(), path if path.startswith("/") else f"/{path}", json_of(data, "--data"), match=match
    )
    show(json.dumps(found, indent=2, ensure_ascii=False))
