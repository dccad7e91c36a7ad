"""The target interface: the delivery passed in, the outcome returned, and the common event formats.

A new target is a class with `kind`, `check`, `deliver` and `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sqlalchemy import Connection

from timebell.errors import InvalidInput
from timebell.model.policy import Retry

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

STORED_OUTPUT_BYTES = 4096
"""Maximum bytes of a response body, or of each output stream of a command, that are stored with the job."""
MAX_RETRY_AFTER_SECONDS = 86_400.0


class TransactionBlock(Protocol):
    """The result of `event.transaction()`: for `async with` in async handlers, for `with` in sync handlers."""

    async def __aenter__(self) -> AsyncConnection: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    def __enter__(self) -> Connection: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class AttemptHandle(Protocol):
    """Lets a handler complete its job in a transaction, report progress, and read whether it should stop."""

    @property
    def should_stop(self) -> bool: ...

    @property
    def lease_until(self) -> float:
        """When the lease of the attempt ends, unless it is renewed (monotonic seconds)."""
        ...

    def report_progress(self, fraction: float | None, text: str | None) -> None:
        """Store the progress of the attempt soon. Returns immediately; thread-safe."""
        ...

    def transaction(self, result: Callable[[], Any]) -> TransactionBlock:
        """Return a transaction that completes the job when it ends; `result` is called then for the job's result."""
        ...

    def join_transaction(
        self, result: Callable[[], Any], connection: Any, atomic: AbstractContextManager[Any]
    ) -> AbstractContextManager[None]:
        """Complete the job in the caller's transaction, which `atomic` begins and commits on `connection`."""
        ...


@dataclass(slots=True)
class Delivery:
    """One attempt of a due job, as passed to any target. All datetimes are aware."""

    job_id: str
    tenant_id: str
    topic: str
    payload: Any
    metadata: dict[str, Any]
    timezone: str
    scheduled_at: datetime
    fired_at: datetime
    schedule_id: str | None
    schedule_name: str | None
    occurrence_key: str
    attempt: int
    upcoming: list[datetime]
    handle: AttemptHandle | None = None
    manual_retries: int = 0
    """How often a user has retried the job after its final failure."""
    retry: Retry = field(default_factory=Retry)
    """The job's retry policy, for queues with retries of their own."""
    priority: int = 0
    expires_at: datetime | None = None
    """When the job expires if it has not started."""
    previous_attempts: list[dict[str, Any]] = field(default_factory=list)
    """Earlier attempts, in the format of the job's `attempts`; the last `progress` among them is the newest."""
    progress: Any = None
    """JSON that a target sets to its progress; stored with the attempt unless the attempt completes the job."""


class Exchange(Protocol):
    """A request and its response, described only when a target is tested."""

    @property
    def sent_request(self) -> dict[str, Any]:
        """The request as JSON, without secrets."""
        ...

    @property
    def received_response(self) -> dict[str, Any] | None:
        """The response as JSON, with its headers and without secrets; None without one."""
        ...


@dataclass(slots=True)
class Outcome:
    """The outcome of a delivery.

    `retryable`: another attempt may succeed. `retry_after`: the delay requested by the receiver, in seconds. `result`:
    JSON stored with the job. `code` (UPPER_SNAKE) and `error` are shown to users, so they contain no secrets and no
    internal addresses.
    """

    delivered: bool
    retryable: bool = True
    retry_after: float | None = None
    result: Any = None
    code: str | None = None
    error: str | None = None
    awaits_report: bool = False
    """Delivered but not done: the receiver will report the result, or the job times out."""
    uses_attempt: bool = True
    """False for a failure that does not count against the retry budget, such as an outage of a shared broker."""
    record: dict[str, Any] | None = field(default=None, compare=False)
    """Details for the job's delivery record: `to` (a host), `status`, `response` (text)."""
    traceback: str | None = field(default=None, repr=False, compare=False)
    """Of the exception of a Python handler; it may contain secrets until the engine has masked them."""
    receiver_gone: bool = False
    """The receiver has permanently gone; a named target is disabled."""
    exchange: Exchange | None = field(default=None, repr=False, compare=False)
    """The request and its response, for testing a target; not stored."""

    @property
    def sent_request(self) -> dict[str, Any] | None:
        """The request as JSON, without secrets."""
        return None if self.exchange is None else self.exchange.sent_request

    @property
    def received_response(self) -> dict[str, Any] | None:
        """The response as JSON, with its headers and without secrets."""
        return None if self.exchange is None else self.exchange.received_response

    @classmethod
    def ok(cls, result: Any = None) -> Outcome:
        return cls(delivered=True, result=result)

    @classmethod
    def failed(
        cls,
        code: str,
        error: str,
        retryable: bool = True,
        retry_after: float | None = None,
        result: Any = None,
    ) -> Outcome:
        return cls(False, retryable, retry_after, result, code, error)


