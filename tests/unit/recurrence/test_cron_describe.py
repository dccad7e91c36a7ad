"""Descriptions of cron expressions: expected wording, and agreement with the expression."""

from __future__ import annotations

from datetime import date, timedelta
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.unit.recurrence import cron_reader, oracle
from tests.unit.recurrence.cron_texts import cron, day_options, texts
from timebell.recurrence import Cron

DAY = timedelta(days=1)
DESCRIPTIONS = [
    ("0 9 * * 1-5", "At 09:00 on Monday to Friday"),
    ("* * * * *", "Every minute"),
    ("*/5 * * * *", "Every 5 minutes"),
    ("*/10 * * * * *", "Every 10 seconds"),
    ("* * * * * *", "Every second"),
    ("@hourly", "Every hour"),
    ("0 */1 * * *", "Every hour"),
    ("5 * * * *", "At minute 5 past every hour"),
    ("*/45 * * * *", "At minutes 0 and 45 past every hour"),
    ("*/7 * * * *", "At every 7th minute from 0 to 56 past every hour"),
    ("0 */5 * * *", "At minute 0 of every 5th hour from 0 to 20"),
    ("0 9-17 * * 1-5", "Every hour from 09:00 to 17:00 on Monday to Friday"),
    ("*/15 9-17 * * *", "Every 15 minutes of hours 9 to 17"),
    ("0 */2 * * *", "At minute 0 of every 2nd hour"),
    ("0,10,20 9,10,11 * * *", "At minutes 0, 10 and 20 of hours 9 to 11"),
    ("30 * * * * *", "At second 30 of every minute"),
    ("30 * 9 * * *", "At second 30 of every minute of hour 9"),
    ("*/10 * 9 * * *", "Every 10 seconds of hour 9"),
    ("* 5 * * * *", "Every second of minute 5 past every hour"),
    ("30 */5 9-17 * * *", "At second 30 of every 5th minute of hours 9 to 17"),
    ("15 30 9 * 3-5 *", "At 09:30:15 in March to May"),
    ("30 2 1,15 * *", "At 02:30 on days 1 and 15"),
    ("0 0,12 * * 0,6", "At 00:00 and 12:00 on Saturday and Sunday"),
    ("0 0 13 * 5", "At 00:00 on day 13 or on Friday"),
    ("0 0 */2 * *", "At 00:00 on every 2nd day from 1 to 31"),
    ("0 0 */2 * MON", "At 00:00 on every 2nd day from 1 to 31 that falls on Monday"),
    ("0 0 */100,1-7 * MON", "At 00:00 on days 1 to 7 that fall on Monday"),
    ("@yearly", "At 00:00 on day 1 in January"),
    ("0 0 1,15 JAN-MAR,DEC 1-5", "At 00:00 on days 1 and 15 or on Monday to Friday in January to March and December"),
    ("0 9 L * *", "At 09:00 on the last day of the month"),
    ("0 9 L-3 * *", "At 09:00 on the 3rd day before the last day of the month"),
    ("0 9 L-1,L-3 * *", "At 09:00 on the 1st and 3rd days before the last day of the month"),
    ("0 9 1,15,L * *", "At 09:00 on days 1 and 15 and the last day of the month"),
    ("0 9 15W * *", "At 09:00 on the weekday nearest the 15th"),
    ("0 9 1W,15W * *", "At 09:00 on the weekdays nearest the 1st and the 15th"),
    ("0 9 LW * ?", "At 09:00 on the last weekday of the month"),
    ("0 9 * * 5L", "At 09:00 on the last Friday of the month"),
    ("0 9 ? * MON#2", "At 09:00 on the second Monday of the month"),
    ("0 9 * * MON#1,MON#3", "At 09:00 on the first and third Monday of the month"),
    ("0 9 * * 5#1,5L", "At 09:00 on the first and last Friday of the month"),
    ("0 9 * * TUE#2,MON#1", "At 09:00 on the first Monday of the month and the second Tuesday of the month"),
    ("0 9 L * +FRI", "At 09:00 on the last day of the month when it falls on Friday"),
    ("0 9 1-7 * +MON,TUE", "At 09:00 on days 1 to 7 that fall on Monday or Tuesday"),
    ("0 9 15W * +MON#3", "At 09:00 on the weekday nearest the 15th when it falls on the third Monday of the month"),
    ("0 9 1,L * FRIL", "At 09:00 on day 1 and the last day of the month or on the last Friday of the month"),
    ("0 0 9 * * * 2027,2028", "At 09:00 in 2027 and 2028"),
    ("0 0 9 L 2 ? 2027-2030", "At 09:00 on the last day of the month in February of 2027 to 2030"),
    ("0 0 9 1 1 ? 2027/2", "At 09:00 on day 1 in January of every 2nd year from 2027"),
    ("0 0 9 1 1 ? 2027-2035/2", "At 09:00 on day 1 in January of every 2nd year from 2027 to 2035"),
    ("0 0 9 ? * MON 2027-2199", "At 09:00 on Monday in 2027 and later"),
]
HASHED_DESCRIPTIONS = [
    ("H 2 * * *", "At a fixed minute between 0 and 59 (chosen by name) of hour 2"),
    ("H(0-29) 9 * * *", "At a fixed minute between 0 and 29 (chosen by name) of hour 9"),
    ("H H * * 1-5", "At a fixed minute between 0 and 59 of a fixed hour between 0 and 23 (chosen by name) on Monday to "
     "Friday"),
    ("H/15 * * * *", "At every 15th minute from a fixed one between 0 and 14 (chosen by name) past every hour"),
    ("H(0-29)/10 9 * * *", "At every 10th minute from a fixed one between 0 and 9 to 29 (chosen by name) of hour 9"),
    ("H,30 9 * * *", "At minute 30 and a fixed minute between 0 and 59 (chosen by name) of hour 9"),
    ("0 9 H * *", "At 09:00 on a fixed day between 1 and 28 (chosen by name)"),
    ("0 9 * * H", "At 09:00 on a fixed day of the week (chosen by name)"),
    ("0 9 * * H(1-5)", "At 09:00 on a fixed day between Monday and Friday (chosen by name)"),
    ("0 9 1 H *", "At 09:00 on day 1 in a fixed month (chosen by name)"),
    ("0 0 9 H H ? 2030", "At 09:00 on a fixed day between 1 and 28 in a fixed month (chosen by name) of 2030"),
]  # fmt: skip
MONTH_END_BACK = [
    ("0 9 31 * *", "At 09:00 on day 31 (or the last day of a shorter month)"),
    ("0 9 31 1,3 *", "At 09:00 on day 31 in January and March"),
    ("0 9 15,29-31 * *", "At 09:00 on days 15 and 29 to 31 (or the last day of a shorter month)"),
    ("0 9 30W * *", "At 09:00 on the weekday nearest the 30th (or the last day of a shorter month)"),
]


