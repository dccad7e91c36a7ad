"""Intervals: anchor + k * duration for k = 0, 1, 2, ..., with ISO 8601 durations (RFC 5545 3.3.6).

Years, months, weeks and days are steps of the local calendar; hours, minutes and seconds are elapsed time.
Every instant is computed from the anchor, so a short month or a clock change never shifts later ones.
With `since`, the interval is a fixed delay: each run determines the next instant, and only the anchor is known in
advance.
"""

from __future__ import annotations

import re
from calendar import isleap
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from math import gcd
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, get_args

from timebell.durations import Duration, to_iso_text
from timebell.errors import InvalidRecurrence
from timebell.recurrence.describe import describe_delay, describe_interval
from timebell.recurrence.instants import (
    DAY_S,
    MAX_S,
    MAX_US,
    SECOND_US,
    format_instant,
    from_us,
    local_to_us,
    parse_instant,
    to_us,
)
from timebell.recurrence.rules.dates import DatesRule
from timebell.recurrence.rules.local_times import LocalTimeRule, LocalTimes
from timebell.recurrence.rules.rule import Fold, Gap, MonthEnd, Rule
from timebell.recurrence.spec import JSON, Delay, Since, Spec
from timebell.recurrence.zones import Zone

_ISO_DURATION = re.compile(
    r"P(?=.)(?:(?P<years>\d{1,9})Y)?(?:(?P<months>\d{1,9})M)?(?:(?P<weeks>\d{1,9})W)?(?:(?P<days>\d{1,9})D)?"
    r"(?:T(?=.)(?:(?P<hours>\d{1,9})H)?(?:(?P<minutes>\d{1,9})M)?"
    r"(?:(?P<seconds>\d{1,9})(?:\.(?P<fraction>\d{1,6}))?S)?)?",
    re.ASCII,
)
_MEAN_MONTH = 2_629_746  # seconds; 400 Gregorian years are 146,097 days
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_MONTH_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_FEBRUARY = 1


class Step(NamedTuple):
    """A duration: calendar months and days, or elapsed microseconds."""

    months: int
    days: int
    elapsed_us: int


