"""Cron beyond crontab(5): years, ?, L, W, #, +, H, and the options."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.cpu import within
from timebell.errors import InvalidRecurrence
from timebell.recurrence import Cron, Recurrence, recurrence_from_json, spec_from_json

CREATED = datetime(2027, 1, 1, tzinfo=UTC)


def fires(expression: str, start: str, end: str, timezone: str = "UTC", key: str = "", **options: Any) -> list[str]:
    """Instants between two UTC dates or times, as text."""
    low, high = (datetime.fromisoformat(edge).replace(tzinfo=UTC) for edge in (start, end))
    bound = Cron(expression, **options).bind(timezone, created_at=CREATED, key=key)
    return [f"{at:%Y-%m-%dT%H:%M}" for at in bound.between(low, high)]


def days(expression: str, year: int = 2027, **options: Any) -> list[str]:
    """The dates of a year on which it fires."""
    return [at[5:10] for at in fires(expression, f"{year}-01-01", f"{year + 1}-01-01", **options)]


def refusal_of(expression: str, **options: Any) -> InvalidRecurrence:
    with within(0.1), pytest.raises(InvalidRecurrence) as caught:
        Cron(expression, **options)
    return caught.value


# days


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("0 0 L 1-4 *", ["01-31", "02-28", "03-31", "04-30"]),
        ("0 0 L-1 1-3 *", ["01-30", "02-27", "03-30"]),
        ("0 0 L-30 1-4 *", ["01-01", "03-01"]),
        ("0 0 1,15,L 2 *", ["02-01", "02-15", "02-28"]),
        ("0 0 15W 5,8 *", ["05-14", "08-16"]),  # a Saturday, a Sunday
        ("0 0 1W 5,8 *", ["05-03", "08-02"]),  # a Saturday, a Sunday: not back into the month before
        ("0 0 31W 1,10 *", ["01-29", "10-29"]),  # both Sundays: not on into the month after
        ("0 0 31W 1-6 *", ["01-29", "03-31", "05-31"]),
        ("0 0 LW 1-5 *", ["01-29", "02-26", "03-31", "04-30", "05-31"]),
        ("0 0 lw,3w 1 *", ["01-04", "01-29"]),
        ("0 0 * 1-3 MON#2", ["01-11", "02-08", "03-08"]),
        ("0 0 * 1,2 mon#1,1#3", ["01-04", "01-18", "02-01", "02-15"]),
        ("0 0 * * FRI#5", ["01-29", "04-30", "07-30", "10-29", "12-31"]),
        ("0 0 * 1 7#1,0#2", ["01-03", "01-10"]),
        ("0 0 * 1-3 5L", ["01-29", "02-26", "03-26"]),
        ("0 0 * 1-3 FRIL", ["01-29", "02-26", "03-26"]),
        ("0 0 * 1 7L,MON#1", ["01-04", "01-31"]),
        ("0 0 ? 1 SAT,SUN#1", ["01-02", "01-03", "01-09", "01-16", "01-23", "01-30"]),
        ("0 0 ? 1 ?", [f"01-{day:02}" for day in range(1, 32)]),
    ],
)
def test_day_fields(expression: str, expected: list[str]) -> None:
    assert days(expression) == expected


def test_question_mark_does_not_restrict() -> None:
    assert days("0 0 ? 1 MON") == days("0 0 * 1 MON") == ["01-04", "01-11", "01-18", "01-25"]
    assert days("0 0 13 1,2 ?") == ["01-13", "02-13"]


def test_plus_requires_both_day_fields() -> None:
    assert days("0 0 13 * +FRI") == ["08-13"]
    assert days("0 0 13 * +FRI,WED") == ["01-13", "08-13", "10-13"]
    assert days("0 0 1-7 1-3 +MON#1") == ["01-04", "02-01", "03-01"]
    assert days("0 0 L * +FRI") == ["04-30", "12-31"]


def test_days_option_requires_both_or_either() -> None:
    assert days("0 0 13 * FRI", days="and") == ["08-13"]
    assert days("0 0 */2 1 MON") == ["01-11", "01-25"]
    assert len(days("0 0 */2 1 MON", days="or")) == 18
    for unrestricted in ("*", "?"):
        assert days(f"0 0 {unrestricted} 1 MON", days="or") == days("0 0 * 1 MON")
        assert days(f"0 0 13 1 {unrestricted}", days="or") == ["01-13"]
    assert "Omit one" in refusal_of("0 0 13 * +FRI", days="or").fix


def test_month_end_option() -> None:
    assert days("0 0 31 1-4 *") == ["01-31", "03-31"]
    assert days("0 0 31 1-4 *", month_end="back") == ["01-31", "02-28", "03-31", "04-30"]
    assert days("0 0 29-31 2,4 *", month_end="back") == ["02-28", "04-29", "04-30"]
    assert days("0 0 31W 2-5 *", month_end="back") == ["02-26", "03-31", "04-30", "05-31"]
    assert days("0 0 29 2 *", month_end="back") == ["02-28"]
    assert days("0 0 29 2 *", 2028, month_end="back") == ["02-29"]
    assert days("0 0 30 2 *", month_end="back") == ["02-28"]


# years


def test_year_field() -> None:
    assert fires("0 30 9 1 1 ? 2028,2030-2031", "2027-01-01", "2040-01-01") == [
        "2028-01-01T09:30",
        "2030-01-01T09:30",
        "2031-01-01T09:30",
    ]
    assert fires("0 0 0 29 2 * 2097/5", "1970-01-01", "2199-12-31") == [
        f"{year}-02-29T00:00" for year in (2112, 2132, 2152, 2172, 2192)
    ]
    leap = Cron("0 0 0 29 2 * 1970-2000,2190-2199").bind("UTC", created_at=CREATED)
    assert leap.next(CREATED) == datetime(2192, 2, 29, tzinfo=UTC)
    assert leap.previous(CREATED) == datetime(2000, 2, 29, tzinfo=UTC)
    assert leap.count(datetime(1970, 1, 1, tzinfo=UTC), datetime(2199, 12, 31, tzinfo=UTC)) == 10
    assert Cron("0 0 0 1 1 * 2020").bind("UTC", created_at=CREATED).next(CREATED) is None


def test_year_field_is_in_local_time() -> None:
    assert fires("0 0 0 1 1 * 2028", "2027-01-01", "2030-01-01", "Asia/Seoul") == ["2027-12-31T15:00"]
    assert fires("0 59 23 31 12 * 2027", "2027-01-01", "2030-01-01", "America/New_York") == ["2028-01-01T04:59"]


# expressions that never fire


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("0 0 30 2 *", "February has no day 30"),
        ("0 0 30,31 2 *", "February has no day 30 or 31"),
        ("0 0 31 4,6 *", "April and June have no day 31"),
        ("0 0 31W 9 *", "31W: September has no such day"),
        ("0 0 L-30 4 *", "L-30: April has no such day"),
        ("0 0 0 29 2 * 2030-2031", "no year from 2030 to 2031 has 29 February"),
        ("0 0 0 29 2 * 2027", "no year of 2027 has 29 February"),
        ("0 0 0 L-28 2 * 2027,2029", "no year of 2027 and 2029 has 29 February, which L-28 needs"),
        ("0 0 0 ? 2 MON#5 2027", "MON#5: there is none in February of 2027"),
        ("0 0 8-14 * +MON#1", "day-of-month 8-14 and day-of-week +MON#1 never meet"),
        ("0 0 15W 3,4 +SUN", "day-of-month 15W and day-of-week +SUN never meet in March or April"),
        ("0 0 0 13 1 +FRI 2027", "day-of-month 13 and day-of-week +FRI never meet in January of 2027"),
        ("H 0 30 2 *", "February has no day 30"),
    ],
)
def test_expression_that_never_fires_is_refused(expression: str, why: str) -> None:
    error = refusal_of(expression)
    assert error.code == "NEVER_FIRES"
    assert f"never fires: {why}." in error.message
    spec = Cron(expression, allow_never=True)
    assert spec.warnings()[-1] == f"It never fires: {why}."
    bound = spec.bind("America/New_York", created_at=CREATED)
    assert bound.next(CREATED) is bound.previous(CREATED) is None
    assert bound.count(CREATED, datetime(2199, 1, 1, tzinfo=UTC)) == 0


def test_hash_key_may_select_a_date_that_never_fires() -> None:
    spec = Cron("0 0 H(28-31) 2 *")
    refused = 0
    for key in "abcdefghijkl":
        try:
            spec.bind("UTC", created_at=CREATED, key=key)
        except InvalidRecurrence as error:
            refused += error.code == "NEVER_FIRES"
    assert 0 < refused < 12


@pytest.mark.parametrize(
    ("expression", "why", "fix"),
    [
        ("0 0 * * L", "L in day-of-week", "SATL"),
        ("0 0 L-31 * *", "L-31 in day-of-month", "1 to 30"),
        ("0 0 L-0 * *", "L-0 in day-of-month", "1 to 30"),
        ("0 0 L-100 * *", "'L-100' in day-of-month", "L-3"),
        ("0 0 1-L * *", "'1-L' in day-of-month", "L-3"),
        ("0 0 L/2 * *", "'L/2' in day-of-month", "L-3"),
        ("L * * * *", "'L' in minute", "day-of-month"),
        ("0 0 W * *", "'W' in day-of-month", "15W"),
        ("0 0 0W * *", "0W in day-of-month", "1 to 31"),
        ("0 0 32W * *", "32W in day-of-month", "1 to 31"),
        ("0 0 LW-1 * *", "'LW-1' in day-of-month", "LW"),
        ("0 0 5W-7W * *", "'5W-7W' in day-of-month", "15W"),
        ("0 0 * * 5W", "'5W' in day-of-week", "15W"),
        ("0 0 * * 0#6", "0#6 in day-of-week", "1 to 5"),
        ("0 0 * * 6#0", "6#0 in day-of-week", "1 to 5"),
        ("0 0 * * 8#1", "8 in day-of-week", "0 to 7"),
        ("0 0 * * FOO#1", "FOO in day-of-week", "SUN to SAT"),
        ("0 0 * * FOOL", "FOO in day-of-week", "SUN to SAT"),
        ("0 0 * * MON-FRIL", "'MON-FRIL' in day-of-week", "FRIL"),
        ("0 0 * * MON#", "'MON#' in day-of-week", "MON#2"),
        ("0 0 1#1 * *", "'1#1' in day-of-month", "MON#2"),
        ("? * * * *", "'?' in minute", "*"),
        ("0 0 ?,1 * MON", "'?' in day-of-month", "*"),
        ("0 0 ?/2 * MON", "'?/2' in day-of-month", "*"),
        ("0 0 +1 * MON", "'+1' in day-of-month", "+MON"),
        ("0 0 1 * MON,+FRI", "'+FRI' in day-of-week", "+MON"),
        ("0 0 1 * ++FRI", "'+FRI' in day-of-week", "+MON"),
        ("0 0 1 * +", "'' in day-of-week", "Write it like"),
        ("H(5-1) * * * *", "H(5-1) in minute runs backwards", "H(5-59) or H(0-1)"),
        ("H(1-5)/9 * * * *", "H(1-5)/9 in minute", "at most 5"),
        ("H/61 * * * *", "H/61 in minute", "at most 60"),
        ("H/0 * * * *", "step of 0", "at least 1"),
        ("H(0-60) * * * *", "60 in minute", "0 to 59"),
        ("H(5) * * * *", "'H(5)' in minute", "H(0-29)"),
        ("H(0-29 * * * *", "'H(0-29' in minute", "H(0-29)"),
        ("H-5 * * * *", "'H-5' in minute", "H(0-29)"),
        ("0 0 0 1 1 * H", "'H' in year", "2027"),
        ("0 0 0 1 1 * 27", "27 in year", "1970 to 2199"),
        ("0 0 0 1 1 * 1969", "1969 in year", "1970 to 2199"),
        ("0 0 0 1 1 * 2200", "2200 in year", "1970 to 2199"),
        ("0 0 0 1 1 * 2030-2027", "2030-2027 in year runs backwards", "2030-2199,1970-2027"),
        ("0 0 0 1 1 * */231", "*/231 in year", "at most 230"),
        ("0 0 0 1 1 * ?", "'?' in year", "*"),
        ("0 0 0 1 1 * 2027 2028", "8 fields, not 5, 6 or 7", "year after"),
        ("1- * * * *", "'1-' in minute", "Write it like"),
        (", * * * *", "'' in minute", "Write it like"),
        ("0\x0b9 * * *", "4 fields", "minute hour"),
        ("0 9 * * *\x1c", "in day-of-week", "Write it like"),
        ("0\xa09 * * *", "4 fields", "minute hour"),
        ("٥ ٩ * * *", "'٥' in minute", "Write it like"),
        ("0 0 ١W * *", "in day-of-month", "Write it like"),
        ("0 0 * * ①#1", "in day-of-week", "MON#2"),
        ("ﬀ * * * *", "in minute", "Write it like"),
        ("0 9 * * *" + "," * 300, "characters", "256"),
        ("*" * 10_000, "10000 characters", "256"),
        ("1," * 63 + "1 * * * x", "in day-of-week", "Write it like"),
        ("1," * 64 + "1 * * * *", "minute lists 65 values", "at most 64"),
    ],
)
def test_invalid_syntax_is_refused_with_a_fix(expression: str, why: str, fix: str) -> None:
    error = refusal_of(expression)
    assert error.code == "INVALID_CRON"
    assert why in error.message
    assert fix in error.fix


# H


def test_h_depends_only_on_the_key() -> None:
    one, again, other = (
        fires("H H * * *", "2027-01-01", "2027-01-03", key=key) for key in ("default/a", "default/a", "default/b")
    )
    assert one == again != other
    assert len(one) == 2
    assert fires("H H * * *", "2027-01-01", "2027-01-03", hash_key="default/a", key="default/b") == one
    # Pinned: another hash would move every schedule that has an H.
    assert one == ["2027-01-01T15:49", "2027-01-02T15:49"]


def test_h_covers_its_range() -> None:
    minutes = {fires("H * * * *", "2027-01-01", "2027-01-01T01", key=str(n))[0][14:] for n in range(600)}
    assert len(minutes) == 60
    halves = {fires("H(10-19) * * * *", "2027-01-01", "2027-01-01T01", key=str(n))[0][14:] for n in range(200)}
    assert halves == {str(minute) for minute in range(10, 20)}
    dates = {days("0 0 H 2 *", key=str(n))[0] for n in range(300)}
    assert dates == {f"02-{day:02}" for day in range(1, 29)}
    weekdays = {days("0 0 * 1 H", key=str(n))[0] for n in range(100)}
    assert len(weekdays) == 7


def test_h_with_a_step() -> None:
    firsts = set()
    for key in map(str, range(40)):
        minutes = [int(at[14:]) for at in fires("H(20-49)/10 9 * * *", "2027-01-01", "2027-01-02", key=key)]
        assert minutes == list(range(minutes[0], 50, 10))
        firsts.add(minutes[0])
        assert len(fires("H/15 9 * * *", "2027-01-01", "2027-01-02", key=key)) == 4
    assert firsts == set(range(20, 30))
    assert len(fires("H(0-29),H(30-59) 9 * * *", "2027-01-01", "2027-01-02")) == 2


def test_bound_h_is_described_with_its_value() -> None:
    bound = Cron("H 2 * * *").bind("UTC", created_at=CREATED, key="default/report")
    assert bound.to_json()["hashKey"] == "default/report"
    again = recurrence_from_json(json.loads(json.dumps(bound.to_json())))
    assert again == bound
    assert again.next(CREATED) == bound.next(CREATED)
    assert bound.describe() == f"At {bound.next(CREATED):%H:%M}, UTC"
    assert bound.spec.warnings() == []
    assert "The minute depends on the schedule's name" in Cron("H 2 * * *").warnings()[0]
    plain = Cron("0 2 * * *").bind("UTC", created_at=CREATED, key="default/report")
    assert "hashKey" not in plain.to_json()
    assert Recurrence(Cron("H 2 * * *"), "UTC").next(CREATED) == Cron("H 2 * * *").bind("UTC", created_at=CREATED).next(
        CREATED
    )


# options


NY = ("2027-03-14T05:00", "2027-03-14T09:00", "America/New_York")
FOLD = ("2027-11-07T04:00", "2027-11-07T08:00", "America/New_York")


def test_wildcard_option() -> None:
    assert fires("*/30 2 * * *", *NY) == []
    assert fires("*/30 2 * * *", *NY, wildcard="fixed") == ["2027-03-14T07:00"]
    assert fires("*/30 2 * * *", *NY, wildcard="fixed", gap="shift") == ["2027-03-14T07:00", "2027-03-14T07:30"]
    assert len(fires("*/30 1 * * *", *FOLD)) == 4
    assert fires("*/30 1 * * *", *FOLD, wildcard="fixed") == ["2027-11-07T05:00", "2027-11-07T05:30"]
    assert fires("30 1 * * *", *FOLD, wildcard="fixed") == fires("30 1 * * *", *FOLD)


def test_options_round_trip_through_json() -> None:
    spec = Cron("H 0 31 2 FRI", wildcard="fixed", days="and", month_end="back", allow_never=True, hash_key="k")
    assert spec.to_json() == {
        "kind": "cron",
        "spec": "H 0 31 2 FRI",
        "dst": {"gap": "end", "fold": "first"},
        "wildcard": "fixed",
        "days": "and",
        "monthEnd": "back",
        "allowNever": True,
        "hashKey": "k",
    }
    assert spec_from_json(spec.to_json()) == spec
    assert set(Cron("0 0 * * *").to_json()) == {"kind", "spec", "dst"}


@pytest.mark.parametrize(
    "options",
    [
        {"wildcard": "free"},
        {"wildcard": None},
        {"days": "xor"},
        {"days": ["and"]},
        {"monthEnd": "clamp"},
        {"monthEnd": {}},
        {"allowNever": 1},
        {"allowNever": "yes"},
        {"hashKey": 5},
        {"hashKey": "x" * 1001},
        {"hashKey": "\0"},
        {"hashKey": "\ud800"},
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecurrence) as caught:
        spec_from_json({"kind": "cron", "spec": "0 0 1 * *", **options})
    assert caught.value.code == "INVALID_CRON"
