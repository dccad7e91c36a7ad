"""Cron: POSIX crontab and crontab(5), with seconds and documented behaviour when the clock jumps.

An entry with `*` at the start of its second, minute or hour field is a wildcard entry and follows real
time. Any other is fixed: each local time it names happens once on each day that exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self, get_args

from timebell.errors import InvalidRecurrence
from timebell.recurrence.base import JSON, Fold, Gap, Spec
from timebell.recurrence.days import Days
from timebell.recurrence.explain import describe_cron
from timebell.recurrence.fields import MONTHS, parse_fields, refuse, uneven_steps
from timebell.recurrence.walls import DailyWalls, TimesOfDay, WallRule, bits
from timebell.recurrence.zones import Zone


@dataclass(frozen=True, slots=True)
class Cron(Spec):
    """A cron expression of 5 fields, or 6 with seconds first, or a macro such as @daily.

    What a fixed time does when the clock jumps over it (`gap`): "end" fires once as the gap ends, "shift"
    as late as the clock jumped, "skip" not at all; and when the clock repeats it (`fold`): "first",
    "last" or "both". Raises InvalidRecurrence: INVALID_CRON, or NEVER_FIRES for days that do not exist.
    """

    kind: ClassVar[str] = "cron"
    expression: str
    gap: Gap = "end"
    fold: Fold = "first"

    def __post_init__(self) -> None:
        for name, value, allowed in (("gap", self.gap, get_args(Gap)), ("fold", self.fold, get_args(Fold))):
            if value not in allowed:
                refuse(f"{name}={value!r} is unknown.", f"Use one of {', '.join(allowed)}.")
        if not isinstance(self.expression, str):
            refuse(f"A cron expression is text, not {self.expression!r:.64}.", 'E.g. "0 9 * * 1-5".')
        _compiled(self.expression)

    def compiled(self, where: Zone) -> WallRule:
        fixed, walls = _compiled(self.expression)
        return WallRule(where, walls, gap=self.gap, fold=self.fold, fixed=fixed)

    def describe(self) -> str:
        return describe_cron(parse_fields(self.expression))

    def warnings(self) -> list[str]:
        fields = parse_fields(self.expression)
        found = uneven_steps(fields)
        if fields.either_day:
            found.append("day-of-month and day-of-week are both restricted: it fires on days that match either.")
        return found

    def fields(self) -> dict[str, Any]:
        return {"spec": self.expression, "dst": {"gap": self.gap, "fold": self.fold}}

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        dst = fields.get("dst") or {}
        if not isinstance(dst, dict) or not dst.keys() <= {"gap", "fold"}:
            refuse(f"dst={dst!r} is unknown.", 'Write it like {"gap": "end", "fold": "first"}.')
        return cls(fields["spec"], **dst)


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> tuple[bool, DailyWalls]:
    fields = parse_fields(expression)
    days = _days(fields.days, fields.months, fields.weekdays, fields.either_day)
    if not days:
        months = " or ".join(MONTHS[month - 1].capitalize() for month in bits(fields.months))
        raise InvalidRecurrence(
            f"{expression!r} never fires: {months} has no day {fields.texts[3]}.",
            code="NEVER_FIRES",
            fix="Change day-of-month or month.",
        )
    return not fields.wildcard, DailyWalls(days, _times(fields.hours, fields.minutes, fields.seconds))


_days = lru_cache(maxsize=1024)(Days)
_times = lru_cache(maxsize=1024)(TimesOfDay)
