"""Print schedules, their runs and revisions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from timebell.cli.inputs import Row, format_relative_time, parse_timestamp, print_list, shorten
from timebell.cli.job_views import print_request
from timebell.cli.output import (
    Format,
    colorize,
    colorize_state,
    print_data,
    print_message,
    print_record,
    print_records,
    print_table,
)
from timebell.errors import InvalidInput
from timebell.formatting import to_local
from timebell.recurrence import resolve_local, zone
from timebell.recurrence.instants import format_instant, parse_instant

# One character per outcome of a run, for the column LAST 10.
OUTCOME_SIGNS = {"completed": ".", "failed": "x", "cancelled": "-", "missed": "!", "expired": "!"}
SKIPPED_SIGN = "s"


def print_schedules(rows: Iterable[Row], output_format: str) -> None:
    """Print one line per schedule."""
    print_list(rows, output_format, ("NAME", "WHEN", "ZONE", "NEXT", "LAST 10", "STATE"), _schedule_cells)


def _schedule_cells(row: Row) -> Sequence[str]:
    recent = "".join(OUTCOME_SIGNS.get(outcome, SKIPPED_SIGN) for outcome in reversed(row["recent"] or []))
    when = row["summary"].removesuffix(f", {row['timezone']}")
    return (
        row["name"],
        shorten(when, 45),
        row["timezone"],
        format_relative_time(row["nextFireAt"], row["timezone"]),
        recent,
        schedule_state(row),
    )


def schedule_state(row: Row) -> str:
    """Return the state of a schedule in one or two words."""
    recent = row.get("recent") or []
    if row["error"]:
        return "errored"
    if not row["enabled"]:
        return "paused"
    if row.get("warnings"):
        return "unhandled"
    if missed := sum(outcome in ("missed", "expired") for outcome in recent[:1]):
        return f"missed {missed}"
    if recent[:1] == ["failed"]:
        return "failing"
    if row["nextFireAt"] is None:
        return "finished"
    return "healthy" if recent or row["lastFiredAt"] else "not run yet"


def print_schedule(schedule: Row, output_format: str, runs: Sequence[Row] = (), fires: Sequence[Row] = ()) -> None:
    """Print one schedule with its last runs and next fires."""
    if output_format != Format.TABLE:
        print_record(schedule, output_format)
        return
    state = schedule_state({**schedule, "recent": [run["reason"] or run["status"] for run in runs]})
    print_data(
        colorize(schedule["name"], "bold", sys.stdout)
        + f"  {colorize_state(state, sys.stdout)}  revision {schedule['revision']}"
    )
    facts = {
        "warning": " ".join(schedule.get("warnings") or ()) or None,
        "id": schedule["id"], "when": schedule["summary"], "topic": schedule["topic"],
        "description": schedule["description"],
        "next": format_relative_time(schedule["nextFireAt"], schedule["timezone"]),
        "last": (
            format_relative_time(schedule["lastFiredAt"], schedule["timezone"]) if schedule["lastFiredAt"] else None
        ),
        "paused": schedule["pausedAt"]
        and f"since {schedule['pausedAt']}: {schedule['pauseReason'] or 'no reason specified'}",
        "error": schedule["error"],
        "payload": shorten(schedule["payload"]) if schedule["payload"] is not None else None,
        "target": schedule["target"] and shorten(schedule["target"]), "overlap": schedule["overlapPolicy"],
        "catch-up": schedule["catchUp"]["policy"], "retries": schedule["maxRetries"],
        "timeout": f"{schedule['timeoutSeconds']:g} s", "queue": schedule["queue"],
        "labels": schedule["labels"] or None,
        "created by": schedule["createdBy"],
    }  # fmt: skip
    for name, value in facts.items():
        if value is not None:
            print_data(f"  {name:<12}{shorten(value, 100)}")
    if runs:
        print_data("  runs")
        for run in runs:
            print_data(f"    {_format_run(run, schedule['timezone'])}")
    if fires:
        print_data("  next" if schedule["enabled"] else "  next, once resumed")
        for fire in fires:
            print_data(f"    {fire['local']}  {fire['note'] or ''}".rstrip())


def _format_run(run: Row, timezone: str) -> str:
    at = to_local(parse_timestamp(run["scheduledAt"]), timezone)  # type: ignore[arg-type]  # a run always has scheduledAt
    duration = "" if run["durationMs"] is None else f"  {run['durationMs']:,} ms"
    reason = run["errorMessage"] or run["reason"] or ""
    return f"{at:%Y-%m-%d %H:%M:%S %Z}  {run['status']}{duration}  {shorten(reason)}".rstrip()


def print_runs(runs: Sequence[Row], timezone: str, output_format: str) -> None:
    """Print the runs of a schedule."""
    if output_format != Format.TABLE:
        print_records(runs, output_format)
        return
    head = ("SCHEDULED", "STATUS", "ATTEMPT", "DURATION", "REASON")
    print_list(runs, output_format, head, lambda run: (
        f"{to_local(parse_timestamp(run['scheduledAt']), timezone):%Y-%m-%d %H:%M:%S %Z}"  # type: ignore[arg-type]
        + (f" (and {run['skippedCount'] - 1:,} more)" if run["skippedCount"] > 1 else ""),
        run["status"], str(run["attemptNumber"]), "" if run["durationMs"] is None else f"{run['durationMs']:,} ms",
        shorten(run["errorMessage"] or run["reason"] or ""),
    ))  # fmt: skip


def print_revisions(items: Sequence[Row], output_format: str) -> None:
    """Print the revisions of a schedule."""
    print_list(items, output_format, ("REVISION", "FROM", "WHEN"), lambda revision: (
        str(revision["revision"]), revision["effectiveAt"], revision["summary"],
    ))  # fmt: skip


def print_preview(previewed: Row, output_format: str) -> None:
    """Print the result of a dry run: description, next fires, warnings, request."""
    if output_format != Format.TABLE:
        print_record(previewed, output_format)
        return
    print_data(colorize(previewed["description"], "bold", sys.stdout))
    print_table(
        [
            [f"{number:>3}", fire["local"], fire["utc"], fire["note"] or ""]
            for number, fire in enumerate(previewed["next"], 1)
        ]
    )
    for note in previewed["notes"]:
        print_data(colorize("! ", "yellow", sys.stdout) + note)
    print_request(previewed.get("request"))
    print_message("Nothing created (--dry-run).")


def describe_backfill(backfill: Row, overlap: str, timezone: str) -> str:
    """Return the effect of a planned backfill as a sentence."""
    instants = backfill["instants"]
    already_run = f" {backfill['alreadyRun']} have already run and are not repeated." if backfill["alreadyRun"] else ""
    if not instants:
        return f"No occurrence to run in that range.{already_run}"
    first, last = (to_local(parse_timestamp(at), timezone) for at in (instants[0], instants[-1]))  # type: ignore[arg-type]
    order = "concurrently" if overlap == "allow" else "one after another"
    times = "once" if len(instants) == 1 else f"{len(instants):,} times"
    return f"Would fire {times} ({first:%d %b %H:%M} to {last:%d %b %H:%M %Z}), {order}.{already_run}"


def to_utc_text(text: str, timezone: str, flag: str) -> str:
    """Convert the time of a flag, local in `timezone` unless it has an offset, to RFC 3339 in UTC.

    Raises InvalidInput.
    """
    try:
        instant = parse_instant(text, flag)
    except InvalidInput as error:
        error.fix = "Write it like 2027-03-14, 2027-03-14T02:30 or 2027-03-14T07:00:00Z."
        raise
    return format_instant(resolve_local(instant, zone(timezone))[0] if instant.tzinfo is None else instant)