@dataclass(frozen=True, slots=True)
class Every(Spec):
    """Instants at equal intervals from an anchor, which is the first one.

    `duration` is text, in calendar steps ("1d", "P1D", "P3M") or elapsed time ("15m", "PT15M"), or elapsed time as a
    timedelta or a number of seconds.
    `anchor` is an aware datetime, or a naive one for a local time in the zone; the default is the time of creation.

    `since` turns an elapsed duration into a fixed delay: "last_end" measures it from the end of each run, "last_start"
    from its start (but the next run never starts before the end of the last). The first run is at the anchor, by
    default one delay after the creation.

    The other options apply to calendar steps. `month_end` is for steps of months and decides about months that lack the
    anchor's day: "back" uses their last day, "skip" omits them, "next" uses the 1st of the following month (SKIP of
    RFC 7529). `gap` ("end", "shift", "skip") and `fold` ("first", "last", "both") mean the same as in Cron; the
    defaults are those of RFC 5545 3.3.5. Raises InvalidRecurrence (INVALID_INTERVAL).
    """

    kind: ClassVar[str] = "interval"
    duration: Duration
    anchor: datetime | None = None
    _: KW_ONLY
    since: Since | None = None
    month_end: MonthEnd = "back"
    gap: Gap = "shift"
    fold: Fold = "first"

    def __post_init__(self) -> None:
        object.__setattr__(self, "duration", _normalize_duration(self.duration))
        self._check_options(self.step)
        if self.anchor is not None:
            if not isinstance(self.anchor, datetime):
                refuse(f"anchor must be a datetime, not {self.anchor!r}.", "Specify a datetime, or omit it.")
            if not 1970 <= self.anchor.year < 2200:
                refuse(f"anchor is in the year {self.anchor.year}.", "Specify one within 1970 to 2199.")
            if self.anchor.tzinfo is not None:
                object.__setattr__(self, "anchor", self.anchor.astimezone(UTC))

    def _check_options(self, step: Step) -> None:
        options: tuple[tuple[str, object, Any], ...] = (
            ("since", self.since, (None, *get_args(Since))), ("month_end", self.month_end, get_args(MonthEnd)),
            ("gap", self.gap, get_args(Gap)), ("fold", self.fold, get_args(Fold)),
        )  # fmt: skip
        for name, value, allowed in options:
            if value not in allowed:
                refuse(f"{name}={value!r:.64} is unknown.", f"Use one of {', '.join(filter(None, allowed))}.")
        if self.since is not None and not step.elapsed_us:
            refuse(
                f"since requires elapsed time, and {self.duration} is a calendar step.",
                f"Write it in hours or shorter, such as {'PT24H' if not step.months else 'PT720H'}.",
            )
        if self.month_end != "back" and not step.months:
            refuse(f"month_end applies to steps of months, and {self.duration} has none.", "Omit it.")
        if step.elapsed_us and (self.gap, self.fold) != ("shift", "first"):
            refuse(
                f"gap and fold apply to calendar steps, and {self.duration} is elapsed time.",
                "Omit them, or use days or longer units.",
            )

    @property
    def step(self) -> Step:
        """The parsed duration."""
        return parse_duration(str(self.duration))

    @property
    def delay(self) -> Delay | None:
        return None if self.since is None else Delay(self.step.elapsed_us, self.since)

    def with_anchor(self, created_at: datetime) -> Every:
        first = to_us(created_at, "created_at") + (self.step.elapsed_us if self.since else 0)
        if self.anchor is not None:
            return self
        if first >= MAX_US:
            raise InvalidRecurrence(
                f"{self.duration} from now is after the year 2199.", code="NEVER_FIRES", fix="Use a shorter duration."
            )
        return replace(self, anchor=from_us(first))

    def compile(self, zone: Zone) -> Rule:
        if self.anchor is None:
            refuse("The interval has no anchor.", "Specify one, or bind the interval with created_at.")
        if self.since is not None:
            return DatesRule((self.anchor,), zone)
        return ElapsedRule(self.step, self.anchor, zone) if self.step.elapsed_us else CalendarRule(self, zone)

    def describe(self) -> str:
        if self.since is not None:
            return describe_delay(self.step, self.since, self.anchor)
        return describe_interval(self.step, self.anchor, self.month_end)

    def to_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "spec": self.duration, "anchor": format_instant(self.anchor) if self.anchor else None,
        }  # fmt: skip
        if self.since is not None:
            fields["since"] = self.since
        if self.month_end != "back":
            fields["monthEnd"] = self.month_end
        if (self.gap, self.fold) != ("shift", "first"):
            fields["dst"] = {"gap": self.gap, "fold": self.fold}
        return fields

    @classmethod
    def from_fields(cls, fields: JSON, parse_part: Callable[[JSON], Spec]) -> Self:
        anchor, dst = fields.get("anchor"), fields.get("dst") or {}
        if not isinstance(dst, dict) or not dst.keys() <= {"gap", "fold"}:
            refuse(f"dst={dst!r:.64} is unknown.", 'Write it like {"gap": "shift", "fold": "first"}.')
        return cls(
            fields["spec"], None if anchor is None else parse_instant(anchor, "anchor"), since=fields.get("since"),
            month_end=fields.get("monthEnd", "back"), **dst,
        )  # fmt: skip


