"""RRULE compared with a brute-force evaluation of RFC 5545 across clock changes, and its options."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from tests.rotation import rotated
from tests.unit.recurrence.oracle import changes, info
from tests.unit.recurrence.rrule_oracle import instants, occurrences, read
from tests.unit.recurrence.rrule_rules import COARSE, FINE, parts_of, text_of
from timebell.errors import InvalidRecurrence
from timebell.recurrence import Recurrence, RRule, recurrence_from_json

CREATED = datetime(2000, 1, 1, tzinfo=UTC)
LOW = datetime(1971, 1, 1, tzinfo=UTC)
ZONES = [
    "UTC",
    "Africa/Cairo",
    "America/New_York",
    "America/Sao_Paulo",
    "America/St_Johns",
    "Antarctica/Troll",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",
    "Europe/Dublin",
    "Pacific/Apia",
]


CUT = ("BYYEARDAY", "BYMONTHDAY", "BYMONTH", "BYSETPOS")


def start_of(rng: Random, zone: str) -> datetime:
    """Return a random local time, often near a clock change."""
    jumps = [at for at in changes(info(zone)) if 2005 <= at.year < 2015]
    if jumps and rng.random() < 0.6:
        at = rng.choice(jumps) + timedelta(minutes=rng.randint(-3000, 120))
        return at.astimezone(info(zone)).replace(tzinfo=None, fold=0)
    odd = rng.choice([0, 0, rng.randint(0, 59)])
    return datetime(rng.randint(2005, 2014), rng.randint(1, 12), rng.randint(1, 28), rng.randint(0, 23), odd, odd)


def assert_matches_oracle(
    parts: dict[str, str], start: datetime, zone: str, end: datetime, gap: str = "shift", fold: str = "first"
) -> int:
    """Compare forward search, backward search and count with the oracle; return the number of instants."""
    expected = occurrences(parts, start, zone, end, gap=gap, fold=fold)
    context = (text_of(parts), start, zone, gap, fold)
    try:
        rule = RRule(text_of(parts), start, gap=gap, fold=fold).bind(zone, created_at=CREATED)  # type: ignore[arg-type]
    except InvalidRecurrence as error:
        return assert_no_instants(error, expected, context)
    found = list(rule.between(LOW, end))
    assert found == expected, context
    assert rule.count(LOW, end) == len(found), context
    back, at = [], rule.previous(end)
    while at is not None:
        back.append(at)
        at = rule.previous(at)
    assert back[::-1] == found, context
    return len(found)


def assert_no_instants(error: InvalidRecurrence, expected: list[datetime], context: object) -> int:
    """Assert that a refused rule has no instant, or is ambiguous because SKIP makes months overlap."""
    assert "SKIP=FORWARD with BYSETPOS" in str(error) or (error.code == "NEVER_FIRES" and not expected), context
    return 0


@pytest.mark.parametrize("seed", rotated(range(12), "1234"))
def test_daily_to_yearly_rules_match_the_oracle(seed: int) -> None:
    total = 0
    for n in range(25):
        rng = Random(seed * 1000 + n)
        parts = parts_of(rng, rng.choice(COARSE))
        if rng.random() < 0.2:
            parts |= {"RSCALE": "GREGORIAN", "SKIP": rng.choice(["BACKWARD", "FORWARD", "OMIT"])}
        zone = rng.choice(ZONES)
        start = start_of(rng, zone)
        dst = rng.choice(["shift", "shift", "end", "skip"]), rng.choice(["first", "first", "last", "both"])
        total += assert_matches_oracle(
            parts, start, zone, start.replace(tzinfo=UTC) + timedelta(days=rng.choice([400, 1500])), *dst
        )
    assert total > 500


@pytest.mark.parametrize("seed", rotated(range(12), "1234"))
def test_hourly_to_secondly_rules_match_the_oracle(seed: int) -> None:
    total = 0
    for n in range(16):
        rng = Random(seed * 1000 + n)
        parts = parts_of(rng, rng.choice(FINE if n % 3 else FINE[:2]))
        if rng.random() < 0.6:
            parts = {name: parts[name] for name in parts if name not in CUT}
        zone = rng.choice(ZONES)
        start = start_of(rng, zone)
        hours = 12 if parts["FREQ"] == "SECONDLY" else 72
        total += assert_matches_oracle(parts, start, zone, start.replace(tzinfo=UTC) + timedelta(hours=hours))
    assert total > 50


JUMPS = [
    ("FREQ=HOURLY", datetime(2010, 4, 3, 20, 15), "Australia/Lord_Howe"),
    ("FREQ=HOURLY;BYMINUTE=0,15,45;INTERVAL=2", datetime(2010, 4, 3, 20, 15), "Australia/Lord_Howe"),
    ("FREQ=HOURLY;BYMINUTE=0,15,45;BYSETPOS=-1", datetime(2010, 10, 2, 20, 15), "America/New_York"),
    ("FREQ=MINUTELY;INTERVAL=7;BYHOUR=0,1,2", datetime(2010, 11, 6, 20, 15), "America/New_York"),
    ("FREQ=MINUTELY;INTERVAL=5;BYSECOND=0,30;BYDAY=SU", datetime(2010, 3, 13, 20, 15, 30), "America/New_York"),
    ("FREQ=MINUTELY;BYMONTH=10;BYMINUTE=12", datetime(2009, 10, 31, 21, 25), "America/St_Johns"),
    ("FREQ=SECONDLY;INTERVAL=1201;BYDAY=FR,SA", datetime(2011, 12, 29, 12), "Pacific/Apia"),
    ("FREQ=DAILY;BYHOUR=0,2,23;BYMINUTE=0,30", datetime(2011, 12, 28, 12), "Pacific/Apia"),
    ("FREQ=DAILY;BYHOUR=0,1,2,3;BYMINUTE=0,15,30,45", datetime(2010, 10, 2), "Australia/Lord_Howe"),
    ("FREQ=WEEKLY;BYDAY=SA,SU;BYHOUR=0,1,2,3;BYSETPOS=-1,2,3,6", datetime(2010, 3, 1, 2), "America/New_York"),
]


@pytest.mark.parametrize(("text", "start", "zone"), JUMPS)
def test_rules_across_clock_changes_match_the_oracle(text: str, start: datetime, zone: str) -> None:
    assert assert_matches_oracle(read(text), start, zone, start.replace(tzinfo=UTC) + timedelta(days=16))


@pytest.mark.parametrize("wkst", ["MO", "WE", "SU"])
@pytest.mark.parametrize("interval", ["2", "3", "5"])
def test_weeks_across_new_year_match_the_oracle(wkst: str, interval: str) -> None:
    parts = {"FREQ": "WEEKLY", "INTERVAL": interval, "WKST": wkst, "BYDAY": "MO,TU,WE,TH,FR,SA,SU"}
    for setpos in ({}, {"BYSETPOS": "-2,1,6"}):
        assert (
            assert_matches_oracle({**parts, **setpos}, datetime(2007, 5, 3, 9), "UTC", datetime(2027, 1, 1, tzinfo=UTC))
            > 300
        )


def bound(text: str, start: datetime | None = None, zone: str = "America/New_York", **options: Any) -> Recurrence:
    return RRule(text, start, **options).bind(zone, created_at=CREATED)


GAP, FOLD = datetime(2027, 3, 14, 2, 30), datetime(2027, 11, 7, 1, 30)


@pytest.mark.parametrize("gap", ["shift", "end", "skip"])
@pytest.mark.parametrize("fold", ["first", "last", "both"])
def test_rdates_and_exdates_follow_gap_and_fold_policies(gap: str, fold: str) -> None:
    options = {"gap": gap, "fold": fold}
    place = info("America/New_York")
    for local_time in (GAP, FOLD):
        expected_instants = instants(local_time, place, gap, fold)
        day = timedelta(days=1)
        span = [at.replace(tzinfo=UTC) for at in (local_time - day / 2, local_time + day)]
        daily = bound("FREQ=DAILY", local_time - 7 * day, **options)
        assert list(daily.between(*span)) == expected_instants
        assert list(bound("FREQ=DAILY", local_time - 7 * day, exdates=[local_time], **options).between(*span)) == []
        yearly = bound("FREQ=YEARLY", datetime(2027, 1, 1), rdates=[local_time], **options)
        assert list(yearly.between(*span)) == expected_instants
        assert [yearly.note(at) for at in expected_instants] == [daily.note(at) for at in expected_instants]


def test_rdate_that_is_also_an_instant_of_the_rule_counts_once() -> None:
    rule = bound("FREQ=DAILY;COUNT=3", GAP, rdates=[GAP, GAP + timedelta(days=1), GAP - timedelta(days=9)])
    assert rule.count(LOW, CREATED.replace(year=2100)) == 4 == len(list(rule.between(LOW, CREATED.replace(year=2100))))
    without = bound("FREQ=DAILY;COUNT=3", GAP, rdates=[FOLD], exdates=[FOLD, GAP])
    assert without.count(LOW, CREATED.replace(year=2100)) == 2


@pytest.mark.parametrize(
    ("until", "last"),
    [
        ("20271107T013000", "06:30"),  # local time: includes its last pass
        ("20271107T053000Z", "05:30"),
        ("20271107T052959Z", "05:00"),
    ],
)
def test_until_in_a_fold(until: str, last: str) -> None:
    rule = bound(f"FREQ=MINUTELY;INTERVAL=30;UNTIL={until}", datetime(2027, 11, 6))
    assert f"{rule.previous(CREATED.replace(year=2100)):%d %H:%M}" == f"07 {last}"


@pytest.mark.parametrize(("zone", "day"), [("America/Sao_Paulo", "20181103"), ("Pacific/Apia", "20111229")])
def test_until_date_ends_with_its_local_day(zone: str, day: str) -> None:
    rule = bound(f"FREQ=MINUTELY;UNTIL={day}", datetime.strptime(day, "%Y%m%d") - timedelta(days=1), zone)
    last = rule.previous(CREATED.replace(year=2100))
    assert last is not None
    assert f"{rule.local(last):%Y%m%d %H:%M}" == f"{day} 23:59"
    assert f"{rule.local(last + timedelta(minutes=1)):%Y%m%d}" > day


def test_month_end_option_equals_skip() -> None:
    start = datetime(2027, 1, 31, 9)
    for option, skip in (("skip", "OMIT"), ("back", "BACKWARD"), ("next", "FORWARD")):
        span = LOW, CREATED.replace(year=2030)
        option_given = bound("FREQ=MONTHLY", start, month_end=option)
        assert list(option_given.between(*span)) == list(
            bound(f"RSCALE=GREGORIAN;SKIP={skip};FREQ=MONTHLY", start).between(*span)
        )
        assert recurrence_from_json(option_given.to_json()) == option_given


@pytest.mark.parametrize(
    "options",
    [
        {"month_end": "no"},
        {"gap": "no"},
        {"fold": None},
        {"dtstart": "20270101"},
        {"dtstart": datetime(2027, 1, 1, microsecond=1)},
        {"dtstart": datetime(2200, 1, 1)},
        {"exdates": ["20270101"]},
        {"rdates": [datetime(1969, 1, 1)]},
        {"rdates": [datetime(2027, 1, 1) + n * timedelta(days=1) for n in range(1001)]},
        {"text": 5},
        {"text": "FREQ=HOURLY", "gap": "end"},
        {"text": "RSCALE=GREGORIAN;SKIP=FORWARD;FREQ=MONTHLY", "month_end": "back"},
        {"text": "FREQ=YEARLY;BYYEARDAY=366", "month_end": "back"},
        {"text": "FREQ=MONTHLY;BYHOUR=1,2;BYSETPOS=1", "month_end": "next"},
        {"text": "DTSTART:20270101\nRRULE:FREQ=DAILY", "dtstart": datetime(2027, 1, 2)},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecurrence) as error:
        RRule(**{"text": "FREQ=DAILY", **options})
    assert error.value.code == "INVALID_RRULE"
    assert error.value.fix


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("FREQ=DAILY;INTERVAL=14;BYDAY=MO", "BYDAY"),
        ("FREQ=MONTHLY;BYMONTHDAY=31;BYMONTH=4", "BYMONTHDAY"),
        ("FREQ=YEARLY;BYDAY=MO;BYSETPOS=54", "BYSETPOS"),
        ("FREQ=YEARLY;BYYEARDAY=366;BYMONTH=1", "BYYEARDAY"),
        ("FREQ=YEARLY;BYWEEKNO=20;BYMONTH=1", "BYWEEKNO"),
        ("FREQ=DAILY;BYSETPOS=2;BYHOUR=3", "BYSETPOS"),
        ("FREQ=DAILY;INTERVAL=2;BYMONTH=2;BYMONTHDAY=30", "BYMONTHDAY"),
        ("FREQ=HOURLY;BYYEARDAY=1;BYMONTH=4", "no date"),
        ("FREQ=DAILY;BYDAY=SU;UNTIL=20270303", "UNTIL"),
    ],
)
def test_part_that_excludes_everything_is_named(text: str, part: str) -> None:
    with pytest.raises(InvalidRecurrence, match=part) as error:
        bound(text, datetime(2027, 3, 2, 9))
    assert error.value.code == "NEVER_FIRES"
