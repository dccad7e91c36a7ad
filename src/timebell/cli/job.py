"""`timebell job ...`: jobs of a server, and the import of jobs from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from timebell.cli.groups import Group
from timebell.cli.options import output_option, timezone_option
from timebell.cli.output import FAILED, Format
from timebell.cli.schedule import (
    condition_option,
    payload_option,
    priority_option,
    queue_option,
    retries_option,
    server_client,
    target_option,
    timeout_option,
    unless_option,
)

WAIT_POLL_SECONDS = 0.5
job = Group("Jobs: create, inspect, cancel, retry.")
job_id_argument = click.argument("id_", metavar="JOB", help="Job id.")
status_option = click.option(
    "--status", multiple=True, help="Only this status: pending, retrying, held, failed, ...; repeatable."
)
at_option = click.option("--at", metavar="T", help="RFC 3339; without offset, local in --timezone.")


@job.command()
@click.argument("topic", help="Topic, e.g. mail.send.")
@at_option
@timezone_option
@payload_option
@click.option("--key", help="Unique among live jobs.")
@click.option("--on-conflict", metavar="error|keep|replace", help="If a live job has the same key.")
@click.option("--request-id", help="Idempotency key: repeating it never creates a second job.")
@click.option("--owner", help="Owner id of the job.")
@retries_option
@timeout_option
@queue_option
@priority_option
@condition_option
@unless_option
@target_option
@click.option("--dry-run", is_flag=True, help="Show the job and its request; create nothing.")
@output_option
def create(
    topic: str,
    at: str | None,
    timezone: str | None,
    payload: str | None,
    key: str | None,
    on_conflict: str | None,
    request_id: str | None,
    owner: str | None,
    retries: int | None,
    timeout: float | None,
    queue: str | None,
    priority: int | None,
    condition: str | None,
    unless: str | None,
    target: str | None,
    dry_run: bool,
    output: str | None,
) -> None:
    """Create a job, due at a time or now."""
    from timebell.cli.inputs import parse_json
    from timebell.cli.job_views import print_job, print_preview
    from timebell.cli.schedule import parse_target
    from timebell.errors import InvalidInput

    remote = server_client(output)
    metadata = {"ownerId": owner, "clientRequestId": request_id}
    fields = {
        "topic": topic, "runAt": at,
        "timezone": remote.settings.default_timezone if timezone is None else timezone,
        "payload": parse_json(payload, "--payload"), "key": key, "onConflict": on_conflict,
        "metadata": {name: value for name, value in metadata.items() if value is not None} or None,
        "maxRetries": retries, "timeoutSeconds": timeout, "queue": queue, "priority": priority,
        "target": parse_target(target), "condition": parse_json(condition, "--condition"),
        "unless": parse_json(unless, "--unless"),
    }  # fmt: skip
    body = {name: value for name, value in fields.items() if value is not None}
    path = "/jobs/preview" if dry_run else "/jobs"
    try:
        created = remote.request("POST", path, body)
    except InvalidInput as refused:
        if refused.code != "TIMEZONE_MISSING" or at is not None:
            raise
        created = remote.request("POST", path, body | {"timezone": "UTC"})  # a job due now needs no zone to be due
    (print_preview if dry_run else print_job)(created, remote.settings.output)


@job.command("list")
@status_option
@click.option("--topic", help="Only jobs of this topic.")
@click.option("--owner", help="Only jobs of this owner.")
@click.option("--schedule", help="Only jobs of this schedule; name or id.")
@click.option("--key", help="Only jobs with this key.")
@click.option("--since", metavar="T", help="Finished or due since: 2h, 1d, or RFC 3339.")
@click.option("--until", metavar="T", help="Finished or due before: 2h, 1d, or RFC 3339.")
@click.option("--correlation", metavar="ID", help="Only jobs with this correlation id.")
@click.option("--payload", metavar="PATH=VALUE", multiple=True, help="Only jobs with this value in the payload.")
@click.option("--error", metavar="TEXT", help="Only jobs with this text in an error.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of rows.")
@output_option
def list_(
    status: tuple[str, ...],
    topic: str | None,
    owner: str | None,
    schedule: str | None,
    key: str | None,
    since: str | None,
    until: str | None,
    correlation: str | None,
    payload: tuple[str, ...],
    error: str | None,
    limit: int,
    output: str | None,
) -> None:
    """List jobs, newest first. A topic may end with `*`."""
    from timebell.cli.inputs import parse_time_ago
    from timebell.cli.job_views import print_jobs

    remote = server_client(output)
    params: dict[str, Any] = {
        "status": status, "topic": topic, "ownerId": owner, "key": key, "from": since and parse_time_ago(since),
        "to": until and parse_time_ago(until), "correlationId": correlation, "payload": payload, "error": error,
    }  # fmt: skip
    if schedule is not None:
        params["scheduleId"] = remote.get_schedule(schedule)["id"]
    print_jobs(remote.list_items("/jobs", params, limit), remote.settings.output)


@job.command()
@job_id_argument
@output_option
def show(id_: str, output: str | None) -> None:
    """Show a job and its attempts."""
    from timebell.cli.job_views import print_job

    remote = server_client(output)
    print_job(remote.request("GET", f"/jobs/{id_}"), remote.settings.output)


@job.command()
@click.option("--topic", help="Only jobs of this topic.")
@output_option
def tail(topic: str | None, output: str | None) -> None:
    """Follow job events until Ctrl-C. With -o json, each event is one line."""
    from timebell.cli.job_views import print_events

    remote = server_client(output)
    print_events(remote.stream_lines("/events", None if topic is None else {"topic": topic}), remote.settings.output)


@job.command()
@job_id_argument
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", help="Maximum time.  [default: none]")
@output_option
def wait(id_: str, timeout: float | None, output: str | None) -> None:
    """Wait until a job is finished, and show it; exit 1 unless it completed."""
    from threading import Event

    from timebell.cli.job_views import print_job
    from timebell.cli.output import print_message

    remote = server_client(output)
    waited = 0.0
    record = remote.request("GET", f"/jobs/{id_}")
    while record["status"] in ("pending", "running", "dispatched"):
        if timeout is not None and waited >= timeout:
            print_message(f"Still {record['status']} after {timeout:g} s. Waiting again is safe.")
            break
        Event().wait(WAIT_POLL_SECONDS)
        waited += WAIT_POLL_SECONDS
        record = remote.request("GET", f"/jobs/{id_}")
    print_job(record, remote.settings.output)
    if record["status"] != "completed":
        raise click.exceptions.Exit(FAILED)


@job.command()
@job_id_argument
@output_option
def retry(id_: str, output: str | None) -> None:
    """Retry a failed job: same id, fresh budget of attempts."""
    _post_action(id_, "retry", None, output)


@job.command()
@job_id_argument
@output_option
def redeliver(id_: str, output: str | None) -> None:
    """Deliver a completed or failed job again; its message id ends in .r1, .r2, ..."""
    _post_action(id_, "redeliver", None, output)


@job.command()
@job_id_argument
@click.option("--stop", is_flag=True, help="Stop it if it is running, and close its request.")
@output_option
def cancel(id_: str, stop: bool, output: str | None) -> None:
    """Cancel a job. A running job is not retried; a finished one is unchanged."""
    from timebell.cli.output import print_message

    remote = server_client(output)
    done = remote.request("POST", f"/jobs/{id_}/cancel", {"stop": True} if stop else None)
    if remote.settings.output != Format.TABLE:
        from timebell.cli.output import print_record

        print_record(done, remote.settings.output)
    else:
        print_message(CANCEL_OUTCOMES[done["outcome"]])


CANCEL_OUTCOMES = {
    "prevented": "Cancelled before it started.",
    "in_flight": "The job is running and will not be retried.",
    "already_done": "The job was already finished.",
}


@job.command()
@job_id_argument
@click.option("--at", required=True, metavar="T", help="RFC 3339; without offset, local in --timezone.")
@timezone_option
@output_option
def reschedule(id_: str, at: str, timezone: str | None, output: str | None) -> None:
    """Replace a pending job with a new one at another time."""
    _post_action(id_, "reschedule", {"runAt": at} | ({} if timezone is None else {"timezone": timezone}), output)


def _post_action(id_: str, action: str, body: dict[str, Any] | None, output: str | None) -> None:
    from timebell.cli.job_views import print_job

    remote = server_client(output)
    print_job(remote.request("POST", f"/jobs/{id_}/{action}", body), remote.settings.output)


@job.command("import")
@click.argument(
    "file", type=click.Path(path_type=Path), help="JSON lines: one job per line, with the fields of POST /jobs."
)
@click.option(
    "--past",
    default="refuse",
    show_default=True,
    metavar="refuse|skip|now",
    help="How to treat jobs with a time in the past.",
)
@timezone_option
@click.option("--database", metavar="URL", help="sqlite:///file or postgresql://...")
@output_option
def import_(file: Path, past: str, timezone: str | None, database: str | None, output: str | None) -> None:
    """Import jobs from a file of JSON lines, directly into the database.

    Safe to repeat: a job that exists is not created again.
    """
    from timebell.cli import job_import as importing

    raise click.exceptions.Exit(importing.import_jobs(file, past, timezone, database, output))
