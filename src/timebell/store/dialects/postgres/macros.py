"""The PostgreSQL dialect: macros of statements, and value conversions.

The macros, which every dialect defines:

- `$in` .. `$end_in`: compare with the result of a subquery, as `id $in SELECT .. $end_in`.
- `$skip_locked`, `$for_update`: lock the selected rows, without or with waiting for locked ones.
- `$select_unlocked`: a subquery that locks and returns the jobs of the batch that no other transaction has locked.
- `$row_id`: the column that identifies a job within a statement.
- `$updated_id`: the id of the updated row, for RETURNING.
- `$lateral` .. `$end_lateral`: join every row of the batch with the result of a subquery that refers to it.
  `$per_row`: ends a SELECT that has such a subquery in its SELECT list.
- `$may_have_waiting`: whether a schedule may have a waiting job. `$last_success`: when schedule `s` last succeeded.
- `$due`, `$due_schedule`: the job or schedule is due, by `:now` and by the clock of the server.
- `$handled`: the job is on one of the routes of a node (parameters of `Routes.sql_params`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any

from sqlalchemy import Insert, Table
from sqlalchemy.dialects.postgresql import insert

from timebell.store.dialects.base import LAST_SUCCESS
from timebell.store.types import to_utc

_TYPES = {
    "id": "uuid", "text": "text", "int": "bigint", "real": "double precision", "bool": "boolean",
    "instant": "timestamptz",
}  # fmt: skip


class PostgresDialect:
    """The macros and value conversions of PostgreSQL.

    With `server_clock=False` (virtual time) only `:now` decides which jobs are due.
    """

    delete_in_cte = True
    partitioned = True

    def __init__(self, *, server_clock: bool = True) -> None:
        self.name = f"postgresql{'' if server_clock else ' on virtual time'}"
        # Never start a job early, even if the clock of this node is ahead: the server's clock must agree.
        guard = " AND {} <= statement_timestamp()" if server_clock else ""
        self.macros: Mapping[str, str] = {
            # ANY(ARRAY(...)) forces index look-ups by id; with IN (...) the planner may join the whole table.
            "in": "= ANY(ARRAY(",
            "end_in": "))",
            "skip_locked": "FOR UPDATE SKIP LOCKED",
            "for_update": "FOR UPDATE",
            # By ctid, which needs no second index look-up. A row version replaced meanwhile is not found, so skipped.
            "select_unlocked": "SELECT ctid FROM timebell_jobs WHERE id = ANY(ARRAY(SELECT id FROM d))"
            " FOR UPDATE SKIP LOCKED",
            "row_id": "ctid",
            "updated_id": "j.id",
            "per_row": "",
            "last_success": LAST_SUCCESS,
            "minute": "date_trunc('minute', run_at)",
            "may_have_waiting": "true",
            # A LATERAL join, so that the subquery applies its LIMIT per row of the batch.
            "lateral": "CROSS JOIN LATERAL (SELECT * FROM timebell_jobs",
            "end_lateral": ") AS s",
            "due": "run_at <= :now" + guard.format("run_at"),
            "due_schedule": "next_fire_at <= :now" + guard.format("next_fire_at"),
            "handled": "(route = ANY(CAST(:exact AS text[])) OR (CAST(:everything AS boolean) AND route NOT LIKE '@%')"
            " OR EXISTS (SELECT 1 FROM unnest(CAST(:prefixes AS text[])) p WHERE left(route, length(p)) = p))",
        }

    def batch_select(self, columns: Mapping[str, str]) -> str:
        typed = ", ".join(f"{name} {_TYPES[kind]}" for name, kind in columns.items())
        # Cast from text, because the connection of a caller may have a codec for json.
        return f"SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r({typed})"  # noqa: S608

    def to_db(self, instant: datetime | None) -> Any:
        return instant

    def from_db(self, value: Any) -> Any:
        return value if value is None or value.tzinfo is UTC else to_utc(value)

    @staticmethod
    @cache
    def insert_ignoring_duplicates(table: Table) -> Insert:
        return insert(table).on_conflict_do_nothing()

    @staticmethod
    @cache
    def upsert(
        table: Table, *, replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = ()
    ) -> Insert:  # fmt: skip
        statement = insert(table)
        new = statement.excluded
        changes = {name: new[name] for name in replace} | {name: table.c[name] + new[name] for name in add}
        return statement.on_conflict_do_update(index_elements=key or table.primary_key.columns, set_=changes)
