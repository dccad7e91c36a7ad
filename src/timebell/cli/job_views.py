"""Jobs as people read them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from timebell.cli.asking import Row, brief, listed, sooner
from timebell.cli.output import Format, emit_one, paint, show

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
        show(f"  failed      {brief(attempt, 100)}")
