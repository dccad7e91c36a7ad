"""JSON form of jobs in requests and responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from timebell.api.conditions import ComparisonOut, Condition, UnlessIn, UnlessOut
from timebell.api.schemas import Instant, Json, Name, RequestBody, ResponseBody, ZoneName, format_utc
from timebell.client.job_fields import metadata_json, target_json
from timebell.model.job import Job
from timebell.model.progress import Progress


class JobIn(RequestBody):
    """Fields of a new job. `topic` is required; `runAt` defaults to now."""

    topic: Name
    run_at: Annotated[
        str | None, Field(max_length=64, description="RFC 3339; without an offset it is local time in timezone.")
    ] = None
    timezone: ZoneName | None = None
    payload: Json = None
    metadata: dict[str, Json] | None = None
    key: Name | None = None
    on_conflict: Literal["error", "keep", "replace"] = "error"
    retry: dict[str, Json] | None = None
    max_retries: Annotated[int | None, Field(ge=0, le=999)] = None
    timeout_seconds: Annotated[float | None, Field(gt=0, lt=1e10)] = None
    expires_after_seconds: Annotated[float | None, Field(ge=0, lt=1e10)] = None
    queue: Annotated[str | None, Field(min_length=1, max_length=100)] = None
    priority: Annotated[int | None, Field(ge=-32_768, le=32_767)] = None
    group: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    condition: Condition = None
    unless: UnlessIn | None = None
    target: Annotated[dict[str, Json] | Name | None, Field(description="Inline target, or the name of a target.")] = (
        None
    )
    on_gap: Literal["shift", "error"] | None = None
    on_fold: Literal["first", "error"] | None = None


class RequestOut(ResponseBody):
    """Request that a target receives. `body` is text; other fields depend on `kind`."""

    model_config = ConfigDict(extra="allow")
    kind: str
    body: str


Warnings = Annotated[
    list[str], Field(description="Only in responses to creation: for example, that no running node handles the topic.")
]


class ProgressOut(ResponseBody):
    """Progress of an attempt: a fraction from 0 to 1, a text, or both."""

    fraction: float | None
    text: str | None
    at: Instant


class JobOut(ResponseBody):
    """Job. `status` is its state; times are UTC."""

    id: str
    tenant_id: str
    topic: str
    status: str
    reason: str | None
    kind: str
    schedule_id: str | None
    occurrence_key: str
    scheduled_at: Instant
    run_at: Instant
    due_at: Annotated[Instant, Field(description="Original due time; retries move `runAt`.")]
    timezone: str
    local_time: str | None
    payload: Json
    metadata: dict[str, Json]
    key: str | None
    queue: str
    priority: int
    group: str | None
    condition: list[ComparisonOut]
    unless: UnlessOut | None
    retry: dict[str, Json] | None
    timeout_seconds: float | None
    expires_at: Instant | None
    target: dict[str, Json] | None
    on_unhandled: str | None
    hold: str | None
    attempt_number: int
    attempts_made: int
    attempts: list[dict[str, Json]]
    node_id: str | None
    created_at: Instant
    fired_at: Annotated[Instant | None, Field(description="Start of the latest attempt.")]
    first_fired_at: Annotated[Instant | None, Field(description="Start of the first attempt.")]
    lag_ms: Annotated[float | None, Field(description="Milliseconds from `dueAt` to `firstFiredAt`.")]
    completed_at: Instant | None
    duration_ms: int | None
    error_code: str | None
    error_message: str | None
    result: Json
    progress: Annotated[
        ProgressOut | None, Field(description="Last progress that the handler reported in the latest attempt.")
    ]
    replaces: str | None
    replaced_by: str | None
    skipped_to: Instant | None
    skipped_count: int
    adjusted: str | None
    warnings: Warnings = Field(default_factory=list)


def render_job(job: Job) -> dict[str, Any]:
    """Render a job as JSON."""
    target_fields = target_json(job.target)
    return {
        "id": job.id, "tenantId": job.tenant_id, "topic": job.topic, "status": job.state.value, "reason": job.reason,
        "kind": str(job.kind), "scheduleId": job.schedule_id, "occurrenceKey": job.occurrence_key,
        "scheduledAt": format_utc(job.scheduled_at), "runAt": format_utc(job.run_at), "dueAt": format_utc(job.due_at),
        "timezone": job.timezone,
        "localTime": job.local_time, "payload": job.payload, "metadata": metadata_json(job.metadata), "key": job.key,
        "queue": job.queue, "priority": job.priority, "group": job.group, "condition": job.condition,
        "unless": job.unless, "retry": job.retry,
        "timeoutSeconds": job.timeout,
        "expiresAt": format_utc(job.expires_at), "target": target_fields.get("target"),
        "onUnhandled": target_fields.get("on_unhandled"),
        "hold": None if job.hold is None else str(job.hold), "attemptNumber": job.attempt,
        "attemptsMade": job.attempts_used,
        "attempts": job.attempts, "nodeId": job.node_id, "createdAt": format_utc(job.created_at),
        "firedAt": format_utc(job.started_at), "firstFiredAt": format_utc(job.first_started_at), "lagMs": lag_ms(job),
        "completedAt": format_utc(job.finished_at),
        "durationMs": duration_ms(job),
        "errorCode": job.error_code, "errorMessage": job.error, "result": job.result,
        "progress": None if job.progress is None else _render_progress(job.progress),
        "replaces": job.replaces, "replacedBy": job.replaced_by,
        "skippedTo": format_utc(job.skipped_to), "skippedCount": job.skipped_count, "adjusted": job.adjusted,
    }  # fmt: skip


def _render_progress(progress: Progress) -> dict[str, Any]:
    return {"fraction": progress.fraction, "text": progress.text, "at": format_utc(progress.at)}


def lag_ms(job: Job) -> float | None:
    """Return the milliseconds from the due time to the first start; None if it has not started."""
    return None if job.lag is None else round(job.lag.total_seconds() * 1000, 3)


def duration_ms(job: Job) -> int | None:
    """Return the milliseconds from the start of the last attempt to its end; None if it has not finished."""
    if job.started_at is None or job.finished_at is None:
        return None
    return max(0, round((job.finished_at - job.started_at).total_seconds() * 1000))
