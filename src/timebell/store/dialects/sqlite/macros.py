"""The SQLite dialect. The macros are explained in `dialects/postgres/macros.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from timebell.store.dialects.base import LAST_SUCCESS

_JSON_COLUMN = "json_extract(value, '$.{0}') AS {0}"


class SqliteMacros:
    """The macros and value conversions of SQLite: no row locks (one writer at a time), JSON by json_each."""

    name = "sqlite"
    macros: Mapping[str, str] = {"in": "IN (", "end_in": ")", "per_row": "", "last_success": LAST_SUCCESS}

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
