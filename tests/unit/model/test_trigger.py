"""What a trigger wants of an item, and what follows from it: pure functions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.errors import InvalidInput
from timebell.model.condition import judge
from timebell.model.condition import read as read_condition
from timebell.model.trigger import (
    Firing,
    Offset,
    Place,
    Rule,
    Steps,
    Value,
    instant_of,
    key_of,
    offsets_of,
    people_of,
    reconcile,
    version_of,
)

T0 = datetime(2027, 3, 1, 12, tzinfo=UTC)
ZERO = Place("0")


def at(**spans: float) -> datetime:
    return T0 + timedelta(**spans)


@pytest.mark.parametrize(
    ("written", "shown", "due"),
    [
        ("0", "0", T0),
        ("-15m", "-15m", at(minutes=-15)),
        ("+2h", "+2h", at(hours=2)),
        ("90s", "+90s", at(seconds=90)),
        ("-0d", "0", T0),
        ("+1w", "+1w", at(weeks=1)),
    ],
)
def test_offsets(written: str, shown: str, due: datetime) -> None:
    offset = Offset.read(written)
    assert str(offset) == shown
    assert offset.after(T0, "UTC") == due
    assert Offset.read(shown) == offset


@pytest.mark.parametrize("written", ["", "15", "1y", "-m", "1.5h", "+ 1d", "٣m", 5, None, "9999999d"])
def test_what_is_no_offset_is_refused(written: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        Offset.read(written)
    assert refused.value.code == "INVALID_OFFSET"


def test_a_day_is_one_of_the_calendar_and_24_hours_elapse() -> None:
    noon = datetime(2027, 3, 13, 17, tzinfo=UTC)  # 12:00 in New York, where clocks go forward that night
    assert Offset.read("+1d").after(noon, "America/New_York") == datetime(2027, 3, 14, 16, tzinfo=UTC)
    assert Offset.read("+24h").after(noon, "America/New_York") == datetime(2027, 3, 14, 17, tzinfo=UTC)


def test_an_offset_beyond_the_years_that_count_is_nothing() -> None:
    assert Offset.read("+999999d").after(T0, "UTC") is None
    assert Offset.read("-999999d").after(T0, "UTC") is None


def test_offsets_are_each_once_and_not_too_many() -> None:
    assert [str(one) for one in offsets_of(["-15m", "0", "-15m"])] == ["-15m", "0"]
    assert offsets_of("0") == (Offset(0),)
    for wrong in ([], ["0"] * 21, 5, None, {"0": 1}):
        with pytest.raises(InvalidInput):
            offsets_of(wrong)


@pytest.mark.parametrize(
    ("value", "timezone", "instant"),
    [
        ("2027-03-01T12:00:00Z", None, T0),
        ("2027-03-01T13:00:00+01:00", "Asia/Seoul", T0),
        ("2027-03-01T21:00:00", "Asia/Seoul", T0),
        ("2027-03-01 21:00", "Asia/Seoul", T0),
        ("2027-03-01", "UTC", at(hours=-12)),
        ("2027-03-01T12:00:00", None, None),  # whose 12 o'clock?
        ("soon", "UTC", None),
        ("", "UTC", None),
        (1_803_902_400, "UTC", None),
        ("0001-01-01T00:00:00+14:00", "UTC", None),
        ("2500-01-01T00:00:00Z", "UTC", None),
        (None, "UTC", None),
        (True, "UTC", None),
    ],
)
def test_values_as_instants(value: Any, timezone: str | None, instant: datetime | None) -> None:
    """S4-28, S4-63: a column without a zone needs a declared one."""
    assert instant_of(value, timezone) == instant


@pytest.mark.parametrize(
    ("value", "people"),
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
def test_people(value: Any, people: list[str] | None) -> None:
    assert people_of(value) == people


def test_versions_are_numbers_or_instants() -> None:
    assert version_of(7) == version_of("7") == 7
    assert version_of("2027-03-01T12:00:00Z") == version_of("2027-03-01T13:00:00+01:00")
    assert version_of("2027-03-01T12:00:00.000001Z") == version_of("2027-03-01T12:00:00Z") + 1
    for wrong in (-1, 2**63, True, None, "now", "2027-03-01T12:00:00", 1.5, "٣"):
        with pytest.raises(InvalidInput) as refused:
            version_of(wrong)
        assert refused.value.code == "INVALID_VERSION"


def test_a_rule_wants_each_offset_for_each_recipient() -> None:
    rule = Rule(column="start_at", offsets=offsets_of(["-15m", "0"]), recipients="users")
    wanted = rule.wanted({"start_at": "2027-03-01T12:00:00Z", "users": ["ana", "bo"]})
    assert wanted.places == {
        Place("-15m", "ana"): at(minutes=-15), Place("-15m", "bo"): at(minutes=-15), Place("0", "ana"): T0,
        Place("0", "bo"): T0,
    }  # fmt: skip
    assert rule.wanted(None).value is Value.NONE
    assert rule.wanted({"start_at": None}).value is Value.NONE
    assert rule.wanted({"start_at": "soon", "users": ["ana"]}).value is Value.UNREADABLE
    assert rule.wanted({"start_at": "2027-03-01T12:00:00Z", "users": [{}]}).value is Value.UNREADABLE


names = st.text("a_%0", max_size=5)


@given(names.filter(bool), names, names.filter(bool), names)
def test_no_two_places_share_a_key(item: str, recipient: str, other_item: str, other: str) -> None:
    one, two = key_of("t", item, Place("0", recipient)), key_of("t", other_item, Place("0", other))
    assert (one == two) == ((item, recipient) == (other_item, other))


def test_keys_read_well_and_stay_short() -> None:
    """S3-14: `trigger__<trigger>__<item>__<offset>`."""
    assert key_of("t1", "12345", ZERO) == "trigger__t1__12345__0"
    assert key_of("t1", "12345", Place("-15m", "ana")) == "trigger__t1__12345__-15m__ana"
    assert len(key_of("t1", "x" * 200, Place("0", "y" * 200))) <= 200
    assert key_of("t1", "x" * 200, ZERO) != key_of("t1", "x" * 201, ZERO)


def planned(instant: datetime | None, **fields: Any) -> Firing:
    return Firing(at=instant, **fields)


@pytest.mark.parametrize(
    ("wanted", "firing", "steps"),
    [
        (at(hours=1), None, Steps({ZERO: at(hours=1)})),
        (at(seconds=-40), None, Steps({ZERO: at(seconds=-40)})),  # learnt of 40 s late, and it still fires
        (at(hours=-1), None, Steps(late=[ZERO])),
        (at(hours=1), planned(at(hours=1)), Steps()),
        (at(seconds=-9), planned(at(seconds=-9)), Steps()),  # fired, and reported again
        (at(hours=2), planned(at(hours=1)), Steps({ZERO: at(hours=2)}, [ZERO])),
        (at(hours=-1), planned(at(hours=1)), Steps({}, [ZERO], [ZERO])),  # past-dating cancels
        (None, planned(at(hours=1)), Steps({}, [ZERO])),  # so does clearing
        (None, planned(None), Steps()),
        (at(hours=1), planned(None), Steps({ZERO: at(hours=1)})),  # cleared, and set to the same again
        (at(seconds=-9), planned(None, fired_at=at(seconds=-9)), Steps()),
        (at(seconds=-9), planned(at(hours=1), fired_at=at(seconds=-9)), Steps({}, [ZERO])),
        (at(hours=1), planned(at(hours=1), revision=6), Steps({ZERO: at(hours=1)}, [ZERO])),
        (at(seconds=-9), planned(at(seconds=-9), revision=6), Steps()),
    ],
)
def test_what_follows_from_what_is_wanted(wanted: datetime | None, firing: Firing | None, steps: Steps) -> None:
    firings = {} if firing is None else {ZERO: firing}
    places = {} if wanted is None else {ZERO: wanted}
    assert reconcile(places, firings, 1, T0, 300) == steps


moments = st.integers(-600, 600).map(lambda seconds: at(seconds=seconds))
places = st.sampled_from([Place("0"), Place("-15m"), Place("0", "ana"), Place("0", "bo")])


@given(
    st.dictionaries(places, moments),
    st.dictionaries(places, st.builds(Firing, at=st.none() | moments, fired_at=st.none() | moments)),
)
def test_reconciling_twice_changes_nothing_more(wanted: dict[Place, datetime], firings: dict[Place, Firing]) -> None:
    steps = reconcile(wanted, firings, 1, T0, 300)
    after = dict(firings)
    for place in steps.cancel:
        after[place] = Firing(at=None, fired_at=after[place].fired_at)
    for place, instant in steps.make.items():
        after[place] = Firing(at=instant, fired_at=after[place].fired_at if place in after else None)
    assert not reconcile(wanted, after, 1, T0, 300)
    live = {place: one.at for place, one in after.items() if one.at is not None and one.at > T0}
    assert live == {
        place: instant for place, instant in wanted.items()
        if instant > T0 and not (place in firings and firings[place].fired_at == instant)
    }  # fmt: skip


FIELDS = {"status": "active", "age": 18, "tags": [], "ok": True}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (None, True),
        ({"status": "active"}, True),
        ({"status": "done"}, False),
        ([{"field": "age", "op": "ge", "value": 18}], True),
        ([{"field": "age", "op": "gt", "value": 18}], False),
        ([{"field": "age", "op": "lt", "value": "20"}], False),  # a number has no order among texts
        ([{"field": "status", "op": "in", "value": ["active", "late"]}], True),
        ([{"field": "status", "op": "not_in", "value": ["active"]}], False),
        ([{"field": "tags", "op": "empty"}, {"field": "none", "op": "empty"}], True),
        ([{"field": "status", "op": "not_empty"}, {"field": "status", "op": "ne", "value": "active"}], False),
        ([{"field": "ok", "op": "eq", "value": 1}], False),
        ([{"field": "none", "op": "eq", "value": None}], True),
    ],
)
def test_conditions(condition: Any, holds: bool) -> None:
    verdict = judge(read_condition(condition), FIELDS)
    assert verdict.holds is holds
    assert (verdict.failed is None) is holds
    assert set(verdict.inputs) <= {*FIELDS, "none"}
    assert [one.to_json() for one in read_condition(read_condition(condition))] == [
        one.to_json() for one in read_condition(condition)
    ]


@pytest.mark.parametrize(
    "condition",
    ["status", [{"field": "a"}], [{"field": "a", "op": "like", "value": "x"}], [{"field": "a", "op": "eq"}], [5],
     [{"field": "a", "op": "empty", "value": 1}], [{"field": "a", "op": "in", "value": "abc"}],
     [{"field": "a", "op": "lt", "value": True}], [{"field": "", "op": "empty"}],
     [{"field": "a", "op": "empty", "no": 1}], [{"field": "a", "op": "empty"}] * 21],
)  # fmt: skip
def test_what_is_no_condition_is_refused(condition: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_condition(condition)
    assert refused.value.code == "INVALID_CONDITION"
