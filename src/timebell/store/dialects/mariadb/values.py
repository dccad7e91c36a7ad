"""Conversions of values, and the clock that decides which jobs are due. Instants are microseconds since 1970."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Insert, Select, String, Table, func, text
from sqlalchemy.dialects.mysql import insert

from timebell.model.routes import Routes
from timebell.store.dialects.batches import encode, split_by_size
from timebell.store.dialects.operations import Executor
from timebell.store.types import from_micros, to_micros

MAX_BATCH_BYTES = 8_000_000
"""Of one JSON parameter. The usual max_allowed_packet of the server is 16 MB."""
MATCHED_KEYS = text("SELECT value FROM JSON_TABLE(:keys, '$[*]' COLUMNS (value VARCHAR(200) PATH '$')) AS given")


class Values:
    """Base of the operations."""

    virtual_time = False
    """True in simulations: the node's own clock decides which jobs are due, and not also the server's."""

    def to_db(self, instant: datetime | None) -> Any:
        """Convert an instant to a parameter or JSON value."""
        return None if instant is None else to_micros(instant)

    def from_db(self, value: Any) -> Any:
        """Convert a value from the database to an instant, or None."""
        return None if value is None else from_micros(value)

    @staticmethod
    @functools.cache
    def insert_ignoring_duplicates(table: Table) -> Insert:
        """Return an INSERT that ignores rows whose key exists already.

        An update without effect, because INSERT IGNORE also ignores other errors, and takes a shared lock on existing
        rows: two transactions that update such a row afterwards would deadlock.
        """
        key = table.primary_key.columns[0]
        return insert(table).on_duplicate_key_update({key.name: key})

    @staticmethod
    @functools.cache
    def upsert(
        table: Table, *, replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = ()
    ) -> Insert:  # fmt: skip
        """Return an INSERT that updates the rows whose key exists already; see `Operations.upsert`."""
        statement = insert(table)
        new = statement.inserted
        changes = {name: new[name] for name in replace} | {name: table.c[name] + new[name] for name in add}
        return statement.on_duplicate_key_update(changes)

    @staticmethod
    @functools.cache
    def on_conflict(
        table: Table, *, replace: tuple[str, ...] = (), add: tuple[str, ...] = (), key: tuple[str, ...] = ()
    ) -> str:  # fmt: skip
        """Return the clause of an INSERT that does the same as `upsert`, as SQL."""
        changes = [f"{name} = VALUES({name})" for name in replace]
        changes += [f"{name} = {table.name}.{name} + VALUES({name})" for name in add]
        return f"ON DUPLICATE KEY UPDATE {', '.join(changes)}"

    def match_keys(self, query: Select[Any], column: ColumnElement[str], keys: Collection[str]) -> Select[Any]:
        """Restrict a query to rows whose text column has one of many values, found by an index of the column.

        Without current statistics, the plan of `IN (...)` reads all rows that match the other conditions.
        """
        values = MATCHED_KEYS.bindparams(keys=encode(sorted(keys))).columns(value=String).subquery("matched")
        return query.select_from(values).prefix_with("STRAIGHT_JOIN").where(column == values.c.value)

    def json_text(self, column: ColumnElement[str], names: Sequence[str]) -> ColumnElement[str]:
        """Return an expression for the text at a path of names in a JSON text."""
        return func.json_value(column, "$" + "".join(f'."{name}"' for name in names))

    def terminate_stalled_sessions(self, tx: Executor) -> list[int]:
        """Return []: the server terminates them itself (net_read_timeout, net_write_timeout)."""
        return []


def batches(rows: Sequence[Any]) -> Iterator[str]:
    """Encode a batch in as few JSON parameters as the maximum packet size allows."""
    return split_by_size(rows, MAX_BATCH_BYTES)


@functools.lru_cache(maxsize=256)  # a node has two or three instances
def route_params(routes: Routes) -> dict[str, Any]:
    """Return the parameters of statements that select routes.

    `exact` is a list with a space around each route, which contains none. `prefixes` is a regular expression, or None.
    """
    params = routes.sql_params()
    prefixes = "|".join(map(re.escape, params["prefixes"]))
    return {
        "everything": params["everything"], "exact": f" {' '.join(params['exact'])} ",
        "prefixes": f"^({prefixes})" if prefixes else None, "only_tenant": params["only_tenant"],
    }  # fmt: skip
