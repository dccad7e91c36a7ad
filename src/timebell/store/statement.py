"""The hot statements: SQL text shared by all dialects, with the few words that differ left open.

A statement takes a whole batch as one JSON parameter, so its cost does not grow with round trips or bind
variables: `$rows` becomes a common table expression that reads the batch back as rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Template
from typing import NamedTuple, Protocol

from sqlalchemy import TextClause
from sqlalchemy import text as text_clause


class Words(Protocol):
    """What a dialect says where the others say something else."""

    name: str
    words: Mapping[str, str]

    def rows(self, columns: Mapping[str, str]) -> str:
        """SELECT that reads the JSON parameter `:rows` as rows of these columns and types."""


class InTwo(NamedTuple):
    """A statement that returns rows, for who reads them one by one at a cost: in two, in one transaction.

    `read` gives all that it returns as one JSON text, and the JSON list of `:ids` that `write`, which returns nothing,
    may read; by them it writes just what was read.
    """

    read: str
    write: str


class Statement:
    """One statement; `columns` (name -> id | text | int | real | bool | instant) are those of its batch."""

    def __init__(self, template: str, in_two: InTwo | None = None, /, **columns: str) -> None:
        self.template = Template(template)
        self.columns = columns
        self.in_two = (
            None if in_two is None else (Statement(in_two.read, **columns), Statement(in_two.write, **columns))
        )
        self.returned: list[str] | None = None
        """The names of what it returns, once a driver has said so."""
        self.by_name: dict[str, str] = {}
        """What `named` gave, by the dialect's name: to be looked up there first where it is asked often."""
        self.by_count: dict[tuple[str, int], str] = {}
        """The same of `listed`."""
        self.by_varying: dict[tuple[str, ...], str] = {}
        """What `spread` gave; only one dialect asks for it."""
        self.many = False
        """Whether it returned many rows when it last ran: then it is run in two. A hint."""
        self._clauses: dict[str, TextClause] = {}
        self._numbered: dict[str, tuple[str, list[str]]] = {}

    def named(self, words: Words) -> str:
        """For drivers that bind `:name`."""
        text = self.by_name.get(words.name)
        if text is None:
            rows = f"d AS ({words.rows(self.columns)})" if self.columns else ""
            text = self.by_name[words.name] = self.template.substitute(words.words, rows=rows)
        return text

    def clause(self, words: Words) -> TextClause:
        """For SQLAlchemy, which reads the text once."""
        found = self._clauses.get(words.name)
        if found is None:
            found = self._clauses[words.name] = text_clause(self.named(words))
        return found

    def listed(self, words: Words, count: int) -> str:
        """For batches of a few: `count` rows of `?`, column by column, where the others read one JSON parameter.

        Other parameters there must be none.
        """
        text = self.by_count.get((words.name, count))
        if text is None:
            marks = ", ".join([f"({', '.join('?' * len(self.columns))})"] * count)
            rows = f"d({', '.join(self.columns)}) AS (VALUES {marks})"
            text = self.by_count[words.name, count] = self.template.substitute(words.words, rows=rows)
        return text

    def spread(self, rows: str, words: Words, varying: tuple[str, ...]) -> str:
        """For batches whose rows differ in these columns only; `rows` reads them."""
        if len(self.by_varying) > 100:
            self.by_varying.clear()
        text = self.by_varying[varying] = self.template.substitute(words.words, rows=f"d AS ({rows})")
        return text

    def numbered(self, words: Words) -> tuple[str, list[str]]:
        """For asyncpg, which binds `$1`: the text and the names in order."""
        found = self._numbered.get(words.name)
        if found is None:
            names: list[str] = []

            def number(match: re.Match[str]) -> str:
                name = match[1]
                if name not in names:
                    names.append(name)
                return f"${names.index(name) + 1}"

            text = re.sub(r"(?<!:):([a-z_]+)\b", number, self.named(words))
            found = self._numbered[words.name] = (text, names)
        return found
