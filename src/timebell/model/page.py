"""One page of a listing, with the keyset cursor of the next page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable
from uuid import UUID

from timebell.errors import InvalidInput
from timebell.model.notebook import render_table

T = TypeVar("T")
MAX_LIMIT = 500


@runtime_checkable
class _Summarized(Protocol):
    def summary(self) -> Mapping[str, object]: ...


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Items ordered by creation, newest first; `next_cursor` is None on the last page."""

    items: list[T]
    next_cursor: str | None

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def _repr_html_(self) -> str | None:
        """Return a table of jobs or schedules for a notebook; None for other items."""
        summaries = [item.summary() for item in self.items if isinstance(item, _Summarized)]
        return render_table(summaries) if len(summaries) == len(self.items) else None


def validate_paging(limit: int, cursor: str | None) -> str | None:
    """Return the id after which the page starts; None for the first page.

    Raises InvalidInput (INVALID_LIMIT, INVALID_CURSOR).
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise InvalidInput(f"limit is {limit!r}; it must be from 1 to {MAX_LIMIT}.", code="INVALID_LIMIT")
    if cursor is None:
        return None
    try:
        return str(UUID(cursor))
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidInput(
            f"cursor {cursor!r} is not valid.", code="INVALID_CURSOR", fix="Pass next_cursor of the last page as it is."
        ) from error
