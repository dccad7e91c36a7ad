"""Adapters for polled trigger sources, one per kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timebell.features.triggers.sources.base import SourceAdapter, TokenProvider

POLLED_KINDS = ("monday", "sql")


def create_adapter(kind: str, options: Mapping[str, Any], token: TokenProvider | None = None) -> SourceAdapter:
    """Return the adapter for a source; `token` provides a token for each request, by default the one in the options.

    Raises InvalidInput (INVALID_SOURCE_OPTIONS).
    """
    assert kind in POLLED_KINDS
    if kind == "monday":
        from timebell.features.triggers.sources.monday import Board

        return Board(options, token)
    from timebell.features.triggers.sources.sql_table import SqlTable

    return SqlTable(options)
