"""What every target shares: the delivery that goes in, the outcome that comes back, the bodies on the wire.

A new target is a class with `kind`, `check`, `deliver` and `close`; nothing else is asked of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from timebell.errors import InvalidInput
from timebell.model.policy import Retry

KEPT_BYTES = 4096
"""How much of a receiver's body, or of each output of a command, is kept with the job."""
LONGEST_RETRY_AFTER = 86_400.0


class Block(Protocol):
    """`async with` in async handlers, `with` in plain functions."""

    async def __aenter__(self) -> AsyncConnection: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    def __enter__(self) -> Connection: ...

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Completion(Protocol):
    """How a handler completes its job itself."""

    def transaction(self, result: Callable[[], Any]) -> Block:
        """A transaction that completes the job, with what `result` gives at its end."""
        ...

    def joined(
        self, result: Callable[[], Any], connection: Any, atomic: AbstractContextManager[Any]
    ) -> AbstractContextManager[None]:
        """The same in a transaction of the caller's: `atomic` begins and commits it on `connection`, in this thread."""
        ...


@dataclass(slots=True)
class Delivery:
    """One attempt at one due job: the same facts for every target. All datetimes are aware."""

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
    completion: Completion | None = None
    replays: int = 0
    """How often the job was replayed after it had failed for good."""
    retry: Retry = field(default_factory=Retry)
    """The job's own retry policy, or the default: for queues that try again themselves."""
    priority: int = 0
    expires_at: datetime | None = None
    """When a job that has not started is void."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """The attempts before, as the job's `attempts` shows them; the last `progress` among them is the newest."""
    progress: Any = None
    """JSON that a target sets to what it has done so far: kept with the attempt unless it completes the job."""


@dataclass(slots=True)
class Outcome:
    """What became of a delivery.

    `retryable` says whether another attempt could end differently; `retry_after` (seconds) is the receiver's
    own wish. `result` is JSON kept with the job. `code` (UPPER_SNAKE) and `error` are fit for a user's eyes:
    they hold no secret and no address inside the network.
    """

    delivered: bool
    retryable: bool = True
    retry_after: float | None = None
    result: Any = None
    code: str | None = None
    error: str | None = None
    reports: bool = False
    """Delivered, but not done: the receiver will say what becomes of it, or its time runs out."""
    counts: bool = True
    """Of a failure: whether it uses up a try. An outage of what everything goes through is not the job's fault."""
    record: dict[str, Any] | None = field(default=None, compare=False)
    """For the job's record of its deliveries, what else there is to say: `to` (a host), `status`, `response` (text)."""
    gone: bool = False
    """Failed because the receiver is there no more: a target under a name is sent nothing further."""
    sent: Any = field(default=None, repr=False, compare=False)
    """What went out, as JSON, for a person who tests the target; it is not kept."""

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
    """A place to deliver to. One instance serves many deliveries at once."""

    kind: str

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options in normal form, when a job is made. Raises InvalidInput or Refused; does no I/O."""
        ...

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Try once, with options that `check` returned. What goes wrong is an outcome, not an exception.

        The job's timeout arrives as a cancellation: clean up, then let it through.
        """
        ...

    async def close(self) -> None:
        """Give back what is held. No delivery is under way, and none follows."""
        ...


@runtime_checkable
class Finds(Target, Protocol):
    """A target that can be asked what its queue still has."""

    async def lost(self, sent: Sequence[tuple[Delivery, dict[str, Any]]]) -> set[str] | None:
        """The job ids, of these deliveries that reports are awaited of, that the queue knows nothing of any more;
        None if it cannot tell. Raises what its library raises."""
        ...


def message_id(delivery: Delivery) -> str:
    """The id of the message of a job in somebody's queue: the occurrence key, and `.rN` after the Nth replay.

    Every attempt sends the same id, so a queue that knows it, or a consumer, can drop what came twice; a replay is
    meant to run again and so has another. No colon is in it, as BullMQ and others keep that for their own keys.
    """
    key = delivery.occurrence_key.replace(":", "_")
    return f"{key}.r{delivery.replays}" if delivery.replays else key


def facts(delivery: Delivery) -> dict[str, Any]:
    """The fields of `Arrived` in camelCase: the `plain` body. `lateBy` is in seconds."""
    return {
        "topic": delivery.topic,
        "payload": delivery.payload,
        "metadata": delivery.metadata,
        "timezone": delivery.timezone,
        "scheduledAt": instant(delivery.scheduled_at),
        "firedAt": instant(delivery.fired_at),
        "lateBy": (delivery.fired_at - delivery.scheduled_at).total_seconds(),
        "jobId": delivery.job_id,
        "scheduleId": delivery.schedule_id,
        "scheduleName": delivery.schedule_name,
        "occurrenceKey": delivery.occurrence_key,
        "attempt": delivery.attempt,
        "upcoming": [instant(at) for at in delivery.upcoming],
    }


def cloudevent(delivery: Delivery) -> dict[str, Any]:
    """A CloudEvents 1.0 event in structured JSON. `id` is the message's, the same for every attempt, to dedupe on."""
    return {
        "specversion": "1.0",
        "id": message_id(delivery),
        "source": "timebell",
        "type": "timebell.job.due",
        "subject": delivery.topic,
        "time": instant(delivery.scheduled_at),
        "datacontenttype": "application/json",
        "data": facts(delivery),
    }


def instant(at: datetime) -> str:
    """RFC 3339 in UTC with `Z`."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def text(data: bytes | bytearray) -> str:
    """Bytes from outside as text that every store can keep: PostgreSQL's jsonb takes no NUL."""
    return data.decode("utf-8", "replace").replace("\x00", "\N{REPLACEMENT CHARACTER}")


def retry_after(value: str, now: datetime) -> float | None:
    """Seconds, from either form of Retry-After (RFC 9110, 10.2.3), within 0 to a day; None if unreadable."""
    if value.isascii() and value.isdigit():
        return min(float(value), LONGEST_RETRY_AFTER)
    try:
        at = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    seconds = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - now).total_seconds()
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


def only(options: dict[str, Any], known: Collection[str]) -> None:
    """Raises InvalidInput for an option that this target does not have."""
    for name in options:
        if name not in known:
            raise InvalidInput(
                f"The target has no option {name!r}.",
                code="TARGET_OPTIONS_INVALID",
                fix=f"It takes: {', '.join(sorted(known))}.",
            )