class ElapsedRule(Rule):
    """anchor + k * duration in elapsed time, independent of local clocks."""

    def __init__(self, step: Step, anchor: datetime, zone: Zone) -> None:
        self.zone = zone
        self._step = step.elapsed_us
        self._anchor = _resolve_anchor(anchor, zone)

    def after(self, instant: int) -> int | None:
        match = self._anchor + self._count_before(instant + 1) * self._step
        return match if match < MAX_US else None

    def before(self, instant: int) -> int | None:
        count = self._count_before(min(instant, MAX_US))
        return self._anchor + (count - 1) * self._step if count else None

    def count(self, start: int, end: int) -> int:
        return self._count_before(min(end, MAX_US)) - self._count_before(min(start, end, MAX_US))

    def iter_local_times(self, low: int, high: int) -> Iterator[int]:
        return iter(())

    def _count_before(self, instant: int) -> int:
        """Return the number of instants before `instant`."""
        return max(0, -((self._anchor - instant) // self._step))


class CalendarRule(LocalTimeRule):
    """anchor + k * step on the local calendar; steps that yield the same instant count once."""

    def __init__(self, spec: Every, zone: Zone) -> None:
        anchor = spec.anchor
        assert anchor is not None
        # An aware anchor is an instant: resolving its local time again could yield another one in a fold.
        self._aware_anchor = None if anchor.tzinfo is None else to_us(anchor)
        local = local_to_us(anchor if anchor.tzinfo is None else zone.local(anchor).replace(tzinfo=None))
        second, fraction = divmod(local, SECOND_US)
        self._all_steps = StepLocalTimes(spec.step, second, 0, spec.month_end)
        local_times = StepLocalTimes(spec.step, second, self._aware_anchor is not None, spec.month_end)
        super().__init__(zone, local_times, gap=spec.gap, fold=spec.fold, fire_on_missing_days=True, fraction=fraction)

    def all_local_times(self) -> LocalTimes:
        return self._all_steps

    def after(self, instant: int) -> int | None:
        return (
            self._aware_anchor
            if self._aware_anchor is not None and instant < self._aware_anchor
            else super().after(instant)
        )

    def before(self, instant: int) -> int | None:
        match = super().before(instant)
        return (
            self._aware_anchor
            if match is None and self._aware_anchor is not None and self._aware_anchor < instant
            else match
        )

    def count(self, start: int, end: int) -> int:
        return super().count(start, end) + (self._aware_anchor is not None and start <= self._aware_anchor < end)


class StepLocalTimes(LocalTimes):
    """Local times start + k * step, for k from `first_step`.

    `month_end` decides about months that lack the day of `start`.
    """

    def __init__(self, step: Step, start: int, first_step: int, month_end: MonthEnd) -> None:
        self._months, self._days, self._first_step = step.months, step.days, first_step
        self._mean_step_seconds = step.months * _MEAN_MONTH + step.days * DAY_S
        self._start = start
        day, self._time = divmod(start, DAY_S)
        self._date = date.fromordinal(day + _EPOCH_DAY)
        self._skip_missing, self._roll_to_next_month = month_end == "skip", month_end == "next"

    def next(self, local: int) -> int | None:
        k = self._steps_before(local)
        while (local_time := self._local_time(k)) is not None and self._is_left_out(k):  # at most a dozen in a row
            k += 1
        return local_time

    def previous(self, local: int) -> int | None:
        k = self._steps_before(local) - 1
        while k >= self._first_step and self._is_left_out(k):
            k -= 1
        return self._local_time(k) if k >= self._first_step else None

    def count(self, low: int, high: int) -> int:
        start, end = self._steps_before(low), self._steps_before(high)
        return max(
            0, end - start - (self._count_lacking(end) - self._count_lacking(start) if self._skip_missing else 0)
        )

    def _steps_before(self, local: int) -> int:
        """Return the smallest k whose local time is not before `local`."""
        # The estimate by the mean step is reduced by one step, so it is never too high, and the loop below is short.
        k = max(self._first_step, (min(local, MAX_S + DAY_S) - self._start) // self._mean_step_seconds - 1)
        while (local_time := self._local_time(k)) is not None and local_time < local:
            k += 1
        return k

    def _local_time(self, k: int) -> int | None:
        """Return the k-th local time, or None from 2201 on.

        A step that "skip" omits is on the last day of its month here; callers check `_is_left_out`.
        """
        year, month = self._month_after(k)
        if year > 2200:
            return None
        month_start = date(year, month + 1, 1).toordinal()
        next_month_start = date(year + month // 11, (month + 1) % 12 + 1, 1).toordinal()
        day = month_start + self._date.day - 1
        if day >= next_month_start:
            day = next_month_start if self._roll_to_next_month else next_month_start - 1
        day += k * self._days - _EPOCH_DAY
        return day * DAY_S + self._time if day * DAY_S < MAX_S + DAY_S else None

    def _month_after(self, k: int) -> tuple[int, int]:
        """Return the year and the zero-based month after k steps."""
        return divmod(self._date.year * 12 + self._date.month - 1 + k * self._months, 12)

    def _is_left_out(self, k: int) -> bool:
        return self._skip_missing and self._lacks_day(*self._month_after(k))

    def _lacks_day(self, year: int, month: int) -> bool:
        return self._date.day > _MONTH_LENGTHS[month] + (month == _FEBRUARY and isleap(year))

    def _count_lacking(self, end: int) -> int:
        """Return the number of k in [0, end) whose month lacks the day.

        The months repeat in a cycle of at most 12 steps, and only for 29 February the result depends on the year.
        """
        cycle = 12 // gcd(self._months, 12)
        total = 0
        for k in range(min(cycle, end)):
            year, month = self._month_after(k)
            if month == _FEBRUARY and self._date.day == 29:
                step, steps = cycle * self._months // 12, len(range(k, end, cycle))
                total += steps - _count_leap_years(range(year, year + steps * step, step))
            elif self._lacks_day(year, month):
                total += len(range(k, end, cycle))
        return total


def _count_leap_years(years: range) -> int:
    """Return the number of leap years in a range up to 2200: every fourth year except 2100 and 2200."""
    multiples_of_four = sum(len(years[n::4]) for n in range(4) if n < len(years) and years[n] % 4 == 0)
    return multiples_of_four - sum(century in years for century in (2100, 2200))


@lru_cache(maxsize=4096)
def parse_duration(text: str) -> Step:
    """Parse an ISO 8601 duration of at least a second. Raises InvalidRecurrence (INVALID_INTERVAL)."""
    match = _ISO_DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        excerpt = repr(text)[:64]
        normalized = text.strip().upper() if isinstance(text, str) else ""
        fix = (
            f"Write {normalized}." if _ISO_DURATION.fullmatch(normalized) else "Write it like 15m, PT1H30M, P1D or P3M."
        )
        refuse(f"{excerpt} is not a duration.", fix)
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    months, days = part["years"] * 12 + part["months"], part["weeks"] * 7 + part["days"]
    fraction = int((match["fraction"] or "").ljust(6, "0"))
    elapsed = (part["hours"] * 3600 + part["minutes"] * 60 + part["seconds"]) * SECOND_US + fraction
    if (months or days) and elapsed:
        refuse(
            f"{text} mixes calendar steps and elapsed time.",
            "Use days or longer units, or hours or shorter units, e.g. PT36H.",
        )
    if not (months or days) and elapsed < SECOND_US:
        refuse(f"{text} is shorter than a second.", "The shortest interval is PT1S.")
    return Step(months, days, elapsed)


def refuse(message: str, fix: str) -> NoReturn:
    """Raise InvalidRecurrence with code INVALID_INTERVAL."""
    raise InvalidRecurrence(message, code="INVALID_INTERVAL", fix=fix)


def _normalize_duration(duration: Any) -> str:
    """Return a duration in any notation as ISO 8601. Raises InvalidRecurrence (INVALID_INTERVAL)."""
    if isinstance(duration, str):
        return to_iso_text(duration)
    if isinstance(duration, int | float) and not isinstance(duration, bool) and 0 <= duration < MAX_S:
        duration = timedelta(seconds=duration)
    if not isinstance(duration, timedelta):
        refuse(f"A duration is text, a timedelta or a number of seconds, not {duration!r:.64}.", 'E.g. "15m".')
    return _to_iso_duration(duration)


def _to_iso_duration(duration: timedelta) -> str:
    if duration < timedelta(seconds=1):
        refuse(f"{duration} is shorter than a second.", "The shortest interval is a second.")
    seconds = duration.days * 86_400 + duration.seconds
    fraction = f".{duration.microseconds:06}" if duration.microseconds else ""
    units = ((seconds // 3600, "H"), (seconds // 60 % 60, "M"), (f"{seconds % 60}{fraction}", "S"))
    return "PT" + "".join(f"{amount}{unit}" for amount, unit in units if amount not in (0, "0"))


def _resolve_anchor(anchor: datetime, zone: Zone) -> int:
    if anchor.tzinfo is not None:
        return to_us(anchor)
    second, fraction = divmod(local_to_us(anchor), SECOND_US)
    return zone.resolve(second)[0] * SECOND_US + fraction
