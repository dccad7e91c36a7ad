"""When: recurrences as immutable data and pure functions, without a clock and without a store."""

from timebell.recurrence.base import Fold, Gap, Recurrence, Rule, Spec
from timebell.recurrence.cron import Cron
from timebell.recurrence.dates import Dates
from timebell.recurrence.interval import Every
from timebell.recurrence.parse import parse_cron, parse_interval, spec_from_json, spec_to_json
from timebell.recurrence.rrule import RRule
from timebell.recurrence.zones import Note, Release, Zone, installed, open_release, resolve_local, tzdata_version, zone

__all__ = [
    "Cron",
    "Dates",
    "Every",
    "Fold",
    "Gap",
    "Note",
    "RRule",
    "Recurrence",
    "Release",
    "Rule",
    "Spec",
    "Zone",
    "installed",
    "open_release",
    "parse_cron",
    "parse_interval",
    "resolve_local",
    "spec_from_json",
    "spec_to_json",
    "tzdata_version",
    "zone",
]
