"""Recurrences as immutable data and pure functions, independent of clocks and stores.

From the bottom to the top; a module imports only from lower layers:

- `instants`, `zones`: instants as integers, and the zone data.
- `rules`: sets of instants in one zone.
- `calendar`, `hours`: business days and hours of the day that limit a rule.
- `recurrence`: a spec in one zone, with bounds and overrides. The rest of the program uses it.
- `spec`: a recurrence as the user writes it, and the operators that combine several.
- `cron`, `rrule`, `interval`, `dates`: the notations. Each has a spec, which compiles to a rule.
- `codec`: specs and recurrences from text and JSON. `preview` and `tzdata_diff` are built on all of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from timebell.recurrence.calendar.calendar import Calendar
    from timebell.recurrence.codec import parse_cron, parse_interval, recurrence_from_json, spec_from_json
    from timebell.recurrence.cron.spec import Cron
    from timebell.recurrence.dates import Dates
    from timebell.recurrence.hours import Hours
    from timebell.recurrence.interval import Every
    from timebell.recurrence.recurrence import Override, Recurrence
    from timebell.recurrence.rrule.spec import RRule
    from timebell.recurrence.rules.rule import Fold, Gap, Rule
    from timebell.recurrence.spec import Except, OnCalendar, Roll, Spec, Union, Within
    from timebell.recurrence.zones import (
        Note,
        Release,
        Zone,
        installed_release,
        open_release,
        resolve_local,
        tzdata_version,
        zone,
        zone_key,
    )

__all__ = [
    "Calendar",
    "Cron",
    "Dates",
    "Every",
    "Except",
    "Fold",
    "Gap",
    "Hours",
    "Note",
    "OnCalendar",
    "Override",
    "RRule",
    "Recurrence",
    "Release",
    "Roll",
    "Rule",
    "Spec",
    "Union",
    "Within",
    "Zone",
    "installed_release",
    "open_release",
    "parse_cron",
    "parse_interval",
    "recurrence_from_json",
    "resolve_local",
    "spec_from_json",
    "tzdata_version",
    "zone",
    "zone_key",
]

# Imported on first access: most programs use one or two notations.
_EXPORTS = {
    "timebell.recurrence.calendar.calendar": ("Calendar",),
    "timebell.recurrence.codec": ("parse_cron", "parse_interval", "recurrence_from_json", "spec_from_json"),
    "timebell.recurrence.cron.spec": ("Cron",),
    "timebell.recurrence.dates": ("Dates",),
    "timebell.recurrence.hours": ("Hours",),
    "timebell.recurrence.interval": ("Every",),
    "timebell.recurrence.recurrence": ("Override", "Recurrence"),
    "timebell.recurrence.rrule.spec": ("RRule",),
    "timebell.recurrence.rules.rule": ("Fold", "Gap", "Rule"),
    "timebell.recurrence.spec": ("Except", "OnCalendar", "Roll", "Spec", "Union", "Within"),
    "timebell.recurrence.zones": (
        "Note",
        "Release",
        "Zone",
        "installed_release",
        "open_release",
        "resolve_local",
        "tzdata_version",
        "zone",
        "zone_key",
    ),
}
_MODULE_BY_NAME = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'timebell.recurrence' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_BY_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
