"""The MariaDB dialect, and the rewriting of Statements, which are written for PostgreSQL and SQLite, for MariaDB.

MariaDB has no UPDATE .. RETURNING, and allows WITH only before SELECT. So an UPDATE that returns rows becomes two
statements: the first one selects and locks the rows, with the values they will have, and the second one updates them.
An INSERT gets its WITH after the column list. Batches are passed as VALUES lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from timebell.store.statement import Statement

NAME = "mysql"
"""The SQLAlchemy name of the dialect."""

# Column names that are reserved words of MariaDB. SQL keywords in statements are upper case, so they do not match.
_RESERVED = re.compile(r"(?<![:'\w`])(key|cursor|before)\b(?!')")
_PARAMETER = re.compile(r"(?<!:):([a-z_]+)\b")
_ID_IN_BATCH = re.compile(r"IN \(<<\s*SELECT (\w+) FROM d\s*>>\)")
_ID_IN_SUBQUERY = re.compile(r"(?:\w+\.)?id IN \(<<(.*?)>>\)", re.DOTALL)
_INSERT = re.compile(r"\s*(WITH d\(.*?:rows\)) (INSERT INTO \w+ \([^)]*\)) (SELECT .*)", re.DOTALL)
_UPDATE = re.compile(
    r"\s*(?P<d>WITH d\(.*?:rows\) )?UPDATE (?P<table>\w+)(?: AS (?P<alias>\w+))? SET (?P<sets>.*?)(?P<from> FROM d)?"
    r" WHERE (?P<where>.*?)(?: RETURNING (?P<returning>[^()]*))?\s*",
    re.DOTALL,
)
_DELETE = re.compile(r"\s*(?P<d>WITH d\(.*?:rows\)) DELETE FROM (?P<table>\w+) WHERE id IN :d_id\s*", re.DOTALL)
# Bare flags as comparisons, for which MariaDB can use an index.
_BOOLEAN_REWRITES = (
    (re.compile(r"\bWHERE enabled AND"), "WHERE enabled = true AND"),
    (re.compile(r"\bAND shared\b"), "AND shared = true"),
)


_LAST_SUCCESS = (
    "SELECT f.finished_at FROM timebell_finished f WHERE f.schedule_id = s.id AND f.state = 'completed' AND"
    " f.scheduled_at >= COALESCE((SELECT g.scheduled_at FROM timebell_finished g WHERE g.schedule_id = s.id"
    " ORDER BY g.scheduled_at DESC LIMIT 1 OFFSET 19), f.scheduled_at) ORDER BY f.scheduled_at DESC LIMIT 1"
)


class MariaMacros:
    """The macros of MariaDB. Some expand to markers (`<<`, `>>`, `<each>`) that `rewrite` replaces."""

    name = NAME
    macros: Mapping[str, str] = {
        "in": "IN (<<",
        "end_in": ">>)",
        # Executed once per row of the batch, because MariaDB has no LATERAL join.
        "per_row": "<each>DUAL",
        "last_success": _LAST_SUCCESS,
    }

    def batch_select(self, columns: Mapping[str, str]) -> str:
        """Return a marker: the VALUES list for `:rows` is written for each call."""
        return "\0"


@dataclass(frozen=True, slots=True)
class RewrittenStatement:
    """A Statement rewritten for MariaDB.

    `read` is executed first: a SELECT, or the whole statement if one suffices. `write` is executed afterwards with the
    ids that `read` returned. With `per_row` both are executed once per row of the batch. `ignores_duplicates` marks an
    INSERT IGNORE.
    """

    read: str
    write: str = ""
    per_row: bool = False
    returns_rows: bool = True
    ignores_duplicates: bool = False


@lru_cache(maxsize=500)
def rewrite(statement: Statement, dialect: MariaMacros) -> RewrittenStatement:
    """Rewrite a Statement for MariaDB."""
    return _rewrite_text(statement.named_sql(dialect), statement)


def _rewrite_text(text: str, statement: Statement) -> RewrittenStatement:
    text = text.replace("d AS (\0)", f"d({', '.join(statement.columns)}) AS (:rows)")
    text = _RESERVED.sub(r"`\1`", text).replace("AS VARCHAR", "AS CHAR")
    for pattern, replacement in _BOOLEAN_REWRITES:
        text = pattern.sub(replacement, text)
    per_row = "<each>" in text
    if per_row:
        text = re.sub(r"\s*WITH d\(.*?:rows\) ", "", text, count=1)
        text = re.sub(r"SELECT d\.(\w+)", r"SELECT :\1 AS \1", text.replace("FROM d <each>", "FROM "))
        text = re.sub(r"\bd\.(\w+)", r":\1", text)
    text = _ID_IN_BATCH.sub(r"IN :d_\1", text)
    if (insert := _INSERT.fullmatch(text)) is not None:
        return _rewrite_insert(*insert.groups())
    if (update := _UPDATE.fullmatch(text)) is not None:
        return _rewrite_update(per_row=per_row, **update.groupdict())
    if (deletion := _DELETE.fullmatch(text)) is not None:
        # Force the primary key, also for small tables: a table scan would wait for rows locked by other transactions.
        source = f"({deletion['d']} SELECT * FROM d) AS d STRAIGHT_JOIN {deletion['table']} AS j FORCE INDEX (PRIMARY)"
        return RewrittenStatement(f"DELETE j FROM {source} ON j.id = d.id")
    text = text.replace("IN (<<", "IN (SELECT * FROM (").replace(">>)", ") AS picked)")
    return RewrittenStatement(_force_join_order(_drop_unused_batch(text)), per_row=per_row)


def _rewrite_insert(rows: str, into: str, select: str) -> RewrittenStatement:
    # INSERT IGNORE returns the inserted rows, but takes a shared lock on existing ones: two transactions that update
    # such a row afterwards deadlock. So it is used only if the result is needed, else ON DUPLICATE KEY UPDATE.
    ignores_duplicates = "ON CONFLICT DO NOTHING RETURNING" in select
    if ignores_duplicates:
        into = into.replace("INSERT INTO", "INSERT IGNORE INTO")
        select = select.replace(" ON CONFLICT DO NOTHING", "")
    first_column = re.search(r"INTO (\w+) \((`?\w+`?)", into)
    assert first_column is not None
    qualified = f"{first_column[1]}.{first_column[2]}"
    select = select.replace(" ON CONFLICT DO NOTHING", f" ON DUPLICATE KEY UPDATE {qualified} = {qualified}")
    select = re.sub(r" ON CONFLICT \([^)]*\) DO UPDATE SET", " ON DUPLICATE KEY UPDATE", select)
    select = re.sub(r"\bexcluded\.(\w+|`\w+`)", r"VALUES(\1)", select)
    # Lock the rows that are copied to another table, or two transactions could move the same row.
    if " JOIN " in select:
        head, returning, tail = select.partition(" RETURNING ")
        select = f"{_force_join_order(head)} FOR UPDATE{returning}{tail}"
    return RewrittenStatement(f"{into} {rows} {select}", ignores_duplicates=ignores_duplicates)


def _rewrite_update(
    d: str | None,
    table: str,
    alias: str | None,
    sets: str,
    where: str,
    returning: str | None,
    *,
    per_row: bool,
    **clauses: Any,
) -> RewrittenStatement:
    target = alias or table
    pairs = [pair.strip().split(" = ", 1) for pair in _split_assignments(sets)]
    joins_batch = clauses["from"] is not None
    subquery = _ID_IN_SUBQUERY.search(where)
    if returning is None and subquery is None:
        if not joins_batch:
            return RewrittenStatement(f"UPDATE {table} SET {sets} WHERE {where}", returns_rows=False)
        changes = ", ".join(f"{target}.{name} = {value}" for name, value in pairs)
        source = f"({d}SELECT * FROM d) AS d"
        return RewrittenStatement(
            f"UPDATE {source} STRAIGHT_JOIN {table} AS {target} FORCE INDEX (PRIMARY) SET {changes} WHERE {where}",
            returns_rows=False,
        )
    new = dict(pairs)
    returned = []
    for column in (returning or "").split(","):
        bare = column.strip().rpartition(".")[2]
        if bare and bare != "id":
            returned.append(f"{new[bare]} AS {bare}" if bare in new else f"{target}.{bare}")
    columns = ", ".join([f"{target}.id", *returned])
    if subquery is not None:
        rest = where.replace(subquery[0], "true")
        first = f"{d.rstrip()}, " if d is not None and re.search(r"\bd\b", subquery[1]) else "WITH "
        read = (
            f"{first}picked(picked_id) AS ({subquery[1].strip()}) SELECT {columns} FROM picked"
            f" STRAIGHT_JOIN {table} AS {target} FORCE INDEX (PRIMARY) ON {target}.id = picked_id"
            f" WHERE {rest} FOR UPDATE"
        )
    elif joins_batch:
        read = (
            f"{d}SELECT {columns} FROM d STRAIGHT_JOIN {table} AS {target} FORCE INDEX (PRIMARY)"
            f" WHERE {where} FOR UPDATE"
        )
    else:
        read = _drop_unused_batch(f"{d or ''}SELECT {columns} FROM {table} WHERE {where} FOR UPDATE")
    if joins_batch:
        changes = ", ".join(f"{target}.{name} = {value}" for name, value in pairs)
        write = (
            f"UPDATE ({d}SELECT * FROM d) AS d STRAIGHT_JOIN {table} AS {target} FORCE INDEX (PRIMARY) SET {changes}"
            f" WHERE {target}.id = d.id AND {target}.id IN :ids"
        )
    else:
        write = f"UPDATE {table} SET {sets} WHERE id IN :ids"
    return RewrittenStatement(read, write, per_row=per_row, returns_rows=returning is not None)


def _split_assignments(sets: str) -> list[str]:
    """Split the assignments of a SET clause at the commas outside of parentheses."""
    return re.split(r",(?![^()]*\))", sets)


def _force_join_order(text: str) -> str:
    """Join from the few rows of the batch to the table by its primary key, in this order."""
    text = re.sub(
        r"FROM d (?:CROSS )?JOIN (timebell_jobs) j ON j\.id = d\.id",
        r"FROM d STRAIGHT_JOIN \1 j FORCE INDEX (PRIMARY) ON j.id = d.id",
        text,
    )
    return text.replace("FROM d CROSS JOIN", "FROM d STRAIGHT_JOIN")


def _drop_unused_batch(text: str) -> str:
    """Remove the batch from a statement that does not refer to it, because its ids are listed as parameters."""
    rest = re.sub(r"^\s*WITH d\(.*?:rows\)\s*", "", text, count=1)
    return text if re.search(r"\bd\b", rest) else rest


def bind_parameters(
    text: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], params: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...]]:
    """Return the SQL with `%s` for the driver, and the values in order."""
    values: list[Any] = []

    def bind(match: re.Match[str]) -> str:
        name = match[1]
        if name == "rows":
            if not rows:
                return f"SELECT {', '.join(['NULL'] * len(columns))} FROM DUAL WHERE false"
            for row in rows:
                values.extend(map(row.get, columns))
            placeholders = f"({', '.join(['%s'] * len(columns))})"
            return f"VALUES {', '.join([placeholders] * len(rows))}"
        value = [row[name[2:]] for row in rows] if name.startswith("d_") else params[name]
        if isinstance(value, list | tuple):
            values.extend(value)
            return f"({', '.join(['%s'] * len(value)) or 'SELECT NULL FROM DUAL WHERE false'})"
        values.append(value)
        return "%s"

    return _PARAMETER.sub(bind, text.replace("%", "%%")), tuple(values)
