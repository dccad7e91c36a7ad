"""Accepted zone names, and conversion of local times to instants."""

from __future__ import annotations

import copy
import pickle
import re
from datetime import UTC, datetime

import pytest

from timebell.errors import InvalidInstant, InvalidTimezone
from timebell.recurrence import resolve_local, tzdata_version, zone
from timebell.recurrence.instants import DAY_S, SECOND_US, local_to_us


def local(text: str) -> int:
    return local_to_us(datetime.fromisoformat(text)) // SECOND_US


def epoch(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


@pytest.mark.parametrize(
    "name", ["UTC", "Etc/UTC", "Etc/GMT+5", "Asia/Seoul", "America/Argentina/Ushuaia", "Asia/Calcutta"]
)
def test_valid_names_are_accepted(name: str) -> None:
    assert zone(name) is zone(name)
    assert zone(name).name == name


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("CST", "America/Chicago"),
        ("CST", "Asia/Shanghai"),
        ("IST", "Europe/Dublin"),
        ("BST", "Asia/Dhaka"),
        ("EST", "America/Panama"),
        ("MST", "America/Phoenix"),
        ("pst", "America/Los_Angeles"),
        ("UTC+5", "Etc/GMT-5"),
        ("GMT-3", "Etc/GMT+3"),
        ("+05:30", "zone of a place"),
        ("UTC+0", "zone of a place"),
        ("EST5", ""),
        ("EST5EDT", "America/New_York"),
        ("US/Eastern", "America/New_York"),
        ("Japan", "Asia/Tokyo"),
        ("Zulu", "Etc/UTC"),
        ("america/new_york", "America/New_York"),
        ("utc", "UTC"),
        ("New York", "America/New_York"),
        ("seoul", "Asia/Seoul"),
        ("Europe/Londn", "Europe/London"),
        (" Asia/Seoul", "Asia/Seoul"),
        ("", ""),
        ("localtime", ""),
        ("Factory", ""),
        ("posixrules", ""),
        ("tzdata.zi", ""),
        ("../UTC", ""),
        ("/etc/localtime", ""),
        ("America", ""),
        ("America/New_York\0", ""),
        ("Ünder/Wegs", ""),
    ],
)
def test_invalid_names_are_refused_with_a_suggestion(name: str, fix: str) -> None:
    with pytest.raises(InvalidTimezone) as caught:
        zone(name)
    assert caught.value.code == "INVALID_TIMEZONE"
    assert caught.value.message == f"Invalid timezone: {name}. Use IANA format (e.g., America/New_York)"
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", [None, 5, ["UTC"], b"UTC", "x" * 10_000])
def test_non_text_and_long_names_are_refused(name: object) -> None:
    with pytest.raises(InvalidTimezone) as caught:
        zone(name)  # type: ignore[arg-type]
    assert len(caught.value.message) < 200


def test_tzdata_version_has_the_iana_format() -> None:
    assert re.fullmatch(r"20\d\d[a-z]", tzdata_version())


def test_zone_survives_copying() -> None:
    seoul = zone("Asia/Seoul")
    assert pickle.loads(pickle.dumps(seoul)) is seoul
    assert copy.deepcopy(seoul) is seoul


def test_instants_of_a_local_time() -> None:
    york = zone("America/New_York")
    assert york.instants(local("2027-03-14T02:30")) == ()
    assert york.instants(local("2027-03-14T03:00")) == (epoch("2027-03-14T07:00"),)
    assert york.instants(local("2027-11-07T01:30")) == (epoch("2027-11-07T05:30"), epoch("2027-11-07T06:30"))
    assert york.gap_end(local("2027-03-14T02:30")) == epoch("2027-03-14T07:00")
    assert york.gap_end(local("2027-03-14T03:00")) is None
    assert york.gap_end(local("2027-11-07T01:30")) is None
    assert york.offset(epoch("2027-03-14T06:59:59")) == -5 * 3600
    assert york.offset(epoch("2027-03-14T07:00")) == -4 * 3600


def test_skipped_dates_are_known() -> None:
    assert zone("Pacific/Apia").missing_days == {local("2011-12-30") // DAY_S}
    assert zone("Pacific/Fakaofo").missing_days == {local("2011-12-30") // DAY_S}
    assert zone("Pacific/Kwajalein").missing_days == {local("1993-08-21") // DAY_S}
    assert zone("America/Sao_Paulo").missing_days == set()


@pytest.mark.parametrize(
    ("local_time", "name", "instant", "note"),
    [
        ("2027-03-14T02:30", "America/New_York", "2027-03-14T07:30", "gap"),
        ("2027-03-14T02:00", "America/New_York", "2027-03-14T07:00", "gap"),
        ("2027-03-14T03:00", "America/New_York", "2027-03-14T07:00", None),
        ("2027-11-07T01:30", "America/New_York", "2027-11-07T05:30", "fold"),
        ("2027-11-07T02:00", "America/New_York", "2027-11-07T07:00", None),
        ("2027-10-03T02:15", "Australia/Lord_Howe", "2027-10-02T15:45", "gap"),
        ("2011-12-30T09:00", "Pacific/Apia", "2011-12-30T19:00", "gap"),
        ("2018-11-04T00:00", "America/Sao_Paulo", "2018-11-04T03:00", "gap"),
        ("2027-06-01T09:00:00.000001", "UTC", "2027-06-01T09:00:00.000001", None),
        ("2150-07-01T09:00", "America/New_York", "2150-07-01T13:00", None),
    ],
)
def test_local_time_is_resolved(local_time: str, name: str, instant: str, note: str | None) -> None:
    expected = datetime.fromisoformat(instant).replace(tzinfo=UTC)
    assert resolve_local(datetime.fromisoformat(local_time), zone(name)) == (expected, note)


@pytest.mark.parametrize("local_time", [datetime(1969, 12, 31), datetime(2200, 1, 1), datetime(2027, 1, 1, tzinfo=UTC)])
def test_unsupported_local_time_is_refused(local_time: datetime) -> None:
    with pytest.raises(InvalidInstant):
        resolve_local(local_time, zone("Asia/Seoul"))
