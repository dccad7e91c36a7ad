"""Rows of batches, which are passed to a statement as one JSON parameter: a list of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

import orjson

from timebell.model.job import Completion, JobState, NewJob
from timebell.store.types import to_micros

ToDb = Callable[[datetime | None], Any]
"""Converts an instant to its form in JSON and in parameters."""


def encode(rows: Sequence[Any]) -> str:
    """Encode a batch."""
    return orjson.dumps(rows).decode()


def job_rows(new_jobs: Iterable[NewJob], to_db: ToDb) -> list[dict[str, Any]]:
    """Return new jobs as rows, without the columns that are constants of the statements."""
    return [job_row(job, to_db) for job in new_jobs]


def job_row(job: NewJob, to_db: ToDb) -> dict[str, Any]:
    """Return a new job as a row. A missing value is NULL."""
    run_at = to_db(job.run_at)
    row = {
        "id": job.id, "tenant_id": job.tenant_id, "topic": job.topic, "schedule_id": job.schedule_id,
        "revision": job.revision, "kind": str(job.kind),
        "scheduled_at": run_at if job.scheduled_at is job.run_at else to_db(job.scheduled_at),
        "run_at": run_at, "timezone": job.timezone, "payload": job.payload,
        "metadata": job.metadata, "owner_id": job.owner_id, "key": job.key, "target": job.target,
        "queue": job.queue, "priority": job.priority, "retry": job.retry, "timeout": job.timeout,
        "expires_at": None if job.expires_at is None else to_db(job.expires_at), "serial": job.serial,
        "created_at": run_at if job.created_at is job.run_at else to_db(job.created_at), "replaces": job.replaces,
        "route": job.route, "hold": job.hold,
    }  # fmt: skip
    if job.local_time is not None:
        row["local_time"], row["tzdata"] = job.local_time, job.tzdata
    if job.group is not None:
        row["group_name"] = job.group
    if job.conditions is not None:
        row["conditions"] = job.conditions
    return row


def request_rows(new_jobs: Iterable[NewJob]) -> list[dict[str, Any]]:
    """Return the request ids of jobs as rows."""
    return [{"tenant_id": job.tenant_id, "request_id": job.request_id, "job_id": job.id} for job in new_jobs]


_OPTIONAL_FIELDS = ("reason", "error", "code", "result", "errors", "cancel", "replaced_by")
_optional_values = attrgetter(*_OPTIONAL_FIELDS)
_NO_OPTIONAL_VALUES = (None,) * len(_OPTIONAL_FIELDS)


def completion_rows(completions: Iterable[Completion], to_db: ToDb) -> list[dict[str, Any]]:
    """Return completions as rows. Enum members become plain strings, which are encoded faster."""
    rows = []
    for completion in completions:
        row = {
            "id": completion.id, "attempt": completion.attempt, "was": completion.expected_state._value_,
            "state": completion.state._value_, "at": to_db(completion.at),
            "counts": 1 if completion.uses_attempt else 0,
        }  # fmt: skip
        if completion.run_at is not None:
            row["run_at"] = to_db(completion.run_at)
        optional = _optional_values(completion)
        if optional != _NO_OPTIONAL_VALUES:  # most completions have none
            row |= {name: value for name, value in zip(_OPTIONAL_FIELDS, optional, strict=True) if value is not None}
        rows.append(row)
    return rows


def attempt_rows(attempts: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return attempts, given as (id, number), as rows."""
    return [{"id": id_, "attempt": number} for id_, number in attempts]


def dispatch_rows(completions: Iterable[Completion]) -> list[dict[str, Any]]:
    """Return dispatched attempts as rows: `until` is the deadline, in microseconds since 1970."""
    return [
        {
            "id": completion.id, "attempt": completion.attempt, "was": completion.expected_state._value_,
            "until": to_micros(completion.run_at), "errors": completion.errors,
        }
        for completion in completions
        if completion.run_at is not None
    ]  # fmt: skip


def fence_rows(attempts: Iterable[tuple[str, int, JobState]]) -> list[dict[str, Any]]:
    """Return attempts, given as (id, number, state), as rows."""
    return [{"id": id_, "attempt": number, "was": str(state)} for id_, number, state in attempts]


def split_by_size(rows: Sequence[Any], max_bytes: int) -> Iterator[str]:
    """Encode a batch in as few parts as possible, each of at most `max_bytes` unless a single row is longer."""
    part: list[bytes] = []
    size = 0
    for row in rows:
        encoded = orjson.dumps(row)
        if part and size + len(encoded) > max_bytes:
            yield f"[{b','.join(part).decode()}]"
            part, size = [], 0
        part.append(encoded)
        size += len(encoded) + 1
    if part:
        yield f"[{b','.join(part).decode()}]"
