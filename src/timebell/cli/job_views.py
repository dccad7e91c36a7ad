"""Print jobs, job events and requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from timebell.cli.inputs import Row, format_relative_time, print_list, shorten
from timebell.cli.output import Format, colorize, colorize_state, print_data, print_message, print_record
from timebell.dashboard.job_timeline import attempts_allowed, explain_state
from timebell.formatting import format_milliseconds, format_progress
from timebell.model.attempts import describe_error

JOB_COLUMNS = ("ID", "TOPIC", "STATUS", "RUN AT", "ATTEMPT", "REASON")


def print_jobs(rows: Iterable[Row], output_format: str) -> None:
    """Print one line per job."""
    print_list(rows, output_format, JOB_COLUMNS, lambda row: (
        row["id"], row["topic"], _format_status(row),
        format_relative_time(row["runAt"], row["timezone"]), str(row["attemptNumber"]), shorten(explain_state(row)),
    ))  # fmt: skip


def _format_status(row: Row) -> str:
    if row["hold"]:
        return f"{row['status']} ({row['hold']})"
    return "retrying" if row["status"] == "pending" and row["attemptsMade"] else str(row["status"])


def print_events(lines: Iterable[str], output_format: str) -> None:
    """Print the events of a text/event-stream response, one line each, as they arrive."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        event = json.loads(line.removeprefix("data:"))
        if output_format != Format.TABLE:
            print_data(json.dumps(event))
            continue
        subject = event.get("job") or event
        reason = subject.get("errorMessage") or subject.get("reason") or ""
        line = f"{event['at']}  {event['type']:<16}  {subject.get('topic', '')}  {subject.get('id', '')}"
        print_data(f"{line}  {shorten(reason)}".rstrip())


def print_request(request: Row | None) -> None:
    """Print the request that a target would receive: method, URL, headers or arguments, and body."""
    if request is None:
        return
    if "url" in request:
        print_data(f"{request['method']} {request['url']}")
    for name, value in request.get("headers", {}).items():
        print_data(f"{name}: {value}")
    if "argv" in request:
        print_data(json.dumps(request["argv"]))
    print_data(request["body"])


def print_preview(previewed: Row, output_format: str) -> None:
    """Print the result of a dry run: the job and its request."""
    if output_format != Format.TABLE:
        print_record(previewed, output_format)
        return
    print_job(previewed["job"], output_format)
    print_request(previewed["request"])
    print_message("Nothing created (--dry-run).")


def _format_attempt(attempt: Row) -> str:
    """Return one attempt as a line: start, node or destination, response, duration, message id, error."""
    if "kind" not in attempt:
        reported = attempt.get("reportedProgress")
        progress = f" at {format_progress(reported)}" if reported else ""
        error = attempt.get("error") or attempt.get("code")
        return f"{_format_time(attempt.get('startedAt'))}  attempt {attempt['attempt']}{progress}" + (
            f": {error}" if error else ""
        )
    response = f" answered {attempt['status']}" if "status" in attempt else ""
    error = f": {describe_error(attempt['code'], attempt['error'])}" if attempt["error"] is not None else ""
    return (
        f"{_format_time(attempt['startedAt'])}  attempt {attempt['attempt']} to"
        f" {attempt.get('to') or attempt['kind']}{response} in {attempt['durationMs']:,g} ms,"
        f" message {attempt['messageId']}{error}"
    )


def _format_time(at: str | None) -> str:
    if at is None:
        return "-"
    return datetime.fromisoformat(at).astimezone(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def _format_attempts(job: Row) -> str | None:
    """Return the number of the attempt, with the limit of its retry policy if that is known."""
    number, allowed = job["attemptNumber"], attempts_allowed(job)
    return f"{number} of {allowed}" if 0 < number <= allowed else str(number) if number else None


def print_job(job: Row, output_format: str) -> None:
    """Print one job and its attempts."""
    if output_format != Format.TABLE:
        print_record(job, output_format)
        return
    state = colorize_state(job["status"], sys.stdout)
    print_data(colorize(job["topic"], "bold", sys.stdout) + f"  {state}  {job['id']}")
    facts = {
        "due": format_relative_time(job["dueAt"], job["timezone"]),
        "runs": format_relative_time(job["runAt"], job["timezone"]) if job["runAt"] != job["dueAt"] else None,
        "lag": None if job["lagMs"] is None else format_milliseconds(timedelta(milliseconds=job["lagMs"])),
        "reason": job["reason"], "hold": job["hold"], "schedule": job["scheduleId"], "key": job["key"],
        "payload": shorten(job["payload"]) if job["payload"] is not None else None,
        "metadata": shorten(job["metadata"]) if job["metadata"] else None,
        "target": job["target"] and shorten(job["target"]), "queue": job["queue"],
        "attempt": _format_attempts(job),
        "progress": None if job["progress"] is None else format_progress(job["progress"]),
        "took": None if job["durationMs"] is None else f"{job['durationMs']:,} ms",
        "error": job["errorMessage"], "result": None if job["result"] is None else shorten(job["result"]),
        "replaces": job["replaces"], "replaced by": job["replacedBy"],
    }  # fmt: skip
    for name, value in facts.items():
        if value is not None:
            print_data(f"  {name:<12}{value}")
    for attempt in job["attempts"]:
        is_postponed = attempt.get("code") == "POSTPONED"
        has_error = attempt.get("error") is not None
        word = "postponed" if is_postponed else "failed" if has_error else "sent" if "kind" in attempt else "ended"
        print_data(f"  {word:<12}{_format_attempt(attempt)}")
        if attempt.get("retryAt"):
            print_data(f"  {'':<12}next attempt {_format_time(attempt['retryAt'])}")
        if attempt.get("retriedAt"):
            by = attempt.get("retriedBy") or "the program"
            print_data(f"  {'retried':<12}{_format_time(attempt['retriedAt'])}  by {by}")
    traceback = job["attempts"][-1].get("traceback") if job["attempts"] else None
    if traceback is not None:
        print_data("  traceback of the last attempt")
        print_data("".join(f"    {line}\n" for line in traceback.splitlines()).rstrip())
