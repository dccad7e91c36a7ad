"""`timebell release`: list, release or discard the backlog of an outage or a restore."""

from __future__ import annotations

import click

from timebell.cli.options import output_option, yes_option
from timebell.cli.output import Format, print_message, print_record
from timebell.cli.schedule import server_client


@click.command("release")
@click.argument("schedule", required=False, help="Schedule to release; name or id.")
@click.option("--all", "every", is_flag=True, help="Release the backlog of every schedule.")
@click.option("--discard", is_flag=True, help="Cancel the jobs instead.")
@yes_option
@output_option
def release(schedule: str | None, every: bool, discard: bool, yes: bool, output: str | None) -> None:
    """Run the backlog of an outage or a restore. Without a schedule or --all, show it."""
    from timebell.cli.inputs import confirm, format_relative_time, print_list

    if (schedule is not None) == every and (every or discard):
        raise click.BadParameter("Specify either a schedule or --all.")
    remote = server_client(output)
    output_format = remote.settings.output
    id_ = None if schedule is None else remote.get_schedule(schedule)["id"]
    rows = [row for row in remote.request("GET", "/backlogs")["items"] if id_ in (None, row["scheduleId"])]
    if id_ is None and not every:
        print_list(rows, output_format, ("SCHEDULE", "TOPIC", "JOBS", "FIRST", "LAST"), lambda row: (
            row["schedule"] or row["scheduleId"] or "(no schedule)", row["topic"], f"{row['jobs']:,}",
            format_relative_time(row["firstAt"], "UTC"), format_relative_time(row["lastAt"], "UTC"),
        ))  # fmt: skip
        return
    verb = "discard" if discard else "release"
    count = sum(row["jobs"] for row in rows)
    if count and not confirm(f"{verb.title()} {count:,} jobs of {len(rows):,} schedules?", yes=yes):
        return
    result = remote.request("POST", f"/backlogs/{verb}", {"scheduleId": id_})
    if output_format != Format.TABLE:
        print_record(result, output_format)
    else:
        print_message(f"{result['jobs']:,} jobs {verb}d.")
