"""Thousands of mutated texts for each parser: each is parsed or refused clearly and quickly."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.cpu import within
from timebell.errors import InvalidInput
from timebell.recurrence import RRule, parse_cron, parse_interval, spec_from_json
from timebell.recurrence.preview import answer_json_line

CREATED = datetime(2027, 1, 1, tzinfo=UTC)
MAX_SECONDS = 0.25  # CPU seconds, generous for a busy machine
CRONS = [
    "0 9 * * 1-5", "*/15 * * * *", "30 2 L * *", "0 0 15W * ?", "0 0 * * MON#2,FRIL", "H/15 H(0-7) * * *",
    "0 0 9 1 1 ? 2027", "@daily", "@every 90s", "0 0 29 2 *", "5,10-50/7 0 */2 JAN-MAR +SUN", "0 0 LW,L-3 * *",
]  # fmt: skip
INTERVALS = [
    "PT15M",
    "P1D",
    "P3M",
    "R/2027-03-14T09:00:00/P1D",
    "R/2027-03-14T09:00:00Z/PT1H30M",
    "P1Y2M",
    "PT0.5S",
    "P2W",
]
RULES = [
    "FREQ=DAILY;COUNT=3", "FREQ=MONTHLY;BYDAY=-1FR", "FREQ=YEARLY;BYWEEKNO=20,-1;BYDAY=MO;WKST=SU",
    "FREQ=HOURLY;INTERVAL=3;BYHOUR=9,12;BYMINUTE=0,30;BYSETPOS=1", "FREQ=WEEKLY;UNTIL=20271231T000000Z;BYDAY=MO,WE",
    "DTSTART:20270101T090000\nRRULE:FREQ=DAILY\nEXDATE:20270102T090000\nRDATE:20270401T120000Z",
    "FREQ=SECONDLY;INTERVAL=7",
    "DTSTART;TZID=UTC:20270101T090000\nRRULE:FREQ=MONTHLY;BYMONTHDAY=31;RSCALE=GREGORIAN;SKIP=BACKWARD",
]  # fmt: skip
LINES = [
    '{"kind": "cron", "spec": "0 9 * * *", "tz": "Asia/Seoul", "start": "2027-01-01T00:00:00Z", "count": 2}',
    '{"kind": "rrule", "spec": "RRULE:FREQ=DAILY", "tz": "UTC", "start": "2027-01-01T00:00:00", "count": 1}',
    '{"kind": "interval", "spec": "R/2027-01-01T00:00:00Z/PT1H", "tz": "UTC", "start": "2027-01-01", "count": 3}',
]
SPECS = [
    '{"kind": "cron", "spec": "0 9 * * *", "dst": {"gap": "end", "fold": "first"}}',
    '{"kind": "interval", "spec": "P1M", "anchor": "2027-01-31T09:00:00", "monthEnd": "back"}',
    '{"kind": "rrule", "spec": "FREQ=DAILY", "dtstart": "2027-01-01T09:00:00", "exdates": [], "rdates": []}',
    '{"kind": "dates", "spec": ["2027-01-01T09:00:00", "2027-01-02T09:00:00Z"]}',
]
ODD = ["\x00", "٣", "é", "\n", "\t", " ", ",", "-", "/", "*", "?", "#", "L", "W", "H", ";", "=", ":", "99999999999",
       "-1", "0", "null", "[", "{", '"', "P", "T", "Z", "e9", "FREQ=", "BYDAY=", "  ", "🕰"]  # fmt: skip


def mutated(rnd: random.Random, seeds: list[str]) -> str:
    text = rnd.choice(seeds)
    for _ in range(rnd.choice([0, 1, 1, 2, 3, 8])):
        at, to = sorted((rnd.randint(0, len(text)), rnd.randint(0, len(text))))
        change = rnd.randrange(6)
        if change == 0:
            text = text[:at] + text[min(at + rnd.randint(1, 4), len(text)) :]
        elif change == 1:
            text = text[:at] + rnd.choice(ODD) + text[at:]
        elif change == 2:
            text = text[:at] + str(rnd.randint(0, 400)) + text[to:]
        elif change == 3:
            other = rnd.choice(seeds)
            text = text[:at] + other[rnd.randint(0, len(other)) :]
        elif change == 4:
            text = text[:to] + text[at:to] * rnd.choice([1, 2, 200]) + text[to:]
        else:
            text = "".join(rnd.sample(text, len(text))) if len(text) < 40 else text[::-1]
    return text[:12_000]


def bind(make: Callable[[str], Any]) -> Callable[[str], None]:
    """Return a function that parses a text and finds its next two instants."""

    def call(text: str) -> None:
        bound = make(text).bind("America/New_York", created_at=CREATED)
        found = bound.next(CREATED)
        assert found is None or found > CREATED
        assert found is None or (bound.next(found) or datetime.max.replace(tzinfo=UTC)) > found

    return call


def from_json(text: str) -> Any:
    return spec_from_json(json.loads(text))


PARSERS = [
    ("cron", bind(parse_cron), CRONS),
    ("interval", bind(parse_interval), INTERVALS),
    ("rrule", bind(RRule), RULES),
    ("json", bind(from_json), SPECS),
    ("line", lambda text: json.loads(answer_json_line(text)), LINES),
]


@pytest.mark.parametrize("inputs", [10_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "call", "seeds"), PARSERS, ids=[parser[0] for parser in PARSERS])
def test_mutated_texts_are_parsed_or_refused_quickly(
    name: str, call: Callable[[str], None], seeds: list[str], inputs: int
) -> None:
    rnd = random.Random(name)
    seen_texts: set[str] = set()
    for _ in range(inputs if name != "line" else inputs // 5):  # the answers of this parser are long
        text = mutated(rnd, seeds)
        if text in seen_texts:
            continue
        seen_texts.add(text)
        refused = None
        with within(MAX_SECONDS, text[:200]):
            try:
                call(text)
            except InvalidInput as clear:
                refused = clear
            except (json.JSONDecodeError, RecursionError):
                assert name == "json"
        assert refused is None or (refused.code and len(str(refused)) < 1000)
