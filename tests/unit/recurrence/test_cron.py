"""Cron: grammar, refused expressions, and clock changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.cpu import within
from timebell.errors import InvalidRecurrence
from timebell.recurrence import Cron, Every, Recurrence, parse_cron

CREATED = datetime(2027, 1, 1, tzinfo=UTC)


def bound(expression: str, timezone: str = "UTC", **dst: str) -> Recurrence:
    return Cron(expression, **dst).bind(timezone, created_at=CREATED)  # type: ignore[arg-type]


def fires(expression: str, timezone: str, start: str, end: str, **dst: str) -> list[str]:
    """Instants between two UTC dates or times, as text."""
    found = bound(expression, timezone, **dst).between(utc(start), utc(end))
    return [f"{at:%Y-%m-%dT%H:%M}" for at in found]


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def refusal_of(expression: str) -> InvalidRecurrence:
    with pytest.raises(InvalidRecurrence) as caught:
        Cron(expression)
    return caught.value


# grammar


@pytest.mark.parametrize(
    ("expression", "same"),
    [
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
        ("@monthly", "0 0 1 * *"),
        ("@weekly", "0 0 * * 0"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@HOURLY", "0 * * * *"),
        ("0 30 2 * * *", "30 2 * * *"),
        ("0 9 * * mon-FRI", "0 9 * * 1-5"),
        ("0 9 * * 7", "0 9 * * 0"),
        ("0 9 * * 5-7", "0 9 * * 5,6,0"),
        ("0 9 * * FRI-SUN", "0 9 * * 5,6,0"),
        ("0 9 * * sun-tue", "0 9 * * 0-2"),
        ("0 9 1 jan,Jul *", "0 9 1 1,7 *"),
        ("5/20 * * * *", "5-59/20 * * * *"),
        ("0 9 * FEB/3 *", "0 9 * 2,5,8,11 *"),
        ("05 09 * * *", "5 9 * * *"),
        ("  0\t9 * *  * ", "0 9 * * *"),
        ("0 0 */100,1-7 * MON", "0 0 */31,1-7 * 1"),
    ],
)
def test_equivalent_spellings(expression: str, same: str) -> None:
    start, end = utc("2027-01-01"), utc("2028-01-01")
    one, other = bound(expression, "Europe/Paris"), bound(same, "Europe/Paris")
    assert one.count(start, end) == other.count(start, end) > 0
    assert [at for at, _ in zip(one.between(start, end), range(200), strict=False)] == [
        at for at, _ in zip(other.between(start, end), range(200), strict=False)
    ]


@pytest.mark.parametrize(
    ("expression", "why", "fix"),
    [
        ("", "0 fields", "minute hour"),
        ("*", "1 field,", "'* * * * *'"),
        ("0 9 * *", "4 fields", "'0 9 * * *'"),
        ("1 2 3 4 5 6 7 8", "8 fields", "seconds"),
        ("60 * * * *", "60 in minute", "0 to 59"),
        ("* 24 * * *", "24 in hour", "0 to 23"),
        ("* * 0 * *", "0 in day-of-month", "1 to 31"),
        ("* * 32 * *", "32 in day-of-month", "1 to 31"),
        ("* * * 13 *", "13 in month", "1 to 12"),
        ("* * * * 8", "8 in day-of-week", "0 to 7"),
        ("60 * * * * *", "60 in second", "0 to 59"),
        ("* * * * FOO", "FOO in day-of-week", "SUN to SAT"),
        ("* * * MON *", "MON in month", "JAN to DEC"),
        ("0 22-2 * * *", "22-2 in hour runs backwards", "22-23,0-2"),
        ("0 9 * * FRI-MON", "FRI-MON in day-of-week runs backwards", "FRI-SAT,SUN-MON"),
        ("0 9 * * 5-1", "5-1 in day-of-week runs backwards", "5-6,0-1"),
        ("0 9 1 NOV-FEB *", "NOV-FEB in month runs backwards", "NOV-DEC,JAN-FEB"),
        ("*/0 * * * *", "step of 0", "at least 1"),
        ("*/90 * * * *", "*/90 in minute", "at most 60"),
        ("0 */25 * * *", "*/25 in hour", "interval"),
        ("*/90,5 * * * *", "*/90 in minute", "at most 60"),
        ("0 0 */100 * MON", "*/100 in day-of-month", "at most 31"),
        ("1,,2 * * * *", "'' in minute", "Write it like"),
        ("1-2-3 * * * *", "'1-2-3' in minute", "Write it like"),
        ("-5 * * * *", "'-5' in minute", "Write it like"),
        ("*-5 * * * *", "'*-5' in minute", "Write it like"),
        ("1.5 * * * *", "'1.5' in minute", "Write it like"),
        ("٥ * * * *", "'٥' in minute", "Write it like"),  # an Arabic digit
        ("@reboot", "@reboot has no meaning", "start hook"),
        ("@every 90s", "@every 90s is an interval", "Every"),
        ("@fortnightly", "not a known macro", "@daily"),
        ("@daily 5", "not a known macro", "@daily"),
        ("CRON_TZ=Asia/Seoul 0 9 * * *", "CRON_TZ=Asia/Seoul is not allowed", "timezone"),
        ("TZ=UTC 0 9 * * *", "TZ=UTC is not allowed", "timezone"),
        ("0 9 * * *" + " " * 300, "309 characters", "256"),
    ],
)
def test_invalid_expression_is_refused_with_a_fix(expression: str, why: str, fix: str) -> None:
    error = refusal_of(expression)
    assert error.code == "INVALID_CRON"
    assert why in error.message
    assert fix in error.fix


@pytest.mark.parametrize("wrong", [None, 5, ["0 9 * * *"], b"0 9 * * *"])
def test_non_text_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRecurrence):
        Cron(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dst", [{"gap": "later"}, {"fold": "second"}, {"gap": None}])
def test_unknown_policy_is_refused(dst: dict[str, str]) -> None:
    with pytest.raises(InvalidRecurrence):
        bound("0 9 * * *", **dst)


@pytest.mark.parametrize(
    ("expression", "expected_text"),
    [
        ("*/7 * * * *", "*/7 in minute is uneven"),
        ("*/25 * * * * *", "*/25 in second is uneven"),
        ("0 0 */2 * *", "*/2 in day-of-month is uneven"),
        ("0 0 13 * 5", "either"),
    ],
)
def test_ambiguous_expression_has_a_warning(expression: str, expected_text: str) -> None:
    assert [expected_text in warning for warning in Cron(expression).warnings()] == [True]


@pytest.mark.parametrize("expression", ["*/15 * * * *", "0 0 1 * *", "0 */6 * * 1-5", "*/60 * * * *"])
def test_plain_expression_has_no_warning(expression: str) -> None:
    assert Cron(expression).warnings() == []


def test_at_every_is_parsed_as_an_interval() -> None:
    assert parse_cron("@every 90s") == Every("PT90S")
    assert parse_cron("@every 1h30m") == Every("PT1H30M")
    assert parse_cron("0 9 * * *") == Cron("0 9 * * *")
    for wrong in ("@every", "@every 5", "@every 1d", "@every 0s"):
        with pytest.raises(InvalidRecurrence):
            parse_cron(wrong)


# days


def test_restricted_day_fields_match_either() -> None:
    assert fires("0 0 13 * 5", "UTC", "2027-08-01", "2027-09-01") == [
        f"2027-08-{day:02}T00:00" for day in (6, 13, 20, 27)
    ]
    assert fires("0 0 1 * 5", "UTC", "2027-08-01", "2027-08-14")[:2] == [
        "2027-08-01T00:00",
        "2027-08-06T00:00",
    ]
    assert len(fires("0 0 1-31 * 5", "UTC", "2027-08-01", "2027-09-01")) == 31


def test_a_day_field_with_a_star_restricts_the_other() -> None:
    assert fires("0 0 */2 * 5", "UTC", "2027-08-01", "2027-09-01") == ["2027-08-13T00:00", "2027-08-27T00:00"]
    assert fires("0 0 1-7 * */7", "UTC", "2027-08-01", "2027-09-01") == ["2027-08-01T00:00"]
    assert fires("0 0 */100,1-7 * MON", "UTC", "2027-08-01", "2027-10-01") == [
        "2027-08-02T00:00",
        "2027-09-06T00:00",
    ]


def test_day_31_skips_short_months() -> None:
    found = fires("15 6 31 * *", "UTC", "2027-01-01", "2028-01-01")
    assert [text[5:7] for text in found] == ["01", "03", "05", "07", "08", "10", "12"]


def test_leap_days_across_2100() -> None:
    leap = bound("0 0 29 2 *")
    assert leap.next(utc("2096-03-01")) == utc("2104-02-29")
    assert leap.previous(utc("2104-02-29")) == utc("2096-02-29")
    assert bound("0 0 */29 2 */7").next(utc("2070-01-01")) is not None


def test_steps_restart_in_each_hour() -> None:
    assert [text[14:] for text in fires("*/25 * * * *", "UTC", "2027-01-01T00", "2027-01-01T02")] == [
        "00",
        "25",
        "50",
    ] * 2


def test_next_and_previous_are_strict() -> None:
    nine = utc("2027-01-05T09:00")
    daily = bound("0 9 * * *")
    assert daily.next(nine) == nine + timedelta(days=1)
    assert daily.next(nine - timedelta(microseconds=1)) == nine
    assert daily.previous(nine) == nine - timedelta(days=1)
    assert daily.previous(nine + timedelta(microseconds=1)) == nine


# clocks go forward: New York, 14 March 2027, 02:00 EST -> 03:00 EDT = 07:00Z

NY = ("America/New_York", "2027-03-14", "2027-03-15")


def test_time_in_a_gap_fires_once_at_its_end() -> None:
    assert fires("30 2 * * *", *NY) == ["2027-03-14T07:00"]
    assert fires("0 30 2 * * *", *NY) == ["2027-03-14T07:00"]


def test_gap_policies() -> None:
    assert fires("30 2 * * *", *NY, gap="shift") == ["2027-03-14T07:30"]
    assert fires("30 2 * * *", *NY, gap="skip") == []


def test_several_times_in_one_gap_fire_once() -> None:
    assert fires("0,30 2 * * *", *NY) == ["2027-03-14T07:00"]
    assert fires("0,30 2,3 * * *", *NY) == ["2027-03-14T07:00", "2027-03-14T07:30"]
    assert fires("0,30 2 * * *", *NY, gap="shift") == ["2027-03-14T07:00", "2027-03-14T07:30"]
    assert fires("0,30 2,3 * * *", *NY, gap="shift") == ["2027-03-14T07:00", "2027-03-14T07:30"]


def test_wildcards_ignore_gaps() -> None:
    assert fires("*/20 2 * * *", *NY) == []
    hourly = fires("30 * * * *", "America/New_York", "2027-03-14T05:00", "2027-03-14T09:00")
    assert hourly == [f"2027-03-14T0{hour}:30" for hour in range(5, 9)]
    assert len(fires("@hourly", *NY)) == 24
    assert fires("*/10 30 2 * * *", *NY) == []
    assert fires("0 */2 * * *", "America/New_York", "2027-03-14T05:00", "2027-03-14T11:00") == [
        "2027-03-14T05:00",
        "2027-03-14T08:00",
        "2027-03-14T10:00",
    ]


# clocks go back: New York, 7 November 2027, 02:00 EDT -> 01:00 EST = 06:00Z

FOLD = ("America/New_York", "2027-11-07T04:00", "2027-11-07T08:00")


def test_time_in_a_fold_fires_in_the_first_pass() -> None:
    assert fires("30 1 * * *", *FOLD) == ["2027-11-07T05:30"]
    assert fires("0 30 1 * * *", *FOLD) == ["2027-11-07T05:30"]
    assert fires("0,30 1 * * *", *FOLD) == ["2027-11-07T05:00", "2027-11-07T05:30"]


def test_fold_policies() -> None:
    assert fires("30 1 * * *", *FOLD, fold="last") == ["2027-11-07T06:30"]
    assert fires("30 1 * * *", *FOLD, fold="both") == ["2027-11-07T05:30", "2027-11-07T06:30"]


def test_wildcards_fire_in_both_passes_of_a_fold() -> None:
    assert fires("30 * * * *", *FOLD) == [f"2027-11-07T0{hour}:30" for hour in range(4, 8)]
    assert fires("*/30 1 * * *", *FOLD) == [f"2027-11-07T0{hour}:{m}" for hour in (5, 6) for m in ("00", "30")]
    assert len(fires("* * * * *", *FOLD)) == 240


def test_yearly_time_in_a_fold() -> None:
    assert fires("30 1 7 11 *", *FOLD, fold="both") == ["2027-11-07T05:30", "2027-11-07T06:30"]
    assert fires("30 1 7 11 *", *FOLD, fold="last") == ["2027-11-07T06:30"]
    assert fires("*/30 1 7 11 *", *FOLD) == [f"2027-11-07T0{hour}:{m}" for hour in (5, 6) for m in ("00", "30")]
    yearly = bound("30 1 7 11 *", "America/New_York")
    assert yearly.previous(utc("2027-11-07T06:15")) == utc("2027-11-07T05:30")


def test_search_from_between_the_passes_of_a_fold() -> None:
    daily = bound("30 1 * * *", "America/New_York")
    assert daily.next(utc("2027-11-07T05:45")) == utc("2027-11-08T06:30")
    assert daily.next(utc("2027-11-07T06:15")) == utc("2027-11-08T06:30")
    assert daily.previous(utc("2027-11-07T06:45")) == utc("2027-11-07T05:30")


# unusual clock changes


@pytest.mark.parametrize(
    ("expression", "timezone", "start", "end", "expected"),
    [
        # half an hour: 02:00 -> 02:30 on 3 Oct 2027, back on 4 Apr 2027
        ("15 2 * * *", "Australia/Lord_Howe", "2027-10-02T12", "2027-10-03T12", ["2027-10-02T15:30"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2027-04-03T12", "2027-04-04T12", ["2027-04-03T14:45"]),
        # two hours: 01:00 -> 03:00 on 28 Mar 2027
        ("30 2 * * *", "Antarctica/Troll", "2027-03-28", "2027-03-28T20", ["2027-03-28T01:00"]),
        ("30 1,2 * * *", "Antarctica/Troll", "2027-03-28", "2027-03-28T20", ["2027-03-28T01:00"]),
        # at midnight: 00:00 -> 01:00
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-04", "2018-11-05", ["2018-11-04T03:00"]),
        ("30 0 * * *", "Africa/Cairo", "2027-04-29T12", "2027-04-30T12", ["2027-04-29T22:00"]),
        ("0 0 * * *", "Asia/Beirut", "2027-03-27T12", "2027-03-28T12", ["2027-03-27T22:00"]),
        ("5 0 28 3 *", "Asia/Beirut", "2027-01-01", "2028-01-01", ["2027-03-27T22:00"]),
        # in tzdata, Dublin has negative daylight saving time in winter
        ("30 1 * * *", "Europe/Dublin", "2027-03-28", "2027-03-28T12", ["2027-03-28T01:00"]),
        ("30 1 * * *", "Europe/Dublin", "2027-10-31", "2027-10-31T12", ["2027-10-31T00:30"]),
        # Ramadan: 03:00 -> 02:00 and a month later 02:00 -> 03:00
        ("30 2 * * *", "Africa/Casablanca", "2025-02-23", "2025-02-24", ["2025-02-23T01:30"]),
        ("30 2 * * *", "Africa/Casablanca", "2025-04-06", "2025-04-07", ["2025-04-06T02:00"]),
    ],
)
def test_unusual_clock_changes(expression: str, timezone: str, start: str, end: str, expected: list[str]) -> None:
    assert fires(expression, timezone, start, end) == expected


def test_shifted_time_may_follow_a_later_local_time() -> None:
    there = ("Australia/Lord_Howe", "2027-10-02T12", "2027-10-03T12")
    assert fires("10,35 2 * * *", *there, gap="shift") == ["2027-10-02T15:35", "2027-10-02T15:40"]
    shifting = bound("10,35 2 * * *", "Australia/Lord_Howe", gap="shift")
    assert shifting.previous(utc("2027-10-02T15:45")) == utc("2027-10-02T15:40")
    assert shifting.previous(utc("2027-10-02T15:40")) == utc("2027-10-02T15:35")
    assert shifting.note(utc("2027-10-02T15:40")) == "gap"
    assert shifting.note(utc("2027-10-02T15:35")) is None


def test_skipped_date_does_not_fire() -> None:
    apia = ("Pacific/Apia", "2011-12-29", "2012-01-01T12")
    assert fires("0 9 * * *", *apia) == ["2011-12-29T19:00", "2011-12-30T19:00", "2011-12-31T19:00"]
    assert fires("0 9 30 12 *", *apia) == []
    for gap in ("end", "shift"):
        assert fires("0 0 30 12 *", *apia, gap=gap) == []
    assert bound("0 9 * * 5", "Pacific/Apia").next(utc("2011-12-29")) == utc("2012-01-05T19:00")
    assert len(fires("*/30 * * * *", *apia)) == 2 * 84


# known bugs of other schedulers


def test_november_is_not_lost_to_a_fold_at_midnight() -> None:
    assert fires("0 0 27 * *", "America/St_Johns", "2002-10-01", "2003-01-01") == [
        "2002-10-27T02:30",
        "2002-11-27T03:30",
        "2002-12-27T03:30",
    ]


def test_november_is_not_lost_to_a_midnight_gap() -> None:
    found = fires("25 9 16,25 */5 *", "America/Asuncion", "2017-07-17", "2018-01-01")
    assert found == ["2017-11-16T12:25", "2017-11-25T12:25"]


def test_a_start_inside_a_fold_never_gives_the_past() -> None:
    start = utc("1993-01-31T02:30")
    assert bound("54 23 * * *", "America/Sao_Paulo").next(start) == utc("1993-02-01T02:54")


def test_the_even_hour_after_a_gap_just_past_midnight() -> None:
    found = fires("0 */2 * * *", "America/St_Johns", "2003-04-06T03:00", "2003-04-06T08:00")
    assert found == ["2003-04-06T03:30", "2003-04-06T04:30", "2003-04-06T06:30"]


def test_folds_at_the_edges_of_a_year_range() -> None:
    passes = ["1972-10-29T05:29", "1972-10-29T06:29"]
    assert fires("0 29 1/23 29 10 * 1972", "America/New_York", "1972-10-01", "1972-12-01", fold="both") == passes
    assert fires("0 29 * 29 10 * 1972", "America/New_York", "1972-10-29T05:00", "1972-10-29T07:00") == passes
    first = bound("0 45,54 23 31 12 ? 1985-2050", "Africa/Casablanca")  # clocks went back at 24:00
    assert first.previous(utc("1985-12-31T23:08:18")) == utc("1985-12-31T22:54")


def test_a_repeated_hour_stays_in_order() -> None:
    found = fires("7,37 * * * *", "America/St_Johns", "2002-10-27T00:00", "2002-10-27T06:00")
    assert found == [f"2002-10-27T0{hour}:{minute}" for hour in range(6) for minute in ("07", "37")]


def test_a_gap_from_one_past_midnight_loses_no_day() -> None:
    found = fires("3 0 4 * *", "America/St_Johns", "1993-03-05", "1993-05-30")
    assert found == ["1993-04-04T03:31", "1993-05-04T02:33"]


def test_a_wildcard_minute_does_not_fire_at_the_end_of_a_gap() -> None:
    assert fires("30 * * * *", "America/New_York", "2027-03-14T06:31", "2027-03-14T07:30") == []


def test_every_second_of_a_year_is_counted_quickly() -> None:
    every = bound("* * * * * *", "America/New_York")
    with within(0.2):
        assert every.count(utc("2027-01-01"), utc("2028-01-01")) == 365 * 86_400


def test_years_1970_to_2199() -> None:
    daily = bound("0 0 * * *")
    assert daily.next(utc("0001-01-01")) == utc("1970-01-01")
    assert daily.previous(datetime.max.replace(tzinfo=UTC)) == utc("2199-12-31")
    assert daily.next(utc("2199-12-31")) is None
    assert daily.next(datetime.max.replace(tzinfo=UTC)) is None
    assert daily.previous(utc("1970-01-01")) is None
    assert daily.count(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)) == 84_006
    for name in ("Pacific/Apia", "America/New_York", "Asia/Tokyo"):
        minutely = bound("* * * * *", name)
        assert minutely.next(utc("1960-01-01")) == utc("1970-01-01")
        assert minutely.previous(utc("2300-01-01")) == utc("2199-12-31T23:59")
        assert minutely.next(utc("2199-12-31T23:59")) is None
