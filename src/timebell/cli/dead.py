"""`timebell dead ...`: jobs that failed for good."""

from __future__ import annotations

from typing import Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import Format
from timebell.cli.schedule import Output, Yes, remote_of

dead = click_signatures.Group("Dead letters: jobs that failed for good.")
Topic = Annotated[str | None, click_signatures.Option(help="Only of this topic.")]
Code = Annotated[str | None, click_signatures.Option("--error", help="Only with this error code.")]
Schedule = Annotated[str | None, click_signatures.Option(help="Only of this schedule, by name or id.")]


def _filter(remote: Any, topic: str | None, error: str | None, schedule: str | None) -> dict[str, Any]:
    given = {"topic": topic, "errorCode": error, "scheduleId": schedule and remote.schedule(schedule)["id"]}
    return {name: value for name, value in given.items() if value is not None}


@dead.command("list")
def list_(
    topic: Topic = None,
    error: Code = None,
    schedule: Schedule = None,
    group: Annotated[
        str | None,
        click_signatures.Option("--group-by", metavar="topic|error", help="Count them instead of listing each."),
    ] = None,
    limit: Annotated[int, click_signatures.Option(min=1, help="At most so many.")] = 50,
    output: Output = None,
) -> None:
    """List dead letters, newest first."""
    from timebell.cli.inputs import brief, listed, sooner

    remote = remote_of(output)
    params = _filter(remote, topic, error, schedule)
    form = remote.settings.output
    if group is not None:
        groups = remote.ask("GET", "/dead-letters", params={**params, "groupBy": group})["items"]
        listed(groups, form, ("COUNT", group.upper(), "LAST", "EXAMPLE"), lambda one: (
            f"{one['count']:,}", str(one[group]), sooner(one["lastFailedAt"], "UTC"), brief(one["errorMessage"] or ""),
        ))  # fmt: skip
        return
    rows = remote.pages("/dead-letters", params, limit)
    listed(rows, form, ("ID", "TOPIC", "FAILED", "ATTEMPTS", "WHY"), lambda row: (
        row["id"], row["topic"], sooner(row["failedAt"], row["timezone"]), str(row["attemptsMade"]),
        brief(row["errorMessage"] or ""),
    ))  # fmt: skip


@dead.command()
def show(id_: Annotated[str, click_signatures.Argument(metavar="JOB", help="Its id.")], output: Output = None) -> None:
    """Show one with its attempts."""
    from timebell.cli.job_views import show_job

    remote = remote_of(output)
    show_job(remote.ask("GET", f"/jobs/{id_}"), remote.settings.output)


@dead.command()
def replay(
    topic: Topic = None,
    error: Code = None,
    schedule: Schedule = None,
    rate: Annotated[
        float | None, click_signatures.Option(min=0.01, help="So many a second.  [default: at once]")
    ] = None,
    yes: Yes = False,
    output: Output = None,
) -> None:
    """Try them again: same ids, fresh budgets of tries."""
    _all("replay", topic, error, schedule, {} if rate is None else {"rate": rate}, yes, output)


@dead.command()
def discard(
    topic: Topic = None, error: Code = None, schedule: Schedule = None, yes: Yes = False, output: Output = None
) -> None:
    """Let them rest: they stay in the history, and are dead letters no more."""
    _all("discard", topic, error, schedule, {}, yes, output)


def _all(
    verb: str, topic: str | None, error: str | None, schedule: str | None, more: dict[str, Any], yes: bool,
    output: Format | None,
) -> None:  # fmt: skip
    from timebell.cli.inputs import confirmed
    from timebell.cli.operations import watched

    remote = remote_of(output)
    body = {"filter": _filter(remote, topic, error, schedule), **more}
    count = remote.ask("POST", f"/dead-letters/{verb}", {**body, "dryRun": True})["count"]
    if confirmed(f"{verb.title()} {count:,} dead letters?", yes=yes):
        watched(remote, remote.ask("POST", f"/dead-letters/{verb}", body))
