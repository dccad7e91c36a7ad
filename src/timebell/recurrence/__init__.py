"""When: recurrences as immutable data and pure functions, without a clock and without a store."""

from timebell.recurrence.calendar.business_days import OnCalendar
from timebell.recurrence.calendar.calendar import Calendar
from timebell.recurrence.codec import parse_cron, parse_interval, spec_from_json, spec_to_json
from timebell.recurrence.core import Fold, Gap, Override, Recurrence, Roll, Rule, Spec
from timebell.recurrence.cron.spec import Cron
from timebell.recurrence.dates import Dates
from timebell.recurrence.interval import Every
from timebell.recurrence.operators import Except, Hours, Union, Within
from timebell.recurrence.rrule.spec import RRule
from timebell.recurrence.zones import Note, Release, Zone, installed, open_release, resolve_local, tzdata_version, zone

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
