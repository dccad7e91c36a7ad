"""A delivery for the tests of targets."""

from __future__ import annotations

from datetime import UTC, datetime

from timebell.targets.base import Delivery

REMINDER = Delivery(
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
