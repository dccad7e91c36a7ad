"""Rewrite DDL of `schema.py` and of migrations for MariaDB.

DDL commits the current transaction on MariaDB, so an interrupted upgrade leaves a migration half done. Therefore each
statement is made idempotent. MariaDB has no partial indexes: ours get the columns of their condition in front.
"""

from __future__ import annotations

import re

COLLATION = "utf8mb4_nopad_bin"
"""Ids, names and keys are compared exactly, including case and trailing spaces."""
_LEADING_COLUMNS = {
    "timebell_schedules_due": "enabled",
    "timebell_jobs_claim": "state, hold",
    "timebell_jobs_shared": "state, hold, shared",
    "timebell_jobs_group": "hold",
    "timebell_jobs_of_tenant": "hold",
    "timebell_jobs_running": "state",
    "timebell_jobs_dispatched": "state",
    "timebell_finished_dead": "state",
    "timebell_finished_missed": "state",
    "timebell_operations_running": "state",
}
_TYPE_REWRITES = ((re.compile(r"\bTEXT\b"), "LONGTEXT"), (re.compile(r"\bFLOAT\b"), "DOUBLE"))
_CREATE_INDEX = re.compile(r"\s*CREATE (UNIQUE )?INDEX (\w+) ON (\w+) \((.*)\)\s*", re.DOTALL)


def rewrite_ddl(statement: str) -> str:
    """Rewrite a statement of a migration for MariaDB, so that it may also be repeated."""
    text = statement.strip()
    if (index := _CREATE_INDEX.fullmatch(text)) is not None:
        unique, name, table, columns = index.groups()
        leading = f"{_LEADING_COLUMNS[name]}, " if name in _LEADING_COLUMNS else ""
        return f"CREATE {unique or ''}INDEX IF NOT EXISTS {name} ON {table} ({leading}{columns})"
    if text.startswith("INSERT INTO timebell_tenants"):
        return text.replace("INSERT", "INSERT IGNORE", 1)
    if not text.startswith(("CREATE TABLE", "ALTER TABLE")):
        return statement
    for pattern, replacement in _TYPE_REWRITES:
        text = pattern.sub(replacement, text)
    text = re.sub(r"^CREATE TABLE(?! IF)", "CREATE TABLE IF NOT EXISTS", text)
    if text.startswith("CREATE TABLE"):
        return f"{text} ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARSET=utf8mb4 COLLATE={COLLATION}"
    return text.replace("ADD COLUMN", "ADD COLUMN IF NOT EXISTS").replace("DROP COLUMN", "DROP COLUMN IF EXISTS")
