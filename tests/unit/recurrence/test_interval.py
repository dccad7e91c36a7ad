"""Intervals: calendar steps and elapsed time from an anchor."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from itertools import islice
from zoneinfo import ZoneInfo

import pytest

from tests.cpu import within
from timebell.errors import InvalidRecurrence
from timebell.recurrence import Every, Recurrence

CREATED = datetime(2027, 1, 1, 0, 7, 30, 250_000, tzinfo=UTC)
FAR = datetime(2190, 1, 1, tzinfo=UTC)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def first(recurrence: Recurrence, count: int) -> list[str]:
    return [f"{at:%Y-%m-%dT%H:%M}" for at in islice(recurrence.between(utc("1970-01-01"), FAR), count)]


def local(recurrence: Recurrence, count: int, start: str = "1970-01-01") -> list[str]:
    found = islice(recurrence.between(utc(start), FAR), count)
    return [f"{recurrence.local(at):%m-%d %H:%M}" for at in found]


def test_default_anchor_is_the_exact_creation_time() -> None:
    quarter = Every("PT15M").bind("Asia/Seoul", created_at=CREATED)
    assert quarter.next(CREATED) == CREATED + timedelta(minutes=15)
    assert quarter.next(CREATED - timedelta(days=9)) == CREATED
    assert quarter.previous(CREATED) is None
    assert quarter.spec == Every("PT15M", CREATED)


def test_elapsed_intervals_stay_on_their_grid() -> None:
    anchor = utc("2027-03-14T06:30")
    hours = Every("PT7H", anchor).bind("America/New_York", created_at=CREATED)
    assert hours.next(anchor + timedelta(hours=700, seconds=1)) == anchor + timedelta(hours=707)
    assert first(hours, 2) == ["2027-03-14T06:30", "2027-03-14T13:30"]


def test_day_keeps_the_local_time_and_24_hours_do_not() -> None:
    anchor = datetime(2027, 3, 13, 9)
    day = Every("P1D", anchor).bind("America/New_York", created_at=CREATED)
    hours = Every("PT24H", anchor).bind("America/New_York", created_at=CREATED)
    assert local(day, 3) == ["03-13 09:00", "03-14 09:00", "03-15 09:00"]
    assert local(hours, 3) == ["03-13 09:00", "03-14 10:00", "03-15 10:00"]
    assert Every(timedelta(days=1)) == Every("PT24H")


def test_month_ends_derive_from_the_anchor() -> None:
    anchor = datetime(2027, 1, 31, 9)
    monthly = Every("P1M", anchor).bind("Asia/Seoul", created_at=CREATED)
    assert [text[:5] for text in local(monthly, 5)] == ["01-31", "02-28", "03-31", "04-30", "05-31"]
    quarterly = Every("P3M", anchor).bind("Asia/Seoul", created_at=CREATED)
    assert [text[:5] for text in local(quarterly, 4)] == ["01-31", "04-30", "07-31", "10-31"]
    leap = Every("P1Y", datetime(2096, 2, 29)).bind("UTC", created_at=CREATED)
    assert [text[:10] for text in first(leap, 9)][::4] == ["2096-02-29", "2100-02-28", "2104-02-29"]


def test_skipped_local_time_shifts_by_the_gap_on_that_day_only() -> None:
    daily = Every("P1D", datetime(2027, 3, 13, 2, 30)).bind("America/New_York", created_at=CREATED)
    assert local(daily, 3) == ["03-13 02:30", "03-14 03:30", "03-15 02:30"]
    assert [daily.note(at) for at in islice(daily.between(CREATED, FAR), 3)] == [None, "gap", None]


def test_repeated_local_time_uses_the_first_pass() -> None:
    daily = Every("P1D", datetime(2027, 11, 6, 1, 30)).bind("America/New_York", created_at=CREATED)
    assert first(daily, 3) == ["2027-11-06T05:30", "2027-11-07T05:30", "2027-11-08T06:30"]
    assert daily.note(utc("2027-11-07T05:30")) == "fold"


def test_anchor_in_the_second_pass_keeps_its_instant() -> None:
    anchor = utc("2027-11-07T06:30")
    daily = Every("P1D", anchor).bind("America/New_York", created_at=CREATED)
    assert first(daily, 2) == ["2027-11-07T06:30", "2027-11-08T06:30"]


def test_skipped_date_is_merged_with_the_next() -> None:
    daily = Every("P1D", datetime(2011, 12, 28, 9)).bind("Pacific/Apia", created_at=CREATED)
    assert local(daily, 4) == ["12-28 09:00", "12-29 09:00", "12-31 09:00", "01-01 09:00"]
    assert daily.count(utc("2011-12-28"), utc("2012-01-02")) == 5
    start, end = utc("2011-12-30T19:00"), utc("2011-12-31T19:00")
    assert daily.count(start, end) == len(list(daily.between(start, end))) == 1
    other = Every("P2D", datetime(2011, 12, 28, 9)).bind("Pacific/Apia", created_at=CREATED)
    assert local(other, 3) == ["12-28 09:00", "12-31 09:00", "01-01 09:00"]


def test_weeks_and_mixed_calendar_steps() -> None:
    assert [text[:5] for text in local(Every("P2W", datetime(2027, 1, 4)).bind("UTC", created_at=CREATED), 3)] == [
        "01-04",
        "01-18",
        "02-01",
    ]
    odd = Every("P1M10D", datetime(2027, 1, 31)).bind("UTC", created_at=CREATED)
    assert [text[:5] for text in local(odd, 3)] == ["01-31", "03-10", "04-20"]


def test_fractional_seconds() -> None:
    often = Every("PT1.5S", utc("2027-01-01")).bind("UTC", created_at=CREATED)
    assert often.next(utc("2027-01-01T00:00:03")) == utc("2027-01-01T00:00:04.500")
    assert often.count(utc("2027-01-01"), utc("2027-01-02")) == 57_600
    assert Every(timedelta(seconds=61, milliseconds=5)).duration == "PT1M1.005000S"


def test_century_is_counted_quickly() -> None:
    every = Every("PT1S", utc("1970-01-01")).bind("UTC", created_at=CREATED)
    daily = Every("P1D", datetime(1970, 1, 1)).bind("America/New_York", created_at=CREATED)
    with within(0.2):
        assert every.count(utc("2000-01-01"), utc("2100-01-01")) == 36_525 * 86_400
        assert daily.count(utc("2000-01-01"), utc("2100-01-01")) == 36_525


def test_last_instants_of_the_supported_range() -> None:
    yearly = Every("P1Y", datetime(2198, 6, 1)).bind("UTC", created_at=CREATED)
    assert yearly.next(utc("2199-06-01")) is None
    assert yearly.previous(utc("2300-01-01")) == utc("2199-06-01")
    centuries = Every("P300Y", datetime(2027, 1, 1)).bind("UTC", created_at=CREATED)
    assert first(centuries, 3) == ["2027-01-01T00:00"]
    for huge in ("P999999999Y", "P999999999M999999999D", "PT999999999H", "P999999999W"):
        assert first(Every(huge, datetime(2027, 1, 1)).bind("UTC", created_at=CREATED), 2) == ["2027-01-01T00:00"]
    late = Every("P1D", datetime(2199, 12, 31, 23)).bind("America/New_York", created_at=CREATED)
    assert late.next(utc("2027-01-01")) is None


def test_durations_have_one_notation() -> None:
    quarters = [Every(duration).to_fields()["spec"] for duration in ("15m", "PT15M", 900, timedelta(minutes=15))]
    assert quarters == ["PT15M"] * 4
    assert [Every(text).to_fields()["spec"] for text in ("1h30m", "1d", "2w", "90s")] == [
        "PT1H30M",
        "P1D",
        "P2W",
        "PT90S",
    ]


@pytest.mark.parametrize(
    ("duration", "why"),
    [
        ("", "not a duration"),
        ("P", "not a duration"),
        ("PT", "not a duration"),
        ("P1DT", "not a duration"),
        ("15M", "not a duration"),
        ("P1S", "not a duration"),
        ("PT1D", "not a duration"),
        ("P-1D", "not a duration"),
        ("P1.5D", "not a duration"),
        ("PT0.5H", "not a duration"),
        ("P٣D", "not a duration"),
        ("P1D\n", "not a duration"),
        ("P1DT12H", "mixes calendar"),
        ("P0D", "shorter than a second"),
        ("PT0S", "shorter than a second"),
        ("PT0.999S", "shorter than a second"),
        (timedelta(milliseconds=999), "shorter than a second"),
        (timedelta(days=-1), "shorter than a second"),
        (0.5, "shorter than a second"),
        (None, "text, a timedelta or a number"),
        (True, "text, a timedelta or a number"),
        (["P1D"], "text, a timedelta or a number"),
    ],
)
def test_invalid_durations_are_refused(duration: object, why: str) -> None:
    with pytest.raises(InvalidRecurrence) as caught:
        Every(duration)  # type: ignore[arg-type]
    assert caught.value.code == "INVALID_INTERVAL"
    assert why in caught.value.message
    assert caught.value.fix


def test_lower_case_duration_is_refused_with_upper_case_as_fix() -> None:
    with pytest.raises(InvalidRecurrence, match="Write PT15M"):
        Every("pt15m")


@pytest.mark.parametrize("anchor", ["2027-01-01", 5, datetime(1969, 12, 31), datetime(2200, 1, 1)])
def test_invalid_anchors_are_refused(anchor: object) -> None:
    with pytest.raises(InvalidRecurrence):
        Every("P1D", anchor)  # type: ignore[arg-type]


def test_anchors_of_the_same_instant_are_equal() -> None:
    there = datetime(2027, 1, 1, 9, tzinfo=timezone(timedelta(hours=9)))
    assert Every("P1D", there) == Every("P1D", utc("2027-01-01"))
    fold = datetime(2027, 11, 7, 1, 30, fold=1, tzinfo=ZoneInfo("America/New_York"))
    assert Every("P1D", fold).anchor == utc("2027-11-07T06:30")
