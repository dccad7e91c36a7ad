"""The effect of a tzdata change in words and counts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from timebell.model.tzdata_change import ChangeTally, OffsetChange, format_offset

SINCE = datetime(2027, 4, 1, 3, tzinfo=UTC)  # the evening before in Mexico


@pytest.mark.parametrize(
    ("fields", "verb", "text"),
    [
        ({"schedules": 14, "occurrences": 212, "since": SINCE}, "move",
         "212 occurrences of 14 schedules in X move by one hour "
         "(from 2027-03-31, UTC-06:00 becomes UTC-05:00)"),
        ({"schedules": 1}, "move", "1 schedule in X moves by one hour (UTC-06:00 becomes UTC-05:00)"),
        ({"jobs": 1}, "move", "1 job in X moves by one hour (UTC-06:00 becomes UTC-05:00)"),
        ({"jobs": 1}, "moved", "1 job in X moved by one hour (UTC-06:00 becomes UTC-05:00)"),
        ({"schedules": 1, "jobs": 1}, "move",
         "1 schedule and 1 job in X move by one hour (UTC-06:00 becomes UTC-05:00)"),
        ({"schedules": 1, "occurrences": 1}, "move",
         "1 occurrence of 1 schedule in X moves by one hour (UTC-06:00 becomes UTC-05:00)"),
        ({"schedules": 1, "occurrences": 2}, "move",
         "2 occurrences of 1 schedule in X move by one hour (UTC-06:00 becomes UTC-05:00)"),
        ({"occurrences": 3}, "move",
         "3 occurrences of schedules in X move by one hour (UTC-06:00 becomes UTC-05:00)"),
    ],
)  # fmt: skip
def test_a_change_is_described(fields: dict[str, Any], verb: str, text: str) -> None:
    change = OffsetChange("X", -6 * 3600, -5 * 3600, **fields)
    assert change.describe(verb) == text
    if verb == "move":
        assert change.describe() == text


@pytest.mark.parametrize(
    ("before", "after", "shift"),
    [(0, 3600, "one hour"), (7200, 0, "2 hours"), (0, 1800, "30 minutes"), (0, 5400, "90 minutes"),
     (0, 3661, "3661 seconds"), (-28, 0, "28 seconds")],
)  # fmt: skip
def test_the_shift_has_its_natural_unit(before: int, after: int, shift: str) -> None:
    assert f" move by {shift} (" in OffsetChange("X", before, after, jobs=2).describe()


@pytest.mark.parametrize(
    ("offset", "text"),
    [(0, "UTC+00:00"), (19_800, "UTC+05:30"), (-21_600, "UTC-06:00"), (-16_966, "UTC-04:42:46"), (59, "UTC+00:00:59"),
     (-1, "UTC-00:00:01")],
)  # fmt: skip
def test_offsets_are_formatted(offset: int, text: str) -> None:
    assert format_offset(offset) == text


def test_changes_are_counted_by_zone_and_offsets() -> None:
    tally = ChangeTally()
    earlier = SINCE.replace(day=1, month=3)
    tally.add("B", 0, 1, SINCE, schedules=1, occurrences=5)
    tally.add("B", 0, 1, earlier, schedules=1, occurrences=7)
    tally.add("B", 0, 1, SINCE, jobs=1)
    tally.add("B", 0, 1, None, schedules=1, jobs=1, occurrences=1)  # examined, and does not move
    tally.add("A", 0, 2, None)
    tally.entry("A", 0, 1).examined += 1
    moved = OffsetChange("B", 0, 1, examined=4, schedules=2, jobs=1, occurrences=12, since=earlier)
    assert list(tally.changes()) == [OffsetChange("A", 0, 1, examined=1), OffsetChange("A", 0, 2, examined=1), moved]
    assert tally.effective_changes() == [moved]


def test_a_change_without_moved_schedules_and_jobs_has_no_effect() -> None:
    for counts, has_effect in (({"examined": 9}, False), ({"jobs": 1}, True), ({"schedules": 1}, True)):
        assert OffsetChange("X", 0, 1, **counts).has_effect is has_effect  # type: ignore[arg-type]
