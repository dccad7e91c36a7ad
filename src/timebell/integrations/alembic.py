"""A filter for the Alembic environment of a host application whose database also has Timebell's tables."""

from __future__ import annotations

from collections.abc import Mapping

TABLE_PREFIX = "timebell_"


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """Return whether `alembic revision --autogenerate` may consider an object: False for Timebell's tables.

    Pass it to `context.configure(include_name=include_name)` in `env.py`.
    """
    return not (type_ == "table" and name is not None and name.startswith(TABLE_PREFIX))
