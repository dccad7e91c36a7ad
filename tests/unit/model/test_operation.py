"""Operations: average rate, remaining time, and how many items a step may process."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from timebell.model.operation import (
    STALL_TIMEOUT,
    STEP_SIZE,
    Operation,
    OperationKind,
    OperationState,
    StepResult,
    allowance,
)

T0 = datetime(2027, 3, 1, 12, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def operation(seconds: float = 10, **fields: Any) -> Operation:
    return Operation(
        id="1", tenant_id="t", kind=OperationKind.RETRY, created_at=T0, updated_at=after(seconds), **fields
    )


def test_a_new_operation_has_processed_nothing() -> None:
    new = operation()
    assert (new.state, new.done, new.failed, new.skipped, new.processed) == (OperationState.RUNNING, 0, 0, 0, 0)
    assert (new.rate(), new.eta()) == (None, None)


@pytest.mark.parametrize(
    ("fields", "rate", "eta"),
    [
        ({"done": 5, "failed": 3, "skipped": 2}, 1.0, None),  # the total is not known
        ({"done": 5, "failed": 3, "skipped": 2, "total": 30}, 1.0, 20.0),
        ({"done": 20, "total": 20}, 2.0, 0.0),
        ({"done": 20, "total": 15}, 2.0, 0.0),  # more than were counted
        ({"done": 1, "total": 2}, 0.1, 10.0),
        ({"done": 10, "total": 20, "state": OperationState.COMPLETED}, 1.0, None),
        ({"done": 10, "total": 20, "seconds": 0}, None, None),
        ({"total": 20}, None, None),
        ({"done": 4, "total": 8, "seconds": 1}, 4.0, 1.0),
    ],
)
def test_the_remaining_time_follows_from_the_average_rate(
    fields: dict[str, Any], rate: float | None, eta: float | None
) -> None:
    assert (operation(**fields).rate(), operation(**fields).eta()) == (rate, eta)


@pytest.mark.parametrize(
    ("rate", "since_last", "count", "recorded"),
    [
        (None, 0, 200, 0),
        (100, 0.05, 0, 0.05),  # a step at most every 0.1 s
        (100, 0.1, 10, 0),
        (100, 0.155, 15, -0.005),
        (0.5, 1.9, 0, 0.1),
        (0.5, 2, 1, 0),
        (0.5, 60, 1, 0),  # unused rate of more than the time of one item is lost
        (100, 60, 100, 0),  # and of more than one second
        (1000, 60, 200, -0.8),  # the rest in the next steps
    ],
)
def test_a_rate_allows_items_for_the_time_since_the_last_step(
    rate: float | None, since_last: float, count: int, recorded: float
) -> None:
    assert allowance(rate, after(-since_last), T0) == (count, after(recorded))


def test_a_step_without_counts_has_processed_nothing() -> None:
    assert StepResult(cursor="x") == StepResult(done=0, failed=0, skipped=0, cursor="x")


def test_steps_are_short_and_stalls_are_noticed() -> None:
    assert STEP_SIZE == 200
    assert timedelta(minutes=2) == STALL_TIMEOUT
