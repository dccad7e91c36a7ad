"""Cron compared with a walk of real time, around every offset change of every zone."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.rotation import rotated
from tests.unit.recurrence.cron_texts import cron, dates, day_options, months, weekdays, years
from tests.unit.recurrence.oracle import DAY, Walk, changes, info, numbers, read
from timebell.recurrence import Cron, zone
from timebell.recurrence.zone_names import accepted_names

CREATED = datetime(2000, 1, 1, tzinfo=UTC)
MINUTE, SECOND, HOUR = timedelta(minutes=1), timedelta(seconds=1), timedelta(hours=1)
NAMES = sorted(accepted_names())
NOTABLE = [
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Asuncion",
    "America/New_York",
    "America/Sao_Paulo",
    "America/St_Johns",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Asia/Gaza",
    "Asia/Pyongyang",
    "Australia/Lord_Howe",
    "Europe/Dublin",
    "Pacific/Apia",
    "Pacific/Fakaofo",
]


def expressions(rng: random.Random, name: str, change: datetime) -> list[str]:
    """Return expressions with times near an offset change, and some elsewhere."""
    near = (change + rng.randrange(-150, 150) * MINUTE).astimezone(info(name))
    before = (change - SECOND).astimezone(info(name)).replace(tzinfo=None) + SECOND
    hour, minute, day = before.hour, before.minute, before.day
    weekday = before.isoweekday() % 7
    return [
        f"{minute} {hour} * * *",
        f"{rng.randrange(60)} {hour} * * *",
        f"{near.minute} {near.hour} * * *",
        f"{rng.randrange(30)},{rng.randrange(30, 60)} {near.hour},{hour} * * *",
        f"*/{rng.choice((5, 7, 20, 30))} {hour} * * *",
        f"{rng.randrange(60)} * * * *",
        f"{rng.randrange(60)} */{rng.choice((2, 5))} * * *",
        f"0-59/{rng.choice((10, 15))} 0-23 {day} * {weekday}",
        f"{minute} {hour} */2 * {weekday}",
        f"{minute} 0-3,{hour} {day} {before.month} *",
        f"{near.minute} {near.hour} {near.day} {near.month} *",
        f"*/{rng.choice((5, 20))} {near.hour} {near.day} {near.month} *",
        f"{minute} {hour} {day}W,L-{rng.randrange(1, 8)} * ?",
        f"{near.minute} {near.hour} ? * {weekday}#{(day + 6) // 7}",
        f"*/{rng.choice((5, 20))} {hour} L,LW,{day} * {weekday}L",
        f"H {hour},{near.hour} * * *",
        f"H/7 H({max(hour - 1, 0)}-{hour}) {day} * +{weekday}",
        f"0 {minute} {hour} * * * {before.year}",
    ]


def check(name: str, expression: str, walk: Walk, start: datetime, end: datetime, **options: str) -> None:
    bound = Cron(expression, **options).bind(name, created_at=CREATED)  # type: ignore[arg-type]
    wanted = [at for at in walk.fires(expression, **options) if start <= at < end]
    context = f"{expression} {name} {start} {options}"
    assert list(bound.between(start, end)) == wanted, context
    assert bound.count(start, end) == len(wanted), context
    back, at = [], bound.previous(end)
    while at is not None and at >= start:
        back.append(at)
        at = bound.previous(at)
    assert back[::-1] == wanted, context


def sweep(name: str, change: datetime, rng: random.Random, count: int) -> None:
    start, end = change - 25 * HOUR, change + 25 * HOUR
    walk = Walk(name, start - 26 * HOUR, end + 26 * HOUR, MINUTE)
    for expression in rng.sample(expressions(rng, name, change), count):
        options = {
            "gap": rng.choice(("end", "shift", "skip")),
            "fold": rng.choice(("first", "last", "both")),
            "wildcard": rng.choice(("real", "fixed")),
            "month_end": rng.choice(("skip", "back")),
            "hash_key": rng.choice(("", "default/report")),
        }
        check(name, expression, walk, start, end, **(options if rng.random() < 0.5 else {}))


def test_all_zones_are_covered() -> None:
    assert len(NAMES) > 500


@pytest.mark.parametrize("part", rotated(range(8), "01"))
def test_every_offset_change_of_every_zone_is_found(part: int) -> None:
    for name in NAMES[part::8]:
        found = [segment.start for segment in zone(name).jumps(946_684_800, 2_208_988_800)]
        assert found == [int(change.timestamp()) for change in changes(info(name))], name


@pytest.mark.parametrize("part", rotated(range(8), "01"))
def test_expressions_around_one_change_of_every_zone(part: int) -> None:
    rng = random.Random(part)
    for name in NAMES[part::8]:
        if changes(info(name)):
            sweep(name, rng.choice(changes(info(name))), rng, 3)


@pytest.mark.parametrize("name", NOTABLE)
def test_expressions_around_changes_of_notable_zones(name: str) -> None:
    rng = random.Random(name)
    for change in changes(info(name))[:: max(1, len(changes(info(name))) // 6)]:
        sweep(name, change, rng, 8)


@pytest.mark.soak  # minutes
@pytest.mark.parametrize("part", range(20))
def test_expressions_around_every_change_of_every_zone(part: int) -> None:
    for name in NAMES[part::20]:
        rng = random.Random(name)
        for change in changes(info(name)):
            sweep(name, change, rng, 6)


@pytest.mark.parametrize("gap", ["end", "shift", "skip"])
@pytest.mark.parametrize("fold", ["first", "last", "both"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("America/New_York", datetime(2027, 3, 14, 7, tzinfo=UTC)),
        ("America/New_York", datetime(2027, 11, 7, 6, tzinfo=UTC)),
    ],
)
def test_every_gap_and_fold_policy(name: str, change: datetime, gap: str, fold: str) -> None:
    start, end = change - 3 * HOUR, change + 3 * HOUR
    walk = Walk(name, start - 24 * HOUR, end + 24 * HOUR, MINUTE)
    for expression in ("30 2 * * *", "0,30 2-3 * * *", "30 1 * * *", "0-59/10 0-4 * * *", "*/10 * * * *"):
        check(name, expression, walk, start, end, gap=gap, fold=fold)


@settings(max_examples=300, deadline=None)
@given(dates, months, weekdays, years, day_options, st.dates(date(1970, 1, 1), date(2198, 12, 31)))
def test_day_fields_match_the_oracle(
    dates: str, months: str, weekdays: str, years: str, options: dict[str, Any], start: date
) -> None:
    """Compare every day of a year and of the years in the year field."""
    assume(weekdays[0] != "+" or options.get("days") != "or")
    for year in (years, "*"):
        text = f"0 0 12 {dates} {months} {weekdays} {year}"
        spec = cron(text, **options)
        expression = read(text, **options)
        first = start if year == "*" else min(start, date(min(numbers(years, 1970, 2199)), 1, 1))
        span = [first + n * DAY for n in range(400)]
        wanted = [day for day in span if expression.on(day)]
        if spec is None:
            assert wanted == []
            continue
        low, high = (datetime.combine(edge, time(), UTC) for edge in (first, span[-1] + DAY))
        bound = spec.bind("UTC", created_at=CREATED)
        assert [at.date() for at in bound.between(low, high)] == wanted, spec
        assert bound.count(low, high) == len(wanted)
        last = bound.previous(high)
        assert wanted[-1:] == ([last.date()] if last and last >= low else [])


@pytest.mark.parametrize("name", ["America/New_York", "Australia/Lord_Howe", "America/St_Johns"])
def test_second_fields_match_the_oracle(name: str) -> None:
    for change in [at for at in changes(info(name)) if at.year == 2010]:
        start, end = change - 2 * HOUR, change + 3 * HOUR
        walk = Walk(name, start - 4 * HOUR, end + 4 * HOUR, SECOND)
        hours = "-".join(str(hour) for hour in sorted({(change.astimezone(info(name))).hour, 0}))
        for expression in (
            f"30 30 {hours} * * *",
            f"0-59/20 15,45 {hours} * * *",
            "*/7 * * * * *",
            "15 */10 * * * *",
            f"59 59 0-4,{hours} * * *",
        ):
            check(name, expression, walk, start, end)


def test_skipped_date_matches_the_oracle() -> None:
    start, end = datetime(2011, 12, 29, tzinfo=UTC), datetime(2012, 1, 2, tzinfo=UTC)
    walk = Walk("Pacific/Apia", start - 48 * HOUR, end + 48 * HOUR, MINUTE)
    for expression in ("0 9 * * *", "0 0 * * *", "*/30 * * * *", "0 9 30 12 *", "0 9 * * 5"):
        for gap in ("end", "shift", "skip"):
            check("Pacific/Apia", expression, walk, start, end, gap=gap)
