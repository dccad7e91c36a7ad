"""What an adapter of a source is: it reads rows, and says nothing of triggers or jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Read:
    """Rows by key, as fields that are JSON; `cursor` is where to go on (None: that is all)."""

    rows: dict[str, dict[str, Any]]
    cursor: str | None


class Token(Protocol):
    """Gives the token for a question to a source; of one that was `refused`, a newer one if there is any."""

    async def __call__(self, refused: str | None = None) -> str:
        """Raises SourceFailed (SOURCE_UNAUTHORIZED)."""


class Adapter(Protocol):
    """A source. All of it may raise SourceFailed."""

    every: float
    """Seconds between looks for changes; 0: it says them itself."""
    sweep: float
    """Seconds between looks at everything."""

    async def page(self, after: str | None, most: int) -> Read:
        """The next rows in the source's own order of keys."""

    async def changed(self, since: str | None, most: int) -> Read | None:
        """The next rows that have changed since a cursor, which always comes back; None: it cannot tell."""

    async def read(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Those of these rows that are there now."""

    async def any(self, query: str, parameters: Mapping[str, Any]) -> bool:
        """Whether a query of the user's finds something."""

    async def listen(self, heard: Callable[[str | None], None]) -> bool:
        """Call `heard` with the key of each row that changes, from now on, and with None when that ends; False if it
        cannot, or did so already."""

    async def close(self) -> None:
        """Let go of connections."""
