"""Interface of source adapters, which read rows and know nothing about triggers or jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from timebell.errors import SourceFailed
from timebell.features.triggers.model.trigger import ItemChange


class InvalidSourceQuery(SourceFailed):
    """The source answers, but a table, column or query of it does not exist."""


class InvalidSourceValue(SourceFailed):
    """The source answers, but a value in a row, or for a query, is invalid."""


@dataclass(frozen=True, slots=True)
class RowPage:
    """Rows by key, with JSON fields; `cursor` is the position of the next page (None: there is none).

    `problems` has the reasons for rows that exist and cannot be read, by key.
    """

    rows: dict[str, dict[str, Any]]
    cursor: str | None
    problems: dict[str, str] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()
    has_more: bool = False

    def to_changes(self, keys: Iterable[str], version: int) -> list[ItemChange]:
        """Return the rows with these keys as changes; rows that the page does not contain are deleted."""
        return [ItemChange(key, version, self.rows.get(key), self.problems.get(key)) for key in keys]


class TokenProvider(Protocol):
    """Provides the token for requests to a source."""

    async def __call__(self, rejected_token: str | None = None) -> str:
        """Return a token, newer than `rejected_token` if possible. Raises SourceFailed (SOURCE_UNAUTHORIZED)."""


class CallBudget(Protocol):
    """Limits the calls to an API, for all nodes."""

    async def take(self) -> None:
        """Count a call. Raises SourceFailed (SOURCE_BUDGET_SPENT) if none is permitted now."""

    async def postpone(self, seconds: float | None) -> None:
        """Permit no calls for some time; None: until the daily limits are reset."""


class SourceAdapter(Protocol):
    """Adapter of a source. Every method may raise SourceFailed."""

    page_size: int
    """Rows per page of a scan."""
    poll_interval: float
    """Seconds between polls for changes; 0 if the source cannot list changes."""
    full_scan_interval: float
    """Seconds between full scans of one page, which find what was missed."""
    daily_calls: int | None
    """Limit of calls to its API a day; None if there is no limit."""

    async def read_page(self, after: str | None, limit: int) -> RowPage:
        """Return the next rows in the source's key order."""

    async def read_changes(self, since: str | None, limit: int) -> RowPage | None:
        """Return rows changed since a cursor, always with a new cursor; None if the source cannot list changes.

        Without a cursor, returns no rows and the current position. Rows that were deleted are in `deleted`. There may
        be more changes if `has_more` is true.
        """

    async def read_rows(self, keys: Sequence[str]) -> RowPage:
        """Return the rows with these keys that exist now, without a cursor."""

    async def matches(self, query: str, parameters: Mapping[str, Any]) -> bool:
        """Return whether a query of the user returns a row."""

    async def listen(self, on_change: Callable[[str | None], None]) -> bool:
        """Call `on_change` with the key of each row that changes, and with None when the subscription ends.

        Also checks that the subscription still works. Returns whether there is a new one; False if the source does not
        support this.
        """

    async def close(self) -> None:
        """Close connections."""
