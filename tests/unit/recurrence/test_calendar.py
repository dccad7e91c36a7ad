"""Business-day calendars: sets of dates, and skipped or rolled occurrences compared with a day-by-day walk."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime, time, timedelta
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rotation import rotated
from timebell import Calendar, Cron, Dates, Every, RRule
from timebell.errors import InvalidRecurrence
from timebell.recurrence import OnCalendar, Spec, recurrence_from_json, spec_from_json, zone

from .oracle import DAY, Walk, read

ZONES = ["UTC", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "Asia/Seoul"]
START, END = datetime(2027, 1, 1, tzinfo=UTC), datetime(2028, 1, 1, tzinfo=UTC)
STEP = timedelta(minutes=5)
FREE = [date(2027, 1, 1), date(2027, 3, 12), date(2027, 3, 15), date(2027, 10, 4), date(2027, 12, 31)]
BUSY = [date(2027, 3, 14), date(2027, 10, 3), date(2027, 11, 7)]
GOLDEN_WEEK = [date(2027, 5, 1) + n * DAY for n in range(12)]
CALENDARS = {
    "week": Calendar(),
    "holidays": Calendar(holidays=FREE, workdays=BUSY),
    "gulf": Calendar(weekend=("FRI", "SAT"), holidays=GOLDEN_WEEK),
    "no weekend": Calendar(weekend=(), holidays=FREE + GOLDEN_WEEK),
    "some days": Calendar(weekend=("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN"), workdays=FREE),
}
FIXED = [
    "0 9 * * *",
    "30 2 * * *",
    "30 1,2 13 * *",
    "0,30 0-3 1-7 * 1,6",
    "15 23 31 * *",
    "0 12 * * 0,6",
    "5 0 15 3,10 *",
]


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    return {name: Walk(name, START - 40 * DAY, END + 40 * DAY, STEP) for name in ZONES}


def is_workday(calendar: Calendar, day: date) -> bool:
    weekday = ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")[day.weekday()]
    return day in calendar.workdays or (weekday not in calendar.weekend and day not in calendar.holidays)


def local_fires(text: str, calendar: Calendar, roll: str) -> set[datetime]:
    """Return the local times of an expression, day by day, skipped or rolled."""
    expression, local_times = read(text), set()
    times: list[time] | None = None  # times of day, the same on each day
    around = (1 if roll == "skip" else 370) * DAY
    day = START.date() - around
    while day < END.date() + around:
        if expression.on(day):
            on, step = day, -DAY if roll == "previous" else DAY
            for _ in range(367):
                if is_workday(calendar, on) or roll == "skip":
                    break
                on += step
            if is_workday(calendar, on):
                if times is None:
                    moments = (datetime.combine(day, time()) + n * STEP for n in range(DAY // STEP))
                    times = [moment.time() for moment in moments if expression.at(moment)]
                local_times |= {datetime.combine(on, one) for one in times}
        day += DAY
    return local_times


def expected(local_times: set[datetime], walk: Walk) -> list[datetime]:
    """Convert local times to instants of a zone."""
    found = {walk.at[local_time][0] for local_time in local_times if local_time in walk.at}
    for (_, before), (after_at, after) in walk.jumps:
        if any(before < local_time < after for local_time in local_times):
            found.add(after_at)
    return sorted(at for at in found if START <= at < END)


@pytest.mark.parametrize(("name", "roll"), list(product(CALENDARS, ["skip", "next", "previous"])))
def test_each_occurrence_on_a_free_day_is_skipped_or_moved(name: str, roll: str, walks: dict[str, Walk]) -> None:
    calendar = CALENDARS[name]
    local_times = {text: local_fires(text, calendar, roll) for text in FIXED}
    for text, (place, walk) in product(FIXED, walks.items()):
        bound = Cron(text).on(calendar, roll=roll).bind(place, created_at=START)
        expected_instants = expected(local_times[text], walk)
        assert list(bound.between(START, END)) == expected_instants, (text, place)
        assert bound.count(START, END) == len(expected_instants), (text, place)
        middle = START + timedelta(days=73, hours=6)
        assert bound.count(START, middle) + bound.count(middle, END) == len(expected_instants)
        for n, at in list(enumerate(expected_instants))[::7]:
            assert n == 0 or bound.previous(at) == expected_instants[n - 1], (text, place)
            assert bound.next(at - timedelta(microseconds=1)) == at


@pytest.mark.parametrize("spec", [Cron("*/20 * * * *"), Every("PT45M", START), Every("P1D", datetime(2027, 1, 1, 9)),
                                  Dates([datetime(2027, 3, day, 9) for day in range(8, 20)])])  # fmt: skip
@pytest.mark.parametrize("name", rotated(CALENDARS, ["week", "holidays"]))
def test_specs_without_fixed_times_skip_free_local_dates(spec: Spec, name: str) -> None:
    calendar = CALENDARS[name]
    for place in ZONES:
        every = spec.bind(place, created_at=START)
        expected_instants = [at for at in every.between(START, END) if is_workday(calendar, every.local(at).date())]
        bound = spec.on(calendar).bind(place, created_at=START)
        if expected_instants:
            assert list(bound.between(START, expected_instants[-1])) == expected_instants[:-1]
            assert bound.next(expected_instants[-1] - timedelta(microseconds=1)) == expected_instants[-1]
        assert bound.count(START, END) == len(expected_instants)
        assert not expected_instants or bound.previous(END) == expected_instants[-1]


def test_calendar_steps_are_rolled_like_cron() -> None:
    for name, roll in product(CALENDARS, ["next", "previous"]):
        daily = Every("P1M", datetime(2026, 1, 31, 9)).on(CALENDARS[name], roll).bind("Asia/Seoul", created_at=START)
        for at in daily.between(START, END):
            assert is_workday(CALENDARS[name], daily.local(at).date())
        assert daily.count(START, END) == len(list(daily.between(START, END)))


@pytest.mark.parametrize("roll", ["next", "previous"])
@pytest.mark.parametrize(("rule", "cron"), [
    ("FREQ=MONTHLY;BYMONTHDAY=-1;BYHOUR=9,17;BYMINUTE=30", "30 9,17 L * *"),
    ("FREQ=DAILY;BYHOUR=1;BYMINUTE=45", "45 1 * * *"),
    ("FREQ=WEEKLY;BYDAY=SA,SU;BYHOUR=9", "0 9 * * 0,6"),
])  # fmt: skip
def test_rrules_are_rolled_like_cron(rule: str, cron: str, roll: str) -> None:
    for name, place in product(CALENDARS, ZONES):
        by_rule = RRule(rule, dtstart=datetime(2024, 1, 1)).on(CALENDARS[name], roll).bind(place, created_at=START)
        by_cron = Cron(cron, gap="shift").on(CALENDARS[name], roll).bind(place, created_at=START)
        found = list(by_rule.between(START, END))
        assert found == list(by_cron.between(START, END)), (name, place)
        assert by_rule.count(START, END) == len(found)
        for at in found[::9]:
            assert by_rule.previous(at) == by_cron.previous(at)
    once = RRule("FREQ=DAILY;COUNT=3", dtstart=datetime(2027, 1, 1, 9)).on(Calendar(), roll="next")
    assert [at.day for at in once.bind("UTC", created_at=START).between(START, END)] == [1, 4]
    with pytest.raises(InvalidRecurrence):
        RRule("FREQ=HOURLY").on(Calendar(), roll="next")


def test_last_business_day_of_the_month() -> None:
    payday = Every("P1M", datetime(2027, 1, 31, 9)).on(Calendar.of("KR", years=[2027]), roll="previous")
    bound = payday.bind("Asia/Seoul", created_at=START)
    days = [bound.local(at).date() for at in bound.between(START, END)]
    assert days[1:3] == [date(2027, 2, 26), date(2027, 3, 31)]
    assert days[0] == date(2027, 1, 29) and days[4] == date(2027, 5, 31) and len(days) == 12
    assert bound.describe() == (
        "Every month from 2027-01-31 09:00, moved to the previous business day of KR (holidays "
        f"{payday.calendar.source.split()[2][:-1]}), Asia/Seoul"  # type: ignore[attr-defined, union-attr]
    )


@pytest.mark.parametrize("spec", [
    Cron("*/5 * * * *"), Every("PT15M"), Dates([datetime(2027, 1, 2, 9)]), Cron("0 9 * * *") | Every("PT1H"),
    Cron("0 9 * * *") - Cron("0 9 1 * *"),
])  # fmt: skip
def test_specs_without_fixed_local_times_cannot_be_rolled(spec: Spec) -> None:
    with pytest.raises(InvalidRecurrence, match="has none") as refused:
        spec.on(Calendar(), roll="next")
    assert refused.value.code == "INVALID_ROLL"


def test_a_fixed_delay_combines_with_nothing() -> None:
    delay = Every("PT1H", since="last_end")
    for combine in (lambda: delay.on(Calendar()), lambda: delay | Cron("0 9 * * *"), lambda: Cron("0 9 * * *") - delay):
        with pytest.raises(InvalidRecurrence, match="fixed delay"):
            combine()


def test_hash_key_applies_to_combined_specs() -> None:
    inner = [spec.with_hash_key("one") for spec in (Cron("H 9 * * *"), Cron("H 9 * * *").on(Calendar()))]
    assert inner[1] == inner[0].on(Calendar())
    assert (Cron("H 9 * * *") | Cron("H 10 * * *")).with_hash_key("one") == inner[0] | Cron("H 10 * * *").with_hash_key(
        "one"
    )


def test_each_part_of_a_union_is_rolled() -> None:
    both = (Cron("0 9 * * SAT") | Cron("0 9 * * SUN")).on(Calendar(), roll="next").bind("UTC", created_at=START)
    found = list(both.between(START, START + 15 * DAY))
    assert [at.date() for at in found] == [date(2027, 1, 4), date(2027, 1, 11)]


def test_calendar_that_excludes_all_occurrences_never_fires() -> None:
    saturdays = Cron("0 9 * * SAT").on(Calendar(holidays=FREE).with_name("office", 4)).bind("UTC", created_at=START)
    for search in (saturdays.next, saturdays.previous):
        with pytest.raises(InvalidRecurrence, match=r"business day of office \(version 4\)") as refused:
            search(START)
        assert refused.value.code == "NEVER_FIRES"
    assert saturdays.count(START, END) == 0
    none = Calendar(weekend=("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN"))
    for roll in ("skip", "next", "previous"):
        assert Cron("0 9 * * *").on(none, roll=roll).bind("UTC", created_at=START).next(START) is None


def test_occurrence_is_rolled_by_a_year_at_most() -> None:
    once = Calendar(weekend=("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN"), workdays=["2030-01-01"])
    for roll, first in (
        ("next", datetime(2029, 1, 1, 9, tzinfo=UTC)),
        ("previous", datetime(2031, 1, 1, 9, tzinfo=UTC)),
    ):
        near = Cron(f"0 9 {first.day} {first.month} *").on(once, roll=roll).bind("UTC", created_at=START)
        assert list(near.between(START, datetime(2199, 1, 1, tzinfo=UTC))) == [datetime(2030, 1, 1, 9, tzinfo=UTC)]
    far = Cron("0 9 1 6 *").on(Calendar(once.weekend, workdays=["1999-01-01"]), roll="next")
    assert far.bind("UTC", created_at=START).next(START) is None


days = st.dates(date(2026, 11, 1), date(2028, 2, 1))
calendars = st.builds(
    Calendar,
    st.sets(st.sampled_from(["MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN"])),
    st.lists(days, max_size=40),
    st.lists(days, max_size=40),
)


@settings(max_examples=50, deadline=None)
@given(calendars, calendars)
def test_calendars_behave_like_sets_of_dates(one: Calendar, other: Calendar) -> None:
    assert Calendar.from_json(one.to_json()) == one
    assert len(one.holidays) + len(one.workdays) <= 80
    for n in range(500):
        day = date(2026, 10, 1) + n * DAY
        a, b = is_workday(one, day), is_workday(other, day)
        assert (day in one) == a
        assert (day in one | other) == (a or b)
        assert (day in one & other) == (a and b)
        assert (day in one - other) == (a and not b)


@settings(max_examples=200, deadline=None)
@given(calendars, days, st.integers(0, 900))
def test_workdays_are_found_and_counted(calendar: Calendar, start: date, length: int) -> None:
    first = (start - date(1970, 1, 1)).days
    listed = [day for day in range(first, first + length) if is_workday(calendar, date(1970, 1, 1) + day * DAY)]
    assert calendar.days.count(first, first + length) == len(listed)
    if listed:
        assert calendar.days.next(first) == listed[0]
        assert calendar.days.previous(first + length - 1) == listed[-1]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"weekend": "SAT"}, "INVALID_CALENDAR"),
        ({"weekend": ["SAM"]}, "INVALID_WEEKDAYS"),
        ({"holidays": ["2027-02-30"]}, "INVALID_CALENDAR"),
        ({"holidays": [datetime(2027, 1, 1)]}, "INVALID_CALENDAR"),
        ({"holidays": "2027-01-01"}, "INVALID_CALENDAR"),
        ({"workdays": ["1969-12-31"]}, "INVALID_CALENDAR"),
        ({"holidays": [date(1970, 1, 1) + n * DAY for n in range(10_001)]}, "INVALID_CALENDAR"),
        ({"years": (2028, 2027)}, "INVALID_CALENDAR"),
        ({"name": ""}, "INVALID_CALENDAR"),
    ],
)
def test_invalid_calendar_is_refused(given: dict[str, object], code: str) -> None:
    with pytest.raises(InvalidRecurrence) as refused:
        Calendar(**given)  # type: ignore[arg-type]
    assert refused.value.code == code and refused.value.fix


@pytest.mark.parametrize(
    "data", [None, [], {"holidays": 3}, {"holidays": [3]}, {"weekend": [3]}, {"years": 3}, {"other": 1}, {"source": 1}]
)
def test_invalid_calendar_json_is_refused(data: object) -> None:
    with pytest.raises(InvalidRecurrence):
        Calendar.from_json(data)  # type: ignore[arg-type]


def test_public_holidays_are_dates() -> None:
    korea = Calendar.of("KR", years=range(2026, 2029))
    assert date(2027, 3, 1) not in korea and date(2027, 3, 2) in korea
    assert korea.years == (2026, 2028) and str(korea.source).startswith("KR (holidays ")
    assert korea.warnings(date(2028, 12, 31)) == []
    (beyond,) = korea.warnings(date(2029, 1, 1))
    assert "2026 to 2028" in beyond
    assert Cron("0 9 * * *").on(korea).warnings() == [beyond]
    assert date(2029, 3, 1) in korea  # outside its years, only the weekend is known
    assert Calendar.from_json(korea.to_json()) == korea
    bavaria = Calendar.of("DE", "BY", years=[2027])
    assert date(2027, 1, 6) not in bavaria and date(2027, 1, 6) in Calendar.of("DE", years=[2027])


def test_weekend_and_substitute_workdays_come_from_the_country() -> None:
    assert Calendar.of("SA", years=[2027]).weekend == ("FRI", "SAT")
    china = Calendar.of("CN", years=[2024])
    assert date(2024, 2, 4) in china.workdays  # a Sunday that was a workday in exchange for the Spring Festival


def test_default_years_are_last_year_to_ten_years_ahead() -> None:
    years = Calendar.of("KR").years
    assert years is not None and years[1] - years[0] == 11
    assert years[0] == datetime.now(UTC).year - 1


@pytest.mark.parametrize(("country", "part"), [("XX", None), ("US", "ZZ"), ("kr", None)])
def test_an_unknown_country_is_refused(country: str, part: str | None) -> None:
    with pytest.raises(InvalidRecurrence) as refused:
        Calendar.of(country, part)
    assert refused.value.code == "INVALID_CALENDAR"


def test_missing_holidays_package_is_refused_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "holidays", None)
    with pytest.raises(InvalidRecurrence, match=r"pip install timebell\[holidays\]") as refused:
        Calendar.of("KR")
    assert refused.value.code == "HOLIDAYS_NOT_INSTALLED"


def test_combined_calendars_cover_their_common_years() -> None:
    korea, japan = Calendar.of("KR", years=range(2026, 2030)), Calendar.of("JP", years=range(2028, 2035))
    assert (korea | japan).years == (2028, 2029)
    assert (korea & Calendar()).years == (2026, 2029)
    with pytest.raises(InvalidRecurrence):
        korea | Calendar.of("JP", years=[2035])


def test_json_keeps_calendar_and_roll() -> None:
    spec = Cron("0 9 * * *").on(Calendar(holidays=FREE).with_name("kr", 3), roll="next")
    assert spec_from_json(spec.to_json()) == spec
    follows = OnCalendar(Cron("0 9 * * *"), Calendar().with_name("kr", 3), follows=True)
    assert spec_from_json(follows.to_json()) == follows != OnCalendar(Cron("0 9 * * *"), follows.calendar)
    bound = spec.bind("Asia/Seoul", created_at=START, max_runs=7)
    assert recurrence_from_json(bound.to_json()) == bound
    assert len(list(bound.between(START, END))) == 7
    assert zone("Asia/Seoul") is bound.rule.zone


@pytest.mark.parametrize(
    "fields", [{"calendar": 1}, {"roll": "up"}, {"roll": 3}, {"follows": 1}, {"spec": 3}, {"spec": {"kind": "on"}}]
)
def test_invalid_json_is_refused(fields: dict[str, object]) -> None:
    good = Cron("0 9 * * *").on(Calendar()).to_json()
    with pytest.raises(InvalidRecurrence):
        spec_from_json({**good, **fields})


def test_rrule_with_its_own_zone_is_rolled() -> None:
    text = "DTSTART;TZID=Asia/Seoul:20270227T090000\nRRULE:FREQ=WEEKLY"
    bound = RRule(text).on(Calendar(), "next").bind("Asia/Seoul", created_at=datetime(2027, 2, 1, tzinfo=UTC))
    assert bound.next(datetime(2027, 2, 26, tzinfo=UTC)) == datetime(2027, 3, 1, 0, tzinfo=UTC)  # Saturday to Monday
