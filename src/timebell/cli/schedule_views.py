"""Schedules as people read them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from timebell.cli.inputs import Row, brief, instant, listed, sooner
from timebell.cli.job_views import show_request
from timebell.cli.output import Format, emit, emit_one, paint, say, show, table
from timebell.errors import InvalidInput
from timebell.formatting import local
from timebell.recurrence import resolve_local, zone
from timebell.recurrence.instants import format_instant, parse_instant

# What became of a run, as one sign in a row of them.
SIGNS = {"completed": ".", "failed": "x", "cancelled": "-", "missed": "!", "expired": "!"}
SKIPPED = "s"


def show_list(rows: Iterable[Row], form: str) -> None:
    """A line a schedule."""
    listed(rows, form, ("NAME", "WHEN", "ZONE", "NEXT", "LAST 10", "STATE"), _line)


def _line(row: Row) -> Sequence[str]:
    recent = "".join(SIGNS.get(became, SKIPPED) for became in reversed(row["recent"] or []))
    when = row["summary"].removesuffix(f", {row['timezone']}")
    return row["name"], brief(when, 45), row["timezone"], sooner(row["nextFireAt"], row["timezone"]), recent, state(row)


def state(row: Row) -> str:
    """How it is, in a word or two."""
    recent = row.get("recent") or []
    if row["fault"]:
        return "fault"
    if not row["enabled"]:
        return "paused"
    if missed := sum(became in ("missed", "expired") for became in recent[:1]):
        return f"missed {missed}"
    if recent[:1] == ["failed"]:
        return "failing"
    return "over" if row["nextFireAt"] is None else "healthy"


def show_one(found: Row, form: str, runs: Sequence[Row] = (), fires: Sequence[Row] = ()) -> None:
    """One schedule with what differs from the defaults, its last runs and its next ones."""
    if form != Format.TABLE:
        emit_one(found, form)
        return
    show(paint(found["name"], "bold", sys.stdout) + f"  {state(found)}  revision {found['revision']}")
    facts = {
        "id": found["id"], "when": found["summary"], "topic": found["topic"], "description": found["description"],
        "next": sooner(found["nextFireAt"], found["timezone"]),
        "last": sooner(found["lastFiredAt"], found["timezone"]) if found["lastFiredAt"] else None,
        "paused": found["pausedAt"] and f"since {found['pausedAt']}: {found['pauseReason'] or 'no reason given'}",
        "fault": found["fault"], "payload": brief(found["payload"]) if found["payload"] is not None else None,
        "target": found["target"] and brief(found["target"]), "overlap": found["overlapPolicy"],
        "catch-up": found["catchUp"]["policy"], "retries": found["maxRetries"],
        "timeout": f"{found['timeoutSeconds']:g} s", "queue": found["queue"], "labels": found["labels"] or None,
        "made by": found["createdBy"],
    }  # fmt: skip
    for name, value in facts.items():
        if value is not None:
            show(f"  {name:<12}{brief(value, 100)}")
    if runs:
        show("  runs")
        for run in runs:
            show(f"    {_run(run, found['timezone'])}")
    if fires:
        show("  next")
        for fire in fires:
            show(f"    {fire['local']}  {fire['note'] or ''}".rstrip())


def _run(run: Row, timezone: str) -> str:
    at = local(instant(run["scheduledAt"]), timezone)  # type: ignore[arg-type]  # a run has one
    took = "" if run["durationMs"] is None else f"  {run['durationMs']:,} ms"
    why = run["errorMessage"] or run["reason"] or ""
    return f"{at:%Y-%m-%d %H:%M:%S %Z}  {run['status']}{took}  {brief(why)}".rstrip()


def show_runs(runs: Sequence[Row], timezone: str, form: str) -> None:
    """Executions."""
    if form != Format.TABLE:
        emit(runs, form)
        return
    head = ("SCHEDULED", "STATUS", "ATTEMPT", "TOOK", "WHY")
    listed(runs, form, head, lambda run: (
        f"{local(instant(run['scheduledAt']), timezone):%Y-%m-%d %H:%M:%S %Z}"  # type: ignore[arg-type]
        + (f" (and {run['skippedCount'] - 1:,} more)" if run["skippedCount"] > 1 else ""),
        run["status"], str(run["attemptNumber"]), "" if run["durationMs"] is None else f"{run['durationMs']:,} ms",
        brief(run["errorMessage"] or run["reason"] or ""),
    ))  # fmt: skip


def show_revisions(items: Sequence[Row], form: str) -> None:
    """Revisions."""
    listed(items, form, ("REVISION", "FROM", "WHEN"), lambda one: (
        str(one["revision"]), one["effectiveAt"], one["summary"],
    ))  # fmt: skip


def preview(seen: Row, form: str) -> None:
    """What a schedule would do."""
    if form != Format.TABLE:
        emit_one(seen, form)
        return
    show(paint(seen["description"], "bold", sys.stdout))
    table(
        [
            [f"{number:>3}", fire["local"], fire["utc"], fire["note"] or ""]
            for number, fire in enumerate(seen["next"], 1)
        ]
    )
    for note in seen["notes"]:
        show(paint("! ", "yellow", sys.stdout) + note)
    show_request(seen.get("request"))
    say("Nothing was made (--dry-run).")


def plan(planned: Row, overlap: str, timezone: str) -> str:
    """What a backfill would do, in a sentence."""
    instants = planned["instants"]
    kept = f" {planned['kept']} ran already and are left alone." if planned["kept"] else ""
    if not instants:
        return f"There is nothing to run in that time.{kept}"
    first, last = (local(instant(at), timezone) for at in (instants[0], instants[-1]))  # type: ignore[arg-type]
    way = "all at once" if overlap == "allow" else "one after another"
    times = "once" if len(instants) == 1 else f"{len(instants):,} times"
    return f"Would fire {times} ({first:%d %b %H:%M} to {last:%d %b %H:%M %Z}), {way}.{kept}"


def absolute(text: str, timezone: str, flag: str) -> str:
    """A time of a flag, local in the zone unless it says otherwise, as RFC 3339 in UTC. Raises InvalidInput."""
    try:
        found = parse_instant(text, flag)
    except InvalidInput as bad:
        bad.fix = "Write it like 2027-03-14, 2027-03-14T02:30 or 2027-03-14T07:00:00Z."
        raise
    return format_instant(resolve_local(found, zone(timezone))[0] if found.tzinfo is None else found)
