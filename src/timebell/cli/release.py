"""`timebell recover`: what waits after an outage or a restore, and what is to become of it."""

from __future__ import annotations

from typing import Annotated

from timebell.cli import click_signatures
from timebell.cli.output import Format, emit_one, say
from timebell.cli.schedule import Output, Yes, remote_of


def recover(
    schedule: Annotated[str | None, click_signatures.Argument(help="Only this one, by name or id.")] = None,
    release: Annotated[bool, click_signatures.Option("--release", help="Let what waits run.")] = False,
    discard: Annotated[bool, click_signatures.Option("--discard", help="Cancel what waits.")] = False,
    yes: Yes = False,
    output: Output = None,
) -> None:
    """Show what waits after an outage, or release or discard it."""
    from timebell.cli.inputs import confirmed, listed, sooner

    if release and discard:
        raise click_signatures.BadParameter("--release and --discard are two answers: give one of them.")
    remote = remote_of(output)
    form = remote.settings.output
    id_ = None if schedule is None else remote.schedule(schedule)["id"]
    rows = [one for one in remote.ask("GET", "/backlogs")["items"] if id_ in (None, one["scheduleId"])]
    if not (release or discard):
        listed(rows, form, ("SCHEDULE", "TOPIC", "JOBS", "FIRST", "LAST"), lambda one: (
            one["schedule"] or one["scheduleId"] or "(jobs of none)", one["topic"], f"{one['jobs']:,}",
            sooner(one["firstAt"], "UTC"), sooner(one["lastAt"], "UTC"),
        ))  # fmt: skip
        return
    verb = "release" if release else "discard"
    count = sum(one["jobs"] for one in rows)
    if count and not confirmed(f"{verb.title()} {count:,} jobs of {len(rows):,} schedules?", yes=yes):
        return
    done = remote.ask("POST", f"/backlogs/{verb}", {"scheduleId": id_})
    if form != Format.TABLE:
        emit_one(done, form)
    else:
        say(f"{done['jobs']:,} jobs {verb}d.")
