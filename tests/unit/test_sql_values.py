"""Column values as JSON: whole rows are converted like their values."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from timebell.features.triggers.sources.sql_values import to_json_rows, to_json_value

AT = datetime(2027, 3, 14, 9, 30, 0, 70_532, tzinfo=UTC)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, 2**64 - 1, -(2**63), 2**64, -(2**63) - 1, 1.5, -0.0, 1e22, float("nan"), float("inf")),
        *("text", "[1, 2]", "[not a list]", "[", 'a "[b]', "a\0b", "\u2028", "\udcff"),
        *(AT, AT.replace(tzinfo=None), datetime(1, 2, 3), AT.date(), date(99, 1, 1), AT.time(), time(1, tzinfo=UTC)),
        *(timedelta(microseconds=7), Decimal("1.50"), Decimal(10**30), UUID(int=7), asyncpg.Point(1, 2)),
        *(b"\0\1", bytearray(b"ab"), memoryview(b"ab"), b"x" * 100),
        *(["a", None], [AT.time()], (1, ["[1]"]), {"a\0": [Decimal("NaN")]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("other", ["text", Decimal("1.5"), "[3]"])
def test_rows_are_converted_like_their_values(value: Any, other: Any) -> None:
    rows = [{"id": 1, "value": other}, {"id": 2, "value": value}]
    expected = [{"id": row["id"], "value": to_json_value(row["value"])} for row in rows]
    assert repr(to_json_rows(rows)) == repr(expected)


def test_a_driver_specific_key_is_converted_to_text() -> None:
    key = asyncpg.pgproto.pgproto.UUID(str(UUID(int=7)))
    assert to_json_rows([{"id": key, "at": AT}]) == [{"id": str(UUID(int=7)), "at": AT.isoformat()}]
