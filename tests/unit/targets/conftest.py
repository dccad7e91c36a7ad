"""A delivery to send, and a clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest
import uvloop

from timebell.targets.base import Delivery

T = TypeVar("T")


@pytest.fixture(params=[asyncio, uvloop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, T]], T]:
    """Runs a coroutine to its end, on either event loop, failing after 30 s instead of hanging."""

    def run(work: Coroutine[Any, Any, T]) -> T:
        result: T = request.param.run(asyncio.wait_for(work, 30))
        return result

    return run


@pytest.fixture
def now() -> datetime:
    return datetime(2027, 3, 14, 9, 26, 53, 589793, tzinfo=UTC)


@pytest.fixture
def delivery() -> Delivery:
    return Delivery(
        job_id="0190-job",
        tenant_id="default",
        topic="notifications.task-reminder",
        payload={"text": "약 먹기 💊", "n": 1},
        metadata={"ownerId": "u-7"},
        timezone="Asia/Seoul",
        scheduled_at=datetime(2027, 3, 14, 9, 26, 52, tzinfo=UTC),
        fired_at=datetime(2027, 3, 14, 9, 26, 52, 250000, tzinfo=UTC),
        schedule_id="0190-schedule",
        schedule_name="pills",
        occurrence_key="occ_2W8c",
        attempt=2,
        upcoming=[datetime(2027, 3, 15, 9, 26, 52, tzinfo=UTC)],
    )
