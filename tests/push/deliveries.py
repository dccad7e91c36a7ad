"""Create a delivery for the tests of push targets."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from timebell.targets.base import Delivery

AT = datetime(2027, 3, 1, 12, tzinfo=UTC)


def delivery(**more: Any) -> Delivery:
    fields: dict[str, Any] = {
        "job_id": "job", "tenant_id": "default", "topic": "push.hello", "payload": {}, "metadata": {},
        "timezone": "UTC", "scheduled_at": AT, "fired_at": AT, "schedule_id": None, "schedule_name": None,
        "occurrence_key": "job", "attempt": 3, "upcoming": [], **more,
    }  # fmt: skip
    return Delivery(**fields)
