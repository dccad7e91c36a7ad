"""One page of a listing, and the keyset cursor that leads to the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar
from uuid import UUID

from timebell.errors import InvalidInput

T = TypeVar("T")
MAX_LIMIT = 500


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """`items` in order of creation, newest first; `next_cursor` is None on the last page."""

    items: list[T]
    next_cursor: str | None

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def check(limit: int, cursor: str | None) -> str | None:
    """The id after which to go on. Raises InvalidInput (INVALID_LIMIT, INVALID_CURSOR)."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise InvalidInput(f"limit is {limit!r}; it goes from 1 to {MAX_LIMIT}.", code="INVALID_LIMIT")
    if cursor is None:
        return None
    try:
        return str(UUID(cursor))
    except (ValueError, AttributeError, TypeError) as bad:
        raise InvalidInput(
            f"cursor {cursor!r} is not one of ours.", code="INVALID_CURSOR", fix="Use next_cursor as it came."
        ) from bad
