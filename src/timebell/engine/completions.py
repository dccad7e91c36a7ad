"""Build the completions of attempts from their outcomes, and count and log them."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

import orjson

from timebell.engine.node import Node
from timebell.errors import InvalidPayload
from timebell.model import decide
from timebell.model.attempts import describe_error, finalize_completion
from timebell.model.job import Attempt, Completion, JobState
from timebell.model.payload import decode, encode
from timebell.targets.base import Outcome
from timebell.targets.payloads import to_json_value

log = logging.getLogger("timebell.runner")

# Log level, name of the event, and verb of the message, by the state that a completion leads to.
STATE_LOGGING = {
    JobState.COMPLETED: (logging.DEBUG, "completed", "completed"),
    JobState.PENDING: (logging.INFO, "postponed", "postponed"),
    JobState.DISPATCHED: (logging.DEBUG, "dispatched", "dispatched"),
    JobState.FAILED: (logging.WARNING, "dead", "failed permanently"),
}


class Completions:
    """Builds, counts and logs the completions of a node's attempts."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def from_outcome(self, attempt: Attempt, outcome: Outcome) -> Completion:
        """Build the completion that follows from the outcome of a delivery."""
        now = self.node.clock.now()
        result, encode_error = (None, None) if outcome.result is None else encode_result(outcome.result)
        if outcome.awaits_report:
            report_by = now + timedelta(seconds=self.node.timeout_for(attempt))
            return Completion(
                attempt.id, attempt.number, JobState.DISPATCHED, now, run_at=report_by, delivery_record=outcome.record
            )
        if outcome.delivered:
            completion = Completion(
                attempt.id, attempt.number, JobState.COMPLETED, now, result=result, reason=encode_error
            )
        else:
            completion = decide.complete_after_failure(
                attempt.id, attempt.number, attempt.attempts_used,
                self.node.retry_policy_for(attempt, decode(attempt.retry)), now,
                outcome.code or "FAILED", self.node.mask(outcome.error or "The delivery failed."),
                retryable=outcome.retryable, retry_after=outcome.retry_after, uses_attempt=outcome.uses_attempt,
            )  # fmt: skip
            completion.result = result
            completion.traceback = None if outcome.traceback is None else self.node.mask(outcome.traceback)
        completion.delivery_record = outcome.record
        return completion

    def success(self, attempt: Attempt, result: object) -> Completion:
        """Build the final completion of a handler that returned `result`."""
        return self.finalize(attempt, self.from_outcome(attempt, Outcome.ok(result)))

    def postponed(self, attempt: Attempt, at: datetime, reason: str) -> Completion:
        """Build a completion that returns the job to pending without using up an attempt."""
        now = self.node.clock.now()
        return Completion(
            attempt.id, attempt.number, JobState.PENDING, now, run_at=at, reason=reason, uses_attempt=False
        )

    def finalize(self, attempt: Attempt, completion: Completion, worker_id: str | None = None) -> Completion:
        """Fill in the fields of a completion that come from its attempt, its schedule and its remote worker, if any."""
        if completion.state is JobState.COMPLETED and attempt.schedule_id is not None:
            revision = self.node.cached_revision(attempt)
            completion.watched = revision is not None and bool(revision.notify)
        return finalize_completion(attempt, completion, worker_id or self.node.id)

    def record(self, attempt: Attempt, completion: Completion) -> None:
        """Count and log a completion; only dead letters are logged as warnings."""
        self.node.counters.record_completion(attempt.topic, completion)
        self.log(attempt, completion)
        warn_result_not_stored(attempt, completion)

    def record_committed(self, attempt: Attempt, committed: Completion, completion: Completion | None) -> None:
        """Count and log the completion that a transaction of the handler has `committed`.

        `completion` is the one that would follow from the end of the handler; it is discarded.
        """
        self.record(attempt, committed)
        self.node.counters.ended += 1
        if completion is None or completion.state is not JobState.COMPLETED:
            error = "cancelled" if completion is None else completion.error or completion.reason or completion.state
            log.error("the handler of job %s failed after its transaction had completed the job: %s", attempt.id, error)
        elif completion.result not in (None, committed.result):
            log.warning(
                "the return value of the handler of job %s is discarded, because the job was completed before: set"
                " event.result inside the transaction", attempt.id,
            )  # fmt: skip

    def log(self, attempt: Attempt, completion: Completion) -> None:
        """Log a completion."""
        level, event, verb = STATE_LOGGING.get(completion.state, (logging.DEBUG, "ended", "ended"))
        if not log.isEnabledFor(level):
            return
        error = "" if completion.error is None else f": {describe_error(completion.code, completion.error)}"
        lag, revision = attempt.started_at - attempt.run_at, self.node.cached_revision(attempt)
        fields = {
            "event": f"job.{event}", "job_id": attempt.id, "schedule": revision.name if revision else None,
            "topic": attempt.topic, "tenant": attempt.tenant_id, "attempt": attempt.number,
            "lag_ms": round(lag.total_seconds() * 1000, 3), "trace_id": attempt.trace_id,
        }  # fmt: skip
        log.log(level, "job %s of %s %s%s", attempt.id, attempt.topic, verb, error, extra=fields)


def warn_result_not_stored(attempt: Attempt, completion: Completion) -> None:
    """Log the warning of a completed job whose result could not be stored."""
    if completion.state is JobState.COMPLETED and completion.reason is not None:
        log.warning("could not store the result of job %s of %s: %s", attempt.id, attempt.topic, completion.reason)


def encode_result(result: object) -> tuple[str | None, str | None]:
    """Return a result as JSON to store with the job, or None and the warning why it cannot be stored.

    Models, dataclasses and datetimes become JSON, also within lists and objects.
    """
    try:
        try:
            return encode(result, "result"), None
        except InvalidPayload as error:
            if error.code != "PAYLOAD_NOT_JSON":
                raise
            return encode(_to_plain_json(result), "result"), None
    except InvalidPayload as error:
        return None, f"RESULT_NOT_STORED: {error.message}"


def _to_plain_json(result: object) -> object:
    try:
        return orjson.loads(orjson.dumps(to_json_value(result), default=_convert_part))
    except (TypeError, ValueError) as error:
        raise InvalidPayload(f"result is not JSON: {error.__cause__ or error}.") from error


def _convert_part(part: object) -> object:
    if (converted := to_json_value(part)) is part:
        raise TypeError(f"it contains a {type(part).__name__} object")
    return converted
