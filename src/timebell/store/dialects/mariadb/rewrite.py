"""How MariaDB says it: the statements of `store/sql`, which are written as PostgreSQL and SQLite take them, made ones
that MariaDB takes.

It has no UPDATE .. RETURNING and no WITH before anything but SELECT. So an update that answers is two statements: what
it will have written is read, and locked, first; and an INSERT has its WITH behind it. Rows are listed as VALUES.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from timebell.store.statement import Statement
from timebell.store.types import from_micros, to_micros

NAME = "mysql"
"""What SQLAlchemy calls the dialect."""
_NOW = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"

# Words of MariaDB's that are columns of ours. Keywords of our statements are upper case.
_RESERVED = re.compile(r"(?<![:'\w`])(key|cursor|before)\b(?!')")
_PARAMETER = re.compile(r"(?<!:):([a-z_]+)\b")
_PICKED_ROWS = re.compile(r"IN \(<<\s*SELECT (\w+) FROM d\s*>>\)")
_PICKED = re.compile(r"(?:\w+\.)?id IN \(<<(.*?)>>\)", re.DOTALL)
_INSERT = re.compile(r"\s*(WITH d\(.*?:rows\)) (INSERT INTO \w+ \([^)]*\)) (SELECT .*)", re.DOTALL)
_UPDATE = re.compile(
    r"\s*(?P<d>WITH d\(.*?:rows\) )?UPDATE (?P<table>\w+)(?: AS (?P<alias>\w+))? SET (?P<sets>.*?)(?P<from> FROM d)?"
    r" WHERE (?P<where>.*?)(?: RETURNING (?P<returning>[^()]*))?\s*",
    re.DOTALL,
)
_DELETE = re.compile(r"\s*(?P<d>WITH d\(.*?:rows\)) DELETE FROM (?P<table>\w+) WHERE id IN :d_id\s*", re.DOTALL)
# Flags by themselves, in words that an index can be used for.
_FLAGS = (
    (re.compile(r"\bWHERE enabled AND"), "WHERE enabled = true AND"),
    (re.compile(r"\bAND shared\b"), "AND shared = true"),
)


_LAST_SUCCESS = (
    "SELECT f.finished_at FROM timebell_finished f WHERE f.schedule_id = s.id AND f.state = 'completed' AND"
    " f.scheduled_at >= COALESCE((SELECT g.scheduled_at FROM timebell_finished g WHERE g.schedule_id = s.id"
    " ORDER BY g.scheduled_at DESC LIMIT 1 OFFSET 19), f.scheduled_at) ORDER BY f.scheduled_at DESC LIMIT 1"
)


class MariaWords:
    """How MariaDB says it. `server_clock=False` is for virtual time: then only `:now` decides what is due."""

    delete_in_cte = False
    partitioned = False

    def __init__(self, *, server_clock: bool = True) -> None:
        self.name = f"{NAME}{'' if server_clock else ' on virtual time'}"
        # Never early, even if this node's idea of the time is wrong: the server's own clock must agree.
        guard = f" AND {{}} <= {_NOW}" if server_clock else ""
        self.words: Mapping[str, str] = {
            "pick": "IN (<<",
            "picked": ">>)",
            "skip_locked": "FOR UPDATE SKIP LOCKED",
            "for_update": "FOR UPDATE",
            "unlocked": "SELECT id FROM d <skip>",  # said of the lock itself, which comes later here
            "place": "id",
            "own_id": "j.id",
            "minute": "run_at DIV 60000000",
            "in_turn": "true",
            # Said of one row at a time: what is in brackets sees nothing of what is beside them.
            "each": "<each>timebell_jobs s",
            "by_row": "<each>DUAL",
            "last_success": _LAST_SUCCESS,
            "each_end": "",
            "due": "run_at <= :now" + guard.format("run_at"),
            "due_schedule": "next_fire_at <= :now" + guard.format("next_fire_at"),
            "hears": "(route IN :exact OR (:everything AND route NOT LIKE '@%') OR :prefixes)",
        }

    def rows(self, columns: Mapping[str, str]) -> str:
        """As in Words: what `:rows` stands for is written for each call."""
        return "\0"

    def to_db(self, instant: datetime | None) -> Any:
        """As in Dialect."""
        return None if instant is None else to_micros(instant)

    def from_db(self, value: Any) -> Any:
        """As in Dialect."""
        return None if value is None else from_micros(value)


@dataclass(frozen=True, slots=True)
class Said:
    """A Statement as MariaDB takes it. `read` is a SELECT, or whatever is one statement; `write` is what
    comes after it, of the ids that it gave. With `each` all is said once for each row. An INSERT that passes over what
    is there is `ignoring`."""

    read: str
    write: str = ""
    each: bool = False
    answers: bool = True
    ignoring: bool = False


@lru_cache(maxsize=500)
def said(statement: Statement, words: MariaWords) -> Said:
    """What a Statement is to MariaDB."""
    text = statement.named(words)
    if "<skip>" in text:
        waiting = _said(text.replace(" <skip>", ""), statement)
        return replace(waiting, read=waiting.read.replace("FOR UPDATE", "FOR UPDATE SKIP LOCKED"))
    return _said(text, statement)


def _said(text: str, statement: Statement) -> Said:
    text = text.replace("d AS (\0)", f"d({', '.join(statement.columns)}) AS (:rows)")
    text = _RESERVED.sub(r"`\1`", text).replace("AS VARCHAR", "AS CHAR")
    for pattern, better in _FLAGS:
        text = pattern.sub(better, text)
    each = "<each>" in text
    if each:
        text = re.sub(r"\s*WITH d\(.*?:rows\) ", "", text, count=1)
        text = re.sub(r"SELECT d\.(\w+)", r"SELECT :\1 AS \1", text.replace("FROM d <each>", "FROM "))
        text = re.sub(r"\bd\.(\w+)", r":\1", text)
    text = _PICKED_ROWS.sub(r"IN :d_\1", text)
    if (insert := _INSERT.fullmatch(text)) is not None:
        return _insert(*insert.groups())
    if (update := _UPDATE.fullmatch(text)) is not None:
        return _update(each=each, **update.groupdict())
    if (gone := _DELETE.fullmatch(text)) is not None:
        # By its key, also where there are few rows: a look at all of them would wait for those that others have locked.
        source = f"({gone['d']} SELECT * FROM d) AS d STRAIGHT_JOIN {gone['table']} AS j FORCE INDEX (PRIMARY)"
        return Said(f"DELETE j FROM {source} ON j.id = d.id")
    text = text.replace("IN (<<", "IN (SELECT * FROM (").replace(">>)", ") AS picked)")
    return Said(_join(_without_rows(text)), each=each)


def _insert(rows: str, into: str, select: str) -> Said:
    # IGNORE says which were written, and locks what is there for reading only: who then writes to it too gets into a
    # deadlock with another who does. So it is used only where the answer is.
    ignoring = "ON CONFLICT DO NOTHING RETURNING" in select
    if ignoring:
        into = into.replace("INSERT INTO", "INSERT IGNORE INTO")
        select = select.replace(" ON CONFLICT DO NOTHING", "")
    first = re.search(r"INTO (\w+) \((`?\w+`?)", into)
    assert first is not None
    same = f"{first[1]}.{first[2]}"
    select = select.replace(" ON CONFLICT DO NOTHING", f" ON DUPLICATE KEY UPDATE {same} = {same}")
    select = re.sub(r" ON CONFLICT \([^)]*\) DO UPDATE SET", " ON DUPLICATE KEY UPDATE", select)
    select = re.sub(r"\bexcluded\.(\w+|`\w+`)", r"VALUES(\1)", select)
    # What is moved elsewhere is locked, or two would move it.
    if " JOIN " in select:
        head, returning, tail = select.partition(" RETURNING ")
        select = f"{_join(head)} FOR UPDATE{returning}{tail}"
    return Said(f"{into} {rows} {select}", ignoring=ignoring)


def _update(
    d: str | None, table: str, alias: str | None, sets: str, where: str, returning: str | None, *, each: bool, **of: Any
) -> Said:
    own = alias or table
    pairs = [pair.strip().split(" = ", 1) for pair in _apart(sets)]
    joined = of["from"] is not None
    picked = _PICKED.search(where)
    if returning is None and picked is None:
        if not joined:
            return Said(f"UPDATE {table} SET {sets} WHERE {where}", answers=False)
        changes = ", ".join(f"{own}.{name} = {value}" for name, value in pairs)
        source = f"({d}SELECT * FROM d) AS d"
        return Said(
            f"UPDATE {source} STRAIGHT_JOIN {table} AS {own} FORCE INDEX (PRIMARY) SET {changes} WHERE {where}",
            answers=False,
        )
    new = dict(pairs)
    asked = []
    for column in (returning or "").split(","):
        bare = column.strip().rpartition(".")[2]
        if bare and bare != "id":
            asked.append(f"{new[bare]} AS {bare}" if bare in new else f"{own}.{bare}")
    columns = ", ".join([f"{own}.id", *asked])
    if picked is not None:
        rest = where.replace(picked[0], "true")
        first = f"{d.rstrip()}, " if d is not None and re.search(r"\bd\b", picked[1]) else "WITH "
        read = (
            f"{first}picked(picked_id) AS ({picked[1].strip()}) SELECT {columns} FROM picked"
            f" STRAIGHT_JOIN {table} AS {own} FORCE INDEX (PRIMARY) ON {own}.id = picked_id WHERE {rest} FOR UPDATE"
        )
    elif joined:
        read = (
            f"{d}SELECT {columns} FROM d STRAIGHT_JOIN {table} AS {own} FORCE INDEX (PRIMARY) WHERE {where} FOR UPDATE"
        )
    else:
        read = _without_rows(f"{d or ''}SELECT {columns} FROM {table} WHERE {where} FOR UPDATE")
    if joined:
        changes = ", ".join(f"{own}.{name} = {value}" for name, value in pairs)
        write = (
            f"UPDATE ({d}SELECT * FROM d) AS d STRAIGHT_JOIN {table} AS {own} FORCE INDEX (PRIMARY) SET {changes}"
            f" WHERE {own}.id = d.id AND {own}.id IN :ids"
        )
    else:
        write = f"UPDATE {table} SET {sets} WHERE id IN :ids"
    return Said(read, write, each=each, answers=returning is not None)


def _apart(sets: str) -> list[str]:
    """Assignments, parted at the commas that are in no brackets."""
    return re.split(r",(?![^()]*\))", sets)


def _join(text: str) -> str:
    """From the few given rows to those of a table, by its key."""
    text = re.sub(
        r"FROM d (?:CROSS )?JOIN (timebell_jobs) j ON j\.id = d\.id",
        r"FROM d STRAIGHT_JOIN \1 j FORCE INDEX (PRIMARY) ON j.id = d.id",
        text,
    )
    return text.replace("FROM d CROSS JOIN", "FROM d STRAIGHT_JOIN")


def _without_rows(text: str) -> str:
    """Without the rows that nothing speaks of any more, as their ids are listed."""
    rest = re.sub(r"^\s*WITH d\(.*?:rows\)\s*", "", text, count=1)
    return text if re.search(r"\bd\b", rest) else rest


def bound(
    text: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], params: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...]]:
    """The text as drivers take it, with `%s`, and the values in order."""
    values: list[Any] = []

    def put(match: re.Match[str]) -> str:
        name = match[1]
        if name == "rows":
            if not rows:
                return f"SELECT {', '.join(['NULL'] * len(columns))} FROM DUAL WHERE false"
            for row in rows:
                values.extend(map(row.get, columns))
            mark = f"({', '.join(['%s'] * len(columns))})"
            return f"VALUES {', '.join([mark] * len(rows))}"
        if name == "prefixes":
            values.extend(each for prefix in params[name] for each in (len(prefix), prefix))
            return " OR ".join(["LEFT(route, %s) = %s"] * len(params[name])) or "false"
        value = [row[name[2:]] for row in rows] if name.startswith("d_") else params[name]
        if isinstance(value, list | tuple):
            values.extend(value)
            return f"({', '.join(['%s'] * len(value)) or 'SELECT NULL FROM DUAL WHERE false'})"
        values.append(value)
        return "%s"

    return _PARAMETER.sub(put, text.replace("%", "%%")), tuple(values)
