"""Properties of every recurrence, and parsing of arbitrary text and JSON."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu import within
from tests.unit.recurrence.cron_texts import crons, dst
from timebell.errors import InvalidRecurrence, InvalidTimezone
from timebell.recurrence import (
    Dates,
    Every,
    Recurrence,
    RRule,
    Spec,
    parse_cron,
    parse_interval,
    recurrence_from_json,
    zone,
)
from timebell.recurrence.preview import answer_json_line, dst_notes

ZONES = [
    "UTC",
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Asuncion",
    "America/New_York",
    "America/Sao_Paulo",
    "America/St_Johns",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",
    "Europe/Dublin",
    "Pacific/Apia",
    "Pacific/Kwajalein",
]
JUMPS = {name: [jump.start for jump in zone(name).jumps(0, 2_500_000_000)] for name in ZONES if name != "UTC"}


instants = st.datetimes(datetime(1971, 1, 1), datetime(2150, 1, 1), timezones=st.just(UTC))
local_times = st.datetimes(datetime(1971, 1, 1), datetime(2150, 1, 1))
near = st.one_of(
    instants,
    st.builds(
        lambda name, n, offset: (
            datetime.fromtimestamp(JUMPS[name][n % len(JUMPS[name])], UTC) + timedelta(minutes=offset)
        ),
        st.sampled_from(sorted(JUMPS)),
        st.integers(0, 99),
        st.integers(-200, 200),
    ),
)


durations = st.one_of(
    st.builds("PT{}S".format, st.integers(1, 100_000)),
    st.builds("PT{}.{:06}S".format, st.integers(1, 1000), st.integers(0, 999_999)),
    st.builds("P{}M".format, st.integers(1, 40)),
    st.builds("P{}D".format, st.integers(1, 500)),
    st.builds("P{}Y{}M{}W{}D".format, *(st.integers(0, 5),) * 3, st.integers(1, 40)),
)
anchors = st.one_of(instants, local_times, near)
by_month = st.builds(
    lambda months, anchor, end, jumps: Every(f"P{months}M", anchor, month_end=end, **jumps),
    st.integers(1, 40), anchors, st.sampled_from(["back", "skip", "next"]), dst,
)  # fmt: skip
intervals = st.one_of(st.builds(Every, durations, anchors), by_month)
dates = st.builds(Dates, st.lists(st.one_of(instants, local_times), min_size=1, max_size=9))
specs = st.one_of(crons(), intervals, dates)


@st.composite
def recurrences(draw: st.DrawFn) -> Recurrence:
    bounds: dict[str, object] = {}
    if draw(st.booleans()):
        bounds["start"] = draw(near)
    if draw(st.booleans()):
        bounds["end"] = draw(near)
        if "start" in bounds and bounds["end"] <= bounds["start"]:  # type: ignore[operator]
            del bounds["end"]
    if draw(st.booleans()) and "end" not in bounds:
        bounds["max_runs"] = draw(st.integers(1, 300))
    spec, name = draw(specs), draw(st.sampled_from(ZONES))
    return spec.bind(name, created_at=draw(near), **bounds)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(recurrences(), near)
def test_next_and_previous_are_inverse(recurrence: Recurrence, start: datetime) -> None:
    found = [start]
    with within(1.0):
        while len(found) < 12 and (at := recurrence.next(found[-1])) is not None:
            found.append(at)
        first = recurrence.previous(start)
    assert all(one < other for one, other in pairwise(found))
    assert first is None or first < start
    for one, other in pairwise(found[1:]):
        assert recurrence.previous(other) == one
        assert recurrence.next(other - timedelta(microseconds=1)) == other
    if first is not None and len(found) > 1:
        assert recurrence.next(first) in (start, found[1])
    for at in found[1:]:
        assert at.tzinfo is UTC
        assert recurrence.local(at).astimezone(UTC) == at
        assert recurrence.note(at) in (None, "gap", "fold")


@settings(max_examples=200, deadline=None)
@given(recurrences(), st.lists(near, max_size=12))
def test_earlier_queries_do_not_change_results(recurrence: Recurrence, earlier_queries: list[datetime]) -> None:
    fresh = recurrence_from_json(recurrence.to_json())
    for at in [
        one for start in earlier_queries for one in (start, start + timedelta(seconds=1), start - timedelta(hours=1))
    ]:
        assert recurrence.next(at) == replace(fresh).next(at)
        following = recurrence.next(at)
        assert following is None or recurrence.next(following - timedelta(microseconds=1)) == following
        assert following is None or recurrence.next(following) == replace(fresh).next(following)


@given(recurrences(), near, st.timedeltas(timedelta(0), timedelta(days=40)))
def test_between_and_count_agree(recurrence: Recurrence, start: datetime, length: timedelta) -> None:
    end = start + length
    found = list(islice(recurrence.between(start, end), 3000))
    if len(found) == 3000:
        end = found.pop()
    assert recurrence.count(start, end) == len(found)
    at, walked = recurrence.next(start - timedelta(microseconds=1)), []
    while at is not None and at < end:
        walked.append(at)
        at = recurrence.next(at)
    assert walked == found
    middle = start + (end - start) / 2
    assert recurrence.count(start, middle) + recurrence.count(middle, end) == len(found)
    if found:
        early = found[0] - timedelta(days=3)
        assert [one for one in islice(recurrence.between(early, end), 20_000) if one >= start][:50] == found[:50] or (
            recurrence.count(early, start) > 15_000
        )


@settings(max_examples=200, deadline=None)
@given(recurrences())
def test_json_round_trips_and_descriptions_exist(recurrence: Recurrence) -> None:
    again = recurrence_from_json(json.loads(json.dumps(recurrence.to_json())))
    assert again == recurrence
    assert hash(again) == hash(recurrence)
    assert recurrence.timezone in recurrence.describe()
    assert isinstance(recurrence.spec.warnings(), list)
    dst_notes(recurrence, datetime(2010, 1, 1, tzinfo=UTC), datetime(2013, 1, 1, tzinfo=UTC))


@settings(max_examples=100, deadline=None)
@given(crons(), st.sampled_from(ZONES), near, st.integers(1, 400))
def test_bounds_only_limit_the_instants(spec: Spec, name: str, start: datetime, runs: int) -> None:
    free = spec.bind(name, created_at=start)
    bounded = spec.bind(name, created_at=start, start=start, max_runs=runs)
    end = datetime(2199, 1, 1, tzinfo=UTC)
    assert list(bounded.between(start, end)) == list(islice(free.between(start, end), runs))


pieces = st.lists(
    st.sampled_from(
        [
            *"0123456789*/,-?+LWH#@ ",
            "H(1-",
            "FRIL",
            "#5",
            "2027",
            "SUN",
            "jan",
            "MON-",
            "@every ",
            "CRON_TZ=",
            "PT",
            "P1",
            "R/",
            "٣",
            "\0",
        ]
    ),
    max_size=20,
).map("".join)
anything = st.one_of(st.text(max_size=40), pieces, st.lists(pieces, min_size=5, max_size=7).map(" ".join))


@settings(max_examples=1000, deadline=None)
@given(anything)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_cron, parse_interval, Every, RRule, zone):
        with suppress(InvalidRecurrence, InvalidTimezone):
            parse(text)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), anything),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.one_of(st.sampled_from(["cron", "interval", "rrule", "dates"]), json_values),
        "spec": st.one_of(st.sampled_from(["@daily", "P1D", "R/2027-01-01/P1D", "FREQ=HOURLY;BYDAY=MO"]), json_values),
        "tz": st.one_of(st.sampled_from(["UTC", "Asia/Seoul"]), json_values),
        "timezone": st.one_of(st.just("UTC"), json_values),
        "start": st.one_of(st.just("2027-01-01T00:00:00Z"), json_values),
        "end": json_values,
        "dst": json_values,
        "anchor": json_values,
        "maxRuns": json_values,
        "count": st.one_of(st.integers(0, 5), json_values),
    },
)


@settings(max_examples=500, deadline=None)
@given(requests)
def test_any_json_is_answered_or_refused(request: dict[str, object]) -> None:
    assert json.loads(answer_json_line(json.dumps(request))) is not None
    with suppress(InvalidRecurrence, InvalidTimezone):
        recurrence_from_json(request)
