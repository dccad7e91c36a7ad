"""Changes of zone data: relocation of stored instants, and differences between releases."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import pytest

from tests.zone_data import MEXICO, SUMMER_TIME, Rules, release
from timebell.errors import InvalidInput, InvalidTimezone
from timebell.recurrence import Cron, Dates, Every, Recurrence, RRule, Spec, installed_release, open_release, zone
from timebell.recurrence.preview import iter_fires
from timebell.recurrence.tzdata_diff import (
    find_differences,
    offset_at,
    re_resolve_local,
    relocate,
    resume_from,
    with_release,
)
from timebell.recurrence.zones import Release

HOUR = timedelta(hours=1)
CST, CDT = -21_600, -18_000


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def bind_in_mexico(spec: Spec, **bounds: datetime) -> Recurrence:
    return spec.bind(MEXICO, created_at=utc("2027-01-01"), **bounds)


@pytest.fixture
def summer(tmp_path: Path) -> Release:
    """A release in which Mexico has summer time, unlike the installed data."""
    return release(tmp_path / "summer", "2020a", {MEXICO: SUMMER_TIME})


def test_a_release_has_its_own_zones_beside_the_installed_ones(summer: Release) -> None:
    july = int(utc("2027-07-01").timestamp())
    assert (summer.zone(MEXICO).offset(july), zone(MEXICO).offset(july)) == (CDT, CST)
    assert summer.zone(MEXICO) is summer.zone(MEXICO)
    assert zone(MEXICO).release is installed_release()
    assert pickle.loads(pickle.dumps(summer.zone(MEXICO))).offset(july) == CDT
    assert pickle.loads(pickle.dumps(zone(MEXICO))) is zone(MEXICO)
    with pytest.raises(InvalidTimezone, match="2020a has no Asia/Seoul"):
        summer.zone("Asia/Seoul")


def test_a_release_is_opened_from_any_of_its_folders(tmp_path: Path) -> None:
    created = release(tmp_path / "tzdata" / "zoneinfo", "2031c", {MEXICO: SUMMER_TIME})
    for folder in (tmp_path, tmp_path / "tzdata", created.folder):
        assert open_release(Path(str(folder))).version == "2031c"
    with pytest.raises(InvalidInput, match="not a folder of compiled zone data") as caught:
        open_release(tmp_path / "nowhere")
    assert caught.value.code == "ZONE_DATA_NOT_FOUND"


def test_recurrence_with_another_release_is_equal(summer: Release) -> None:
    here = bind_in_mexico(Cron("0 9 * * *"))
    there = with_release(here, summer)
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
        # 10:00 by the old rules is the instant of 09:00 by the new rules, and still moves.
        (Cron("0 9,10 * * *"), "2027-07-01T15:00", CDT, "2027-07-01T16:00"),
        (Cron("0 * * * *"), "2027-07-01T14:00", CDT, "2027-07-01T14:00"),
        (Every("PT6H", utc("2027-01-01")), "2027-07-01T12:00", CDT, "2027-07-01T12:00"),
        (Every("P1D", datetime(2027, 1, 1, 9)), "2027-07-01T14:00", CDT, "2027-07-01T15:00"),
        (RRule("DTSTART:20270101T090000\nRRULE:FREQ=DAILY"), "2027-07-01T14:00", CDT, "2027-07-01T15:00"),
        (RRule("DTSTART:20270101T090000\nRRULE:FREQ=HOURLY"), "2027-07-01T14:00", CDT, "2027-07-01T14:00"),
        (Dates([datetime(2027, 7, 1, 9)]), "2027-07-01T14:00", CDT, "2027-07-01T15:00"),
        (Dates([utc("2027-07-01T14:00")]), "2027-07-01T14:00", CDT, "2027-07-01T14:00"),
        # The gap of 4 April 2027, which moved 02:30 to 03:00, no longer exists.
        (Cron("30 2 * * *"), "2027-04-04T08:00", CDT, "2027-04-04T08:30"),
    ],
)
def test_occurrence_keeps_its_local_time_or_its_instant(
    spec: Spec, stored: str, offset: int | None, found: str
) -> None:
    assert relocate(bind_in_mexico(spec), utc(stored), offset) == utc(found)


def test_occurrence_in_a_new_gap_fires_at_its_end(summer: Release) -> None:
    night = with_release(bind_in_mexico(Cron("30 2 * * *")), summer)
    assert relocate(night, utc("2027-04-04T08:30"), CST) == utc("2027-04-04T08:00")
    skipping = with_release(bind_in_mexico(Cron("30 2 * * *", gap="skip")), summer)
    assert relocate(skipping, utc("2027-04-04T08:30"), CST) == utc("2027-04-05T07:30")


@pytest.mark.parametrize(("fold", "second"), [("first", 0), ("last", 1)])
def test_occurrence_in_a_new_fold_fires_in_the_configured_pass(summer: Release, fold: str, second: int) -> None:
    twice = with_release(bind_in_mexico(Cron("30 1 * * *", fold=fold)), summer)
    first = utc("2027-10-31T06:30")
    assert relocate(twice, first + HOUR, CST) == first + HOUR * second


def test_second_pass_of_an_unchanged_fold_stays(summer: Release) -> None:
    twice = with_release(bind_in_mexico(Cron("30 1 * * *", fold="both")), summer)
    assert relocate(twice, utc("2027-10-31T07:30"), CST) == utc("2027-10-31T07:30")


def test_occurrence_beyond_the_end_is_dropped() -> None:
    short = bind_in_mexico(Dates([datetime(2027, 7, 1, 9)]), end=utc("2027-07-01T14:30"))
    assert relocate(short, utc("2027-07-01T14:00"), CDT) is None


def test_fixed_delay_is_not_relocated() -> None:
    delay = bind_in_mexico(Every("PT1H", since="last_end"))
    assert relocate(delay, utc("2027-07-01T14:07"), CDT) == utc("2027-07-01T14:07")
    assert resume_from(delay, utc("2027-07-01T14:07"), CDT) is delay


@pytest.mark.parametrize(
    ("spec", "stored", "following"),
    [
        (Cron("0 9 * * *"), "2027-07-01T14:00", ["2027-07-02T15:00", "2027-07-03T15:00"]),
        (Cron("0 9,10 * * *"), "2027-07-01T14:00", ["2027-07-01T16:00", "2027-07-02T15:00"]),
        (Cron("0 * * * *"), "2027-07-01T14:00", ["2027-07-01T15:00", "2027-07-01T16:00"]),
        (Dates([datetime(2027, 7, 1, 9)]), "2027-07-01T14:00", []),
    ],
)
def test_stored_instant_stays_and_its_local_time_fires_once(spec: Spec, stored: str, following: list[str]) -> None:
    at = utc(stored)
    resumed = resume_from(bind_in_mexico(spec), at, CDT)
    expected = [at, *map(utc, following)]
    assert list(islice(iter_fires(resumed, at - HOUR), 3)) == expected
    end = expected[-1] + timedelta(microseconds=1)
    assert list(resumed.between(at, end)) == expected
    assert resumed.count(at, end) == len(expected)
    assert resumed.previous(at + timedelta(seconds=1)) == at
    assert resumed == bind_in_mexico(spec)


def test_instant_common_to_both_releases_is_unchanged() -> None:
    daily = bind_in_mexico(Cron("0 9 * * *"))
    assert resume_from(daily, utc("2027-01-15T15:00"), CST) is daily
    assert resume_from(daily, utc("2027-01-15T15:00"), None) is daily
    assert resume_from(daily, None, None) is daily


def test_a_local_time_is_resolved_again(summer: Release) -> None:
    there = summer.zone(MEXICO)
    assert re_resolve_local("2027-07-01T09:00:00", utc("2027-07-01T15:00"), there) == utc("2027-07-01T14:00")
    assert re_resolve_local("2027-07-01T09:00:00.25", utc("2027-07-01T15:00:00.25"), there) == utc(
        "2027-07-01T14:00:00.25"
    )
    for pass_ in ("2027-10-31T06:30", "2027-10-31T07:30"):  # the second pass was requested with fold=1
        assert re_resolve_local("2027-10-31T01:30:00", utc(pass_), there) == utc(pass_)
    assert re_resolve_local("2027-04-04T02:30:00", utc("2027-04-04T08:30"), there) == utc("2027-04-04T08:30")


def test_differences_are_grouped_by_offset_change(summer: Release) -> None:
    year = utc("2027-03-01T12:00"), utc("2028-03-01T12:00")
    daily = bind_in_mexico(Cron("0 9 * * *"))
    (one,) = find_differences(with_release(daily, summer), daily, *year)
    assert (one.offset_before, one.offset_after) == (CDT, CST)
    assert (one.occurrences, one.since) == (210, utc("2027-04-04T14:00"))
    (two,) = find_differences(
        with_release(bind_in_mexico(Cron("0 9,10 * * *")), summer), bind_in_mexico(Cron("0 9,10 * * *")), *year
    )
    assert two.occurrences == 420
    for steady in (Cron("*/15 * * * *"), Every("PT15M")):
        assert not list(find_differences(with_release(bind_in_mexico(steady), summer), bind_in_mexico(steady), *year))
    hours = bind_in_mexico(Cron("*/30 9-10 * * *"))  # elapsed time, but only in some hours of the day
    (three,) = find_differences(with_release(hours, summer), hours, *year)
    assert three.occurrences == 420


def test_moved_transition_is_the_only_difference(tmp_path: Path) -> None:
    rules = "CST6CDT,M4.1.0,M10.5.0", "CST6CDT,M4.1.0,M11.1.0"
    old, new = (release(tmp_path / str(n), "2030a", {MEXICO: rule}) for n, rule in enumerate(rules))
    daily = bind_in_mexico(Cron("0 9 * * *"))
    year = utc("2027-03-01"), utc("2028-03-01")
    (one,) = find_differences(with_release(daily, old), with_release(daily, new), *year)
    assert (one.offset_before, one.offset_after, one.occurrences) == (CST, CDT, 7)


def test_offset_change_applies_from_its_date(tmp_path: Path) -> None:
    change = int(utc("2027-03-10T06:00").timestamp())
    new = release(tmp_path, "2030a", {MEXICO: Rules("<-05>5", change, CST, CDT)})
    daily = with_release(bind_in_mexico(Cron("0 9 * * *")), new)
    assert [offset_at(daily, utc(f"2027-03-{day}")) for day in ("09", "11")] == [CST, CDT]
    assert relocate(daily, utc("2027-03-09T15:00"), CST) == utc("2027-03-09T15:00")
    assert relocate(daily, utc("2027-03-10T15:00"), CST) == utc("2027-03-10T14:00")
