"""Bound recurrences: bounds, JSON, dates, identity."""

from __future__ import annotations

import copy
import json
import pickle
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from timebell.errors import InvalidRecurrence, InvalidTimezone
from timebell.recurrence import (
    Cron,
    Dates,
    Every,
    Recurrence,
    Spec,
    parse_interval,
    recurrence_from_json,
    spec_from_json,
)

CREATED = datetime(2027, 1, 1, 12, tzinfo=UTC)
EARLY, LATE = datetime(2020, 1, 1, tzinfo=UTC), datetime(2040, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
SPECS = [
    Cron("0 9 * * 1-5"),
    Cron("30 2 * * *", gap="shift", fold="both"),
    Cron("@hourly"),
    Every("PT15M"),
    Every("P1M", datetime(2027, 1, 31, 9)),
    Every(timedelta(seconds=90), CREATED),
    Dates([datetime(2027, 5, 1, 9), CREATED, datetime(2027, 11, 7, 1, 30)]),
]


def days(recurrence: Recurrence) -> list[int]:
    return [at.day for at in recurrence.between(EARLY, LATE)]


def test_bounds_are_half_open() -> None:
    daily = Cron("0 0 * * *").bind(
        "UTC",
        created_at=CREATED,
        start=datetime(2027, 1, 3, tzinfo=UTC),
        end=datetime(2027, 1, 6, tzinfo=UTC),
    )
    assert days(daily) == [3, 4, 5]
    assert daily.next(EARLY) == datetime(2027, 1, 3, tzinfo=UTC)
    assert daily.next(datetime(2027, 1, 5, tzinfo=UTC)) is None
    assert daily.previous(LATE) == datetime(2027, 1, 5, tzinfo=UTC)
    assert daily.previous(datetime(2027, 1, 3, tzinfo=UTC)) is None
    assert daily.count(EARLY, LATE) == 3
    assert daily.count(LATE, EARLY) == 0


def test_max_runs_counts_from_start() -> None:
    start = datetime(2027, 1, 3, tzinfo=UTC)
    assert days(Cron("0 0 * * *").bind("UTC", created_at=CREATED, start=start, max_runs=3)) == [3, 4, 5]
    limited = Cron("0 0 * * *").bind("UTC", created_at=CREATED, start=start, end=start + 2 * DAY, max_runs=9)
    assert days(limited) == [3, 4]


@pytest.mark.parametrize("spec", [Cron("0 12 * * *"), Every("P1D"), Every("PT24H")])
def test_max_runs_without_start_counts_from_creation(spec: Spec) -> None:
    limited = spec.bind("UTC", created_at=CREATED, max_runs=3)
    assert days(limited) == [2, 3, 4]
    assert limited.next(CREATED) == CREATED + DAY
    assert limited.count(EARLY, LATE) == 3


@pytest.mark.parametrize("runs", [1, 2, 7, 100, 5000])
def test_max_runs_limits_the_count(runs: int) -> None:
    for spec in (Cron("*/5 * * * *"), Cron("0 0 29 2 *"), Every("PT7H")):
        found = spec.bind("America/New_York", created_at=CREATED, max_runs=runs)
        free = spec.bind("America/New_York", created_at=CREATED)
        horizon = datetime(2199, 1, 1, tzinfo=UTC)
        total = found.count(EARLY, horizon)
        assert total == min(runs, free.count(CREATED + timedelta(microseconds=1), horizon))


@pytest.mark.parametrize("runs", [0, -1, True, 1.5, "3"])
def test_invalid_max_runs_is_refused(runs: object) -> None:
    with pytest.raises(InvalidRecurrence):
        Cron("@daily").bind("UTC", created_at=CREATED, max_runs=runs)  # type: ignore[arg-type]


def test_invalid_bounds_are_refused() -> None:
    for start, end in ((CREATED, CREATED), (CREATED, CREATED - DAY)):
        with pytest.raises(InvalidRecurrence):
            Cron("@daily").bind("UTC", created_at=CREATED, start=start, end=end)
    naive = datetime(2027, 1, 1)
    for wrong in (
        {"created_at": naive},
        {"created_at": CREATED, "start": naive},
        {"created_at": CREATED, "end": naive},
    ):
        with pytest.raises(InvalidRecurrence):
            Cron("@daily").bind("UTC", **wrong)
    with pytest.raises(InvalidTimezone):
        Cron("@daily").bind("CST", created_at=CREATED)


def test_naive_instants_are_refused() -> None:
    daily = Cron("@daily").bind("UTC", created_at=CREATED)
    naive = datetime(2027, 1, 1)
    for method in (daily.next, daily.previous, daily.note, daily.local):
        with pytest.raises(InvalidRecurrence):
            method(naive)
    with pytest.raises(InvalidRecurrence):
        daily.count(naive, LATE)
    with pytest.raises(InvalidRecurrence):
        next(daily.between(naive, LATE))


@pytest.mark.parametrize("spec", SPECS)
def test_json_round_trips(spec: Spec) -> None:
    assert spec_from_json(json.loads(json.dumps(spec.to_json()))) == spec
    for bounds in (
        {},
        {"start": CREATED, "end": LATE},
        {"max_runs": 5},
        {"start": datetime(2027, 6, 1, tzinfo=ZoneInfo("Asia/Seoul"))},
    ):
        bound = spec.bind("America/New_York", created_at=CREATED, **bounds)  # type: ignore[arg-type]
        again = recurrence_from_json(json.loads(json.dumps(bound.to_json())))
        assert again == bound
        assert hash(again) == hash(bound)
        assert again.to_json() == bound.to_json()
        assert list(again.between(CREATED, CREATED + 300 * DAY)) == list(bound.between(CREATED, CREATED + 300 * DAY))
        assert pickle.loads(pickle.dumps(bound)) == copy.deepcopy(bound) == bound


def test_json_contains_all_fields() -> None:
    bound = Cron("0 9 * * *", gap="skip").bind("Asia/Seoul", created_at=CREATED, end=LATE, max_runs=2)
    assert bound.to_json() == {
        "kind": "cron",
        "spec": "0 9 * * *",
        "dst": {"gap": "skip", "fold": "first"},
        "timezone": "Asia/Seoul",
        "start": "2027-01-01T12:00:00.000001Z",
        "end": "2040-01-01T00:00:00Z",
        "maxRuns": 2,
    }
    assert Every("P1D", datetime(2027, 1, 1, 9)).bind("Asia/Seoul", created_at=CREATED).to_json()["anchor"] == (
        "2027-01-01T09:00:00"
    )


GOOD = {"kind": "cron", "spec": "0 9 * * *", "timezone": "UTC"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "rrule"},
        {"kind": None},
        {"kind": ["cron"]},
        {"spec": None},
        {"spec": ["0 9 * * *"]},
        {"spec": {}},
        {"dst": "end"},
        {"dst": {"gap": "no"}},
        {"dst": {"pag": "end"}},
        {"dst": {"gap": ["end"]}},
        {"start": "soon"},
        {"start": 5},
        {"start": "2027-01-01T00:00:00"},
        {"end": "2027-13-01T00:00:00Z"},
        {"end": "0001-01-01T00:00:00+23:59"},
        {"maxRuns": "3"},
        {"maxRuns": 0},
        {"kind": "interval", "spec": None},
        {"kind": "interval", "spec": "P1D"},
        {"kind": "interval", "spec": "P1D", "anchor": "now"},
        {"kind": "dates", "spec": "2027-01-01T00:00:00Z"},
        {"kind": "dates", "spec": []},
        {"kind": "dates", "spec": [None]},
        {"kind": "dates", "spec": ["2027-01-01T00:00:00Z"] * 10_001},
    ],
)
def test_invalid_json_is_refused(wrong: dict[str, object]) -> None:
    assert recurrence_from_json(GOOD)
    with pytest.raises(InvalidRecurrence):
        recurrence_from_json({**GOOD, **wrong})


