"""`timebell calendar`, `node`, `config` and `api`: upcoming fires, nodes, settings and raw API calls."""

from __future__ import annotations

import json
from typing import Any

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option
from timebell.cli.output import Format, print_data, print_records
from timebell.cli.schedule import server_client

node = Group("Nodes: engine processes of the server.")
config = Group("Settings.")


@node.command("list")
@output_option
def node_list(output: str | None) -> None:
    """List nodes and their state; one of them is the leader."""
    from timebell.cli.inputs import format_relative_time, print_list

    remote = server_client(output)
    head = ("NAME", "STATE", "VERSION", "ZONE DATA", "STARTED")
    print_list(remote.list_items("/nodes"), remote.settings.output, head, lambda row: (
        row["name"], "leader" if row["leader"] else "alive" if row["alive"] else "unresponsive", row["version"],
        row["tzdata"], format_relative_time(row["startedAt"], "UTC"),
    ))  # fmt: skip


@node.command("drain")
@click.argument("name_or_id", metavar="NODE", help="Node name or id.")
def node_drain(name_or_id: str) -> None:
    """Ask a node to finish its running jobs and exit. It stops claiming jobs within one heartbeat."""
    from timebell.cli.output import print_message
    from timebell.errors import NotFound

    remote = server_client()
    ids = [node["id"] for node in remote.list_items("/nodes") if name_or_id in (node["id"], node["name"])]
    if not ids:
        raise NotFound(f"There is no node {name_or_id!r:.80}.", code="NODE_NOT_FOUND", fix="Try: timebell node list.")
    for id_ in ids:
        remote.request("POST", f"/nodes/{id_}/drain")
    print_message(f"Drain of {name_or_id} requested.")


@click.command()
@click.option("--hours", type=click.IntRange(min=1, max=168), default=24, show_default=True, help="Hours from now.")
@click.option("--limit", type=click.IntRange(min=1, max=500), default=50, show_default=True, help="Schedules.")
@output_option
def upcoming(hours: int, limit: int, output: str | None) -> None:
    """List the schedules that run next, by time, with their number of runs."""
    from datetime import timedelta

    from timebell.cli.inputs import format_relative_time, print_list
    from timebell.cli.output import print_message
    from timebell.clock import system_now

    remote = server_client(output)
    end = (system_now() + timedelta(hours=hours)).isoformat().replace("+00:00", "Z")
    report = remote.request("GET", "/forecast/upcoming", params={"to": end, "limit": limit})
    columns = ("NEXT RUN", "SCHEDULE", "TOPIC", "RUNS")
    print_list(report["items"], remote.settings.output, columns, lambda row: (
        format_relative_time(row["nextAt"], row["timezone"]), row["name"], row["topic"], f"{row['runs']:,}",
    ))  # fmt: skip
    if not report["complete"]:
        print_message(f"More than {limit} schedules run within {hours} h. Use --limit.")


@click.command("calendar")
@click.option(
    "--days", type=click.IntRange(min=1, max=366), default=7, show_default=True, help="Number of days from now."
)
@click.option("--ics", is_flag=True, help="Print iCalendar, for a calendar program.")
@click.option("--topic", help="Only schedules of this topic.")
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=1000),
    default=100,
    show_default=True,
    help="Maximum number of fires per schedule.",
)
@output_option
def calendar(days: int, ics: bool, topic: str | None, limit: int, output: str | None) -> None:
    """Show the fires of the coming days, across all schedules."""
    from datetime import timedelta

    from timebell.cli.calendars import print_days, to_icalendar
    from timebell.cli.inputs import parse_timestamp
    from timebell.clock import system_now

    remote = server_client(output)
    end = system_now() + timedelta(days=days)
    fires: list[dict[str, Any]] = []
    for schedule in remote.list_items("/schedules", {"enabled": True, "topic": topic}):
        if schedule["nextFireAt"] is None:
            continue
        next_fires = remote.request("GET", f"/schedules/{schedule['id']}/next", params={"count": limit})["items"]
        fires += [
            {
                "schedule": schedule["name"],
                "topic": schedule["topic"],
                "timezone": schedule["timezone"],
                "id": schedule["id"],
                **fire,
            }
            for fire in next_fires
            if (parse_timestamp(fire["utc"]) or end) < end
        ]
    fires.sort(key=lambda fire: (fire["utc"], fire["schedule"]))
    if ics:
        print_data(to_icalendar(fires).rstrip())
    elif remote.settings.output != Format.TABLE:
        print_records(fires, remote.settings.output)
    else:
        print_days(fires)


@config.command("show")
@click.option("--origin", is_flag=True, help="Show where each value comes from.")
@output_option
def config_show(origin: bool, output: str | None) -> None:
    """Show the settings, without secrets."""
    from timebell.cli.inputs import print_list
    from timebell.settings import list_with_origins, load

    rows = [
        {"setting": name, "value": value} | ({"origin": where} if origin else {})
        for name, value, where in list_with_origins()
    ]
    head = ("SETTING", "VALUE", *(("ORIGIN",) if origin else ()))
    print_list(rows, load(output=output).output, head, lambda row: [
        "" if value is None else str(value) for value in row.values()
    ])  # fmt: skip


@click.command("api")
@click.argument("method", help="GET, POST, ...")
@click.argument("path", help="Path below /api/v1: /schedules?limit=2")
@click.option("--data", "-d", metavar="JSON", help="Request body; @file reads a file.")
@click.option("--if-match", "match", help="ETag of the object to change.")
def api(method: str, path: str, data: str | None, match: str | None) -> None:
    """Call the API with your key and print the response."""
    from timebell.cli.inputs import parse_json

    remote = server_client()
    path = path.removeprefix("/api/v1")
    response = remote.request(
        method.upper(), path if path.startswith("/") else f"/{path}", parse_json(data, "--data"), if_match=match
    )
    print_data(json.dumps(response, indent=2, ensure_ascii=False))
