"""`timebell release`: list, release or discard the backlog of an outage or a restore."""

from __future__ import annotations

import click

from timebell.cli.options import output_option, yes_option
from timebell.cli.output import Format, print_message, print_record
from timebell.cli.schedule import server_client


@click.command("release")
@click.argument("schedule", required=False, help="Only this schedule; name or id.")
@click.option("--release", is_flag=True, help="Run the backlog.")
@click.option("--discard", is_flag=True, help="Cancel the backlog.")
@yes_option
@output_option
def release(schedule: str | None, release: bool, discard: bool, yes: bool, output: str | None) -> None:
    """Show the backlog after an outage or a restore, or release or discard it."""
    from timebell.cli.inputs import confirm, format_relative_time, print_list

    if release and discard:
        raise click.BadParameter("--release and --discard exclude each other.")
    remote = server_client(output)
    output_format = remote.settings.output
    id_ = None if schedule is None else remote.get_schedule(schedule)["id"]
    rows = [row for row in remote.request("GET", "/backlogs")["items"] if id_ in (None, row["scheduleId"])]
    if not (release or discard):
        print_list(rows, output_format, ("SCHEDULE", "TOPIC", "JOBS", "FIRST", "LAST"), lambda row: (
            row["schedule"] or row["scheduleId"] or "(no schedule)", row["topic"], f"{row['jobs']:,}",
            format_relative_time(row["firstAt"], "UTC"), format_relative_time(row["lastAt"], "UTC"),
        ))  # fmt: skip
        return
    verb = "release" if release else "discard"
    count = sum(row["jobs"] for row in rows)
    if count and not confirm(f"{verb.title()} {count:,} jobs of {len(rows):,} schedules?", yes=yes):
        return
    result = remote.request("POST", f"/backlogs/{verb}", {"scheduleId": id_})
    if output_format != Format.TABLE:
        print_record(result, output_format)
    else:
        print_message(f"{result['jobs']:,} jobs {verb}d.")
