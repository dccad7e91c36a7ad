"""Pure functions of triggers: offsets, column values, recipients and reconciliation."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from timebell.errors import InvalidInput
from timebell.features.triggers.model.column_values import parse_column_instant, parse_recipients
from timebell.features.triggers.model.trigger import (
    ColumnStatus,
    Firing,
    FiringChanges,
    FiringKey,
    Offset,
    TriggerRule,
    firing_job_key,
    parse_edge,
    parse_offsets,
    parse_version,
    reconcile,
)

T0 = datetime(2027, 3, 1, 12, tzinfo=UTC)
ZERO = FiringKey("0")


def at(**spans: float) -> datetime:
    return T0 + timedelta(**spans)


@pytest.mark.parametrize(
    ("written", "formatted", "due"),
    [
        ("0", "0", T0),
        ("-15m", "-15m", at(minutes=-15)),
        ("+2h", "+2h", at(hours=2)),
        ("90s", "+90s", at(seconds=90)),
        ("-0d", "0", T0),
        ("+1w", "+1w", at(weeks=1)),
        ("-1d+9h", "-1d+9h", at(days=-1, hours=9)),
        ("-3d@09:00", "-3d@09:00", at(days=-3, hours=-3)),
        ("@18:30", "@18:30", at(hours=6, minutes=30)),
        ("-1bd", "-1bd", at(days=-3)),  # T0 is a Monday
        ("+5bd", "+5bd", at(days=7)),
    ],
)
def test_offsets_are_parsed_and_applied(written: str, formatted: str, due: datetime) -> None:
    offset = Offset.parse(written)
    assert str(offset) == formatted
    assert offset.apply(T0, "UTC") == due
    assert Offset.parse(formatted) == offset


@pytest.mark.parametrize(
    "written",
    ["", "15", "1y", "-m", "1.5h", "+ 1d", "٣m", 5, None, "9999999d", "@25:00", "-1d@9", "1bd" * 9, "-1001bd", "@"],
)
def test_invalid_offset_is_refused(written: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        Offset.parse(written)
    assert refused.value.code == "INVALID_OFFSET"


def test_day_offset_follows_the_calendar_and_hour_offset_elapsed_time() -> None:
    noon = datetime(2027, 3, 13, 17, tzinfo=UTC)  # 12:00 in New York, where clocks go forward that night
    assert Offset.parse("+1d").apply(noon, "America/New_York") == datetime(2027, 3, 14, 16, tzinfo=UTC)
    assert Offset.parse("+24h").apply(noon, "America/New_York") == datetime(2027, 3, 14, 17, tzinfo=UTC)


def test_offset_beyond_the_supported_years_gives_none() -> None:
    assert Offset.parse("+999999d").apply(T0, "UTC") is None
    assert Offset.parse("-999999d").apply(T0, "UTC") is None


def test_offsets_are_deduplicated_and_limited() -> None:
    assert [str(one) for one in parse_offsets(["-15m", "0", "-15m"])] == ["-15m", "0"]
    assert parse_offsets("0") == (Offset(),)
    for wrong in ([], ["0"] * 21, 5, None, {"0": 1}):
        with pytest.raises(InvalidInput):
            parse_offsets(wrong)


@pytest.mark.parametrize(
    ("value", "timezone", "instant"),
    [
        ("2027-03-01T12:00:00Z", None, T0),
        ("2027-03-01T13:00:00+01:00", "Asia/Seoul", T0),
        ("2027-03-01T21:00:00", "Asia/Seoul", T0),
        ("2027-03-01 21:00", "Asia/Seoul", T0),
        ("2027-03-01", "UTC", at(hours=-12)),
        ("2027-03-01T12:00:00", None, None),  # no time zone
        ("soon", "UTC", None),
        ("", "UTC", None),
        (T0.timestamp(), None, T0),
        (int(T0.timestamp() * 1000), "Asia/Seoul", T0),
        (5, "UTC", None),  # no date
        (1e300, "UTC", None),
        ("2027-03-01T21:00[Asia/Seoul]", "UTC", T0),
        ("2027-03-01T21:00:00+09:00[Asia/Seoul][u-ca=gregory]", None, T0),
        ("2027-03-01T21:00[Mars/Base]", "UTC", None),
        ("0001-01-01T00:00:00+14:00", "UTC", None),
        ("2500-01-01T00:00:00Z", "UTC", None),
        (None, "UTC", None),
        (True, "UTC", None),
    ],
)
def test_column_values_are_parsed_as_instants(value: Any, timezone: str | None, instant: datetime | None) -> None:
    """A value without an offset needs a declared time zone."""
    assert parse_column_instant(value, timezone) == instant


@pytest.mark.parametrize(
    ("value", "recipients"),
    [
        ("ana", ["ana"]),
        (7, ["7"]),
        (["ana", "bo", "ana", 3], ["ana", "bo", "3"]),
        (None, []),
        ("", []),
        ([], []),
        ([None], None),
        ([""], None),
        (True, None),
        ({"a": 1}, None),
        (["x" * 201], None),
    ],
)
def test_recipients_are_parsed(value: Any, recipients: list[str] | None) -> None:
    assert parse_recipients(value) == recipients


def test_versions_are_numbers_or_instants() -> None:
    assert parse_version(7) == parse_version("7") == 7
    assert parse_version("2027-03-01T12:00:00Z") == parse_version("2027-03-01T13:00:00+01:00")
    assert parse_version("2027-03-01T12:00:00.000001Z") == parse_version("2027-03-01T12:00:00Z") + 1
    for wrong in (-1, 2**63, True, None, "now", "2027-03-01T12:00:00", 1.5, "٣"):
        with pytest.raises(InvalidInput) as refused:
            parse_version(wrong)
        assert refused.value.code == "INVALID_VERSION"


def test_rule_plans_each_offset_for_each_recipient() -> None:
    rule = TriggerRule(column="start_at", offsets=parse_offsets(["-15m", "0"]), recipients="users")
    desired = rule.desired_firings({"start_at": "2027-03-01T12:00:00Z", "users": ["ana", "bo"]})
    assert desired.instants == {
        FiringKey("-15m", "ana"): at(minutes=-15), FiringKey("-15m", "bo"): at(minutes=-15), FiringKey("0", "ana"): T0,
        FiringKey("0", "bo"): T0,
    }  # fmt: skip
    assert rule.desired_firings(None).column_status is ColumnStatus.EMPTY
    assert rule.desired_firings({"start_at": None}).column_status is ColumnStatus.EMPTY
    assert rule.desired_firings({"start_at": "soon", "users": ["ana"]}).column_status is ColumnStatus.UNREADABLE
    assert (
        rule.desired_firings({"start_at": "2027-03-01T12:00:00Z", "users": [{}]}).column_status
        is ColumnStatus.UNREADABLE
    )


names = st.text("a_%0", max_size=5)


@given(names.filter(bool), names, names.filter(bool), names)
def test_job_keys_are_unique(item: str, recipient: str, other_item: str, other: str) -> None:
    one, two = (
        firing_job_key("t", item, FiringKey("0", recipient)),
        firing_job_key("t", other_item, FiringKey("0", other)),
    )
    assert (one == two) == ((item, recipient) == (other_item, other))


def test_job_keys_are_readable_and_short() -> None:
    """Format: `trigger__<trigger>__<item>__<offset>`."""
    assert firing_job_key("t1", "12345", ZERO) == "trigger__t1__12345__0"
    assert firing_job_key("t1", "12345", FiringKey("-15m", "ana")) == "trigger__t1__12345__-15m__ana"
    assert len(firing_job_key("t1", "x" * 200, FiringKey("0", "y" * 200))) <= 200
    assert firing_job_key("t1", "x" * 200, ZERO) != firing_job_key("t1", "x" * 201, ZERO)


def planned(instant: datetime | None, **fields: Any) -> Firing:
    return Firing(at=instant, **fields)


@pytest.mark.parametrize(
    ("desired", "firing", "steps"),
    [
        (at(hours=1), None, FiringChanges({ZERO: at(hours=1)})),
        (at(seconds=-40), None, FiringChanges({ZERO: at(seconds=-40)})),  # detected 40 s late, still fires
        (at(hours=-1), None, FiringChanges(too_late=[ZERO])),
        (at(hours=1), planned(at(hours=1)), FiringChanges()),
        (at(seconds=-9), planned(at(seconds=-9)), FiringChanges()),  # fired, and reported again
        (at(hours=2), planned(at(hours=1)), FiringChanges({ZERO: at(hours=2)}, [ZERO])),
        (at(hours=-1), planned(at(hours=1)), FiringChanges({}, [ZERO], [ZERO])),  # past-dating cancels
        (None, planned(at(hours=1)), FiringChanges({}, [ZERO])),  # so does clearing
        (None, planned(None), FiringChanges()),
        (at(hours=1), planned(None), FiringChanges({ZERO: at(hours=1)})),  # cleared, and set to the same again
        (at(seconds=-9), planned(None, fired_at=at(seconds=-9)), FiringChanges()),
        (at(seconds=-9), planned(at(hours=1), fired_at=at(seconds=-9)), FiringChanges({}, [ZERO])),
        (at(hours=1), planned(at(hours=1), revision=6), FiringChanges({ZERO: at(hours=1)}, [ZERO])),
        (at(seconds=-9), planned(at(seconds=-9), revision=6), FiringChanges()),
    ],
)
def test_reconcile_creates_cancels_and_rejects_late_firings(
    desired: datetime | None, firing: Firing | None, steps: FiringChanges
) -> None:
    firings = {} if firing is None else {ZERO: firing}
    places = {} if desired is None else {ZERO: desired}
    assert reconcile(places, firings, 1, T0, 300) == steps


moments = st.integers(-600, 600).map(lambda seconds: at(seconds=seconds))
# An instant that has fired is not planned again.
recorded = st.builds(Firing, at=st.none() | moments, fired_at=st.none() | moments).filter(
    lambda firing: firing.at is None or firing.at != firing.fired_at
)
places = st.sampled_from([FiringKey("0"), FiringKey("-15m"), FiringKey("0", "ana"), FiringKey("0", "bo")])


@given(
    st.dictionaries(places, moments),
    st.dictionaries(places, recorded),
)
def test_reconciling_twice_changes_nothing_more(
    desired: dict[FiringKey, datetime], firings: dict[FiringKey, Firing]
) -> None:
    steps = reconcile(desired, firings, 1, T0, 300)
    after = dict(firings)
    for place in steps.cancel:
        after[place] = Firing(at=None, fired_at=after[place].fired_at)
    for place, instant in steps.create.items():
        after[place] = Firing(at=instant, fired_at=after[place].fired_at if place in after else None)
    assert not reconcile(desired, after, 1, T0, 300)
    live = {place: one.at for place, one in after.items() if one.at is not None and one.at > T0}
    assert live == {
        place: instant for place, instant in desired.items()
        if instant > T0 and not (place in firings and firings[place].fired_at == instant)
    }  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(-400, 400), st.sampled_from(["s", "m", "h", "d", "bd", "w"])), max_size=3),
    st.none() | st.times().map(lambda one: one.replace(second=0, microsecond=0)),
    st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)),
    st.sampled_from(["UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]),
)
def test_every_offset_is_read_back_and_sets_its_time_of_day(
    steps: list[tuple[int, str]], clock: time | None, start: datetime, name: str
) -> None:
    text = "".join(f"{count:+}{unit}" for count, unit in steps) + (f"@{clock:%H:%M}" if clock else "") or "0"
    assume(len(text) <= 20)
    offset = Offset.parse(text)
    assert Offset.parse(str(offset)) == offset
    due = offset.apply(start.replace(tzinfo=UTC), name)
    assert due is not None
    local = due.astimezone(ZoneInfo(name))
    if clock is not None:
        shifted = local - datetime.combine(local.date(), clock, local.tzinfo)
        assert timedelta(0) <= shifted <= timedelta(hours=1)  # later only in a gap
    elif steps and steps[-1][1] == "bd" and steps[-1][0]:
        assert local.weekday() < 5 or not steps[-1][0]


@given(st.text() | st.integers() | st.floats() | st.dictionaries(st.text(), st.text()))
def test_no_column_value_raises(value: Any) -> None:
    instant = parse_column_instant(value, "Europe/Madrid")
    assert instant is None or 1970 <= instant.year <= 2199


RANGES = [
    "2027-03-01/2027-03-05",
    " 2027-03-01T00:00[UTC]/2027-03-05T00:00[UTC]",
    {"from": "2027-03-01", "to": "2027-03-05", "changed_at": "2027-02-01T00:00:00Z"},
    {"start": "2027-03-01", "end": "2027-03-05"},
]


@pytest.mark.parametrize("value", RANGES)
def test_edge_of_a_range_is_selected(value: Any) -> None:
    fields = {"timeline": value}
    for edge, due in (("start", at(hours=-12)), ("end", at(days=4, hours=-12))):
        rule = TriggerRule(column="timeline", timezone="UTC", edge=edge)
        assert rule.desired_firings(fields).instants == {ZERO: due}


@pytest.mark.parametrize("value", ["2027-03-01/", {"from": "2027-03-01", "to": None}, {"start": "2027-03-01"}])
def test_range_without_an_end_fires_only_at_its_start(value: Any) -> None:
    start, end = (TriggerRule(column="timeline", timezone="UTC", edge=edge) for edge in ("start", "end"))
    assert start.desired_firings({"timeline": value}).instants == {ZERO: at(hours=-12)}
    assert end.desired_firings({"timeline": value}).column_status is ColumnStatus.EMPTY


def test_unknown_edge_is_refused() -> None:
    with pytest.raises(InvalidInput, match="edge"):
        parse_edge("middle")


DST_ZONES = ("America/New_York", "Europe/Madrid", "Australia/Lord_Howe", "Asia/Seoul")


@given(
    st.datetimes(datetime(2027, 3, 10), datetime(2027, 4, 6))
    | st.datetimes(datetime(2027, 10, 1), datetime(2027, 11, 10)),
    st.sampled_from(DST_ZONES),
)
def test_local_time_is_read_in_the_zone_of_its_row(local: datetime, name: str) -> None:
    rule = TriggerRule(column="at", zone_column="tz", offsets=parse_offsets(["0", "-1d@09:00"]))
    desired = rule.desired_firings({"at": local.isoformat(), "tz": name})
    due = desired.instants[ZERO]
    assert due == local.replace(tzinfo=ZoneInfo(name)).astimezone(UTC)  # a gap uses the offset before it, as zoneinfo
    day_before = due.astimezone(ZoneInfo(name)).date() - timedelta(days=1)
    nine = desired.instants[FiringKey("-1d@09:00")].astimezone(ZoneInfo(name))
    assert (nine.date(), nine.time()) == (day_before, time(9))
    assert desired.timezone == name


@pytest.mark.parametrize("name", [None, "", "Mars/Base", "CEST", 5, ["UTC"]])
def test_row_without_a_valid_zone_is_unreadable_unless_there_is_a_default(name: Any) -> None:
    rule = TriggerRule(column="at", zone_column="tz")
    fields = {"at": "2027-03-01T21:00", "tz": name}
    assert rule.desired_firings(fields).column_status is ColumnStatus.UNREADABLE
    assert rule.describe_unreadable(fields) == f"tz: {name!r} is not a time zone"
    with_default = TriggerRule(column="at", zone_column="tz", timezone="Asia/Seoul")
    assert with_default.desired_firings(fields) == ({ZERO: T0}, ColumnStatus.READABLE, "Asia/Seoul")


def test_zone_in_a_value_applies_to_its_offsets_before_all_others() -> None:
    rule = TriggerRule(column="at", zone_column="tz", timezone="UTC", offsets=parse_offsets(["-1d@09:00"]))
    for at_text in ("2027-03-14T20:00[Asia/Seoul]", "2027-03-14T11:00Z[Asia/Seoul]"):
        desired = rule.desired_firings({"at": at_text, "tz": "Europe/Madrid"})
        assert desired.instants == {FiringKey("-1d@09:00"): datetime(2027, 3, 13, 0, tzinfo=UTC)}
        assert desired.timezone == "Asia/Seoul"
    assert rule.desired_firings({"at": "2027-03-14T20:00[Mars/Base]"}).column_status is ColumnStatus.UNREADABLE


def test_local_time_without_a_zone_says_so() -> None:
    rule = TriggerRule(column="at")
    assert "is a local time, and no time zone is specified" in rule.describe_unreadable({"at": "2027-03-14T20:00"})
    assert rule.describe_unreadable({"at": "soon"}) == "at: 'soon'"


def test_time_of_day_requires_a_zone() -> None:
    with pytest.raises(InvalidInput, match="-3d@09:00") as refused:
        TriggerRule(column="at", offsets=parse_offsets(["0", "-3d@09:00"]))
    assert refused.value.code == "TIMEZONE_MISSING"


def test_a_nested_value_is_read_by_its_path() -> None:
    rule = TriggerRule(column="timeline.from", timezone="UTC")
    fields = {"timeline": {"from": "2027-03-01", "to": "2027-03-05"}}
    assert rule.desired_firings(fields).instants == {ZERO: at(hours=-12)}
    assert rule.desired_firings({"timeline": "soon"}).column_status is ColumnStatus.EMPTY
