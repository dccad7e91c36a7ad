"""`timebell segment ...`: filters with a name, for the audiences of campaigns."""

from __future__ import annotations

from urllib.parse import quote

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option, yes_option
from timebell.cli.output import FAILED
from timebell.cli.schedule import server_client

segment = Group("Segments: filters of devices with a name.")
name_argument = click.argument("name", metavar="NAME", help="Name of the segment.")


@segment.command("set")
@name_argument
@click.option(
    "--filter", "filters", multiple=True, required=True, metavar="NAME=VALUE",
    help="Condition, e.g. platform=ios; repeatable.",
)  # fmt: skip
@output_option
def set_(name: str, filters: tuple[str, ...], output: str | None) -> None:
    """Create a segment, or change its filters."""
    from timebell.cli.inputs import parse_pairs
    from timebell.cli.output import print_record
    from timebell.features.campaigns.cli.campaign import parse_filters

    remote = server_client(output)
    body = {"filters": parse_filters(parse_pairs(filters, "--filter") or {})}
    print_record(remote.request("PUT", f"/segments/{quote(name, safe='')}", body), remote.settings.output)


@segment.command("list")
@click.option("--limit", type=int, default=50, show_default=True, metavar="N")
@output_option
def list_(limit: int, output: str | None) -> None:
    """List segments by name."""
    import json

    from timebell.cli.inputs import print_list, shorten

    remote = server_client(output)
    rows = remote.list_items("/segments", {}, limit)
    print_list(rows, remote.settings.output, ("NAME", "FILTERS"), lambda row: (
        row["name"], shorten(json.dumps(row["filters"], ensure_ascii=False), 80),
    ))  # fmt: skip


@segment.command()
@name_argument
@output_option
def show(name: str, output: str | None) -> None:
    """Show a segment and the number of its devices."""
    from timebell.cli.output import print_record

    remote = server_client(output)
    print_record(remote.request("GET", f"/segments/{quote(name, safe='')}"), remote.settings.output)


@segment.command()
@name_argument
@yes_option
def delete(name: str, yes: bool) -> None:
    """Delete a segment. Its devices are kept."""
    from timebell.cli.inputs import confirm
    from timebell.cli.output import print_message

    if not confirm(f"Delete segment {name}?", yes=yes):
        raise click.exceptions.Exit(FAILED)
    server_client(None).request("DELETE", f"/segments/{quote(name, safe='')}")
    print_message(f"Deleted segment {name}.")
