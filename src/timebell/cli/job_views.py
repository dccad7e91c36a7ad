"""Jobs as people read them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from timebell.cli.inputs import Row, brief, listed, sooner
from timebell.cli.output import Format, emit_one, paint, say, show

HEAD = ("ID", "TOPIC", "STATUS", "RUN AT", "ATTEMPT", "WHY")


def show_jobs(rows: Iterable[Row], form: str) -> None:
    """A line a job."""
    listed(rows, form, HEAD, lambda row: (
        row["id"], row["topic"], row["status"] + (f" ({row['hold']})" if row["hold"] else ""),
        sooner(row["runAt"], row["timezone"]), str(row["attemptNumber"]),
        brief(row["errorMessage"] or row["reason"] or ""),
    ))  # fmt: skip


def follow(lines: Iterable[str], form: str) -> None:
    """Events of a server (text/event-stream), one line each as they come."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        event = json.loads(line.removeprefix("data:"))
        if form != Format.TABLE:
            show(json.dumps(event))
            continue
        what = event.get("job") or event
        why = what.get("errorMessage") or what.get("reason") or ""
        show(
            f"{event['at']}  {event['type']:<16}  {what.get('topic', '')}  {what.get('id', '')}  {brief(why)}".rstrip()
        )


def show_request(request: Row | None) -> None:
    """What a target would be sent: its body, and what goes with it."""
    if request is None:
        return
    if "url" in request:
        show(f"{request['method']} {request['url']}")
    for name, value in request.get("headers", {}).items():
        show(f"{name}: {value}")
    if "argv" in request:
        show(json.dumps(request["argv"]))
    show(request["body"])


def preview(seen: Row, form: str) -> None:
    """What a job would be, and what it would send."""
    if form != Format.TABLE:
        emit_one(seen, form)
        return
    show_job(seen["job"], form)
    show_request(seen["request"])
    say("Nothing was made (--dry-run).")


def _attempt(one: Row) -> str:
    """One attempt in a line: when, where to, what was answered, how long it took, what was wrong."""
    if "kind" not in one:
        return brief(one, 100)
    answered = f" answered {one['status']}" if "status" in one else ""
    wrong = f": {one['code']}: {one['error']}" if one["error"] is not None else ""
    return (
        f"{one['startedAt']}  attempt {one['attempt']} to {one.get('to') or one['kind']}{answered} in "
        f"{one['durationMs']:,g} ms, message {one['messageId']}{wrong}"
    )


def show_job(found: Row, form: str) -> None:
    """One job and its attempts."""
    if form != Format.TABLE:
        emit_one(found, form)
        return
    show(paint(found["topic"], "bold", sys.stdout) + f"  {found['status']}  {found['id']}")
    facts = {
        "due": sooner(found["scheduledAt"], found["timezone"]),
        "runs": sooner(found["runAt"], found["timezone"]) if found["runAt"] != found["scheduledAt"] else None,
        "reason": found["reason"], "hold": found["hold"], "schedule": found["scheduleId"], "key": found["key"],
        "payload": brief(found["payload"]) if found["payload"] is not None else None,
        "metadata": brief(found["metadata"]) if found["metadata"] else None,
        "target": found["target"] and brief(found["target"]), "queue": found["queue"],
        "attempt": found["attemptNumber"] or None,
        "took": None if found["durationMs"] is None else f"{found['durationMs']:,} ms",
        "error": found["errorMessage"], "result": None if found["result"] is None else brief(found["result"]),
        "replaces": found["replaces"], "replaced by": found["replacedBy"],
    }  # fmt: skip
    for name, value in facts.items():
        if value is not None:
            show(f"  {name:<12}{value}")
    for attempt in found["attempts"]:
        show(f"  {'sent' if attempt.get('error') is None else 'failed':<12}{_attempt(attempt)}")
