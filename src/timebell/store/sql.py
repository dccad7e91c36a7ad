"""Literal SQL statements and the notation of their parameters for each driver.

The text of a statement is complete: it can be pasted into a console, with values for its parameters (`:name`). Only the
notation of the parameters differs between drivers, and SQLAlchemy converts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from sqlalchemy import Dialect, TextClause, text

Row = Mapping[str, Any]


class SQL:
    """One literal statement."""

    def __init__(self, statement: str) -> None:
        self.text = statement
        self.returned_columns: list[str] | None = None
        """The names of the returned columns, known after the first execution. Used by one dialect only, SQLite."""

    @cached_property
    def clause(self) -> TextClause:
        """The statement for a SQLAlchemy connection."""
        return text(self.text)

    @cached_property
    def numbered(self) -> tuple[str, list[str]]:
        """The statement for asyncpg, which binds `$1`, and the names of the parameters in order."""
        from sqlalchemy.dialects.postgresql.asyncpg import dialect

        return self._compile(dialect())  # type: ignore[no-untyped-call]

    @cached_property
    def formatted(self) -> tuple[str, list[str]]:
        """The statement for PyMySQL, which binds `%s`, and the names of the parameters in order."""
        from sqlalchemy.dialects.mysql.pymysql import dialect

        return self._compile(dialect())

    def _compile(self, dialect: Dialect) -> tuple[str, list[str]]:
        compiled: Any = self.clause.compile(dialect=dialect)
        return compiled.string, list(compiled.positiontup)
