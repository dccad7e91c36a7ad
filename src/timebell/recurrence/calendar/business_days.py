"""Rules restricted to the business days of a calendar, or moved to them."""

from __future__ import annotations

from typing import Literal

from timebell.recurrence.calendar.calendar import FIRST_DAY, LAST_DAY, BusinessDays
from timebell.recurrence.instants import DAY_S, SECOND_US
from timebell.recurrence.rules.local_times import LocalTimeRule, LocalTimes
from timebell.recurrence.rules.rule import Rule
from timebell.recurrence.rules.search_limit import SearchLimitReached, search
from timebell.recurrence.rules.time_windows import DayWindows, WindowedRule
from timebell.recurrence.zones import LOCAL_MARGIN_S

MAX_DAYS_OFF = 2_000  # days off in a row after which a search is given up: 38 years of every Saturday
MAX_ROLL_DAYS = 366  # limit on how far an occurrence is moved


def omit_days_off(rule: Rule, days: BusinessDays, reason: str) -> Rule:
    """Return the rule without the instants on days off; `reason` explains the exclusion in errors."""
    if isinstance(rule, LocalTimeRule):
        return rule.with_local_times(BusinessDayTimes(rule.all_local_times(), days, reason))
    return WindowedRule(rule, DayWindows(days), reason)


def roll_days_off(rule: Rule, days: BusinessDays, roll: Literal["next", "previous"]) -> Rule | None:
    """Return the rule with local times on days off moved to a business day, or None if it has no local times."""
    if not rule.fixed:
        return None
    if not isinstance(rule, LocalTimeRule):
        rule = LocalTimeRule(rule.zone, RuleLocalTimes(rule), gap=rule.gap, fold=rule.fold, fire_on_missing_days=True)
    return rule.with_local_times(RolledTimes(rule.all_local_times(), days, roll))


