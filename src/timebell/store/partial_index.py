"""Indexes of the rows that satisfy a condition."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Index, event, text


class PartialIndex(Index):
    """An index of the rows that satisfy `where`, an SQL condition. MariaDB has none and indexes all rows."""

    def __init__(self, name: str, *columns: str, where: str, unique: bool = False) -> None:
        super().__init__(name, *columns, unique=unique)
        self.where = where


@event.listens_for(PartialIndex, "before_create")
def _set_option_of_dialect(index: PartialIndex, connection: Connection, **_: Any) -> None:
    """Set `postgresql_where` or `sqlite_where`, which would load both dialects if it was set in the constructor."""
    if connection.dialect.name in ("postgresql", "sqlite"):
        index.dialect_kwargs[f"{connection.dialect.name}_where"] = text(index.where)
