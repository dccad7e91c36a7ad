"""The attempt records of a job: one per attempt that failed, was postponed or was delivered outside Python.

The first record has the original due time of the job (`due`), which retries move in the row. A record of an attempt
that another one follows has the reason (`code`, `error`) and end (`retryAt`) of the wait; a manual retry adds
`retriedAt` and `retriedBy`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from timebell.errors import InvalidPayload
from timebell.model.job import Attempt, Completion, JobState
from timebell.model.payload import decode, encode, sanitize_text
from timebell.model.progress import Progress, decode_progress, progress_from_json

MAX_RECORDED_ATTEMPTS = 20
MAX_TRACEBACK_LENGTH = 10_000
MAX_RECORD_BYTES = MAX_RECORDED_ATTEMPTS * 16_384

FIRST_RECORD_PREFIX_LENGTH = 200
"""Characters of the stored records that contain the due time and the start of the first one."""
_FIRST_RECORD = re.compile(r'\[\{"attempt":\d+,"due":"([^"]+)","startedAt":"([^"]+)"')

AttemptRecord = dict[str, Any]
_NO_DETAILS = (None,) * 8
_NO_RECORDED_DETAILS = (None,) * 5


def first_start(run_at: datetime, started_at: datetime, errors_prefix: str | None) -> tuple[datetime, datetime]:
    """Return the original due time and the first start of a job.

    `errors_prefix` has the first FIRST_RECORD_PREFIX_LENGTH characters of its stored records, if it has any.
    """
    match = _FIRST_RECORD.match(errors_prefix) if errors_prefix else None
    if match is None:
        return run_at, started_at
    return datetime.fromisoformat(match[1]), datetime.fromisoformat(match[2])


def describe_error(code: str | None, error: str | None) -> str:
    """Return an error with its code, which the texts of exceptions already begin with."""
    if not code or not error:
        return error or code or ""
    return error if error.startswith(code) else f"{code}: {error}"


def last_progress(number: int, records: list[AttemptRecord], stored: str | None) -> Progress | None:
    """Return the last progress of attempt `number`: from its record, or from the row (`stored`) while it runs."""
    if records and records[-1].get("attempt") == number and (reported := records[-1].get("reportedProgress")):
        return progress_from_json(reported)
    return decode_progress(stored, number)


def encode_recent(records: list[AttemptRecord]) -> str:
    """Encode the first and the newest records as JSON; above MAX_RECORD_BYTES, only the newest one keeps its details.

    At most MAX_RECORDED_ATTEMPTS are encoded. Raises InvalidPayload if the result is still too large.
    """
    if len(records) > MAX_RECORDED_ATTEMPTS:
        records = [records[0], *records[1 - MAX_RECORDED_ATTEMPTS :]]
    try:
        return encode(records, "attempts", limit=MAX_RECORD_BYTES)
    except InvalidPayload:
        for record in records[:-1]:
            record.pop("response", None)
            record.pop("traceback", None)
        return encode(records, "attempts", limit=MAX_RECORD_BYTES)


def mark_retried(errors: str | None, at: datetime, actor: str | None) -> str | None:
    """Record a manual retry in the newest attempt record."""
    records: list[AttemptRecord] = decode(errors) or []
    if not records:
        return errors
    records[-1] |= {"retriedAt": at.isoformat()} | ({} if actor is None else {"retriedBy": actor})
    return encode_recent(records)


def merge_delivery(records: list[AttemptRecord], delivery: AttemptRecord) -> list[AttemptRecord]:
    """Return `records` with a delivery record merged in, ordered by attempt.

    Fields of an existing record of the same attempt win: they were written when the attempt completed, which can
    happen before its delivery is recorded.
    """
    number = delivery["attempt"]
    same = [record for record in records if record.get("attempt", 0) == number]
    others = [record for record in records if record.get("attempt", 0) != number]
    merged = {**delivery, **(same[-1] if same else {})}
    return sorted([*others, merged], key=lambda record: record.get("attempt", 0))


def finalize_completion(
    attempt: Attempt, completion: Completion, node_id: str | None, reclaimed_by: str | None = None
) -> Completion:  # fmt: skip
    """Fill in the fields of a completion that come from its attempt: serial order, group, fence and attempt log.

    `node_id` is the node that ran the attempt, `reclaimed_by` another one that reclaimed it.
    """
    completion.schedule_id = attempt.schedule_id if attempt.serial else None
    completion.expected_state = attempt.state
    completion.group_queue = attempt.queue if attempt.group is not None else None
    completion.errors = attempt.errors
    details = (
        attempt.errors, attempt.verdict, attempt.source_read, attempt.progress,
        completion.reason, completion.error, completion.delivery_record, completion.progress,
    )  # fmt: skip
    if completion.state is JobState.COMPLETED and details == _NO_DETAILS:
        return completion  # the usual case: nothing to add to the attempt log
    completion.reason = None if completion.reason is None else sanitize_text(completion.reason, 200)
    completion.code = None if completion.code is None else sanitize_text(completion.code, 100)
    completion.error = None if completion.error is None else sanitize_text(completion.error, 4000)
    lines = [] if attempt.errors is None else decode(attempt.errors) or []
    if completion.run_at is not None and completion.state is JobState.PENDING:
        completion.run_at = max(completion.run_at, attempt.scheduled_at)  # the database's clock may have been set back
    if lines and (completion.progress is not None or completion.state is JobState.COMPLETED):
        lines = [_without_progress(line) for line in lines]  # superseded by the latest progress or by the result
    if _needs_record(attempt, completion):
        line = _attempt_record(attempt, completion, node_id)
        if reclaimed_by is not None:
            line["reclaimedBy"] = reclaimed_by
        if lines and lines[-1].get("attempt") == completion.attempt:  # merge the report with its dispatch
            line = {**lines.pop(), **line}
        completion.errors = encode_recent([*lines, line])
    elif lines and completion.state is JobState.COMPLETED and '"progress"' in (attempt.errors or ""):
        completion.errors = encode_recent(lines)
    return completion


def _needs_record(attempt: Attempt, completion: Completion) -> bool:
    if completion.state is JobState.PENDING:
        return True
    if attempt.verdict is not None and completion.state in (JobState.COMPLETED, JobState.DISPATCHED):
        return True
    details = (
        attempt.source_read, attempt.progress, completion.error, completion.delivery_record, completion.progress
    )  # fmt: skip
    return details != _NO_RECORDED_DETAILS


def _attempt_record(attempt: Attempt, completion: Completion, node_id: str | None) -> AttemptRecord:
    record = {
        "attempt": completion.attempt, "due": attempt.run_at.isoformat(),
        "startedAt": attempt.started_at.isoformat(),
        "endedAt": completion.at.isoformat(),
        "node": node_id, "code": completion.code, "error": completion.error and completion.error[:1000],
        **(completion.delivery_record or {}),
    }  # fmt: skip
    if attempt.target_used is not None:
        record["target"] = attempt.target_used
    if attempt.verdict is not None:
        record["condition"] = attempt.verdict
    if attempt.source_read is not None:
        record["source"] = attempt.source_read
    if attempt.progress is not None:
        record["reportedProgress"] = attempt.progress.to_json()
    if completion.traceback is not None:
        record["traceback"] = sanitize_text(completion.traceback, MAX_TRACEBACK_LENGTH)
    if completion.attempts_allowed is not None:
        record["attemptsAllowed"] = completion.attempts_allowed
    if completion.progress is not None:
        record["progress"] = completion.progress
    if completion.state is JobState.PENDING:
        if completion.error is None:
            record |= {"code": "POSTPONED", "error": completion.reason or "The attempt was postponed."}
        if completion.run_at is not None:
            record["retryAt"] = completion.run_at.isoformat()
    return record


def _without_progress(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "progress"}
