"""Timebell: a durable job scheduler that runs each job at its time, in the right time zone, despite crashes."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from timebell import errors

if TYPE_CHECKING:
    from timebell.app import Timebell
    from timebell.client.job_spec import JobSpec
    from timebell.model.policy import Retry
    from timebell.recurrence import Calendar, Cron, Dates, Every, Hours, RRule
    from timebell.targets.arrived import SCHEDULE_ARRIVED, Arrived, Cancel, Fail, Snooze, arrived_event_name
    from timebell.targets.handler import CallNext

__all__ = [
    "SCHEDULE_ARRIVED",
    "Arrived",
    "Calendar",
    "CallNext",
    "Cancel",
    "Cron",
    "Dates",
    "Every",
    "Fail",
    "Hours",
    "JobSpec",
    "RRule",
    "Retry",
    "Snooze",
    "Timebell",
    "arrived_event_name",
    "errors",
]

# Imported on first access, so that commands such as `timebell next` do not load database drivers.
_EXPORTS = {
    "timebell.app": ("Timebell",),
    "timebell.client.job_spec": ("JobSpec",),
    "timebell.model.policy": ("Retry",),
    "timebell.recurrence": ("Calendar", "Cron", "Dates", "Every", "Hours", "RRule"),
    "timebell.targets.arrived": ("SCHEDULE_ARRIVED", "Arrived", "Cancel", "Fail", "Snooze", "arrived_event_name"),
    "timebell.targets.handler": ("CallNext",),
}
_MODULE_BY_NAME = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'timebell' has no attribute {name!r}")
    # Modules stay until the process ends, so collecting garbage while they are loaded finds nothing and takes 40 ms.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        value = getattr(import_module(_MODULE_BY_NAME[name]), name)
    finally:
        if is_collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
