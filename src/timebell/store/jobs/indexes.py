"""Helpers to match queries of live jobs with their partial indexes.

The indexes for listing jobs exclude running jobs, so that a claim does not add entries to them. Running jobs are few,
at most one per slot, and have an index of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import BindParameter, Select, bindparam, select, text, true
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from timebell.store.schema import CLAIMABLE, NOT_RUNNING, jobs

NOT_RUNNING_CLAUSE, RUNNING_CLAUSE = (
    text(NOT_RUNNING),
    text("state = 'running'"),
)  # literally as in the indexes: with bound values they would not be used
COUNT_LIMIT = 10_000
"""Counts stop at one row more, because there may be millions."""


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


@compiles(UnindexedFilter, "mysql", "mariadb")
def _compile_mariadb(element: Any, compiler: Any, **options: Any) -> str:
    return f"CONCAT({compiler.process(element.clauses, **options)}, '')"


@compiles(UnindexedFilter, "postgresql")
def _compile_postgresql(element: Any, compiler: Any, **options: Any) -> str:
    return f"(({compiler.process(element.clauses, **options)} || '') COLLATE \"C\")"


class SingleValue(FunctionElement[str]):
    """The required value of a column, compared so that PostgreSQL keeps the column in ORDER BY.

    After `column = value`, PostgreSQL would reduce ORDER BY column, id to ORDER BY id, and read the primary key
    backwards past all jobs of other tenants until it has found enough rows. With `column = ANY (ARRAY[value])`, only an
    index that begins with the column has the required order.
    """

    inherit_cache = True


@compiles(SingleValue)
def _compile_value(element: Any, compiler: Any, **options: Any) -> str:
    return str(compiler.process(element.clauses, **options))


@compiles(SingleValue, "postgresql")
def _compile_array(element: Any, compiler: Any, **options: Any) -> str:
    return f"ANY (ARRAY[{compiler.process(element.clauses, **options)}])"


def split_by_running(query: Select[Any]) -> tuple[Select[Any], Select[Any]]:
    """Split a query of live jobs into two: of jobs that are not running, and of running ones."""
    return query.where(NOT_RUNNING_CLAUSE), query.where(RUNNING_CLAUSE)


def select_due(
    columns: Sequence[Any], tenant_id: str, queue: str, priority: int, before: datetime | None = None
) -> Select[Any]:
    """Select a tenant's claimable jobs of a lane, or those that are due before an instant, earliest first.

    The index timebell_jobs_shared has the jobs that were created while there were several tenants. The others belong
    to the tenant `default`, for which the lane is read in the claim index.
    """
    j = jobs.c
    due = select(*columns).where(text(CLAIMABLE), j.queue == queue, j.priority == priority)
    if before is not None:
        due = due.where(j.run_at < before)
    if tenant_id == "default":
        return due.where(UnindexedFilter(j.tenant_id) == tenant_id).order_by(j.run_at)
    # A literal, so that PostgreSQL plans for this tenant: a plan for all tenants may suit only those with many jobs.
    literal_tenant: BindParameter[str] = bindparam("tenant", tenant_id, literal_execute=True)
    # `shared` is as in the index of PostgreSQL and SQLite; that of MariaDB needs the comparison.
    return due.where(text("shared"), j.shared == true(), j.tenant_id == literal_tenant).order_by(j.run_at)
