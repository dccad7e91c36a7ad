"""Adapters for polled trigger sources, one per kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timebell.features.triggers.sources.base import CallBudget, SourceAdapter, TokenProvider
from timebell.features.triggers.sources.call_plan import CallPlan

POLLED_KINDS = ("monday", "sql")


def scan_interval(kind: str, options: Mapping[str, Any], pages: int = 1) -> float:
    """Return the seconds between full scans, which find changes that polls and webhooks missed; 0 if there are none.

    `pages` is the number of pages of all sources of its account, which share the daily calls.
    """
    if kind == "sql":
        from timebell.features.triggers.sources.sql_table import intervals

        return intervals(options)[1]
    if kind == "monday":
        return CallPlan.parse(options).interval_of(pages)
    return 0.0


def create_adapter(
    kind: str, options: Mapping[str, Any], token: TokenProvider | None = None, budget: CallBudget | None = None
) -> SourceAdapter:
    """Return the adapter for a source; `token` provides a token for each request, by default the one in the options.

    `budget` limits the requests, if the API limits them.

    Raises InvalidInput (INVALID_SOURCE_OPTIONS).
    """
    assert kind in POLLED_KINDS
    if kind == "monday":
        from timebell.features.triggers.sources.monday import Board

        return Board(options, token, budget)
    from timebell.features.triggers.sources.sql_table import SqlTable

    return SqlTable(options)
