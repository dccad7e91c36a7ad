"""How the tables of `schema.py`, and the migrations that make them, are said to MariaDB.

Its DDL ends the transaction it is in, so an upgrade that was killed has done half of a migration: each step is one that
may be done again. It has no partial indexes: those of ours have the columns of their condition in front.
"""

from __future__ import annotations

import re

COLLATION = "utf8mb4_nopad_bin"
"""Ids, names and keys are the same only if they are so to the letter, blanks at the end included."""
_LED_BY = {
    "timebell_schedules_due": "enabled",
    "timebell_jobs_claim": "state, hold",
    "timebell_jobs_shared": "state, hold, shared",
    "timebell_jobs_group": "hold",
    "timebell_jobs_of_tenant": "hold",
    "timebell_jobs_running": "state",
    "timebell_jobs_dispatched": "state",
    "timebell_finished_dead": "state",
    "timebell_operations_running": "state",
}
_TYPES = ((re.compile(r"\bTEXT\b"), "LONGTEXT"), (re.compile(r"\bFLOAT\b"), "DOUBLE"))
_INDEX = re.compile(r"\s*CREATE (UNIQUE )?INDEX (\w+) ON (\w+) \((.*)\)\s*", re.DOTALL)


def said(statement: str) -> str:
    """A statement of DDL, or of a migration, as MariaDB takes it, also when it has been done before."""
    text = statement.strip()
    if (index := _INDEX.fullmatch(text)) is not None:
        unique, name, table, columns = index.groups()
        led = f"{_LED_BY[name]}, " if name in _LED_BY else ""
        return f"CREATE {unique or ''}INDEX IF NOT EXISTS {name} ON {table} ({led}{columns})"
    if text.startswith("INSERT INTO timebell_tenants"):
        return text.replace("INSERT", "INSERT IGNORE", 1)
    if not text.startswith(("CREATE TABLE", "ALTER TABLE")):
        return statement
    for pattern, own in _TYPES:
        text = pattern.sub(own, text)
    text = re.sub(r"^CREATE TABLE(?! IF)", "CREATE TABLE IF NOT EXISTS", text)
    if text.startswith("CREATE TABLE"):
        return f"{text} ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=utf8mb4 COLLATE={COLLATION}"
    return text.replace("ADD COLUMN", "ADD COLUMN IF NOT EXISTS").replace("DROP COLUMN", "DROP COLUMN IF EXISTS")
