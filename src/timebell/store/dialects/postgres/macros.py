"""How PostgreSQL says it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from timebell.store.dialects.base import LAST_SUCCESS
from timebell.store.types import in_utc

_TYPES = {
    "id": "uuid", "text": "text", "int": "bigint", "real": "double precision", "bool": "boolean",
    "instant": "timestamptz",
}  # fmt: skip


class PostgresWords:
    """How PostgreSQL says it. `server_clock=False` is for virtual time: then only `:now` decides what is due."""

    delete_in_cte = True
    partitioned = True

    def __init__(self, *, server_clock: bool = True) -> None:
        self.name = f"postgresql{'' if server_clock else ' on virtual time'}"
        # Never early, even if this node's idea of the time is wrong: the server's own clock must agree.
        guard = " AND {} <= statement_timestamp()" if server_clock else ""
        self.words: Mapping[str, str] = {
            # ANY(ARRAY(...)) pins an index look-up by id; IN (...) lets the planner join the whole table.
            "pick": "= ANY(ARRAY(",
            "picked": "))",
            "skip_locked": "FOR UPDATE SKIP LOCKED",
            "for_update": "FOR UPDATE",
            # Those that nobody else has locked, from now on ours, by their place; one that moved meanwhile is left.
            "unlocked": "SELECT ctid FROM timebell_jobs WHERE id = ANY(ARRAY(SELECT id FROM d)) FOR UPDATE SKIP LOCKED",
            "place": "ctid",
            "own_id": "j.id",
            "by_row": "",
            "last_success": LAST_SUCCESS,
            "minute": "date_trunc('minute', run_at)",
            "in_turn": "true",
            # A join that takes so many rows for each of those before it.
            "each": "CROSS JOIN LATERAL (SELECT * FROM timebell_jobs",
            "each_end": ") AS s",
            "due": "run_at <= :now" + guard.format("run_at"),
            "due_schedule": "next_fire_at <= :now" + guard.format("next_fire_at"),
            "hears": "(route = ANY(CAST(:exact AS text[])) OR (CAST(:everything AS boolean) AND route NOT LIKE '@%')"
            " OR EXISTS (SELECT 1 FROM unnest(CAST(:prefixes AS text[])) p WHERE left(route, length(p)) = p))",
        }

    def rows(self, columns: Mapping[str, str]) -> str:
        """As in Words."""
        typed = ", ".join(f"{name} {_TYPES[kind]}" for name, kind in columns.items())
        # By way of text, as a caller's own connection may have a codec for json.
        return f"SELECT * FROM json_to_recordset(CAST(CAST(:rows AS text) AS json)) AS r({typed})"  # noqa: S608

    def to_db(self, instant: datetime | None) -> Any:
        """As in Dialect."""
        return instant

    def from_db(self, value: Any) -> Any:
        """As in Dialect."""
        return value if value is None or value.tzinfo is UTC else in_utc(value)
