"""`timebell dead ...`: dead letters of a server."""

from __future__ import annotations

from typing import Any

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option, yes_option
from timebell.cli.schedule import server_client

dead = Group("Dead letters: jobs that failed permanently.")
topic_option = click.option("--topic", help="Only jobs of this topic.")
error_code_option = click.option("--error", help="Only jobs with this error code.")
error_group_option = click.option(
    "--error-group", help="Only jobs with this normalized message; see `--group-by error`."
)
schedule_option = click.option("--schedule", help="Only jobs of this schedule; name or id.")


def _filter_params(
    remote: Any, topic: str | None, error: str | None, error_group: str | None, schedule: str | None
) -> dict[str, Any]:
    params = {
        "topic": topic,
        "errorCode": error,
        "errorGroup": error_group,
        "scheduleId": schedule and remote.get_schedule(schedule)["id"],
    }
    return {name: value for name, value in params.items() if value is not None}


@dead.command("list")
@topic_option
@error_code_option
@error_group_option
@schedule_option
@click.option("--group-by", "group", metavar="topic|error", help="Show counts instead of single jobs.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of rows.")
@output_option
def list_(
    topic: str | None,
    error: str | None,
    error_group: str | None,
    schedule: str | None,
    group: str | None,
    limit: int,
    output: str | None,
) -> None:
    """List dead letters, newest first."""
    from timebell.cli.inputs import format_relative_time, print_list, shorten

    remote = server_client(output)
    params = _filter_params(remote, topic, error, error_group, schedule)
    form = remote.settings.output
    if group is not None:
        groups = remote.request("GET", "/dead-letters", params={**params, "groupBy": group})["items"]
        print_list(groups, form, ("COUNT", "TOPIC", "ERROR", "GROUP", "LAST", "EXAMPLE"), lambda row: (
            f"{row['count']:,}", row["topic"], row["error"] or "", row["errorGroup"] or "",
            format_relative_time(row["lastFailedAt"], "UTC"), shorten(row["errorMessage"] or ""),
        ))  # fmt: skip
        return
    rows = remote.list_items("/dead-letters", params, limit)
    print_list(rows, form, ("ID", "TOPIC", "FAILED", "ATTEMPTS", "ERROR"), lambda row: (
        row["id"], row["topic"], format_relative_time(row["failedAt"], row["timezone"]), str(row["attemptsMade"]),
        shorten(row["errorMessage"] or ""),
    ))  # fmt: skip


@dead.command()
@click.argument("id_", metavar="JOB", help="Job id.")
@output_option
def show(id_: str, output: str | None) -> None:
    """Show a dead letter with its attempts."""
    from timebell.cli.job_views import print_job

    remote = server_client(output)
    print_job(remote.request("GET", f"/jobs/{id_}"), remote.settings.output)


@dead.command()
@topic_option
@error_code_option
@error_group_option
@schedule_option
@click.option("--rate", type=click.FloatRange(min=0.01), help="Jobs per second.  [default: no limit]")
@yes_option
@output_option
def retry(
    topic: str | None,
    error: str | None,
    error_group: str | None,
    schedule: str | None,
    rate: float | None,
    yes: bool,
    output: str | None,
) -> None:
    """Retry dead letters: same job ids, with a fresh budget of attempts."""
    _start_operation("retry", topic, error, error_group, schedule, {} if rate is None else {"rate": rate}, yes, output)


@dead.command()
@topic_option
@error_code_option
@error_group_option
@schedule_option
@yes_option
@output_option
def discard(
    topic: str | None, error: str | None, error_group: str | None, schedule: str | None, yes: bool, output: str | None
) -> None:
    """Discard dead letters; the jobs remain in the history."""
    _start_operation("discard", topic, error, error_group, schedule, {}, yes, output)


def _start_operation(
    action: str, topic: str | None, error: str | None, error_group: str | None, schedule: str | None,
    options: dict[str, Any], yes: bool,
    output: str | None,
) -> None:  # fmt: skip
    from timebell.cli.inputs import confirm
    from timebell.cli.operations import watch_operation

    remote = server_client(output)
    body = {"filter": _filter_params(remote, topic, error, error_group, schedule), **options}
    count = remote.request("POST", f"/dead-letters/{action}", {**body, "dryRun": True})["count"]
    if confirm(f"{action.title()} {count:,} dead letters?", yes=yes):
        watch_operation(remote, remote.request("POST", f"/dead-letters/{action}", body))
