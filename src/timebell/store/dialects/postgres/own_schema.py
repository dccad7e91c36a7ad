"""Tables in a schema of their own, beside those of the application, which has another `search_path`.

Timebell's connections have the schema as their `search_path`. On a connection of the caller or of a handler it is set
for the length of an operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from timebell.store.transaction import SqlTransaction

P = ParamSpec("P")
R = TypeVar("R")

_SET_SEARCH_PATH = text(
    "SELECT before, set_config('search_path', :path, true)"
    " FROM (SELECT current_setting('search_path') AS before OFFSET 0) AS setting"
)


def in_schema(schema: str | None, operation: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return an operation that finds the tables of `schema` on any connection; None: those of the connection."""
    if schema is None:
        return operation

    @functools.wraps(operation)
    def run_in_schema(tx: SqlTransaction, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with _search_path(tx.connection, schema):
            return operation(tx, *args, **kwargs)

    return run_in_schema


@contextmanager
def _search_path(connection: Connection, schema: str) -> Iterator[None]:
    """Set `search_path` until the block ends.

    It is not restored after an error of the database: the server does that when the caller rolls back.
    """
    before = connection.execute(_SET_SEARCH_PATH, {"path": schema}).scalar_one()
    try:
        yield
    except DBAPIError:
        raise
    except Exception:
        connection.execute(_SET_SEARCH_PATH, {"path": before})
        raise
    connection.execute(_SET_SEARCH_PATH, {"path": before})
