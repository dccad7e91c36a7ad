"""The event that handlers receive, and the exceptions with which they end an attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic

from timebell.durations import Duration
from timebell.errors import TimebellError
from timebell.model.policy import parse_seconds
from timebell.model.progress import check_progress
from timebell.targets.base import AttemptHandle, TransactionBlock

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    P = TypeVar("P", default=Any)  # so that mypy --strict accepts `Arrived` without a parameter
else:
    from typing import TypeVar

    P = TypeVar("P")

SCHEDULE_ARRIVED = "schedule.arrived"


def arrived_event_name(topic: str) -> str:
    """Return the arrived event name of a topic: `schedule.<topic>.arrived`."""
    return f"schedule.{topic}.arrived"


@dataclass(slots=True, kw_only=True)
class Arrived(Generic[P]):
    """The event passed to the handlers of a due job. Datetimes are aware and in UTC.

    `occurrence_key` is the same for every attempt of an occurrence: use it to drop duplicates. For a handler that takes
    `Arrived[Reminder]`, the payload is validated and converted to a Reminder: a pydantic model, dataclass or TypedDict.
    """

    topic: str
    payload: P
    metadata: dict[str, Any]
    timezone: str
    scheduled_at: datetime
    fired_at: datetime
    late_by: timedelta
    job_id: str
    schedule_id: str | None
    occurrence_key: str
    attempt: int
    upcoming: list[datetime] = field(default_factory=list)
    state: Any = None
    """The value yielded by the app's lifespan."""
    result: Any = None
    """Set it inside `transaction()` to store a result with the job."""
    _attempt: AttemptHandle | None = field(default=None, repr=False, compare=False)
    _is_exclusive: bool = field(default=True, repr=False, compare=False)
    """False if other handlers of the topic run, too, so that this one cannot complete the job."""

    @property
    def cancelled(self) -> bool:
        """True once the handler should stop: its job was cancelled with `stop=True`, superseded, or taken over.

        For plain functions, which cannot be interrupted: `if event.cancelled: raise Cancel("stopped")`.
        """
        return self._attempt is not None and self._attempt.should_stop

    def progress(self, fraction: float | None = None, text: str | None = None) -> None:
        """Report how far the handler is: a fraction from 0 to 1, a text of at most 200 characters, or both.

        Returns immediately, in async and plain handlers. The last report is stored with the job at most once per
        second, shown on its page, and kept in the attempt record. Raises InvalidInput (INVALID_PROGRESS).
        """
        checked = check_progress(fraction, text)
        if self._attempt is not None:
            self._attempt.report_progress(*checked)

    def transaction(self) -> TransactionBlock:
        """Open a transaction on Timebell's database that completes the job when the block ends.

        The handler's writes in the block are committed if and only if this attempt completes the job.
        `async with event.transaction() as connection:` yields a SQLAlchemy AsyncConnection; in a sync handler, `with`
        yields a Connection. An error in the block rolls back and fails the attempt. Raises Conflict (ATTEMPT_ENDED) at
        the end of the block if another attempt took over, and TimebellError (TRANSACTION_NOT_EXCLUSIVE) if the topic
        has several handlers.
        """
        return self._require_exclusive_attempt().transaction(lambda: self.result)

    def _require_exclusive_attempt(self) -> AttemptHandle:
        if self._attempt is None or not self._is_exclusive:
            raise TimebellError(
                f"This event of {self.topic} cannot complete its job.", code="TRANSACTION_NOT_EXCLUSIVE",
                fix="A transaction requires a single handler, called by the engine ('*' observers do not count).",
            )  # fmt: skip
        return self._attempt


class Snooze(Exception):
    """Raise in a handler to run the job again after `delay` (numbers are seconds); uses no attempt of the budget."""

    reason = "The handler snoozed the job."

    def __init__(self, delay: Duration) -> None:
        self.delay = parse_seconds(delay, "snooze delay")
        super().__init__(f"snoozed for {self.delay:g} s")


class NoFreeThread(Snooze):
    """No thread or process became free for the handler of a claimed job, which becomes pending again."""

    reason = "No thread or process became free for the handler in time."

    def __init__(self) -> None:
        self.delay = 0.0
        Exception.__init__(self, self.reason)


class Cancel(Exception):
    """Raise in a handler to end the job as cancelled, with a reason."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason)


class Fail(Exception):
    """Raise in a handler to fail the job at once, whatever attempts are left: it becomes a dead letter."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason)
