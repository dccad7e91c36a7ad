"""Options of intervals: month ends, gaps and folds, and the fixed delay after each run."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from calendar import monthrange
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.cpu import within
from timebell.errors import InvalidRecurrence
from timebell.recurrence import Cron, Dates, Every, recurrence_from_json, spec_from_json
from timebell.recurrence.preview import dst_notes, next_fires

CREATED = datetime(2027, 1, 1, tzinfo=UTC)
FAR = datetime(2199, 12, 1, tzinfo=UTC)
NEW_YORK = "America/New_York"
ENDS = ("back", "skip", "next")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def days(count: int, duration: str, start: str, month_end: str) -> list[str]:
    spec = Every(duration, datetime.fromisoformat(start), month_end=month_end)  # type: ignore[arg-type]
    found = islice(spec.bind("UTC", created_at=CREATED).between(utc("1970-01-01"), FAR), count)
    return [f"{at:%Y-%m-%d}" for at in found]


@pytest.mark.parametrize(
    ("duration", "start", "month_end", "expected"),
    [
        ("P1M", "2027-01-31", "back", "2027-01-31 2027-02-28 2027-03-31 2027-04-30 2027-05-31"),
        ("P1M", "2027-01-31", "skip", "2027-01-31 2027-03-31 2027-05-31 2027-07-31 2027-08-31"),
        ("P1M", "2027-01-31", "next", "2027-01-31 2027-03-01 2027-03-31 2027-05-01 2027-05-31"),
        ("P1M", "2027-12-30", "skip", "2027-12-30 2028-01-30 2028-03-30 2028-04-30"),
        ("P1M", "2027-11-30", "next", "2027-11-30 2027-12-30 2028-01-30 2028-03-01 2028-03-30"),
        ("P1M", "2028-01-29", "skip", "2028-01-29 2028-02-29 2028-03-29"),
        ("P1M", "2027-01-29", "next", "2027-01-29 2027-03-01 2027-03-29"),
        ("P3M", "2027-01-31", "skip", "2027-01-31 2027-07-31 2027-10-31 2028-01-31"),
        ("P3M", "2027-01-31", "next", "2027-01-31 2027-05-01 2027-07-31 2027-10-31"),
        ("P1Y", "2028-02-29", "back", "2028-02-29 2029-02-28 2030-02-28"),
        ("P1Y", "2096-02-29", "skip", "2096-02-29 2104-02-29 2108-02-29"),
        ("P1Y", "2096-02-29", "next", "2096-02-29 2097-03-01 2098-03-01"),
        ("P3Y", "2096-02-29", "skip", "2096-02-29 2108-02-29 2120-02-29"),
        ("P4M", "2027-10-31", "next", "2027-10-31 2028-03-01 2028-07-01 2028-10-31"),
        ("P1M10D", "2027-01-31", "skip", "2027-01-31 2027-04-20 2027-07-10"),
        ("P1M10D", "2027-01-31", "next", "2027-01-31 2027-03-11 2027-04-20"),
        ("P1M", "2027-01-28", "skip", "2027-01-28 2027-02-28 2027-03-28"),
        ("P1M", "2027-01-15", "next", "2027-01-15 2027-02-15 2027-03-15"),
    ],
)
def test_month_end_policies(duration: str, start: str, month_end: str, expected: str) -> None:
    wanted = expected.split()
    assert days(len(wanted), duration, start, month_end) == wanted


@pytest.mark.parametrize(
    ("options", "march", "november"),
    [
        ({}, ["14 03:30 EDT"], ["07 01:30 EDT"]),
        ({"gap": "end"}, ["14 03:00 EDT"], ["07 01:30 EDT"]),
        ({"gap": "skip"}, [], ["07 01:30 EDT"]),
        ({"fold": "last"}, ["14 03:30 EDT"], ["07 01:30 EST"]),
        ({"fold": "both", "gap": "skip"}, [], ["07 01:30 EDT", "07 01:30 EST"]),
    ],
)
def test_gap_and_fold_policies(options: dict[str, Any], march: list[str], november: list[str]) -> None:
    def fires(start: datetime, day: str) -> list[str]:
        bound = Every("P1D", start, **options).bind(NEW_YORK, created_at=CREATED)
        low = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(NEW_YORK)).astimezone(UTC)
        found = list(bound.between(low, low + timedelta(hours=23)))
        assert bound.count(low, low + timedelta(hours=23)) == len(found)
        return [f"{bound.local(at):%d %H:%M %Z}" for at in found]

    assert fires(datetime(2027, 3, 1, 2, 30), "2027-03-14") == march
    assert fires(datetime(2027, 3, 1, 1, 30), "2027-11-07") == november


def test_skipped_time_is_noted() -> None:
    daily = Every("P1D", datetime(2027, 3, 1, 2, 30), gap="skip").bind(NEW_YORK, created_at=CREATED)
    (note,) = dst_notes(daily, utc("2027-03-01"), utc("2027-06-01"))
    assert note == "02:30 does not exist on Sun 14 Mar 2027 in America/New_York: does not fire."


# The oracle: every step, one after another, resolved with zoneinfo.


def resolved(local_time: datetime, name: str, gap: str, fold: str) -> list[datetime]:
    zone = ZoneInfo(name)
    both = [local_time.replace(tzinfo=zone, fold=n).astimezone(UTC) for n in (0, 1)]
    real = [at for at in both if at.astimezone(zone).replace(tzinfo=None, fold=0) == local_time]
    if real:
        return {"first": real[:1], "last": real[-1:], "both": sorted(set(real))}[fold]
    if gap == "skip":
        return []
    if gap == "shift":
        return [both[0]]
    low, high = both[1], both[0]  # with the later and with the earlier offset: the jump lies between
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) // 2 // timedelta(seconds=1) * timedelta(seconds=1)
        if middle.astimezone(zone).replace(tzinfo=None, fold=0) < local_time:
            low = middle
        else:
            high = middle
    return [high]


def local_times(months: int, step_days: int, start: datetime, month_end: str, end: datetime) -> Iterator[datetime]:
    month = start.year * 12 + start.month - 1
    for k in range(100_000):
        year, month0 = divmod(month + k * months, 12)
        if year > end.year + 1:
            return
        last = monthrange(year, month0 + 1)[1]
        day = date(year, month0 + 1, min(start.day, last))
        if start.day > last:
            if month_end == "skip":
                continue
            day += timedelta(month_end == "next")
        if day.year > 2199:
            return
        day += timedelta(k * step_days)
        yield datetime.combine(day, start.time())
        if day > end.date() + timedelta(2):
            return


starts = st.builds(
    lambda day, minute: datetime.combine(day, datetime.min.time()) + timedelta(minutes=minute),
    st.one_of(
        st.dates(date(1975, 1, 1), date(2037, 12, 31)),
        st.sampled_from([date(2011, 12, 29), date(2012, 2, 29), date(2000, 2, 29), date(2010, 1, 30)]),
        st.builds(lambda year, month: date(year, month, 31), st.integers(1980, 2030), st.sampled_from((1, 3, 5, 10))),
    ),
    st.sampled_from([0, 1, 30, 90, 125, 150, 179, 180, 540, 1439]),
)
zones = st.sampled_from([
    "UTC", NEW_YORK, "Pacific/Apia", "Australia/Lord_Howe", "America/Sao_Paulo", "Africa/Cairo", "America/St_Johns",
    "Antarctica/Troll", "Europe/Dublin",
])  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from([(1, 0), (2, 0), (3, 0), (4, 0), (6, 0), (12, 0), (24, 0), (1, 10), (0, 1), (0, 7), (0, 30)]),
    starts, st.sampled_from(ENDS), st.sampled_from(["end", "shift", "skip"]),
    st.sampled_from(["first", "last", "both"]), zones, st.integers(0, 12), st.integers(-400, 400), st.booleans(),
)  # fmt: skip
@example((0, 1), datetime(2027, 3, 1, 2, 30), "back", "end", "both", NEW_YORK, 3, 5, False)
@example((1, 0), datetime(2011, 10, 30, 9), "skip", "shift", "first", "Pacific/Apia", 3, 5, True)
def test_interval_matches_a_step_by_step_walk(
    step: tuple[int, int], start: datetime, month_end: Any, gap: Any, fold: Any, name: str, years: int, back: int,
    aware: bool,
) -> None:  # fmt: skip
    month_end = month_end if step[0] else "back"
    end = start + timedelta(days=400 + 366 * years)
    found = {
        at for local_time in local_times(*step, start, month_end, end) for at in resolved(local_time, name, gap, fold)
    }  # fmt: skip
    anchor = start
    if aware:  # the anchor is then an instant, and only the later ones are local times
        anchor = start.replace(tzinfo=ZoneInfo(name)).astimezone(UTC)
        start_shown = anchor.astimezone(ZoneInfo(name)).replace(tzinfo=None)
        found = {anchor} | {
            at
            for local_time in islice(local_times(*step, start_shown.replace(fold=0), month_end, end), 1, None)
            for at in resolved(local_time, name, gap, fold)
        }
    duration = f"P{step[0]}M{step[1]}D" if all(step) else f"P{step[0]}M" if step[0] else f"P{step[1]}D"
    spec = Every(duration, anchor, month_end=month_end, gap=gap, fold=fold)
    bound = spec.bind(name, created_at=CREATED)
    low = start.replace(tzinfo=UTC) + timedelta(days=back)
    high = max(low, end.replace(tzinfo=UTC))
    expected = sorted(found)
    wanted = expected[bisect_left(expected, low) : bisect_left(expected, high)]
    assert list(bound.between(low, high)) == wanted
    assert bound.count(low, high) == len(wanted)
    walked, at = [], bound.previous(high)
    while at is not None and at >= low:
        walked.append(at)
        at = bound.previous(at)
    assert walked[::-1] == wanted
    middle = low + (high - low) / 3
    assert bound.next(middle) in (*expected[bisect_right(expected, middle) :][:1], bound.next(high))
    assert recurrence_from_json(json.loads(json.dumps(bound.to_json()))) == bound


@pytest.mark.parametrize("month_end", ENDS)
@pytest.mark.parametrize("duration", ["P1M", "P5M", "P1Y", "P1M1D"])
def test_two_centuries_are_counted_quickly_and_exactly(duration: str, month_end: Any) -> None:
    bound = Every(duration, datetime(1972, 2, 29, 9), month_end=month_end).bind(NEW_YORK, created_at=CREATED)
    with within(0.1):
        counted = bound.count(utc("1970-01-01"), FAR)
    assert counted == sum(1 for _ in bound.between(utc("1970-01-01"), FAR))


def test_max_runs_counts_only_existing_occurrences() -> None:
    bound = Every("P1M", datetime(2027, 1, 31), month_end="skip").bind("UTC", created_at=CREATED, max_runs=3)
    assert [f"{at:%m-%d}" for at in bound.between(CREATED, FAR)] == ["01-31", "03-31", "05-31"]


def test_last_months_of_the_supported_range() -> None:
    skipping = Every("P1M", datetime(2199, 8, 31), month_end="skip").bind("UTC", created_at=CREATED)
    assert [f"{at:%m-%d}" for at in skipping.between(CREATED, utc("2300-01-01"))] == ["08-31", "10-31", "12-31"]
    assert skipping.previous(utc("2300-01-01")) == utc("2199-12-31")
    onward = Every("P1M", datetime(2199, 10, 31), month_end="next").bind("UTC", created_at=CREATED)
    assert [f"{at:%m-%d}" for at in onward.between(CREATED, utc("2300-01-01"))] == ["10-31", "12-01", "12-31"]


# JSON and descriptions.


def test_defaults_are_not_in_the_json() -> None:
    assert Every("P1M", datetime(2027, 1, 31)).to_fields() == {"spec": "P1M", "anchor": "2027-01-31T00:00:00"}
    full = Every("P1M", datetime(2027, 1, 31), month_end="next", gap="end", fold="both")
    assert full.to_fields() == {
        "spec": "P1M", "anchor": "2027-01-31T00:00:00", "monthEnd": "next", "dst": {"gap": "end", "fold": "both"},
    }  # fmt: skip
    assert Every("PT9S", since="last_end").to_fields() == {"spec": "PT9S", "anchor": None, "since": "last_end"}
    assert Every.from_fields({"spec": "P1M", "dst": None}, spec_from_json) == Every("P1M")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Every("P1M", datetime(2027, 1, 31, 9), month_end="skip"),
         "Every month from 2027-01-31 09:00, without the months that lack the day"),
        (Every("P1M", month_end="next"), "Every month, on the 1st of the next month where a month lacks the day"),
        (Every("PT10M", since="last_end"), "10 minutes after each run ends"),
        (Every("PT1H", utc("2027-03-14T07:00"), since="last_start"),
         "1 hour after each run starts, from 2027-03-14 07:00 UTC"),
        (Every("PT1H30M5S", since="last_end"), "1 hour, 30 minutes and 5 seconds after each run ends"),
    ],
)  # fmt: skip
def test_descriptions(spec: Every, words: str) -> None:
    assert spec.describe() == words


# Fixed delay.


def test_only_the_first_instant_of_a_fixed_delay_is_known() -> None:
    bound = Every("PT10M", since="last_end").bind("Asia/Seoul", created_at=CREATED)
    first = CREATED + timedelta(minutes=10)
    assert (bound.next(CREATED), bound.next(first), bound.previous(first), bound.previous(FAR)) == (
        first, None, None, first,
    )  # fmt: skip
    assert (bound.count(CREATED, FAR), list(bound.between(CREATED, FAR))) == (1, [first])
    assert [fire["utc"] for fire in next_fires(bound, CREATED, 5)] == ["2027-01-01T00:10:00Z"]
    assert bound.describe() == "10 minutes after each run ends, from 2027-01-01 00:10 UTC, Asia/Seoul"
    assert recurrence_from_json(bound.to_json()) == bound
    named = Every("PT10M", datetime(2027, 3, 14, 2, 30), since="last_start").bind(NEW_YORK, created_at=CREATED)
    assert named.next(CREATED) == utc("2027-03-14T07:30")
    assert named.note(utc("2027-03-14T07:30")) == "gap"


def test_first_fire_of_a_new_schedule() -> None:
    later = Every("PT10M", CREATED + timedelta(hours=1), since="last_end").bind("UTC", created_at=CREATED)
    assert later.first_fire(CREATED) == CREATED + timedelta(hours=1)
    passed = Every("PT10M", CREATED - timedelta(hours=1), since="last_end").bind("UTC", created_at=CREATED)
    assert passed.first_fire(CREATED) == CREATED + timedelta(minutes=10)
    bounded = Every("PT10M", since="last_end").bind("UTC", created_at=CREATED, start=utc("2027-02-01"))
    assert bounded.first_fire(CREATED) == utc("2027-02-01")
    over = Every("PT10M", since="last_end").bind("UTC", created_at=CREATED, end=utc("2027-01-01T00:10"))
    assert over.first_fire(CREATED) is None
    assert Every("PT10M", CREATED).bind("UTC", created_at=CREATED).first_fire(CREATED) == CREATED + timedelta(
        minutes=10
    )
    assert Dates([CREATED]).bind("UTC", created_at=CREATED).first_fire(CREATED) is None


@pytest.mark.parametrize(
    ("since", "started", "ended", "due"),
    [
        ("last_end", 0, 3, 13),
        ("last_end", None, 3, 13),
        ("last_start", 0, 3, 10),
        ("last_start", 0, 10, 10),
        ("last_start", 0, 25, 25),
        ("last_start", None, 3, 13),
    ],
)
def test_next_instant_after_a_run(since: Any, started: int | None, ended: int, due: int) -> None:
    bound = Every("PT10M", since=since).bind("UTC", created_at=CREATED, end=CREATED + timedelta(minutes=30))
    start = None if started is None else CREATED + timedelta(minutes=started)
    assert bound.next_after_run(start, CREATED + timedelta(minutes=ended)) == CREATED + timedelta(minutes=due)
    assert bound.next_after_run(None, CREATED + timedelta(minutes=30)) is None


def test_fixed_delay_beyond_the_last_year_has_no_instant() -> None:
    bound = Every("PT10M", since="last_end").bind("UTC", created_at=CREATED)
    assert bound.next_after_run(None, utc("2199-12-31T23:55")) is None
    with pytest.raises(InvalidRecurrence) as refused:
        Every("PT999999999H", since="last_end").bind("UTC", created_at=CREATED)
    assert refused.value.code == "NEVER_FIRES"


@pytest.mark.parametrize(
    ("duration", "options", "expected"),
    [
        ("PT1H", {"since": "end"}, "last_end, last_start"),
        ("PT1H", {"since": ["last_end"]}, "last_end, last_start"),
        ("PT1H", {"since": True}, "last_end, last_start"),
        ("P1D", {"since": "last_end"}, "PT24H"),
        ("P1M", {"since": "last_start"}, "calendar step"),
        ("P1M", {"month_end": "forward"}, "back, skip, next"),
        ("P1M", {"month_end": None}, "back, skip, next"),
        ("P1D", {"month_end": "skip"}, "steps of months"),
        ("PT1H", {"month_end": "next"}, "steps of months"),
        ("P1D", {"gap": "before"}, "end, shift, skip"),
        ("P1D", {"fold": 2}, "first, last, both"),
        ("PT1H", {"gap": "skip"}, "elapsed time"),
        ("PT1H", {"fold": "both"}, "elapsed time"),
    ],
)
def test_invalid_options_are_refused(duration: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidRecurrence) as refused:
        Every(duration, **options)
    assert refused.value.code == "INVALID_INTERVAL"
    assert expected in str(refused.value)
    assert refused.value.fix


@pytest.mark.parametrize(
    "fields",
    [
        {"since": "never"}, {"since": 1}, {"monthEnd": "skip"}, {"monthEnd": []}, {"dst": {"gap": "skip"}},
        {"dst": {"wildcard": "fixed"}}, {"dst": "skip"},
    ],
)  # fmt: skip
def test_invalid_json_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecurrence):
        Every.from_fields({"spec": "PT1H", **fields}, spec_from_json)


def test_fixed_delay_does_not_accept_max_runs() -> None:
    with pytest.raises(InvalidRecurrence, match="max_runs"):
        Every("PT1H", since="last_end").bind("UTC", created_at=CREATED, max_runs=2)
    assert Cron("@daily").delay is Dates([CREATED]).delay is Every("PT1H").delay is None
