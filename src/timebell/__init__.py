"""Timebell: things that must happen at a time happen once, on time, in the right zone, whatever crashes."""

from timebell import errors
from timebell.app import Timebell
from timebell.client.jobs import JobSpec
from timebell.model.policy import Retry
from timebell.recurrence import Cron, Dates, Every
from timebell.targets.handler import SCHEDULE_ARRIVED, Arrived, Cancel, Snooze, arrived_event_name

__all__ = [
    "SCHEDULE_ARRIVED",
    "Arrived",
    "Cancel",
    "Cron",
    "Dates",
    "Every",
    "JobSpec",
    "Retry",
    "Snooze",
    "Timebell",
    "arrived_event_name",
    "errors",
]