class Target(Protocol):
    """A destination of deliveries. One instance serves many concurrent deliveries."""

    kind: str

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Validate options when a job is created, and return their normal form. Does no I/O.

        Raises InvalidInput or Refused.
        """
        ...

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Deliver once, with options returned by `check`. Failures are outcomes, not exceptions.

        The job's timeout arrives as a cancellation: clean up and re-raise it.
        """
        ...

    async def close(self) -> None:
        """Release all resources. No delivery is in progress, and none follows."""
        ...


@runtime_checkable
class ReconcilableTarget(Target, Protocol):
    """A target that can check whether its queue still has a message."""

    async def find_lost(self, sent: Sequence[tuple[Delivery, dict[str, Any]]]) -> set[str] | None:
        """Return the job ids of these dispatched deliveries whose messages the queue has lost.

        None if the queue cannot tell. Errors of the client library propagate.
        """
        ...


def message_id(delivery: Delivery) -> str:
    """Return the message id of a job in an external queue: the occurrence key, with `.rN` after the Nth manual retry.

    All attempts have the same id, so that a queue or consumer can drop duplicates; a manual retry is intended to run
    again, so it has a new one. Colons are replaced, because BullMQ and others reserve them for their own keys.
    """
    key = delivery.occurrence_key.replace(":", "_")
    return f"{key}.r{delivery.manual_retries}" if delivery.manual_retries else key


def event_fields(delivery: Delivery) -> dict[str, Any]:
    """Return the fields of `Arrived` in camelCase: the `plain` body. `lateBy` is in seconds."""
    return {
        "topic": delivery.topic,
        "payload": delivery.payload,
        "metadata": delivery.metadata,
        "timezone": delivery.timezone,
        "scheduledAt": format_utc(delivery.scheduled_at),
        "firedAt": format_utc(delivery.fired_at),
        "lateBy": (delivery.fired_at - delivery.scheduled_at).total_seconds(),
        "jobId": delivery.job_id,
        "scheduleId": delivery.schedule_id,
        "scheduleName": delivery.schedule_name,
        "occurrenceKey": delivery.occurrence_key,
        "attempt": delivery.attempt,
        "upcoming": [format_utc(at) for at in delivery.upcoming],
    }


def cloudevent(delivery: Delivery) -> dict[str, Any]:
    """Return a CloudEvents 1.0 event in structured JSON. Its `id` is the message id, the same for every attempt."""
    data = event_fields(delivery)
    return {
        "specversion": "1.0",
        "id": message_id(delivery),
        "source": "timebell",
        "type": "timebell.job.due",
        "subject": delivery.topic,
        "time": data["scheduledAt"],
        "datacontenttype": "application/json",
        "data": data,
    }


def format_utc(at: datetime) -> str:
    """Format a datetime as RFC 3339 in UTC with `Z`."""
    return f"{(at if at.tzinfo is UTC else at.astimezone(UTC)).isoformat()[:-6]}Z"


def decode_text(data: bytes | bytearray) -> str:
    """Decode external bytes to text that every store accepts: PostgreSQL's jsonb rejects NUL."""
    return data.decode("utf-8", "replace").replace("\x00", "\N{REPLACEMENT CHARACTER}")


def parse_retry_after(value: str, now: datetime) -> float | None:
    """Parse either form of Retry-After (RFC 9110, 10.2.3) to seconds, from 0 to one day; None if invalid."""
    if value.isascii() and value.isdigit():
        return min(float(value), MAX_RETRY_AFTER_SECONDS)
    try:
        at = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    seconds = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - now).total_seconds()
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)


def reject_unknown_options(options: dict[str, Any], known: Collection[str]) -> None:
    """Raise InvalidInput (INVALID_TARGET_OPTIONS) for an option that the target does not have."""
    for name in options:
        if name not in known:
            raise InvalidInput(
                f"The target has no option {name!r}.",
                code="INVALID_TARGET_OPTIONS",
                fix=f"It takes: {', '.join(sorted(known))}.",
            )
