"""Cron: POSIX crontab and crontab(5), with seconds, years and documented behaviour when the clock jumps.

An entry with `*` at the start of its second, minute or hour field is a wildcard entry and follows real
time. Any other is fixed: each local time it names happens once on each day that exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

from timebell.errors import InvalidRecurrence
from timebell.recurrence.core import JSON, Fold, Gap, Spec
from timebell.recurrence.cron.day_masks import matching
from timebell.recurrence.cron.describe import describe_cron
from timebell.recurrence.cron.lint import remarks, why_never
from timebell.recurrence.cron.parser import WEEKDAY, YEAR, CronFields, parse_fields, refuse
from timebell.recurrence.local_times import DailyWalls, TimesOfDay, WallRule
from timebell.recurrence.zones import Zone

Wildcard = Literal["real", "fixed"]
BothDays = Literal["and", "or"]
MonthEnd = Literal["skip", "back"]
_CHOICES = {
    "gap": get_args(Gap),
    "fold": get_args(Fold),
    "wildcard": get_args(Wildcard),
    "days": (None, *get_args(BothDays)),
    "month_end": get_args(MonthEnd),
}
_USUAL = ("end", "first", "real", None, "skip")
_KEY = re.compile(r"[^\0\ud800-\udfff]{0,1000}")


@dataclass(frozen=True, slots=True)
class Cron(Spec):
    """A cron expression: 5 fields, 6 with seconds first, 7 with years last too, or a macro such as @daily.

    What a fixed time does when the clock jumps over it (`gap`): "end" fires once as the gap ends, "shift"
    as late as the clock jumped, "skip" not at all; and when the clock repeats it (`fold`): "first",
    "last" or "both". An entry whose second, minute or hour starts with `*` follows real time, unless
    `wildcard` is "fixed". `days` says whether day-of-month and day-of-week must both match ("and") or one
    of them ("or"); without it, crontab(5) does. `month_end` says what becomes of day 29, 30 or 31 in a
    shorter month: "skip", or "back" for its last day. `hash_key` chooses the numbers of each `H`; without
    one, `bind` does. Raises InvalidRecurrence: INVALID_CRON, or NEVER_FIRES for days that do not exist,
    which `allow_never` allows.
    """

    kind: ClassVar[str] = "cron"
    expression: str
    gap: Gap = "end"
    fold: Fold = "first"
    wildcard: Wildcard = "real"
    days: BothDays | None = None
    month_end: MonthEnd = "skip"
    allow_never: bool = False
    hash_key: str | None = None

    def __post_init__(self) -> None:
        if (self.gap, self.fold, self.wildcard, self.days, self.month_end) != _USUAL:
            for name, allowed in _CHOICES.items():
                if (value := getattr(self, name)) not in allowed:
                    refuse(f"{name}={value!r:.64} is unknown.", f"Use one of {', '.join(map(str, allowed))}.")
        if not isinstance(self.allow_never, bool):
            refuse(f"allow_never={self.allow_never!r:.64} is unknown.", "Use True or False.")
        if self.hash_key is not None and (not isinstance(self.hash_key, str) or not _KEY.fullmatch(self.hash_key)):
            refuse(f"hash_key={self.hash_key!r:.64} is no key.", "Use text of at most 1000 characters.")
        if not isinstance(self.expression, str):
            refuse(f"A cron expression is text, not {self.expression!r:.64}.", 'E.g. "0 9 * * 1-5".')
        if self.days == "or" and self._fields().texts[WEEKDAY].startswith("+"):
            refuse('+ asks for both day fields, days="or" for either.', "Leave one of them out.")
        if not self._compiled().ever and not self.allow_never:
            why = why_never(self._fields(), back=self.month_end == "back")
            raise InvalidRecurrence(
                f"{self.expression!r} never fires: {why}.", code="NEVER_FIRES", fix="Change its days, months or years."
            )

    def compiled(self, where: Zone) -> WallRule:
        made = self._compiled()
        if made.hashed:
            made = _compiled(self.expression, "", self.days, self.month_end)
        fixed = self.wildcard == "fixed" or not made.starred
        return WallRule(where, made.walls, gap=self.gap, fold=self.fold, fixed=fixed)

    def keyed(self, key: str) -> Cron:
        return replace(self, hash_key=key) if self._compiled().hashed else self

    def over(self) -> str:
        year = self._fields().texts[YEAR]
        return "it never fires again" + ("" if year == "*" else f" (its year field is {year})")

    def describe(self) -> str:
        fields = self._fields()
        return describe_cron(fields, either=fields.either_day(self.days), back=self.month_end == "back")

    def warnings(self) -> list[str]:
        fields, back = self._fields(), self.month_end == "back"
        if not self._compiled().ever:
            return [f"It never fires: {why_never(fields, back=back)}."]
        found = remarks(fields, back=back)
        if fields.either_day() and self.days is None:
            found.append("day-of-month and day-of-week are both restricted: it fires on days that match either.")
        return found

    def fields(self) -> dict[str, Any]:
        options = {name: getattr(self, field) for name, field in _OPTIONS.items()}
        given = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
        return {"spec": self.expression, "dst": {"gap": self.gap, "fold": self.fold}, **given}

    @classmethod
    def from_fields(cls, fields: JSON) -> Self:
        dst = fields.get("dst") or {}
        if not isinstance(dst, dict) or not dst.keys() <= {"gap", "fold"}:
            refuse(f"dst={dst!r} is unknown.", 'Write it like {"gap": "end", "fold": "first"}.')
        options = {field: fields[name] for name, field in _OPTIONS.items() if name in fields}
        return cls(fields["spec"], **dst, **options)

    def _fields(self) -> CronFields:
        return parse_fields(self.expression, self.hash_key)

    def _compiled(self) -> _Compiled:
        return _compiled(self.expression, self.hash_key, self.days, self.month_end)


_OPTIONS = {
    "wildcard": "wildcard", "days": "days", "monthEnd": "month_end", "allowNever": "allow_never", "hashKey": "hash_key"
}  # fmt: skip
_DEFAULTS = {"wildcard": "real", "days": None, "monthEnd": "skip", "allowNever": False, "hashKey": None}


class _Compiled(NamedTuple):
    starred: bool
    hashed: bool
    """Whether something is left to the name."""
    ever: bool
    walls: DailyWalls


@lru_cache(maxsize=4096)
def _compiled(expression: str, key: str | None, days: BothDays | None, month_end: MonthEnd) -> _Compiled:
    fields = parse_fields(expression, key)
    either, back = fields.either_day(days), month_end == "back"
    found = _days(fields.dates, fields.months, fields.weekdays, fields.years, either=either, back=back)
    times = _times(fields.hours, fields.minutes, fields.seconds)
    return _Compiled(fields.wildcard, any(fields.chosen), bool(found), DailyWalls(found, times))


_days = lru_cache(maxsize=1024)(matching)
_times = lru_cache(maxsize=1024)(TimesOfDay)
