"""An operation: long work that one request started, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

STEP = 200
"""So many items at once: a step is one transaction, and short."""
TICK = 0.1  # seconds between the steps of one that keeps a rate
AT_ONCE = 1.0  # seconds of its rate that one may make up for
STALLED = timedelta(minutes=2)
"""An import whose process is gone writes nothing for so long."""


class OperationKind(StrEnum):
    """What an operation does."""

    REPLAY = "replay"
    DISCARD = "discard"
    CANCEL = "cancel"
    IMPORT = "import"
    SCAN = "scan"


class OperationState(StrEnum):
    """Where it stands."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, kw_only=True)
class Operation:
    """One operation. `spec` says of what; `done`, `failed` and `skipped` of `total` items (None: not known) are past.

    `errors` are the first that were refused, and why. Instants are aware UTC datetimes.
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
    def past(self) -> int:
        """Items that are dealt with."""
        return self.done + self.failed + self.skipped

    def rate(self) -> float | None:
        """Items a second so far; None before the first."""
        seconds = (self.updated_at - self.created_at).total_seconds()
        return self.past / seconds if seconds > 0 and self.past else None

    def eta(self) -> float | None:
        """Seconds until it is over at this rate; None where that is not known."""
        if self.state is not OperationState.RUNNING or self.total is None or not (rate := self.rate()):
            return None
        return max(0, self.total - self.past) / rate


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of an operation came to; `cursor` is where the next one goes on, None: there is none.

    `spec` and `total` are given where they changed; `wait` is how many seconds there is nothing to go on with.
    """

    done: int = 0
    failed: int = 0
    skipped: int = 0
    cursor: str | None = None
    errors: tuple[dict[str, Any], ...] = ()
    spec: dict[str, Any] | None = None
    total: int | None = None
    wait: float = 0.0


def allowance(rate: float | None, last: datetime, now: datetime) -> tuple[int, datetime]:
    """How many items may be dealt with now, at `rate` a second (None: as fast as it goes), and what counts as the
    instant of that step; or none, and when to look again."""
    if rate is None:
        return STEP, now
    pause = timedelta(seconds=max(TICK, 1 / rate))
    if now < last + pause:
        return 0, last + pause
    begun = max(last, now - timedelta(seconds=max(AT_ONCE, 1 / rate)))
    most = min(STEP, int(rate * (now - begun).total_seconds() + 1e-6))
    return most, begun + timedelta(seconds=most / rate)
