"""Other zone data: where an instant that one release gave lies by another, and what moves."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import pytest

from tests.zone_data import MEXICO, SUMMER_TIME, Rules, release
from timebell.errors import InvalidInput, InvalidTimezone
from timebell.recurrence import Cron, Dates, Every, Recurrence, RRule, Spec, installed, open_release, zone
from timebell.recurrence.preview import upcoming
from timebell.recurrence.tzdata_diff import carried, differences, moved_to, offset_at, resolve_again, under
from timebell.recurrence.zones import Release

HOUR = timedelta(hours=1)
CST, CDT = -21_600, -18_000


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def mexican(spec: Spec, **bounds: datetime) -> Recurrence:
    return spec.bind(MEXICO, created_at=utc("2027-01-01"), **bounds)


@pytest.fixture
def summer(tmp_path: Path) -> Release:
    """Mexico with summer time, as the data that is installed does not have it."""
    return release(tmp_path / "summer", "2020a", {MEXICO: SUMMER_TIME})


def test_a_release_has_its_own_zones_beside_the_installed_ones(summer: Release) -> None:
    july = int(utc("2027-07-01").timestamp())
    assert (summer.zone(MEXICO).offset(july), zone(MEXICO).offset(july)) == (CDT, CST)
    assert summer.zone(MEXICO) is summer.zone(MEXICO)
    assert zone(MEXICO).release is installed()
    assert pickle.loads(pickle.dumps(summer.zone(MEXICO))).offset(july) == CDT
    assert pickle.loads(pickle.dumps(zone(MEXICO))) is zone(MEXICO)
    with pytest.raises(InvalidTimezone, match="2020a has no Asia/Seoul"):
        summer.zone("Asia/Seoul")


def test_a_release_is_opened_from_any_of_its_folders(tmp_path: Path) -> None:
    made = release(tmp_path / "tzdata" / "zoneinfo", "2031c", {MEXICO: SUMMER_TIME})
    for folder in (tmp_path, tmp_path / "tzdata", made.folder):
        assert open_release(Path(str(folder))).version == "2031c"
    with pytest.raises(InvalidInput, match="no folder of compiled zone data") as caught:
        open_release(tmp_path / "nowhere")
    assert caught.value.code == "ZONE_DATA_NOT_FOUND"


def test_a_recurrence_by_another_release_is_the_same_otherwise(summer: Release) -> None:
    here = mexican(Cron("0 9 * * *"))
    there = under(here, summer)
    assert (there, there.to_json()) == (here, here.to_json())
    assert there.next(utc("2027-07-01")) == utc("2027-07-01T14:00")
    assert here.next(utc("2027-07-01")) == utc("2027-07-01T15:00")


@pytest.mark.parametrize(
    ("spec", "stored", "offset", "found"),
    [
        (Cron("0 9 * * *"), "2027-07-01T14:00", CDT, "2027-07-01T15:00"),
        (Cron("0 9 * * *"), "2027-07-01T14:00", None, "2027-07-01T15:00"),
        (Cron("0 9 * * *"), "2027-01-15T15:00", CST, "2027-01-15T15:00"),
        (Cron("0 9,10 * * *"), "2027-07-01T14:00", CDT, "2027-07-01T15:00"),
        # 10:00 of old is the instant of 9:00 by the new rules, and moves on all the same.
        (Cron("0 9,10 * * *"), "2027-07-01T15:00", CDT, "2027-07-01T16:00"),
        (Cron("0 * * * *"), "2027-07-01T14:00", CDT, "2027-07-01T14:00"),
        (Every("PT6H", utc("2027-01-01")), "2027-07-01T12:00", CDT, "2027-07-01T12:00"),
        (Every("P1D", datetime(2027, 1, 1, 9)), "2027-07-01T14:00", CDT, "2027-07-01T15:00"),
        (RRule("DTSTART:20270101T090000\nRRULE:FREQ=DAILY"), "2027-07-01T14:00", CDT, "2027-07-01T15:00"),
        (RRule("DTSTART:20270101T090000\nRRULE:FREQ=HOURLY"), "2027-07-01T14:00", CDT, "2027-07-01T14:00"),
        (Dates([datetime(2027, 7, 1, 9)]), "2027-07-01T14:00", CDT, "2027-07-01T15:00"),
        (Dates([utc("2027-07-01T14:00")]), "2027-07-01T14:00", CDT, "2027-07-01T14:00"),
        # The gap of 4 April 2027 is no more, and with it what moved 02:30 to 03:00.
        (Cron("30 2 * * *"), "2027-04-04T08:00", CDT, "2027-04-04T08:30"),
    ],
)
def test_an_occurrence_keeps_its_local_time_or_its_instant(
    spec: Spec, stored: str, offset: int | None, found: str
) -> None:
    assert moved_to(mexican(spec), utc(stored), offset) == utc(found)


def test_what_a_new_gap_skips_fires_when_it_ends(summer: Release) -> None:
    night = under(mexican(Cron("30 2 * * *")), summer)
    assert moved_to(night, utc("2027-04-04T08:30"), CST) == utc("2027-04-04T08:00")
    skipping = under(mexican(Cron("30 2 * * *", gap="skip")), summer)
    assert moved_to(skipping, utc("2027-04-04T08:30"), CST) == utc("2027-04-05T07:30")


@pytest.mark.parametrize(("fold", "second"), [("first", 0), ("last", 1)])
def test_in_a_fold_the_pass_that_fires_is_the_one_that_was_meant(summer: Release, fold: str, second: int) -> None:
    twice = under(mexican(Cron("30 1 * * *", fold=fold)), summer)
    first = utc("2027-10-31T06:30")
    assert moved_to(twice, first + HOUR, CST) == first + HOUR * second


def test_the_second_pass_of_a_fold_that_is_still_there_does_not_fire_the_first_again(summer: Release) -> None:
    twice = under(mexican(Cron("30 1 * * *", fold="both")), summer)
    assert moved_to(twice, utc("2027-10-31T07:30"), CST) == utc("2027-10-31T07:30")


def test_what_lies_beyond_the_end_by_new_data_is_over() -> None:
    short = mexican(Dates([datetime(2027, 7, 1, 9)]), end=utc("2027-07-01T14:30"))
    assert moved_to(short, utc("2027-07-01T14:00"), CDT) is None


def test_a_fixed_delay_knows_no_local_time() -> None:
    delay = mexican(Every("PT1H", since="last_end"))
    assert moved_to(delay, utc("2027-07-01T14:07"), CDT) == utc("2027-07-01T14:07")
    assert carried(delay, utc("2027-07-01T14:07"), CDT) is delay


@pytest.mark.parametrize(
    ("spec", "stored", "following"),
    [
        (Cron("0 9 * * *"), "2027-07-01T14:00", ["2027-07-02T15:00", "2027-07-03T15:00"]),
        (Cron("0 9,10 * * *"), "2027-07-01T14:00", ["2027-07-01T16:00", "2027-07-02T15:00"]),
        (Cron("0 * * * *"), "2027-07-01T14:00", ["2027-07-01T15:00", "2027-07-01T16:00"]),
        (Dates([datetime(2027, 7, 1, 9)]), "2027-07-01T14:00", []),
    ],
)
def test_a_stored_instant_stays_and_its_local_time_comes_once(spec: Spec, stored: str, following: list[str]) -> None:
    at = utc(stored)
    goes_on = carried(mexican(spec), at, CDT)
    expected = [at, *map(utc, following)]
    assert list(islice(upcoming(goes_on, at - HOUR), 3)) == expected
    end = expected[-1] + timedelta(microseconds=1)
    assert list(goes_on.between(at, end)) == expected
    assert goes_on.count(at, end) == len(expected)
    assert goes_on.previous(at + timedelta(seconds=1)) == at
    assert goes_on == mexican(spec)


def test_an_instant_that_both_give_is_carried_as_it_is() -> None:
    daily = mexican(Cron("0 9 * * *"))
    assert carried(daily, utc("2027-01-15T15:00"), CST) is daily
    assert carried(daily, utc("2027-01-15T15:00"), None) is daily
    assert carried(daily, None, None) is daily


def test_a_local_time_is_resolved_again(summer: Release) -> None:
    there = summer.zone(MEXICO)
    assert resolve_again("2027-07-01T09:00:00", utc("2027-07-01T15:00"), there) == utc("2027-07-01T14:00")
    assert resolve_again("2027-07-01T09:00:00.25", utc("2027-07-01T15:00:00.25"), there) == utc(
        "2027-07-01T14:00:00.25"
    )
    for pass_ in ("2027-10-31T06:30", "2027-10-31T07:30"):  # the second was asked for with fold=1
        assert resolve_again("2027-10-31T01:30:00", utc(pass_), there) == utc(pass_)
    assert resolve_again("2027-04-04T02:30:00", utc("2027-04-04T08:30"), there) == utc("2027-04-04T08:30")


def test_differences_are_counted_by_change_of_offset(summer: Release) -> None:
    year = utc("2027-03-01T12:00"), utc("2028-03-01T12:00")
    daily = mexican(Cron("0 9 * * *"))
    (one,) = differences(under(daily, summer), daily, *year)
    assert (one.offset_before, one.offset_after) == (CDT, CST)
    assert (one.occurrences, one.since) == (210, utc("2027-04-04T14:00"))
    (two,) = differences(under(mexican(Cron("0 9,10 * * *")), summer), mexican(Cron("0 9,10 * * *")), *year)
    assert two.occurrences == 420
    for steady in (Cron("*/15 * * * *"), Every("PT15M")):
        assert not list(differences(under(mexican(steady), summer), mexican(steady), *year))
    hours = mexican(Cron("*/30 9-10 * * *"))  # real time, but only in some hours of the day
    (three,) = differences(under(hours, summer), hours, *year)
    assert three.occurrences == 420


def test_one_transition_that_moves_is_all_that_differs(tmp_path: Path) -> None:
    rules = "CST6CDT,M4.1.0,M10.5.0", "CST6CDT,M4.1.0,M11.1.0"
    old, new = (release(tmp_path / str(n), "2030a", {MEXICO: rule}) for n, rule in enumerate(rules))
    daily = mexican(Cron("0 9 * * *"))
    year = utc("2027-03-01"), utc("2028-03-01")
    (one,) = differences(under(daily, old), under(daily, new), *year)
    assert (one.offset_before, one.offset_after, one.occurrences) == (CST, CDT, 7)


def test_a_change_on_a_date_begins_there(tmp_path: Path) -> None:
    change = int(utc("2027-03-10T06:00").timestamp())
    new = release(tmp_path, "2030a", {MEXICO: Rules("<-05>5", change, CST, CDT)})
    daily = under(mexican(Cron("0 9 * * *")), new)
    assert [offset_at(daily, utc(f"2027-03-{day}")) for day in ("09", "11")] == [CST, CDT]
    assert moved_to(daily, utc("2027-03-09T15:00"), CST) == utc("2027-03-09T15:00")
    assert moved_to(daily, utc("2027-03-10T15:00"), CST) == utc("2027-03-10T14:00")
