"""History of a schedule's occurrences as JSON."""

from __future__ import annotations

from typing import Any

from timebell.api.job_fields import duration_ms, lag_ms
from timebell.api.schemas import Instant, Json, ResponseBody, format_utc
from timebell.model.job import Job


class Execution(ResponseBody):
    """One occurrence, or a range of skipped occurrences up to `skippedTo` if `skippedCount` is greater than 1."""

    id: str
    schedule_id: str | None
    kind: str
    scheduled_at: Instant
    fired_at: Instant | None
    lag_ms: float | None
    completed_at: Instant | None
    status: str
    reason: str | None
    error_message: str | None
    attempt_number: int
    duration_ms: int | None
    result: Json
    skipped_to: Instant | None
    skipped_count: int
    created_at: Instant


class ExecutionPage(ResponseBody):
    """Page of executions, newest first."""

    items: list[Execution]
    next_cursor: str | None


def render_execution(job: Job) -> dict[str, Any]:
    """Render an occurrence as JSON."""
    return {
        "id": job.id, "scheduleId": job.schedule_id, "kind": str(job.kind), "scheduledAt": format_utc(job.scheduled_at),
        "firedAt": format_utc(job.started_at), "lagMs": lag_ms(job), "completedAt": format_utc(job.finished_at),
        "status": job.state.value,
        "reason": job.reason, "errorMessage": job.error, "attemptNumber": job.attempt, "durationMs": duration_ms(job),
        "result": job.result, "skippedTo": format_utc(job.skipped_to), "skippedCount": job.skipped_count,
        "createdAt": format_utc(job.created_at),
    }  # fmt: skip
