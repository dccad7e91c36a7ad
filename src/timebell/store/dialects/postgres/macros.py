"""The macros of PostgreSQL for statements that are shared by all dialects.

The macros, which every dialect defines:

- `$in` .. `$end_in`: compare with the result of a subquery, as `id $in SELECT .. $end_in`.
- `$per_row`: ends a SELECT that has a subquery on the batch in its SELECT list.
- `$last_success`: when schedule `s` last succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping

from timebell.store.dialects.base import LAST_SUCCESS

_TYPES = {
    "id": "uuid", "text": "text", "int": "bigint", "real": "double precision", "bool": "boolean",
    "instant": "timestamptz",
}  # fmt: skip


class PostgresMacros:
    """The macros of PostgreSQL."""

    name = "postgresql"
    macros: Mapping[str, str] = {
        # ANY(ARRAY(...)) forces index look-ups by id; with IN (...) the planner may join the whole table.
        "in": "= ANY(ARRAY(",
        "end_in": "))",
        "per_row": "",
        "last_success": LAST_SUCCESS,
    }

    def batch_select(self, columns: Mapping[str, str]) -> str:
        typed = ", ".join(f"{name} {_TYPES[kind]}" for name, kind in columns.items())
        # Cast from text, because the connection of a caller may have a codec for json.
        return f"SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r({typed})"  # noqa: S608
