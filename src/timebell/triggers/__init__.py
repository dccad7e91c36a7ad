"""Sources that Timebell reads itself: an adapter for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timebell.triggers.base import Adapter, Token

KINDS = ("monday", "sql")


def adapter(kind: str, options: Mapping[str, Any], token: Token | None = None) -> Adapter:
    """What reads a source of this kind, with the token in its options or one that is asked for each time.

    Raises InvalidInput (SOURCE_OPTIONS_INVALID).
    """
    assert kind in KINDS
    if kind == "monday":
        from timebell.triggers.monday import Board

        return Board(options, token)
    from timebell.triggers.sql_table import SqlTable

    return SqlTable(options)
