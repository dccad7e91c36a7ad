"""`timebell job ...`: jobs of a server; and files of them."""

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
    remote_of,
)

job = click_signatures.Group("Jobs: make, look, cancel, try again.")
Id = Annotated[str, click_signatures.Argument(metavar="JOB", help="Its id.")]
Status = Annotated[list[str] | None, click_signatures.Option(help="Only these: pending, running, failed, ...")]
At = Annotated[
    str | None, click_signatures.Option("--at", metavar="T", help="RFC 3339; without offset, local in --timezone.")
]


@job.command()
def create(
    topic: Annotated[str, click_signatures.Argument(help="What it is about: mail.send.")],
    at: At = None,
    timezone: Zone = None,
    payload: Payload = None,
    key: Annotated[str | None, click_signatures.Option(help="At most one live job has it.")] = None,
    on_conflict: Annotated[
        str | None,
        click_signatures.Option("--on-conflict", metavar="error|keep|replace", help="If one has it already."),
    ] = None,
    request_id: Annotated[
        str | None, click_signatures.Option("--request-id", help="The same again makes no second job, ever.")
    ] = None,
    owner: Annotated[str | None, click_signatures.Option(help="Whom it is for.")] = None,
    retries: Retries = None,
    timeout: Timeout = None,
    queue: Queue = None,
    priority: Priority = None,
    condition: Condition = None,
    unless: Unless = None,
    target: Target = None,
    dry_run: Annotated[
        bool, click_signatures.Option("--dry-run", help="Show what it would send; make nothing.")
    ] = False,
    output: Output = None,
) -> None:
    """Make a job, due at a time or now."""
    from timebell.cli.inputs import json_of
    from timebell.cli.job_views import preview, show_job
    from timebell.cli.schedule import target_of

    remote = remote_of(output)
    labels = {"ownerId": owner, "clientRequestId": request_id}
    given = {
        "topic": topic, "runAt": at, "timezone": timezone or remote.settings.default_timezone,
        "payload": json_of(payload, "--payload"), "key": key, "onConflict": on_conflict,
        "metadata": {name: value for name, value in labels.items() if value is not None} or None,
        "maxRetries": retries, "timeoutSeconds": timeout, "queue": queue, "priority": priority,
        "target": target_of(target), "condition": json_of(condition, "--condition"),
        "unless": json_of(unless, "--unless"),
    }  # fmt: skip
    body = {name: value for name, value in given.items() if value is not None}
    if dry_run:
        preview(remote.ask("POST", "/jobs/preview", body), remote.settings.output)
        return
    show_job(remote.ask("POST", "/jobs", body), remote.settings.output)


@job.command("list")
def list_(
    status: Status = None,
    topic: Annotated[str | None, click_signatures.Option(help="Only of this topic.")] = None,
    owner: Annotated[str | None, click_signatures.Option(help="Only of this owner.")] = None,
    schedule: Annotated[str | None, click_signatures.Option(help="Only of this schedule, by name or id.")] = None,
    key: Annotated[str | None, click_signatures.Option(help="Only with this key.")] = None,
    limit: Annotated[int, click_signatures.Option(min=1, help="At most so many.")] = 50,
    output: Output = None,
) -> None:
    """List jobs, newest first."""
    from timebell.cli.job_views import show_jobs

    remote = remote_of(output)
    params: dict[str, Any] = {"status": status, "topic": topic, "ownerId": owner, "key": key}
    if schedule is not None:
        params["scheduleId"] = remote.schedule(schedule)["id"]
    show_jobs(remote.pages("/jobs", params, limit), remote.settings.output)


@job.command()
def show(id_: Id, output: Output = None) -> None:
    """Show a job and its attempts."""
    from timebell.cli.job_views import show_job

    remote = remote_of(output)
    show_job(remote.ask("GET", f"/jobs/{id_}"), remote.settings.output)


@job.command()
def tail(
    topic: Annotated[str | None, click_signatures.Option(help="Only of this topic.")] = None,
    output: Output = None,
) -> None:
    """Print what becomes of jobs, as it happens, until Ctrl-C. With -o json: a line each."""
    from timebell.cli.job_views import follow

    remote = remote_of(output)
    follow(remote.lines("/events", None if topic is None else {"topic": topic}), remote.settings.output)


@job.command()
def retry(id_: Id, output: Output = None) -> None:
    """Try a failed job again: same id, fresh budget of tries."""
    _do(id_, "retry", None, output)


@job.command()
def resend(id_: Id, output: Output = None) -> None:
    """Send a completed or failed job to its target once more; its message id ends in .r1, .r2, ..."""
    _do(id_, "resend", None, output)


@job.command()
def cancel(id_: Id, output: Output = None) -> None:
    """Keep a job from starting, if that is still possible."""
    from timebell.cli.output import say

    remote = remote_of(output)
    done = remote.ask("POST", f"/jobs/{id_}/cancel")
    if remote.settings.output != Format.TABLE:
        from timebell.cli.output import emit_one

        emit_one(done, remote.settings.output)
    else:
        say(OUTCOMES[done["outcome"]])


OUTCOMES = {
    "prevented": "Cancelled: it did not start and will not.",
    "in_flight": "It runs just now: it is asked to stop, and is not tried again.",
    "already_done": "It was over already.",
}


@job.command()
def reschedule(
    id_: Id,
    at: Annotated[
        str, click_signatures.Option("--at", metavar="T", help="RFC 3339; without offset, local in --timezone.")
    ],
    timezone: Zone = None,
    output: Output = None,
) -> None:
    """Make a new job at another time in place of a pending one."""
    _do(id_, "reschedule", {"runAt": at} | ({} if timezone is None else {"timezone": timezone}), output)


def _do(id_: str, verb: str, body: dict[str, Any] | None, output: Format | None) -> None:
    from timebell.cli.job_views import show_job

    remote = remote_of(output)
    show_job(remote.ask("POST", f"/jobs/{id_}/{verb}", body), remote.settings.output)


@job.command("import")
def import_(
    file: Annotated[Path, click_signatures.Argument(help="One job a line, with the fields of POST /jobs.")],
    past: Annotated[
        str, click_signatures.Option(metavar="refuse|skip|now", help="What becomes of jobs in the past.")
    ] = "refuse",
    timezone: Zone = None,
    database: Annotated[
        str | None, click_signatures.Option(metavar="URL", help="sqlite:///file or postgresql://...")
    ] = None,
    output: Output = None,
) -> None:
    """Make jobs from a file of JSON lines, straight in the database. Safe to repeat: nothing is made twice."""
    from timebell.cli import job_import as importing

    raise click_signatures.Exit(importing.take(file, past, timezone, database, output))
