"""Adapters for polled trigger sources, one per kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timebell.features.triggers.sources.base import SourceAdapter, TokenProvider
from timebell.model.policy import parse_seconds

POLLED_KINDS = ("monday", "sql")


def scan_interval(kind: str, options: Mapping[str, Any]) -> float:
    """Return the seconds within which a source finds a change that every other way has missed; 0 for webhooks only."""
    if kind == "sql":
        from timebell.features.triggers.sources.sql_table import intervals

        return intervals(options)[1]
    if kind == "monday":
        from timebell.features.triggers.sources.monday import DEFAULT_FULL_SCAN_SECONDS

        return parse_seconds(options.get("everySeconds", DEFAULT_FULL_SCAN_SECONDS), "everySeconds", minimum=0.1)
    return 0.0


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
