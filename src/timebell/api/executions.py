"""What became of a schedule's occurrences, as the history shows it."""

from __future__ import annotations

from typing import Any

from timebell.api.job_fields import duration_ms
from timebell.api.schemas import Instant, Json, Shown, utc
from timebell.model.job import Job


class Execution(Shown):
    """One occurrence; or with `skippedCount` above 1, a range of skipped ones up to `skippedTo`."""

    id: str
    schedule_id: str | None
    kind: str
    scheduled_at: Instant
    fired_at: Instant | None
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


class ExecutionPage(Shown):
    """Executions, newest first."""

    items: list[Execution]
    next_cursor: str | None


def execution(job: Job) -> dict[str, Any]:
    """An occurrence as it is answered."""
    return {
        "id": job.id, "scheduleId": job.schedule_id, "kind": str(job.kind), "scheduledAt": utc(job.scheduled_at),
        "firedAt": utc(job.started_at), "completedAt": utc(job.finished_at), "status": job.state.value,
        "reason": job.reason, "errorMessage": job.error, "attemptNumber": job.attempt, "durationMs": duration_ms(job),
        "result": job.result, "skippedTo": utc(job.skipped_to), "skippedCount": job.skipped_count,
        "createdAt": utc(job.created_at),
    }  # fmt: skip