@pytest.mark.parametrize("timezone", [None, 5, "CST", ["UTC"]])
def test_invalid_timezone_in_json_is_refused(timezone: object) -> None:
    with pytest.raises(InvalidTimezone):
        recurrence_from_json({**GOOD, "timezone": timezone})


@pytest.mark.parametrize("data", [None, [], "cron", {}, {"kind": "cron"}])
def test_json_that_is_not_a_recurrence_is_refused(data: object) -> None:
    with pytest.raises(InvalidRecurrence):
        recurrence_from_json(data)  # type: ignore[arg-type]


def test_recurrences_are_immutable_and_hashable() -> None:
    one, two = (Cron("@daily").bind("UTC", created_at=CREATED) for _ in range(2))
    assert one == two
    assert len({one, two}) == 1
    assert one != Cron("@daily").bind("Etc/UTC", created_at=CREATED)
    with pytest.raises(AttributeError):
        one.timezone = "Asia/Seoul"  # type: ignore[misc]


def test_dates_are_sorted_deduplicated_and_resolved_in_the_zone() -> None:
    dates = Dates(
        [
            datetime(2027, 6, 1, 9),
            datetime(2027, 3, 14, 2, 30),
            datetime(2027, 6, 1, 9),
            datetime(2027, 6, 1, 13, tzinfo=UTC),
            datetime(2027, 11, 7, 1, 30),
        ]
    )
    york = dates.bind("America/New_York", created_at=CREATED)
    found = list(york.between(EARLY, LATE))
    assert [at.strftime("%m-%dT%H:%M") for at in found] == ["03-14T07:30", "06-01T13:00", "11-07T05:30"]
    assert [york.note(at) for at in found] == ["gap", None, "fold"]
    assert york.count(EARLY, LATE) == 3
    assert york.previous(found[1]) == found[0]
    assert york.next(found[2]) is None
    assert dates == Dates(reversed(dates.dates))


@pytest.mark.parametrize("dates", [[], [datetime(2200, 1, 1)], ["2027-01-01"], [None]])
def test_invalid_dates_are_refused(dates: list[datetime]) -> None:
    with pytest.raises(InvalidRecurrence) as caught:
        Dates(dates)
    assert caught.value.code == "INVALID_DATES"


def test_repeating_interval_notation_is_parsed() -> None:
    assert parse_interval("R/2027-01-01T09:00/P1D") == Every("P1D", datetime(2027, 1, 1, 9))
    assert parse_interval("R/2027-01-01T09:00:00Z/PT1H") == Every("PT1H", datetime(2027, 1, 1, 9, tzinfo=UTC))
    assert parse_interval("PT1H") == Every("PT1H")
    for wrong in (
        "R/2027-01-01",
        "R5/2027-01-01/P1D",
        "R//P1D",
        "R/2027-01-01/",
        "r/2027-01-01/P1D",
        "",
        None,
    ):
        with pytest.raises(InvalidRecurrence):
            parse_interval(wrong)  # type: ignore[arg-type]
