"""Descriptions of recurrences, notes on clock changes, and the JSON line interface."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from timebell.recurrence import Cron, Dates, Every, Spec
from timebell.recurrence.preview import answer_json_line, dst_notes, next_fires

CREATED = datetime(2027, 1, 1, tzinfo=UTC)
YEAR = datetime(2028, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("0 9 * * 1-5", "At 09:00 on Monday to Friday"),
        ("* * * * *", "Every minute"),
        ("*/5 * * * *", "Every 5 minutes"),
        ("*/10 * * * * *", "Every 10 seconds"),
        ("* * * * * *", "Every second"),
        ("@hourly", "Every hour"),
        ("5 * * * *", "At minute 5 past every hour"),
        ("0 9-17 * * 1-5", "Every hour from 09:00 to 17:00 on Monday to Friday"),
        ("*/15 9-17 * * *", "Every 15 minutes of hours 9 to 17"),
        ("0 */2 * * *", "At minute 0 of every 2nd hour"),
        ("30 2 1,15 * *", "At 02:30 on days 1 and 15"),
        ("0 0,12 * * 0,6", "At 00:00 and 12:00 on Saturday and Sunday"),
        ("0 0 13 * 5", "At 00:00 on day 13 or on Friday"),
        ("0 0 */100,1-7 * MON", "At 00:00 on days 1 to 7 that fall on Monday"),
        ("@yearly", "At 00:00 on day 1 in January"),
        ("15 30 9 * 3-5 *", "At 09:30:15 in March to May"),
        ("30 */5 9-17 * * *", "At second 30 of every 5th minute of hours 9 to 17"),
    ],
)
def test_cron_descriptions(expression: str, words: str) -> None:
    assert Cron(expression).describe() == words


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Cron("0 9 * * 1-5"), "At 09:00 on Monday to Friday, Asia/Seoul"),
        (Every("PT15M"), "Every 15 minutes from 2027-01-01 00:00 UTC, Asia/Seoul"),
        (Every("P1D", datetime(2027, 1, 1, 9)), "Every day from 2027-01-01 09:00, Asia/Seoul"),
        (Every("P3M", CREATED), "Every 3 months from 2027-01-01 00:00 UTC, Asia/Seoul"),
        (Every("PT1H30M", CREATED), "Every 1 hour and 30 minutes from 2027-01-01 00:00 UTC, Asia/Seoul"),
        (Every("PT1.5S", CREATED), "Every 1.5 seconds from 2027-01-01 00:00 UTC, Asia/Seoul"),
        (Every("P2W", CREATED), "Every 2 weeks from 2027-01-01 00:00 UTC, Asia/Seoul"),
        (Dates([CREATED]), "At 2027-01-01 00:00 UTC, Asia/Seoul"),
        (
            Dates([datetime(2027, 1, day) for day in (1, 2, 3, 4, 5)]),
            "At 2027-01-01 00:00, 2027-01-02 00:00, 2027-01-03 00:00 and 2 more, Asia/Seoul",
        ),
    ],
)
def test_spec_descriptions(spec: Spec, words: str) -> None:
    assert spec.bind("Asia/Seoul", created_at=CREATED).describe() == words


def test_bounds_are_described() -> None:
    bound = Cron("@daily").bind("Asia/Seoul", created_at=CREATED, start=CREATED, end=YEAR, max_runs=3)
    assert bound.describe() == (
        "At 00:00, Asia/Seoul, from 2027-01-01 09:00+09:00, until 2028-01-01 09:00+09:00, at most 3 times"
    )


def test_next_fires_have_instant_local_time_and_note() -> None:
    bound = Cron("30 2 * * *").bind("America/New_York", created_at=CREATED)
    assert next_fires(bound, datetime(2027, 3, 13, 7, 30, tzinfo=UTC), 2) == [
        {"utc": "2027-03-14T07:00:00Z", "local": "2027-03-14T03:00:00-04:00", "note": "gap"},
        {"utc": "2027-03-15T06:30:00Z", "local": "2027-03-15T02:30:00-04:00", "note": None},
    ]
    both = Cron("30 1 7 11 *", fold="both").bind("America/New_York", created_at=CREATED)
    assert [fire["note"] for fire in next_fires(both, CREATED, 3)] == ["fold", "fold", None]
    last = Dates([CREATED]).bind("UTC", created_at=CREATED)
    assert next_fires(last, CREATED, 5) == []


@pytest.mark.parametrize(
    ("spec", "zone", "notes"),
    [
        (
            Cron("30 2 * * *"),
            "America/New_York",
            ["02:30 does not exist on Sun 14 Mar 2027 in America/New_York: fires once at 03:00 EDT."],
        ),
        (
            Cron("0,30 2 * * *", gap="shift"),
            "America/New_York",
            ["02:00 and 02:30 do not exist on Sun 14 Mar 2027 in America/New_York: fires at 03:00 EDT and 03:30 EDT."],
        ),
        (
            Cron("30 2 * * *", gap="skip"),
            "America/New_York",
            ["02:30 does not exist on Sun 14 Mar 2027 in America/New_York: does not fire."],
        ),
        (
            Cron("30 1 * * *"),
            "America/New_York",
            ["01:30 happens twice on Sun 7 Nov 2027 in America/New_York: fires once, the first time (EDT)."],
        ),
        (
            Cron("30 1 * * *", fold="last"),
            "America/New_York",
            ["01:30 happens twice on Sun 7 Nov 2027 in America/New_York: fires once, the second time (EST)."],
        ),
        (
            Cron("0-40/10 1 * * *", fold="both"),
            "America/New_York",
            [
                "01:00, 01:10, 01:20, 01:30 and others happen twice on Sun 7 Nov 2027 in America/New_York: "
                "fires both times (EDT and EST)."
            ],
        ),
        (Cron("* * * * *"), "America/New_York", []),
        (Cron("0 9 * * *"), "America/New_York", []),
        (Every("PT1H"), "America/New_York", []),
        (
            Every("P1D", datetime(2027, 1, 1, 2, 30)),
            "America/New_York",
            ["02:30 does not exist on Sun 14 Mar 2027 in America/New_York: fires at 03:30 EDT."],
        ),
        (
            Dates([datetime(2027, 3, 14, 2, 30)]),
            "America/New_York",
            ["02:30 does not exist on Sun 14 Mar 2027 in America/New_York: fires at 03:30 EDT."],
        ),
        (Cron("30 2 * * *"), "Asia/Seoul", []),
    ],
)
def test_notes_on_clock_changes(spec: Spec, zone: str, notes: list[str]) -> None:
    assert dst_notes(spec.bind(zone, created_at=CREATED), CREATED, YEAR) == notes


def answer(**request: Any) -> Any:
    return json.loads(answer_json_line(json.dumps({"tz": "America/New_York", "count": 2, **request})))


def test_json_lines_are_answered() -> None:
    start = "2027-03-13T07:30:00Z"
    assert answer(kind="cron", spec="30 2 * * *", start=start) == [
        "2027-03-14T07:00:00Z",
        "2027-03-15T06:30:00Z",
    ]
    assert answer(kind="interval", spec="R/2027-03-13T02:30/P1D", start=start) == [
        "2027-03-14T07:30:00Z",
        "2027-03-15T06:30:00Z",
    ]
    assert answer(kind="interval", spec="R/2027-03-13T07:30:00.5Z/PT1.25S", start=start) == [
        "2027-03-13T07:30:00.500000Z",
        "2027-03-13T07:30:01.750000Z",
    ]
    assert answer(kind="cron", spec="@every 90s", start=start)[0] == "2027-03-13T07:31:30Z"
    assert answer(kind="cron", spec="30 2 * * *", start="2027-03-14T02:15:00") == [
        "2027-03-15T06:30:00Z",
        "2027-03-16T06:30:00Z",
    ]
    assert answer(kind="cron", spec="30 2 * * *", start="2199-12-31T00:00:00Z", count=9) == ["2199-12-31T07:30:00Z"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no",
        "[]",
        "null",
        "5",
        '"cron"',
        "{}",
        "[" * 100_000,
        '{"kind": "cron"',
        '{"count": ' + "9" * 5000 + "}",
        "\ud800",
        '{"kind": "rrule", "spec": "RRULE:FREQ=FORTNIGHTLY", "start": "2027-01-01T00:00:00Z"}',
        '{"kind": ["cron"], "spec": "@daily", "start": "2027-01-01T00:00:00Z"}',
        '{"kind": "cron", "spec": "@daily"}',
        '{"kind": "cron", "start": "2027-01-01T00:00:00Z"}',
        '{"kind": "cron", "spec": ["@daily"], "start": "2027-01-01T00:00:00Z"}',
        '{"kind": "cron", "spec": "@daily", "start": 5}',
        '{"kind": "cron", "spec": "@daily", "start": "9999-12-31T23:59:59-01:00"}',
        '{"kind": "cron", "spec": "@daily", "start": "2027-01-01T00:00:00Z", "count": -1}',
        '{"kind": "cron", "spec": "@daily", "start": "2027-01-01T00:00:00Z", "count": 1e3}',
        '{"kind": "cron", "spec": "@daily", "start": "2027-01-01T00:00:00Z", "count": true}',
        '{"kind": "cron", "spec": "@daily", "start": "2027-01-01T00:00:00Z", "tz": "CST"}',
        '{"kind": "cron", "spec": "@daily", "start": "2027-01-01T00:00:00Z", "tz": null}',
        '{"kind": "cron", "spec": "@daily", "start": "2027-01-01T00:00:00Z", "tz": ["UTC"]}',
        '{"kind": "interval", "spec": "R/2027-01-01/P", "start": "2027-01-01T00:00:00Z"}',
        '{"kind": "interval", "spec": {}, "start": "2027-01-01T00:00:00Z"}',
        '{"kind": "cron", "spec": "0 0 30 2 *", "start": "2027-01-01T00:00:00Z"}',
    ],
)
def test_invalid_json_lines_are_answered_with_an_error(line: str) -> None:
    answer = json.loads(answer_json_line(line))
    assert isinstance(answer, dict)
    assert list(answer) == ["error"]
    assert answer["error"]


def test_notes_of_a_frequent_expression_are_limited() -> None:
    every = Cron("0-59 0-59 0-23 * * *").bind("America/New_York", created_at=CREATED)
    assert len(dst_notes(every, CREATED, CREATED + timedelta(days=3650))) == 20
