"""Columns that a trigger reads: exact bounds of lengths, years and epochs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from timebell.features.triggers.model.column_values import (
    parse_column_instant,
    parse_column_zone,
    parse_recipients,
    parse_value_zone,
    resolve_to_utc,
    select_edge,
)


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("value", "start", "end"),
    [
        ("2027-03-01/2027-03-05", "2027-03-01", "2027-03-05"),
        (" a / b ", "a", "b"),
        ("2027-03-01T09:00[Europe/Madrid]/2027-03-02T09:00[Asia/Seoul]", "2027-03-01T09:00[Europe/Madrid]",
         "2027-03-02T09:00[Asia/Seoul]"),
        ("2027-03-01T09:00[Europe/Madrid]", "2027-03-01T09:00[Europe/Madrid]", "2027-03-01T09:00[Europe/Madrid]"),
        ("soon", "soon", "soon"),
        ("a/b/c", "a/b/c", "a/b/c"),
        ("a/" + "b" * 198, "a", "b" * 198),
        ("a/" + "b" * 199, "a/" + "b" * 199, "a/" + "b" * 199),
        ({"from": 1, "to": 2, "start": 3}, 1, 2),
        ({"start": 3, "other": 4}, 3, None),
        ({"to": 2}, None, 2),
        ({"other": 4}, {"other": 4}, {"other": 4}),
        (5, 5, 5),
    ],
)  # fmt: skip
def test_the_edges_of_a_range_are_selected(value: Any, start: Any, end: Any) -> None:
    assert (select_edge(value, "start"), select_edge(value, "end")) == (start, end)


@pytest.mark.parametrize(
    ("value", "name"),
    [(" Asia/Seoul ", "Asia/Seoul"), ("asia/seoul", None), ("", None), ("Mars/Base", None), (None, None), (5, None)],
)
def test_a_zone_is_its_exact_name(value: Any, name: str | None) -> None:
    assert parse_column_zone(value) == name


SUFFIX = "[Asia/Seoul][u-ca=gregory]"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("2027-03-01T09:00[Asia/Seoul]", "Asia/Seoul"),
        (" 2027-03-01T09:00+09:00[!Asia/Seoul][u-ca=gregory] ", "Asia/Seoul"),
        ("2027-03-01T09:00", None),
        ("2027-03-01T09:00[Mars/Base]", None),
        ("2027-03-01T09:00[Asia/Seoul", None),
        ("[Asia/Seoul]", None),
        ("x" * (100 - len(SUFFIX)) + SUFFIX, "Asia/Seoul"),
        ("x" * (101 - len(SUFFIX)) + SUFFIX, None),
        (["["], None),
        (5, None),
    ],
)
def test_the_zone_in_a_value_is_found(value: Any, name: str | None) -> None:
    assert parse_value_zone(value) == name


@pytest.mark.parametrize(
    ("value", "instant"),
    [
        ("1970-01-01T00:00:00Z", utc(1970, 1, 1)),
        ("1969-12-31T23:59:59Z", None),
        ("2199-12-31T23:59:59Z", utc(2199, 12, 31, 23, 59, 59)),
        ("2200-01-01T00:00:00Z", None),
        ("2027-03-01T12:00:00Z".ljust(100), utc(2027, 3, 1, 12)),
        ("2027-03-01T12:00:00Z".ljust(101), None),
        ("2027-03-01T12:00[Asia/Seoul]", utc(2027, 3, 1, 3)),
        # Seconds or milliseconds, from 2001 on.
        (1e9, utc(2001, 9, 9, 1, 46, 40)),
        (1e9 - 1, None),
        (1e11, None),
        (1e12, utc(2001, 9, 9, 1, 46, 40)),
        (1e12 - 1, None),
        (7_258_118_399, utc(2199, 12, 31, 23, 59, 59)),
        (7_258_118_400, None),
        (7_258_118_399_000, utc(2199, 12, 31, 23, 59, 59)),
        (7_258_118_400_000, None),
        (1e14, None),
        (float("nan"), None),
        (False, None),
    ],
)
def test_instants_are_from_1970_to_2199(value: Any, instant: datetime | None) -> None:
    assert parse_column_instant(value, None) == instant


def test_a_local_time_is_resolved_in_its_zone() -> None:
    assert resolve_to_utc(datetime(2027, 3, 1, 12), "Asia/Seoul") == utc(2027, 3, 1, 3)


def test_an_item_has_up_to_1_000_recipients_of_200_characters() -> None:
    for accepted in (["x" * 200], ["x"], [str(number) for number in range(1000)]):
        assert parse_recipients(accepted) == accepted
    for refused in (["x" * 201], [""], [str(number) for number in range(1001)], ["ana", None], [True], {"a": 1}):
        assert parse_recipients(refused) is None
    assert parse_recipients(["ana", 7, "7", "ana"]) == ["ana", "7"]
