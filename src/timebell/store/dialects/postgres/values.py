"""Conversions of values, and the clock that decides which jobs are due."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, ColumnElement, Select, Text, cast, func, literal, literal_column, select, true
from sqlalchemy.dialects.postgresql import insert

from timebell.store.dialects.batches import encode
from timebell.store.dialects.on_conflict import OnConflict
from timebell.store.types import to_utc


class Values(OnConflict):
    """Base of the operations."""

    insert = staticmethod(insert)
    virtual_time = False
    """True in simulations: the node's own clock decides which jobs are due, and not also the server's."""

    def to_db(self, instant: datetime | None) -> Any:
        """Convert an instant to a parameter or JSON value."""
        return instant

    def from_db(self, value: Any) -> Any:
        """Convert a value from the database to an instant, or None."""
        return value if value is None or value.tzinfo is UTC else to_utc(value)

    def match_keys(self, query: Select[Any], column: ColumnElement[str], keys: Collection[str]) -> Select[Any]:
        """Restrict a query to rows whose text column has one of many values, found by an index of the column.

        The query is executed once per value: OFFSET 0 keeps it from being merged into a join. Without statistics, as of
        a table that is growing, the plan of a join or of `IN (...)` reads all rows that match the other conditions.
        """
        given = cast(literal(encode(sorted(keys)), Text), JSON)  # encoding an array of text takes longer
        values = func.json_array_elements_text(given).table_valued("value").render_derived()
        rows = query.where(column == values.c.value).offset(literal_column("0")).lateral()
        return select(rows).select_from(values).join(rows, true())

    def json_text(self, column: ColumnElement[str], names: Sequence[str]) -> ColumnElement[str]:
        """Return an expression for the text at a path of names in a JSON text."""
        return func.json_extract_path_text(cast(column, JSON), *names)
