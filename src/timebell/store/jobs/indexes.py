"""Queries of live jobs, as their indexes have them: those of pages are without what runs, so that no claim writes them.

What runs are few, as many as there are hands, and in an index of their own.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from timebell.store.schema import NOT_RUNNING

RESTING, RUNNING = text(NOT_RUNNING), text("state = 'running'")  # as the indexes say it: bound values would not do


class Unsought(FunctionElement[str]):
    """A column that no rows are looked up by. Without statistics SQLite and PostgreSQL take a tenant for rarer than an
    hour, and would read all that the tenant ever did, be it in an index alone."""

    inherit_cache = True


@compiles(Unsought)
def _as_it_is(element: Any, compiler: Any, **how: Any) -> str:
    return str(compiler.process(element.clauses, **how))


@compiles(Unsought, "sqlite")
def _plus(element: Any, compiler: Any, **how: Any) -> str:
    return f"+{compiler.process(element.clauses, **how)}"


@compiles(Unsought, "postgresql")
def _joined(element: Any, compiler: Any, **how: Any) -> str:
    return f"(({compiler.process(element.clauses, **how)} || '') COLLATE \"C\")"


def apart(query: Select[Any]) -> tuple[Select[Any], Select[Any]]:
    """A query of live jobs as two: of those that do not run, and of those that do."""
    return query.where(RESTING), query.where(RUNNING)
