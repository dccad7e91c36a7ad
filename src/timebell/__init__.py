"""Timebell: things that must happen at a time happen once, on time, in the right zone, whatever crashes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from timebell import errors

if TYPE_CHECKING:
    from timebell.app import Timebell
    from timebell.client.jobs import JobSpec
    from timebell.model.policy import Retry
    from timebell.recurrence import Calendar, Cron, Dates, Every, Hours, RRule
    from timebell.targets.handler import SCHEDULE_ARRIVED, Arrived, CallNext, Cancel, Snooze, arrived_event_name

__all__ = [
    "SCHEDULE_ARRIVED",
    "Arrived",
    "Calendar",
    "CallNext",
    "Cancel",
    "Cron",
    "Dates",
    "Every",
    "Hours",
    "JobSpec",
    "RRule",
    "Retry",
    "Snooze",
    "Timebell",
    "arrived_event_name",
    "errors",
]

# Imported when first asked for, so that `timebell next` does not wait for database drivers.
_HOMES = {
    "timebell.app": ("Timebell",),
    "timebell.client.jobs": ("JobSpec",),
    "timebell.model.policy": ("Retry",),
    "timebell.recurrence": ("Calendar", "Cron", "Dates", "Every", "Hours", "RRule"),
    "timebell.targets.handler": ("SCHEDULE_ARRIVED", "Arrived", "CallNext", "Cancel", "Snooze", "arrived_event_name"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'timebell' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
