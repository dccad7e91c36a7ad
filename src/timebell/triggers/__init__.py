"""Sources that Timebell reads itself: an adapter for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timebell.triggers.base import Adapter

KINDS = ("sql",)


def adapter(kind: str, options: Mapping[str, Any]) -> Adapter:
    """What reads a source of this kind. Raises InvalidInput (SOURCE_OPTIONS_INVALID)."""
    from timebell.triggers.sql_table import SqlTable

    assert kind in KINDS
    return SqlTable(options)
