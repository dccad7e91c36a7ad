"""The runs of a simulation, read from its job rows."""

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
    """An occurrence or one-shot and its outcome.

    `fired_at` is the start of the last attempt, None if none started; `error` is that of the last failed attempt.
    """

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
    """Number of occurrences: more than 1 for a range of skipped ones."""


def jobs_since(tx: Transaction, since: datetime, now: datetime) -> list[Job]:
    """Return the jobs that started or finished since an instant, or are due and pending."""
    live = select(jobs).where((jobs.c.started_at >= since) | (jobs.c.run_at <= now))
    done = select(finished).where(finished.c.finished_at >= since)
    return [repository.job_from_row(row) for query in (live, done) for row in tx.execute(query)]


def run_fingerprint(job: Job) -> tuple[str, int, JobState]:
    """Return a value that changes with each attempt and state of a job."""
    return job.id, job.attempt, job.state


def to_runs(unsorted_jobs: list[Job]) -> list[Run]:
    """Convert jobs to runs, in the order of their starts or completions."""
    unsorted_jobs.sort(key=lambda job: (job.started_at or job.finished_at or job.run_at, job.scheduled_at, job.id))
    return [_to_run(job) for job in unsorted_jobs]


def _to_run(job: Job) -> Run:
    last_error = job.attempts[-1]["error"] if job.attempts else None
    return Run(
        topic=job.topic, scheduled_at=job.scheduled_at, fired_at=job.started_at, payload=job.payload, state=job.state,
        attempt=job.attempt, error=job.error or last_error, reason=job.reason, timezone=job.timezone, job_id=job.id,
        schedule_id=job.schedule_id, count=job.skipped_count,
    )  # fmt: skip
