"""Cron: POSIX crontab and crontab(5), with seconds, years and defined behavior across clock changes.

An expression whose second, minute or hour field starts with `*` is a wildcard entry and follows real time. Any other
expression is fixed: each of its local times fires once on each matching date that exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

from timebell.errors import InvalidRecurrence
from timebell.recurrence.cron.day_masks import matching_days
from timebell.recurrence.cron.describe import describe_cron
from timebell.recurrence.cron.lint import explain_never, find_warnings
from timebell.recurrence.cron.parser import WEEKDAY, YEAR, CronFields, parse_fields, refuse
from timebell.recurrence.rules.local_times import DailyLocalTimes, LocalTimeRule, TimesOfDay
from timebell.recurrence.rules.rule import Fold, Gap
from timebell.recurrence.spec import JSON, Spec
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
_DEFAULT_CHOICES = ("end", "first", "real", None, "skip")
_HASH_KEY = re.compile(r"[^\0\ud800-\udfff]{0,1000}")


@dataclass(frozen=True, slots=True)
class Cron(Spec):
    """A cron expression: 5 fields, 6 with seconds first, 7 with years last, or a macro such as @daily.

    `gap` decides when a fixed local time fires that the clock skips: "end" fires once at the end of the gap, "shift"
    fires later by the size of the gap, "skip" does not fire. `fold` decides about a local time that the clock repeats:
    "first", "last" or "both". An expression whose second, minute or hour starts with `*` follows real time, unless
    `wildcard` is "fixed". `days` requires a match of both day-of-month and day-of-week ("and") or of one of them
    ("or"); the default are the rules of crontab(5). `month_end` decides about day 29, 30 or 31 in a shorter month:
    "skip" omits it, "back" uses the last day. `hash_key` chooses the values of each `H`; by default `bind` does.
    Raises InvalidRecurrence: INVALID_CRON, or NEVER_FIRES if no day matches, unless `allow_never` is set.
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
        if (self.gap, self.fold, self.wildcard, self.days, self.month_end) != _DEFAULT_CHOICES:
            for name, allowed in _CHOICES.items():
                if (value := getattr(self, name)) not in allowed:
                    refuse(f"{name}={value!r:.64} is unknown.", f"Use one of {', '.join(map(str, allowed))}.")
        if not isinstance(self.allow_never, bool):
            refuse(f"allow_never={self.allow_never!r:.64} is unknown.", "Use True or False.")
        if self.hash_key is not None and (not isinstance(self.hash_key, str) or not _HASH_KEY.fullmatch(self.hash_key)):
            refuse(f"hash_key={self.hash_key!r:.64} is invalid.", "Use text of at most 1000 characters.")
        if not isinstance(self.expression, str):
            refuse(f"A cron expression is text, not {self.expression!r:.64}.", 'Write it like "0 9 * * 1-5".')
        if self.days == "or" and self._parsed_fields().texts[WEEKDAY].startswith("+"):
            refuse('+ requires both day fields, days="or" either of them.', "Omit one of the two.")
        if not self._compiled_expression().can_fire and not self.allow_never:
            reason = explain_never(self._parsed_fields(), clamp_to_month_end=self.month_end == "back")
            raise InvalidRecurrence(
                f"{self.expression!r} never fires: {reason}.",
                code="NEVER_FIRES",
                fix="Change its days, months or years.",
            )

    def compile(self, zone: Zone) -> LocalTimeRule:
        compiled = self._compiled_expression()
        if compiled.uses_hash:
            compiled = _compile_expression(self.expression, "", self.days, self.month_end)
        fixed = self.wildcard == "fixed" or not compiled.is_wildcard
        return LocalTimeRule(zone, compiled.local_times, gap=self.gap, fold=self.fold, fixed=fixed)

    def with_hash_key(self, key: str) -> Cron:
        return replace(self, hash_key=key) if self._compiled_expression().uses_hash else self

    def exhausted_message(self) -> str:
        year = self._parsed_fields().texts[YEAR]
        return "it never fires again" + ("" if year == "*" else f" (its year field is {year})")

    def describe(self) -> str:
        fields = self._parsed_fields()
        return describe_cron(
            fields, match_either=fields.matches_either_day(self.days), clamp_to_month_end=self.month_end == "back"
        )

    def warnings(self) -> list[str]:
        fields, clamp = self._parsed_fields(), self.month_end == "back"
        if not self._compiled_expression().can_fire:
            return [f"It never fires: {explain_never(fields, clamp_to_month_end=clamp)}."]
        warnings = find_warnings(fields, clamp_to_month_end=clamp)
        if fields.matches_either_day() and self.days is None:
            warnings.append("day-of-month and day-of-week are both restricted: it fires on days that match either.")
        return warnings

    def to_fields(self) -> dict[str, Any]:
        options = {name: getattr(self, field) for name, field in _JSON_OPTIONS.items()}
        changed = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
        return {"spec": self.expression, "dst": {"gap": self.gap, "fold": self.fold}, **changed}

    @classmethod
    def from_fields(cls, fields: JSON, parse_part: Callable[[JSON], Spec]) -> Self:
        dst = fields.get("dst") or {}
        if not isinstance(dst, dict) or not dst.keys() <= {"gap", "fold"}:
            refuse(f"dst={dst!r} is unknown.", 'Write it like {"gap": "end", "fold": "first"}.')
        options = {field: fields[name] for name, field in _JSON_OPTIONS.items() if name in fields}
        return cls(fields["spec"], **dst, **options)

    def _parsed_fields(self) -> CronFields:
        return parse_fields(self.expression, self.hash_key)

    def _compiled_expression(self) -> _CompiledExpression:
        return _compile_expression(self.expression, self.hash_key, self.days, self.month_end)


_JSON_OPTIONS = {
    "wildcard": "wildcard", "days": "days", "monthEnd": "month_end", "allowNever": "allow_never", "hashKey": "hash_key"
}  # fmt: skip
_DEFAULTS = {"wildcard": "real", "days": None, "monthEnd": "skip", "allowNever": False, "hashKey": None}


class _CompiledExpression(NamedTuple):
    is_wildcard: bool
    uses_hash: bool
    """True if a field has an `H` whose value is not chosen yet."""
    can_fire: bool
    local_times: DailyLocalTimes


@lru_cache(maxsize=4096)
def _compile_expression(
    expression: str, key: str | None, days: BothDays | None, month_end: MonthEnd
) -> _CompiledExpression:
    fields = parse_fields(expression, key)
    match_either, clamp = fields.matches_either_day(days), month_end == "back"
    matching = _cached_days(
        fields.dates, fields.months, fields.weekdays, fields.years, match_either=match_either, clamp_to_month_end=clamp
    )
    times = _cached_times(fields.hours, fields.minutes, fields.seconds)
    return _CompiledExpression(
        fields.is_wildcard, any(fields.hash_choices), bool(matching), DailyLocalTimes(matching, times)
    )


_cached_days = lru_cache(maxsize=1024)(matching_days)
_cached_times = lru_cache(maxsize=1024)(TimesOfDay)