@pytest.mark.parametrize(("expression", "words"), [*DESCRIPTIONS, *HASHED_DESCRIPTIONS])
def test_descriptions(expression: str, words: str) -> None:
    assert Cron(expression).describe() == words


@pytest.mark.parametrize(("expression", "words"), MONTH_END_BACK)
def test_descriptions_with_month_end_back(expression: str, words: str) -> None:
    assert Cron(expression, month_end="back").describe() == words
    assert_description_matches(expression, words, month_end="back")


@pytest.mark.parametrize(("expression", "words"), DESCRIPTIONS)
def test_descriptions_match_the_expression(expression: str, words: str) -> None:
    macros = {"@hourly": "0 * * * *", "@yearly": "0 0 1 1 *"}
    assert_description_matches(macros.get(expression, expression), words)


@settings(max_examples=400, deadline=None)
@given(texts(), day_options, st.dates(date(1970, 1, 1), date(2190, 1, 1)))
def test_descriptions_of_random_expressions_match(text: str, options: dict[str, Any], start: date) -> None:
    assume("+" not in text or options.get("days") != "or")
    options = {"hash_key": "", **options}
    spec = cron(text, **options)
    assume(spec is not None)
    assert spec is not None
    assert_description_matches(text, spec.describe(), start, **options)


def assert_description_matches(text: str, words: str, start: date = date(2027, 1, 1), **options: Any) -> None:
    expression = oracle.read(text, **options)
    time, on = cron_reader.split_description(words)
    for n in range(500):
        day = start + n * DAY
        assert on(day) == expression.on(day), (words, day)
    second, minute, hour = (
        oracle.numbers(field, 0, most) for field, most in zip(expression.texts, (59, 59, 23), strict=False)
    )
    parsed = cron_reader.times(time)
    assert (
        parsed == (hour, minute, second) if isinstance(parsed, tuple) else parsed == set(product(hour, minute, second))
    )


@pytest.mark.parametrize(
    ("expression", "remarks"),
    [
        (
            "H 2 * * *",
            ["The minute depends on the schedule's name (H): the times shown without a name are an example."],
        ),
        (
            "H H * * *",
            ["The minute and hour depend on the schedule's name (H): the times shown without a name are an example."],
        ),
        ("0 9 31W * *", ["31W does not occur in months without day 31; LW is the last weekday of every month."]),
        ("0 9 29W 3 *", []),
        ("0 9 29 2 *", ['29 February comes in leap years only; month_end="back" uses 28 February in the others.']),
        (
            "0 9 15,31 * *",
            [
                "Day 31 is skipped in months without it; L is the last day of every month, and so is day 31 with "
                'month_end="back".'
            ],
        ),
        ("0 9 31 1,3 *", []),
        ("0 9 25-31 * *", []),
        ("0 9 L * *", []),
        ("0 * * * *", ['Many schedules fire at this minute; "H * * * *" spreads them by their names.']),
        ("@daily", ['Many schedules fire at this minute; "H 0 * * *" spreads them by their names.']),
        ("0 0 * * 1-5", []),
        ("0 9 * * *", []),
        (
            "0 0 9 ? * 2",
            ["? comes from Quartz, where 1 is Sunday; here 1 is Monday. Names such as MON are unambiguous."],
        ),
        ("0 0 9 ? * MON#1", []),
        ("0 0 9 1 * ?", []),
        ("0 0 9 1 1 ? */4", []),
    ],
)
def test_warnings(expression: str, remarks: list[str]) -> None:
    assert Cron(expression).warnings() == remarks


def test_options_remove_warnings() -> None:
    assert Cron("0 9 31 * *", month_end="back").warnings() == []
    assert Cron("0 9 29 2 *", month_end="back").warnings() == []
    assert Cron("0 9 13 * FRI", days="or").warnings() == []
    assert len(Cron("0 9 13 * FRI").warnings()) == 1
