"""What happened in a simulation, as its rows tell it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select

from timebell.model.job import Job, JobState
from timebell.store.jobs import repository
from timebell.store.schema import finished, jobs
from timebell.store.transaction import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An occurrence or one-shot, and what became of it. `fired_at` is the start of its last attempt, None if none
    started; `error` is what the last failed attempt said."""

    topic: str
    scheduled_at: datetime
    fired_at: datetime | None
    payload: Any
    state: JobState
    attempt: int
    error: str | None
    reason: str | None
    timezone: str
    job_id: str
    schedule_id: str | None
    count: int
    """1; more for a row that stands for a range of skipped occurrences."""


def jobs_since(tx: Transaction, since: datetime, now: datetime) -> list[Job]:
    """Jobs that started or ended since an instant, or wait though they are due."""
    live = select(jobs).where((jobs.c.started_at >= since) | (jobs.c.run_at <= now))
    over = select(finished).where(finished.c.finished_at >= since)
    return [repository.read(row) for query in (live, over) for row in tx.execute(query)]


def mark(job: Job) -> tuple[str, int, JobState]:
    """What tells it from itself as it was before."""
    return job.id, job.attempt, job.state


def in_order(found: list[Job]) -> list[Run]:
    """Jobs as runs, in the order of their starts or ends."""
    found.sort(key=lambda job: (job.started_at or job.finished_at or job.run_at, job.scheduled_at, job.id))
    return [_run(job) for job in found]


def _run(job: Job) -> Run:
    last = job.attempts[-1]["error"] if job.attempts else None
    return Run(
        topic=job.topic, scheduled_at=job.scheduled_at, fired_at=job.started_at, payload=job.payload, state=job.state,
        attempt=job.attempt, error=job.error or last, reason=job.reason, timezone=job.timezone, job_id=job.id,
        schedule_id=job.schedule_id, count=job.skipped_count,
    )  # fmt: skip
