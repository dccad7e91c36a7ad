"""Unions, differences, hours and overrides, compared with plain sets of instants."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu import within
from tests.rotation import rotated
from timebell import Calendar, Cron, Dates, Every, Hours
from timebell.errors import InvalidRecurrence
from timebell.recurrence import Override, Recurrence, Spec, Union, recurrence_from_json, spec_from_json
from timebell.recurrence.overrides import partition_overrides
from timebell.recurrence.preview import dst_notes, next_fires

ZONES = ["UTC", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "Pacific/Apia"]
START, END = datetime(2027, 2, 20, tzinfo=UTC), datetime(2027, 4, 10, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
PARTS: list[Spec] = [
    Cron("0 9 * * *"),
    Cron("30 2 * * *"),
    Cron("30 2 * * *", gap="shift"),
    Cron("*/20 * * * *"),
    Cron("0 */6 * * 1-5"),
    Every("PT45M", datetime(2027, 3, 1, tzinfo=UTC)),
    Every("P1D", datetime(2027, 3, 1, 9, 0)),
    Dates([datetime(2027, 3, 14, 2, 30), datetime(2027, 3, 15, 9, tzinfo=UTC), datetime(2027, 11, 7, 1, 30)]),
]
HOURS = [Hours("09:00", "17:30", "MON-FRI"), Hours("22:00", "02:30", "SAT-SUN"), Hours("00:00", "24:00", "FRI-MON"),
         Hours("03:00", "03:00:01"), Hours("09:00", "08:59:59")]  # fmt: skip


def instants(spec: Spec, zone: str) -> list[datetime]:
    return list(spec.bind(zone, created_at=START).between(START - timedelta(days=2), END + timedelta(days=2)))


def assert_instants(spec: Spec, zone: str, expected: set[datetime]) -> None:
    """`between`, `next`, `previous` and `count` have exactly these instants."""
    bound = spec.bind(zone, created_at=START)
    listed = sorted(at for at in expected if START <= at < END)
    assert list(bound.between(START, END)) == listed
    assert bound.count(START, END) == len(listed)
    middle = START + timedelta(days=22, hours=7, minutes=13)
    assert bound.count(START, middle) + bound.count(middle, END) == len(listed)
    for one, other in list(pairwise(listed))[:: max(1, len(listed) // 50)]:
        assert bound.next(one) == other
        assert bound.previous(other) == one
    assert recurrence_from_json(json.loads(json.dumps(bound.to_json()))) == bound


@pytest.mark.parametrize("zone", rotated(ZONES, ["America/New_York", "Australia/Lord_Howe"]))
@pytest.mark.parametrize("one", PARTS)
def test_union_and_difference(one: Spec, zone: str) -> None:
    mine = set(instants(one, zone))
    for other in PARTS:
        theirs = set(instants(other, zone))
        assert_instants(one | other, zone, mine | theirs)
        if mine - theirs:
            assert_instants(one - other, zone, mine - theirs)
    assert_instants(
        one | PARTS[0] | PARTS[5], zone, mine | set(instants(PARTS[0], zone)) | set(instants(PARTS[5], zone))
    )


def is_within(local: datetime, hours: Hours) -> bool:
    """Return whether a local time lies in the hours, computed from its text."""
    days = {"MON-FRI": range(5), "SAT-SUN": (5, 6), "FRI-MON": (4, 5, 6, 0), "*": range(7)}[hours.days]
    at, low, high = local.strftime("%H:%M:%S"), hours.start, hours.end
    today, yesterday = local.weekday() in days, (local.weekday() - 1) % 7 in days
    if low < high:
        return today and low <= at < high
    return (today and at >= low) or (yesterday and at < high)


@pytest.mark.parametrize("zone", rotated(ZONES, ["America/New_York", "Australia/Lord_Howe"]))
@pytest.mark.parametrize("hours", HOURS)
def test_within_hours(hours: Hours, zone: str) -> None:
    for part in [*PARTS, Cron("*/10 0-5 * * *"), PARTS[0] | PARTS[5], PARTS[3] - PARTS[4]]:
        bound = part.bind(zone, created_at=START)
        expected = {at for at in instants(part, zone) if is_within(bound.local(at).replace(tzinfo=None), hours)}
        assert_instants(part & hours, zone, expected)


def test_repeated_local_times_are_within_hours_twice() -> None:
    night = (Every("PT10M", START) & Hours("01:00", "01:30")).bind("America/New_York", created_at=START)
    day = datetime(2027, 11, 7, tzinfo=UTC)
    assert [f"{night.local(at):%H:%M %Z}" for at in night.between(day, day + timedelta(days=1))] == [
        *("01:00 EDT", "01:10 EDT", "01:20 EDT"), *("01:00 EST", "01:10 EST", "01:20 EST"),
    ]  # fmt: skip
    assert night.count(day, day + timedelta(days=1)) == 6
    last = night.previous(day + timedelta(days=1))
    assert last is not None and night.previous(last - timedelta(minutes=20)) == last - timedelta(minutes=60)


def test_descriptions() -> None:
    weekdays = Hours("09:00", "17:30", "MON-FRI")
    assert (Every("PT15M") & weekdays).describe() == "Every 15 minutes, between 09:00 and 17:30 on Monday to Friday"
    assert (Cron("0 9 * * *") | Cron("0 12 * * SAT")).describe() == "At 09:00; and at 12:00 on Saturday"
    assert (Cron("0 9 * * *") - Cron("0 9 1 * *")).describe() == "At 09:00, except at 09:00 on day 1"
    assert ((Cron("0 9 * * *") | Every("PT1H")) & Hours("08:00", "10:00")).describe() == (
        "(At 09:00; and every hour), between 08:00 and 10:00"
    )


def test_notes_cover_only_the_affected_parts() -> None:
    year = datetime(2027, 1, 1, tzinfo=UTC), datetime(2028, 1, 1, tzinfo=UTC)

    def notes(spec: Spec) -> list[str]:
        return dst_notes(spec.bind("America/New_York", created_at=START), *year)

    half_past = "02:30 does not exist on Sun 14 Mar 2027 in America/New_York: fires once at 03:00 EDT."
    assert notes(Cron("30 2 * * *") | Cron("0 9 * * *")) == [half_past]
    assert notes(Cron("30 2 * * *") | Cron("30 2 * * SUN")) == [half_past]
    assert notes((Cron("30 2 * * *") | Every("PT1H")) & Hours("00:00", "04:00")) == [half_past]
    assert notes(Cron("30 2 * * *") & Hours("04:00", "12:00")) == []
    assert notes(Cron("30 2 * * *") - Cron("0 3 * * *")) == []
    assert notes(Cron("30 2 * * *").on(Calendar(holidays=[date(2027, 3, 15)]))) == []
    assert notes(Cron("30 2 * * *").on(Calendar(workdays=[date(2027, 3, 14)]))) == [half_past]
    both = (Cron("30 2 * * *") | Cron("0 9 * * *")).bind("America/New_York", created_at=START)
    assert both.note(datetime(2027, 3, 14, 7, tzinfo=UTC)) == "gap"
    assert both.note(datetime(2027, 3, 14, 13, tzinfo=UTC)) is None


@pytest.mark.parametrize("spec", [
    Cron("* * * * *") - Cron("* * * * *"), Every("PT1S", datetime(1971, 1, 1)) - Cron("* * * * * *"),
    Cron("0 20 * * *") & Hours("09:00", "17:00"), Every("PT24H", datetime(1971, 1, 1, 20)) & Hours("09:00", "17:00"),
    Every("PT1M", datetime(1971, 1, 1)) & Hours("09:00", "10:00", "SAT") & Hours("09:00", "10:00", "SUN"),
    Cron("0 9 * * SAT").on(Calendar()), Cron("*/5 * * * SUN").on(Calendar()),
    Every("PT168H", datetime(1971, 1, 2)).on(Calendar()),
    (Cron("0 9 * * *") - Cron("0 9 * * *")) | (Cron("0 9 * * SAT").on(Calendar())),
    # Nested searches, each of which excludes many instants before it finds one for the next.
    Every("PT1M", datetime(1971, 1, 1)) - Cron("1-59 * * * *") - Cron("0 1-23 * * *") & Hours("09:00", "17:00"),
    (Every("PT1M", datetime(1971, 1, 1)) - Cron("0-58 * * * *")).on(Calendar(("SAT",))) & Hours("09:00", "09:30"),
])  # fmt: skip
def test_search_of_a_spec_that_never_fires_ends_quickly(spec: Spec) -> None:
    bound = spec.bind("UTC", created_at=START)
    for search in (bound.next, bound.previous):
        with within(0.5), pytest.raises(InvalidRecurrence, match="It never fires") as refused:
            search(datetime(2030, 1, 1, tzinfo=UTC))
        assert refused.value.code == "NEVER_FIRES"
    assert bound.count(START, START + timedelta(hours=3)) == 0
    assert list(bound.between(START, START + timedelta(hours=3))) == []
    both = (spec | Cron("*/15 * * * *")).bind("UTC", created_at=START)  # the other part still fires
    assert both.next(START) == START + timedelta(minutes=15)
    assert both.previous(START) == START - timedelta(minutes=15)
    with pytest.raises(InvalidRecurrence):
        spec.bind("UTC", created_at=START, max_runs=5).next(START)


def test_a_combination_fires_although_one_of_its_parts_never_does() -> None:
    never = Cron("* * * * *") - Cron("* * * * *")
    mondays = ((never | Cron("0 9 * * *")) & Hours("00:00", "24:00", "MON")).bind("UTC", created_at=START)
    assert mondays.next(START) == datetime(2027, 2, 22, 9, tzinfo=UTC)
    assert mondays.previous(START) == datetime(2027, 2, 15, 9, tzinfo=UTC)


def test_nesting_and_size_are_limited() -> None:
    deep: Spec = Cron("0 9 * * *")
    for _ in range(7):
        deep = deep & Hours("00:00", "24:00")
    for make in (lambda: deep & Hours("00:00", "24:00"), lambda: deep - Cron("0 9 * * *")):
        with pytest.raises(InvalidRecurrence) as refused:
            make()
        assert refused.value.code == "RECURRENCE_TOO_LARGE"
    wide = Union(Cron(f"{n} * * * *") for n in range(60))
    assert len((wide | Cron("1 1 * * *")).specs) == 61  # type: ignore[attr-defined]
    with pytest.raises(InvalidRecurrence):
        wide | wide
    data: dict[str, object] = Cron("0 9 * * *").to_json()
    for _ in range(500):
        data = {"kind": "union", "spec": [data, data]}
    with pytest.raises(InvalidRecurrence) as refused:
        spec_from_json(data)
    assert refused.value.code == "RECURRENCE_TOO_LARGE"


@pytest.mark.parametrize(
    ("start", "end", "days"),
    [("9:00", "10:00", "*"), ("09:00", "09:00", "*"), ("24:00", "10:00", "*"), ("09:00", "25:00", "*"),
     ("09:00", "10:00", "MON-"), ("09:00", "10:00", "1-5"), (9, 10, "*"), ("09:00", "10:00", None)],
)  # fmt: skip
def test_invalid_hours_are_refused(start: str, end: str, days: str) -> None:
    with pytest.raises(InvalidRecurrence) as refused:
        Hours(start, end, days)
    assert refused.value.code in ("INVALID_HOURS", "INVALID_WEEKDAYS")


@pytest.mark.parametrize("data", [
    {"kind": "union", "spec": []}, {"kind": "union", "spec": 3}, {"kind": "union", "spec": [3, 4]},
    {"kind": "union", "spec": [{"kind": "cron", "spec": "0 9 * * *"}]}, {"kind": "except", "spec": 3},
    {"kind": "except", "spec": {"kind": "cron", "spec": "0 9 * * *"}}, {"kind": "within", "spec": {}},
    {"kind": "within", "spec": {"kind": "cron", "spec": "0 9 * * *"}, "hours": {"start": "09:00"}},
    {"kind": "within", "spec": {"kind": "cron", "spec": "0 9 * * *"}, "hours": 3},
    {"kind": "cron", "spec": "0 9 * * *", "timezone": "UTC", "overrides": 3},
    {"kind": "cron", "spec": "0 9 * * *", "timezone": "UTC", "overrides": [3]},
    {"kind": "cron", "spec": "0 9 * * *", "timezone": "UTC", "overrides": [{"at": "2027-01-01T09:00:00Z"}]},
    {"kind": "cron", "spec": "0 9 * * *", "timezone": "UTC", "overrides": [{"at": "2027-01-01", "action": "skip"}]},
])  # fmt: skip
def test_invalid_json_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(InvalidRecurrence):
        recurrence_from_json({"timezone": "UTC", **data})


# Single occurrences.

DAYS = [datetime(2027, 3, day, 9, tzinfo=UTC) for day in range(1, 29)]


def daily(*overrides: Override, **bounds: object) -> Recurrence:
    bound = Cron("0 9 * * *").bind("UTC", created_at=START, **bounds)  # type: ignore[arg-type]
    return Recurrence(bound.spec, "UTC", bound.start, bound.end, bound.max_runs, overrides)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from(DAYS), st.one_of(st.none(), st.integers(1, 60 * 24 * 40)), max_size=8),
    st.booleans(),
)
def test_overrides_match_set_operations(changes: dict[datetime, int | None], bounded: bool) -> None:
    end = DAYS[20] if bounded else None
    changes = {at: to for at, to in changes.items() if end is None or at < end}
    moved = {at: at + timedelta(minutes=to, seconds=7) if to else None for at, to in changes.items()}
    whole = daily(*(Override(at, to) for at, to in moved.items()), end=end)
    low, high = DAYS[0] - timedelta(days=1), DAYS[-1] + timedelta(days=60)
    plain = set(daily(end=end).between(low, high))
    targets = {to for to in moved.values() if to is not None}
    for bound, expected in ((whole, plain | targets), (whole.effective(), plain - moved.keys() | targets)):
        listed = sorted(expected)
        assert list(bound.between(low, high)) == listed
        assert bound.count(low, high) == len(listed)
        for one, other in pairwise(listed):
            assert bound.next(one) == other
            assert bound.previous(other) == one
    assert whole.overridden_instants(low, high) == sorted(moved)
    assert [fire["utc"] for fire in next_fires(whole, low, 5)] == [
        at.isoformat().replace("+00:00", "Z") for at in islice(whole.effective().between(low + MICROSECOND, high), 5)
    ]
    assert recurrence_from_json(json.loads(json.dumps(whole.to_json()))) == whole
    assert hash(whole) == hash(recurrence_from_json(whole.to_json()))
    assert not targets or "moved to" in whole.describe()


def test_json_without_overrides_has_no_overrides_field() -> None:
    assert "overrides" not in daily().to_json()
    assert daily().effective() is not None and daily().overridden_instants(START, END) == []


def test_overrides_of_existing_occurrences_are_kept() -> None:
    now = DAYS[5]
    past, passed_to_come = Override(DAYS[2]), Override(DAYS[3], DAYS[8] + timedelta(hours=1))
    stays, goes, taken = Override(DAYS[10]), Override(DAYS[11]), Override(DAYS[12], DAYS[12] + timedelta(hours=3))
    overrides = [past, passed_to_come, stays, goes, taken]
    assert partition_overrides(overrides, daily(), now) == ((passed_to_come, stays, goes, taken), ())
    noon = (Cron("0 9,12 * * *") - Dates([DAYS[11]])).bind("UTC", created_at=START)
    assert partition_overrides(overrides, noon, now) == ((passed_to_come, stays), (goes, taken))


parts = st.sampled_from([*PARTS, Cron("0 0 29 2 *"), Every("P1M", datetime(2027, 1, 31, 1, 30))])
hours = st.builds(
    Hours, st.sampled_from(["00:00", "01:15", "09:00"]), st.sampled_from(["24:00", "02:30", "17:00", "23:59:59"]),
    st.sampled_from(["*", "MON-FRI", "SUN", "FRI-MON"]),
)  # fmt: skip
calendars = st.builds(
    Calendar, st.sampled_from([("SAT", "SUN"), (), ("FRI",)]),
    st.lists(st.dates(date(2027, 2, 20), date(2027, 4, 10)), max_size=20),
)  # fmt: skip


def _combined(inner: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    def on(spec: Spec, calendar: Calendar, roll: str) -> Spec:
        try:
            return spec.on(calendar, roll)  # type: ignore[arg-type]
        except InvalidRecurrence:
            return spec.on(calendar)

    return st.one_of(
        st.builds(lambda a, b: a | b, inner, inner), st.builds(lambda a, b: a - b, inner, inner),
        st.builds(lambda a, b: a & b, inner, hours),
        st.builds(on, inner, calendars, st.sampled_from(["skip", "next", "previous"])),
    )  # fmt: skip


combined = st.recursive(parts, _combined, max_leaves=5)


@settings(max_examples=100, deadline=None)
@given(
    combined, st.sampled_from(ZONES), st.datetimes(datetime(2027, 3, 1), datetime(2027, 4, 1), timezones=st.just(UTC))
)
def test_random_combinations_are_consistent(spec: Spec, zone: str, start: datetime) -> None:
    bound = spec.bind(zone, created_at=START)
    assert recurrence_from_json(json.loads(json.dumps(bound.to_json()))) == bound
    assert zone in bound.describe() and isinstance(spec.warnings(), list)
    dst_notes(bound, START, END)
    with suppress(InvalidRecurrence):
        end = start + timedelta(hours=15)
        found = list(bound.between(start, end))
        assert all(one < other for one, other in pairwise(found))
        assert bound.count(start, end) == len(found)
        for one, other in list(pairwise(found))[:20]:
            assert bound.next(one) == other
            assert bound.previous(other) == one
            assert bound.note(one) in (None, "gap", "fold")
        if found:
            assert bound.next(start - MICROSECOND) == found[0]
            assert bound.previous(end) == found[-1]
            runs = spec.bind(zone, created_at=START, start=start, max_runs=len(found))
            assert list(runs.between(start, END + timedelta(days=99))) == found
