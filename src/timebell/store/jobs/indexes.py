"""Helpers to match queries of live jobs with their partial indexes.

The indexes for listing jobs exclude running jobs, so that a claim does not add entries to them. Running jobs are few,
at most one per slot, and have an index of their own.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from timebell.store.schema import NOT_RUNNING

NOT_RUNNING_CLAUSE, RUNNING_CLAUSE = (
    text(NOT_RUNNING),
    text("state = 'running'"),
)  # literally as in the indexes: with bound values they would not be used


class UnindexedFilter(FunctionElement[str]):
    """Prevents the planner from using an index of this column.

    Without statistics SQLite and PostgreSQL assume that a tenant is more selective than an hour, and would read the
    whole history of the tenant, even if only in an index.
    """

    inherit_cache = True


@compiles(UnindexedFilter)
def _compile_plain(element: Any, compiler: Any, **options: Any) -> str:
    return str(compiler.process(element.clauses, **options))


@compiles(UnindexedFilter, "sqlite")
def _compile_sqlite(element: Any, compiler: Any, **options: Any) -> str:
    return f"+{compiler.process(element.clauses, **options)}"


@compiles(UnindexedFilter, "postgresql")
def _compile_postgresql(element: Any, compiler: Any, **options: Any) -> str:
    return f"(({compiler.process(element.clauses, **options)} || '') COLLATE \"C\")"


def split_by_running(query: Select[Any]) -> tuple[Select[Any], Select[Any]]:
    """Split a query of live jobs into two: of jobs that are not running, and of running ones."""
    return query.where(NOT_RUNNING_CLAUSE), query.where(RUNNING_CLAUSE)
