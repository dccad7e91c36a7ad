"""`timebell dead ...`: dead letters of a server."""

from __future__ import annotations

from typing import Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import Format
from timebell.cli.schedule import Output, Yes, server_client

dead = click_signatures.Group("Dead letters: jobs that failed permanently.")
Topic = Annotated[str | None, click_signatures.Option(help="Only jobs of this topic.")]
ErrorCode = Annotated[str | None, click_signatures.Option("--error", help="Only jobs with this error code.")]
Schedule = Annotated[str | None, click_signatures.Option(help="Only jobs of this schedule; name or id.")]


def _filter_params(remote: Any, topic: str | None, error: str | None, schedule: str | None) -> dict[str, Any]:
    params = {"topic": topic, "errorCode": error, "scheduleId": schedule and remote.get_schedule(schedule)["id"]}
    return {name: value for name, value in params.items() if value is not None}


@dead.command("list")
def list_(
    topic: Topic = None,
    error: ErrorCode = None,
    schedule: Schedule = None,
    group: Annotated[
        str | None,
        click_signatures.Option("--group-by", metavar="topic|error", help="Show counts instead of single jobs."),
    ] = None,
    limit: Annotated[int, click_signatures.Option(min=1, help="Maximum number of rows.")] = 50,
    output: Output = None,
) -> None:
    """List dead letters, newest first."""
    from timebell.cli.inputs import format_relative_time, print_list, shorten

    remote = server_client(output)
    params = _filter_params(remote, topic, error, schedule)
    form = remote.settings.output
    if group is not None:
        groups = remote.request("GET", "/dead-letters", params={**params, "groupBy": group})["items"]
        print_list(groups, form, ("COUNT", group.upper(), "LAST", "EXAMPLE"), lambda row: (
            f"{row['count']:,}", str(row[group]), format_relative_time(row["lastFailedAt"], "UTC"),
            shorten(row["errorMessage"] or ""),
        ))  # fmt: skip
        return
    rows = remote.list_items("/dead-letters", params, limit)
    print_list(rows, form, ("ID", "TOPIC", "FAILED", "ATTEMPTS", "ERROR"), lambda row: (
        row["id"], row["topic"], format_relative_time(row["failedAt"], row["timezone"]), str(row["attemptsMade"]),
        shorten(row["errorMessage"] or ""),
    ))  # fmt: skip


@dead.command()
def show(id_: Annotated[str, click_signatures.Argument(metavar="JOB", help="Job id.")], output: Output = None) -> None:
    """Show a dead letter with its attempts."""
    from timebell.cli.job_views import print_job

    remote = server_client(output)
    print_job(remote.request("GET", f"/jobs/{id_}"), remote.settings.output)


@dead.command()
def retry(
    topic: Topic = None,
    error: ErrorCode = None,
    schedule: Schedule = None,
    rate: Annotated[
        float | None, click_signatures.Option(min=0.01, help="Jobs per second.  [default: no limit]")
    ] = None,
    yes: Yes = False,
    output: Output = None,
) -> None:
    """Retry dead letters: same job ids, with a fresh budget of attempts."""
    _start_operation("retry", topic, error, schedule, {} if rate is None else {"rate": rate}, yes, output)


@dead.command()
def discard(
    topic: Topic = None, error: ErrorCode = None, schedule: Schedule = None, yes: Yes = False, output: Output = None
) -> None:
    """Discard dead letters; the jobs remain in the history."""
    _start_operation("discard", topic, error, schedule, {}, yes, output)


def _start_operation(
    action: str, topic: str | None, error: str | None, schedule: str | None, options: dict[str, Any], yes: bool,
    output: Format | None,
) -> None:  # fmt: skip
    from timebell.cli.inputs import confirm
    from timebell.cli.operations import watch_operation

    remote = server_client(output)
    body = {"filter": _filter_params(remote, topic, error, schedule), **options}
    count = remote.request("POST", f"/dead-letters/{action}", {**body, "dryRun": True})["count"]
    if confirm(f"{action.title()} {count:,} dead letters?", yes=yes):
        watch_operation(remote, remote.request("POST", f"/dead-letters/{action}", body))
