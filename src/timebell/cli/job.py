"""`timebell job ...`: jobs of a server, and the import of jobs from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from timebell.cli import click_signatures
from timebell.cli.output import Format
from timebell.cli.schedule import (
    Condition,
    Output,
    Payload,
    Priority,
    Queue,
    Retries,
    Target,
    Timeout,
    Unless,
    Zone,
    server_client,
)

job = click_signatures.Group("Jobs: create, inspect, cancel, retry.")
JobId = Annotated[str, click_signatures.Argument(metavar="JOB", help="Job id.")]
Status = Annotated[
    list[str] | None, click_signatures.Option(help="Only this status: pending, running, failed, ...; repeatable.")
]
At = Annotated[
    str | None, click_signatures.Option("--at", metavar="T", help="RFC 3339; without offset, local in --timezone.")
]


@job.command()
def create(
    topic: Annotated[str, click_signatures.Argument(help="Topic, e.g. mail.send.")],
    at: At = None,
    timezone: Zone = None,
    payload: Payload = None,
    key: Annotated[str | None, click_signatures.Option(help="Unique among live jobs.")] = None,
    on_conflict: Annotated[
        str | None,
        click_signatures.Option("--on-conflict", metavar="error|keep|replace", help="If a live job has the same key."),
    ] = None,
    request_id: Annotated[
        str | None,
        click_signatures.Option("--request-id", help="Idempotency key: repeating it never creates a second job."),
    ] = None,
    owner: Annotated[str | None, click_signatures.Option(help="Owner id of the job.")] = None,
    retries: Retries = None,
    timeout: Timeout = None,
    queue: Queue = None,
    priority: Priority = None,
    condition: Condition = None,
    unless: Unless = None,
    target: Target = None,
    dry_run: Annotated[
        bool, click_signatures.Option("--dry-run", help="Show the job and its request; create nothing.")
    ] = False,
    output: Output = None,
) -> None:
    """Create a job, due at a time or now."""
    from timebell.cli.inputs import parse_json
    from timebell.cli.job_views import print_job, print_preview
    from timebell.cli.schedule import parse_target

    remote = server_client(output)
    metadata = {"ownerId": owner, "clientRequestId": request_id}
    fields = {
        "topic": topic, "runAt": at, "timezone": timezone or remote.settings.default_timezone,
        "payload": parse_json(payload, "--payload"), "key": key, "onConflict": on_conflict,
        "metadata": {name: value for name, value in metadata.items() if value is not None} or None,
        "maxRetries": retries, "timeoutSeconds": timeout, "queue": queue, "priority": priority,
        "target": parse_target(target), "condition": parse_json(condition, "--condition"),
        "unless": parse_json(unless, "--unless"),
    }  # fmt: skip
    body = {name: value for name, value in fields.items() if value is not None}
    if dry_run:
        print_preview(remote.request("POST", "/jobs/preview", body), remote.settings.output)
        return
    print_job(remote.request("POST", "/jobs", body), remote.settings.output)


@job.command("list")
def list_(
    status: Status = None,
    topic: Annotated[str | None, click_signatures.Option(help="Only jobs of this topic.")] = None,
    owner: Annotated[str | None, click_signatures.Option(help="Only jobs of this owner.")] = None,
    schedule: Annotated[str | None, click_signatures.Option(help="Only jobs of this schedule; name or id.")] = None,
    key: Annotated[str | None, click_signatures.Option(help="Only jobs with this key.")] = None,
    limit: Annotated[int, click_signatures.Option(min=1, help="Maximum number of rows.")] = 50,
    output: Output = None,
) -> None:
    """List jobs, newest first."""
    from timebell.cli.job_views import print_jobs

    remote = server_client(output)
    params: dict[str, Any] = {"status": status, "topic": topic, "ownerId": owner, "key": key}
    if schedule is not None:
        params["scheduleId"] = remote.get_schedule(schedule)["id"]
    print_jobs(remote.list_items("/jobs", params, limit), remote.settings.output)


@job.command()
def show(id_: JobId, output: Output = None) -> None:
    """Show a job and its attempts."""
    from timebell.cli.job_views import print_job

    remote = server_client(output)
    print_job(remote.request("GET", f"/jobs/{id_}"), remote.settings.output)


@job.command()
def tail(
    topic: Annotated[str | None, click_signatures.Option(help="Only jobs of this topic.")] = None,
    output: Output = None,
) -> None:
    """Follow job events until Ctrl-C. With -o json, each event is one line."""
    from timebell.cli.job_views import print_events

    remote = server_client(output)
    print_events(remote.stream_lines("/events", None if topic is None else {"topic": topic}), remote.settings.output)


@job.command()
def retry(id_: JobId, output: Output = None) -> None:
    """Retry a failed job: same id, fresh budget of attempts."""
    _post_action(id_, "retry", None, output)


@job.command()
def redeliver(id_: JobId, output: Output = None) -> None:
    """Deliver a completed or failed job again; its message id ends in .r1, .r2, ..."""
    _post_action(id_, "redeliver", None, output)


@job.command()
def cancel(id_: JobId, output: Output = None) -> None:
    """Cancel a job. A running job is asked to stop; a finished one is unchanged."""
    from timebell.cli.output import print_message

    remote = server_client(output)
    done = remote.request("POST", f"/jobs/{id_}/cancel")
    if remote.settings.output != Format.TABLE:
        from timebell.cli.output import print_record

        print_record(done, remote.settings.output)
    else:
        print_message(CANCEL_OUTCOMES[done["outcome"]])


CANCEL_OUTCOMES = {
    "prevented": "Cancelled before it started.",
    "in_flight": "The job is running: it was asked to stop and will not be retried.",
    "already_done": "The job was already finished.",
}


@job.command()
def reschedule(
    id_: JobId,
    at: Annotated[
        str, click_signatures.Option("--at", metavar="T", help="RFC 3339; without offset, local in --timezone.")
    ],
    timezone: Zone = None,
    output: Output = None,
) -> None:
    """Replace a pending job with a new one at another time."""
    _post_action(id_, "reschedule", {"runAt": at} | ({} if timezone is None else {"timezone": timezone}), output)


def _post_action(id_: str, action: str, body: dict[str, Any] | None, output: Format | None) -> None:
    from timebell.cli.job_views import print_job

    remote = server_client(output)
    print_job(remote.request("POST", f"/jobs/{id_}/{action}", body), remote.settings.output)


@job.command("import")
def import_(
    file: Annotated[
        Path, click_signatures.Argument(help="JSON lines: one job per line, with the fields of POST /jobs.")
    ],
    past: Annotated[
        str, click_signatures.Option(metavar="refuse|skip|now", help="How to treat jobs with a time in the past.")
    ] = "refuse",
    timezone: Zone = None,
    database: Annotated[
        str | None, click_signatures.Option(metavar="URL", help="sqlite:///file or postgresql://...")
    ] = None,
    output: Output = None,
) -> None:
    """Import jobs from a file of JSON lines, directly into the database.

    Safe to repeat: a job that exists is not created again.
    """
    from timebell.cli import job_import as importing

    raise click_signatures.Exit(importing.import_jobs(file, past, timezone, database, output))
