"""A long-running operation that was started by a request, and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

STEP_SIZE = 200
"""Items per step: a step is one short transaction."""
STEP_INTERVAL_SECONDS = 0.1  # minimum between the steps of an operation with a rate limit
MAX_BURST_SECONDS = 1.0  # at most this much of unused rate may be used later
STALL_TIMEOUT = timedelta(minutes=2)
"""An import without progress for this long is considered abandoned by its process."""


class OperationKind(StrEnum):
    """The kind of an operation."""

    RETRY = "retry"
    DISCARD = "discard"
    CANCEL = "cancel"
    IMPORT = "import"
    SCAN = "scan"


class OperationState(StrEnum):
    """The state of an operation."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, kw_only=True)
class Operation:
    """One operation. Instants are aware UTC datetimes.

    `spec` defines the items; of `total` items (None: not known), `done`, `failed` and `skipped` are processed.
    `errors` has the first failed items with the reasons.
    """

    id: str
    tenant_id: str
    kind: OperationKind
    state: OperationState = OperationState.RUNNING
    spec: dict[str, Any] = field(default_factory=dict)
    cursor: str | None = None
    total: int | None = None
    done: int = 0
    failed: int = 0
    skipped: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    created_at: datetime
    created_by: str | None = None
    updated_at: datetime
    finished_at: datetime | None = None

    @property
    def processed(self) -> int:
        """The number of processed items."""
        return self.done + self.failed + self.skipped

    def rate(self) -> float | None:
        """Return the average number of items per second; None before the first item."""
        seconds = (self.updated_at - self.created_at).total_seconds()
        return self.processed / seconds if seconds > 0 and self.processed else None

    def eta(self) -> float | None:
        """Return the seconds until completion at the average rate; None if unknown or not running."""
        if self.state is not OperationState.RUNNING or self.total is None or not (rate := self.rate()):
            return None
        return max(0, self.total - self.processed) / rate


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step of an operation; `cursor` is where the next step starts, None if this was the last one.

    `spec` and `total` are set if they changed. `wait_seconds` is how long the next step has nothing to process.
    """

    done: int = 0
    failed: int = 0
    skipped: int = 0
    cursor: str | None = None
    errors: tuple[dict[str, Any], ...] = ()
    spec: dict[str, Any] | None = None
    total: int | None = None
    wait_seconds: float = 0.0


def allowance(rate: float | None, last: datetime, now: datetime) -> tuple[int, datetime]:
    """Return how many items may be processed now, and the instant to record for that step.

    `rate` is in items per second, None: unlimited. `last` is the instant recorded for the previous step. If the next
    step is not due yet, returns 0 and the instant at which it is.
    """
    if rate is None:
        return STEP_SIZE, now
    pause = timedelta(seconds=max(STEP_INTERVAL_SECONDS, 1 / rate))
    if now < last + pause:
        return 0, last + pause
    since = max(last, now - timedelta(seconds=max(MAX_BURST_SECONDS, 1 / rate)))
    count = min(STEP_SIZE, int(rate * (now - since).total_seconds() + 1e-6))
    return count, since + timedelta(seconds=count / rate)
