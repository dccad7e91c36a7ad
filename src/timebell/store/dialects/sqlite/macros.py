"""How SQLite says it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from timebell.store.dialects.base import LAST_SUCCESS
from timebell.store.types import EPOCH, MICROSECOND, read_micros

_JSON = "json_extract(value, '$.{0}') AS {0}"


class SqliteWords:
    """How SQLite says it: no row locks (one writer at a time), JSON by json_each."""

    name = "sqlite"
    delete_in_cte = False
    partitioned = False
    words: Mapping[str, str] = {
        "pick": "IN (",
        "picked": ")",
        "skip_locked": "",
        "for_update": "",
        "unlocked": "SELECT id FROM d",
        "place": "id",
        "own_id": "id",
        "in_turn": "EXISTS (SELECT 1 FROM timebell_jobs j WHERE j.schedule_id = timebell_schedules.id"
        " AND j.hold = 'overlap')",
        "each": "CROSS JOIN timebell_jobs s WHERE s.id IN (SELECT id FROM timebell_jobs",
        "each_end": ")",
        "by_row": "",
        "last_success": LAST_SUCCESS,
        "minute": "run_at / 60000000",
        "due": "run_at <= :now",
        "due_schedule": "next_fire_at <= :now",
        "hears": "((:everything AND route NOT LIKE '@%') OR route IN (SELECT value FROM json_each(:exact))"
        " OR EXISTS (SELECT 1 FROM json_each(:prefixes) p WHERE substr(route, 1, length(p.value)) = p.value))",
    }

    def rows(self, columns: Mapping[str, str]) -> str:
        """As in Words."""
        return f"SELECT {', '.join(map(_JSON.format, columns))} FROM json_each(:rows)"  # noqa: S608

    def rows_of(self, columns: Iterable[str], varying: Sequence[str]) -> str:
        """The same of `:rows` that has only what differs between them; what all have in common is `:same_`."""
        item = "value" if len(varying) == 1 else "json_extract(value, '$[{}]')"
        values = (
            f"{item.format(varying.index(name)) if name in varying else f':same_{name}'} AS {name}" for name in columns
        )
        return f"SELECT {', '.join(values)} FROM json_each(:rows)"  # noqa: S608

    def to_db(self, instant: datetime | None) -> Any:
        """As in Dialect."""
        return None if instant is None else (instant - EPOCH) // MICROSECOND  # `to_micros`, many times a job

    from_db = staticmethod(read_micros)
