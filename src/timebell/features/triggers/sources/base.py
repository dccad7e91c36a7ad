"""Interface of source adapters, which read rows and know nothing about triggers or jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class RowPage:
    """Rows by key, with JSON fields; `cursor` is the position of the next page (None: there is none)."""

    rows: dict[str, dict[str, Any]]
    cursor: str | None


class TokenProvider(Protocol):
    """Provides the token for requests to a source."""

    async def __call__(self, rejected_token: str | None = None) -> str:
        """Return a token, newer than `rejected_token` if possible. Raises SourceFailed (SOURCE_UNAUTHORIZED)."""


class SourceAdapter(Protocol):
    """Adapter of a source. Every method may raise SourceFailed."""

    poll_interval: float
    """Seconds between polls for changes; 0 if the source reports changes itself (`listen`)."""
    full_scan_interval: float
    """Seconds between full scans."""

    async def read_page(self, after: str | None, limit: int) -> RowPage:
        """Return the next rows in the source's key order."""

    async def read_changes(self, since: str | None, limit: int) -> RowPage | None:
        """Return rows changed since a cursor, always with a new cursor; None if the source cannot list changes."""

    async def read_rows(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the rows with these keys that exist now."""

    async def matches(self, query: str, parameters: Mapping[str, Any]) -> bool:
        """Return whether a query of the user returns a row."""

    async def listen(self, on_change: Callable[[str | None], None]) -> bool:
        """Call `on_change` with the key of each row that changes, and with None when the subscription ends.

        Returns False if the source does not support this, or if there is a subscription already.
        """

    async def close(self) -> None:
        """Close connections."""
