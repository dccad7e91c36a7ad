"""The SQLite dialect. The macros are explained in `dialects/postgres/macros.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Insert, Table
from sqlalchemy.dialects.sqlite import insert

from timebell.store.dialects.base import LAST_SUCCESS
from timebell.store.types import EPOCH, MICROSECOND, optional_from_micros

_JSON_COLUMN = "json_extract(value, '$.{0}') AS {0}"


class SqliteDialect:
    """The macros and value conversions of SQLite: no row locks (one writer at a time), JSON by json_each."""

    name = "sqlite"
    delete_in_cte = False
    partitioned = False
    macros: Mapping[str, str] = {
        "in": "IN (",
        "end_in": ")",
        "skip_locked": "",
        "for_update": "",
        "select_unlocked": "SELECT id FROM d",
        "row_id": "id",
        "updated_id": "id",
        "may_have_waiting": "EXISTS (SELECT 1 FROM timebell_jobs j WHERE j.schedule_id = timebell_schedules.id"
        " AND j.hold = 'overlap')",
        "lateral": "CROSS JOIN timebell_jobs s WHERE s.id IN (SELECT id FROM timebell_jobs",
        "end_lateral": ")",
        "per_row": "",
        "last_success": LAST_SUCCESS,
        "minute": "run_at / 60000000",
        "due": "run_at <= :now",
        "due_schedule": "next_fire_at <= :now",
        "handled": "((:everything AND route NOT LIKE '@%') OR route IN (SELECT value FROM json_each(:exact))"
        " OR EXISTS (SELECT 1 FROM json_each(:prefixes) p WHERE substr(route, 1, length(p.value)) = p.value))",
    }

    def batch_select(self, columns: Mapping[str, str]) -> str:
        return f"SELECT {', '.join(map(_JSON_COLUMN.format, columns))} FROM json_each(:rows)"  # noqa: S608

    def varying_batch_select(self, columns: Iterable[str], varying: Sequence[str]) -> str:
        """Return a SELECT like `batch_select` for a batch whose rows differ only in the columns `varying`.

        The JSON parameter `:rows` has only these columns; a common value is the parameter `:same_<column>`.
        """
        item = "value" if len(varying) == 1 else "json_extract(value, '$[{}]')"
        values = (
            f"{item.format(varying.index(name)) if name in varying else f':same_{name}'} AS {name}" for name in columns
        )
        return f"SELECT {', '.join(values)} FROM json_each(:rows)"  # noqa: S608

    def to_db(self, instant: datetime | None) -> Any:
        return (
            None if instant is None else (instant - EPOCH) // MICROSECOND
        )  # `to_micros` inlined: called many times per job

    from_db = staticmethod(optional_from_micros)

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