class RuleLocalTimes(LocalTimes):
    """The local times at which a rule with fixed local times fires."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def next(self, local: int) -> int | None:
        instant = self._rule.after(self._first_instant(local) * SECOND_US - 1)
        while instant is not None and self._local_second(instant) < local:  # in the second pass of a fold
            instant = self._rule.after(instant)
        return None if instant is None else self._local_second(instant)

    def previous(self, local: int) -> int | None:
        instant = self._rule.before(self._first_instant(local + LOCAL_MARGIN_S) * SECOND_US)
        while instant is not None and self._local_second(instant) >= local:
            instant = self._rule.before(instant)
        return None if instant is None else self._local_second(instant)

    def count(self, low: int, high: int) -> int:
        return self._rule.count(self._first_instant(low) * SECOND_US, self._first_instant(high) * SECOND_US)

    def _first_instant(self, local: int) -> int:
        """Return the first epoch second at which clocks show this local second or, in a gap, a later one."""
        gap_end = self._rule.zone.gap_end(local)
        return self._rule.zone.resolve(local)[0] if gap_end is None else gap_end

    def _local_second(self, instant: int) -> int:
        second = instant // SECOND_US
        return second + self._rule.zone.offset(second)


class BusinessDayTimes(LocalTimes):
    """The local times of a set that are on business days."""

    def __init__(self, local_times: LocalTimes, days: BusinessDays, reason: str) -> None:
        self._local_times, self._days, self._reason = local_times, days, reason
        self.uniform = local_times.uniform

    def next(self, local: int) -> int | None:
        with search:
            for _ in range(MAX_DAYS_OFF):
                match = self._local_times.next(local)
                business_day = None if match is None else self._days.next(match // DAY_S)
                if match is None or business_day is None or business_day == match // DAY_S:
                    return None if business_day is None else match
                search.miss(self._reason, (match - LOCAL_MARGIN_S) * SECOND_US)
                local = business_day * DAY_S
        raise SearchLimitReached(self._reason, (local - LOCAL_MARGIN_S) * SECOND_US, MAX_DAYS_OFF)

    def previous(self, local: int) -> int | None:
        with search:
            for _ in range(MAX_DAYS_OFF):
                match = self._local_times.previous(local)
                business_day = None if match is None else self._days.previous(match // DAY_S)
                if match is None or business_day is None or business_day == match // DAY_S:
                    return None if business_day is None else match
                search.miss(self._reason, (match + LOCAL_MARGIN_S) * SECOND_US)
                local = (business_day + 1) * DAY_S
        raise SearchLimitReached(self._reason, (local + LOCAL_MARGIN_S) * SECOND_US, MAX_DAYS_OFF)

    def count(self, low: int, high: int) -> int:
        total = 0
        day = self._days.next(low // DAY_S)
        while day is not None and day * DAY_S < high:
            day_off = self._days.next_day_off(day)
            total += self._local_times.count(max(low, day * DAY_S), min(high, day_off * DAY_S))
            day = self._days.next(day_off)
        return total


class RolledTimes(LocalTimes):
    """The local times of a set, with those on days off moved to a business day.

    The times on a business day come from its source days: the day itself, and the days off before it (roll "next") or
    after it ("previous").
    """

    def __init__(self, local_times: LocalTimes, days: BusinessDays, roll: Literal["next", "previous"]) -> None:
        self._local_times, self._days = local_times, days
        self._forward = roll == "next"
        self.uniform = local_times.uniform

    def next(self, local: int) -> int | None:
        day = self._days.next(local // DAY_S)
        since = local % DAY_S if day == local // DAY_S else 0
        while day is not None:
            if (second := self._first_second(day, since)) is not None:
                return day * DAY_S + second
            last_source = self._source_span(day)[1]
            following = self._local_times.next((last_source + 1) * DAY_S) if last_source < LAST_DAY else None
            day = None if following is None else self._rolled_day(following // DAY_S)
            since = 0
        return None

    def previous(self, local: int) -> int | None:
        day = self._days.previous(local // DAY_S)
        until = local % DAY_S if day == local // DAY_S else DAY_S
        while day is not None:
            if (second := self._last_second(day, until)) is not None:
                return day * DAY_S + second
            first_source = self._source_span(day)[0]
            preceding = self._local_times.previous(first_source * DAY_S) if first_source > FIRST_DAY else None
            day = None if preceding is None else self._rolled_day(preceding // DAY_S)
            until = DAY_S
        return None

    def count(self, low: int, high: int) -> int:
        total = 0
        day = self._days.next(low // DAY_S)
        while day is not None and day * DAY_S < high:
            first, last = self._source_span(day)
            if first == last:
                # Count all days up to the next day off together: each of them is its only source day.
                last = self._days.next_day_off(day) - (1 if self._forward else 2)
                total += self._local_times.count(max(low, day * DAY_S), min(high, (last + 1) * DAY_S))
            else:
                total += self._count_merged(day, max(low - day * DAY_S, 0), min(high - day * DAY_S, DAY_S))
                last = day
            day = self._days.next(last + 1)
        return total

    def _rolled_day(self, day: int) -> int | None:
        return self._days.next(day) if self._forward else self._days.previous(day)

    def _source_span(self, day: int) -> tuple[int, int]:
        """Return the first and the last source day of a business day."""
        if self._forward:
            before = self._days.previous(day - 1)
            return (FIRST_DAY if before is None else before + 1), day
        after = self._days.next(day + 1)
        return day, (LAST_DAY if after is None else after - 1)

    def _reachable_span(self, day: int) -> tuple[int, int]:
        first, last = self._source_span(day)
        return max(first, day - MAX_ROLL_DAYS), min(last, day + MAX_ROLL_DAYS)

    def _source_days(self, day: int) -> list[int]:
        """Return the source days that have local times; only the first of them if all days have the same times."""
        first, last = self._reachable_span(day)
        days: list[int] = []
        local = self._local_times.next(first * DAY_S)
        while local is not None and local // DAY_S <= last and not (days and self.uniform):
            days.append(local // DAY_S)
            local = self._local_times.next((local // DAY_S + 1) * DAY_S)
        return days

    def _first_second(self, day: int, since: int) -> int | None:
        """Return the first second of the day from `since` (inclusive), or None."""
        seconds = [
            local - source * DAY_S
            for source in self._source_days(day)
            if (local := self._local_times.next(source * DAY_S + since)) is not None and local // DAY_S == source
        ]
        return min(seconds, default=None)

    def _last_second(self, day: int, until: int) -> int | None:
        """Return the last second of the day before `until`, or None."""
        seconds = [
            local - source * DAY_S
            for source in self._source_days(day)
            if (local := self._local_times.previous(source * DAY_S + until)) is not None and local // DAY_S == source
        ]
        return max(seconds, default=None)

    def _count_merged(self, day: int, since: int, until: int) -> int:
        """Return the number of distinct seconds of the day in [since, until)."""
        sources = self._source_days(day)
        if len(sources) == 1:
            return self._local_times.count(sources[0] * DAY_S + since, sources[0] * DAY_S + until)
        seconds = set()
        for source in sources:
            local = self._local_times.next(source * DAY_S + since)
            while local is not None and local < source * DAY_S + until:
                seconds.add(local - source * DAY_S)
                local = self._local_times.next(local + 1)
        return len(seconds)
