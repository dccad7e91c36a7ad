"""Conversions of values. Instants are microseconds since 1970."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Select, Table, func, select

from timebell.model.routes import Routes
from timebell.store.dialects.batches import encode
from timebell.store.dialects.on_conflict import OnConflict
from timebell.store.dialects.operations import Executor
from timebell.store.types import EPOCH, MICROSECOND, optional_from_micros

if TYPE_CHECKING:
    from sqlalchemy.dialects.sqlite import Insert


class Values(OnConflict):
    """Base of the operations."""

    @staticmethod
    def insert(table: Table) -> Insert:
        """Return an INSERT of the dialect in SQLAlchemy."""
        from sqlalchemy.dialects.sqlite import insert  # with all drivers: 10 ms, when the store is opened

        return insert(table)

    def to_db(self, instant: datetime | None) -> Any:
        """Convert an instant to a parameter or JSON value."""
        return None if instant is None else (instant - EPOCH) // MICROSECOND  # `to_micros` inlined: many calls per job

    from_db = staticmethod(optional_from_micros)

    def match_keys(self, query: Select[Any], column: ColumnElement[str], keys: Collection[str]) -> Select[Any]:
        """Restrict a query to rows whose text column has one of many values, found by an index of the column.

        All values are one parameter, because binding each of a thousand takes longer than finding the rows.
        """
        values = func.json_each(encode(sorted(keys))).table_valued("value")
        return query.where(column.in_(select(values.c.value)))

    def json_text(self, column: ColumnElement[str], names: Sequence[str]) -> ColumnElement[str]:
        """Return an expression for the text at a path of names in a JSON text."""
        return func.json_extract(column, "$" + "".join(f'."{name}"' for name in names))

    def terminate_stalled_sessions(self, tx: Executor) -> list[int]:
        """Return []: there are no sessions."""
        return []


@functools.lru_cache(maxsize=256)  # a node has two or three instances
def route_params(routes: Routes) -> dict[str, Any]:
    """Return the parameters of statements that select routes; lists are JSON."""
    params = routes.sql_params()
    return {**params, "exact": encode(params["exact"]), "prefixes": encode(params["prefixes"])}
