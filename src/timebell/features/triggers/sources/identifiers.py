"""Names of tables and columns of external databases. They are always quoted, so they are used exactly as written."""

from __future__ import annotations

import re

MAX_NAME_LENGTH = 63
_PART = re.compile(r'"((?:[^"]|"")+)"|([^".\x00]+)')


def quote_name(database: str, name: str) -> str:
    """Quote a name for a database of kind `postgresql`, `mysql` or `sqlite`."""
    mark = "`" if database == "mysql" else '"'
    return f"{mark}{name.replace(mark, mark * 2)}{mark}"


def quote_table(database: str, name: str) -> str:
    """Quote a table name, with its schema if it has one. Raises ValueError."""
    return ".".join(quote_name(database, part) for part in split_table(name))


def split_table(name: str) -> list[str]:
    """Split `schema.table`. A part in double quotes may contain a dot. Raises ValueError."""
    parts, position = [], 0
    while True:
        match = _PART.match(name, position)
        if match is None:
            raise ValueError(name)
        parts.append((match[1] or match[2]).replace('""', '"'))
        if match.end() == len(name) and len(parts) <= 2 and all(map(is_valid_name, parts)):
            return parts
        if match.end() == len(name) or name[match.end()] != ".":
            raise ValueError(name)
        position = match.end() + 1


def is_valid_name(name: str) -> bool:
    """Return whether this can be the name of a table or column."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and name == name.strip() and ";" not in name
