"""Statements shared by all dialects, with macros (`$name`) for the parts that differ.

A statement takes a whole batch as one JSON parameter, so its cost does not grow with round trips or bind variables:
`$rows` expands to a common table expression `d` with the rows of the batch. The other macros are defined and explained
in `dialects/postgres/macros.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Template
from typing import Protocol

from sqlalchemy import TextClause
from sqlalchemy import text as text_clause


class StatementDialect(Protocol):
    """The parts of a dialect from which the SQL of statements is generated."""

    name: str
    macros: Mapping[str, str]

    def batch_select(self, columns: Mapping[str, str]) -> str:
        """Return a SELECT that reads the JSON parameter `:rows` as rows; `columns` maps names to types."""


class Statement:
    """One SQL statement for all dialects.

    `columns` are the columns of its batch, as name=type with the types id, text, int, real, bool and instant.
    """

    def __init__(self, template: str, /, **columns: str) -> None:
        self.template = Template(template)
        self.columns = columns
        self.returned_columns: list[str] | None = None
        """The names of the returned columns, known after the first execution."""
        self.named_sql_cache: dict[str, str] = {}
        """Results of `named_sql` by dialect name. Hot paths look here first."""
        self.values_sql_cache: dict[tuple[str, int], str] = {}
        """Results of `values_sql` by dialect name and number of rows."""
        self.varying_sql_cache: dict[tuple[str, ...], str] = {}
        """Results of `varying_sql` by columns; used by one dialect only, SQLite."""
        self._clause_cache: dict[str, TextClause] = {}
        self._numbered_sql_cache: dict[str, tuple[str, list[str]]] = {}

    def named_sql(self, dialect: StatementDialect) -> str:
        """Return the SQL for drivers that bind `:name`."""
        text = self.named_sql_cache.get(dialect.name)
        if text is None:
            rows = f"d AS ({dialect.batch_select(self.columns)})" if self.columns else ""
            text = self.named_sql_cache[dialect.name] = self.template.substitute(dialect.macros, rows=rows)
        return text

    def clause(self, dialect: StatementDialect) -> TextClause:
        """Return the SQL as a SQLAlchemy clause, parsed once per dialect."""
        clause = self._clause_cache.get(dialect.name)
        if clause is None:
            clause = self._clause_cache[dialect.name] = text_clause(self.named_sql(dialect))
        return clause

    def values_sql(self, dialect: StatementDialect, count: int) -> str:
        """Return the SQL for a small batch: a VALUES list of `count` rows of `?` instead of the JSON parameter.

        The statement must have no other parameters.
        """
        text = self.values_sql_cache.get((dialect.name, count))
        if text is None:
            marks = ", ".join([f"({', '.join('?' * len(self.columns))})"] * count)
            rows = f"d({', '.join(self.columns)}) AS (VALUES {marks})"
            text = self.values_sql_cache[dialect.name, count] = self.template.substitute(dialect.macros, rows=rows)
        return text

    def varying_sql(self, batch_select: str, dialect: StatementDialect, varying: tuple[str, ...]) -> str:
        """Return the SQL for a batch whose rows differ only in the columns `varying`; `batch_select` reads them."""
        if len(self.varying_sql_cache) > 100:
            self.varying_sql_cache.clear()
        text = self.varying_sql_cache[varying] = self.template.substitute(dialect.macros, rows=f"d AS ({batch_select})")
        return text

    def numbered_sql(self, dialect: StatementDialect) -> tuple[str, list[str]]:
        """Return the SQL for asyncpg, which binds `$1`, and the parameter names in order."""
        numbered = self._numbered_sql_cache.get(dialect.name)
        if numbered is None:
            names: list[str] = []

            def number(match: re.Match[str]) -> str:
                name = match[1]
                if name not in names:
                    names.append(name)
                return f"${names.index(name) + 1}"

            text = re.sub(r"(?<!:):([a-z_]+)\b", number, self.named_sql(dialect))
            numbered = self._numbered_sql_cache[dialect.name] = (text, names)
        return numbered
