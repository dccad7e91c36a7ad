"""How much a tenant may use. None: no limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from timebell.errors import InvalidInput, TimebellError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a tenant."""

    requests_per_second: int | None = None
    """On each node."""
    schedules: int | None = None
    pending_jobs: int | None = None
    payload_bytes_per_day: int | None = None
    jobs_at_once: int | None = None
    """Running or with outside workers, over all nodes."""
    starts_per_minute: int | None = None
    """Attempts begun in any minute, over all nodes."""
    jobs_per_month: int | None = None
    """Delivered in a month of the tenant's zone, over all nodes."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Limits by name. Raises InvalidInput (INVALID_LIMITS)."""
        known = [each.name for each in fields(cls)]
        for name, value in given.items():
            whole = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53
            if name not in known or not (value is None or whole):
                raise InvalidInput(
                    f"{name!s:.40} is limited to {value!r:.40}.", code="INVALID_LIMITS",
                    fix=f"Give whole numbers above 0 for {', '.join(known)}.",
                )  # fmt: skip
        return cls(**given)

    @property
    def of_running(self) -> bool:
        """Whether its jobs may have to wait for their turn."""
        return self.jobs_at_once is not None or self.starts_per_minute is not None

    def to_json(self) -> dict[str, int]:
        """Those that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class LimitReached(TimebellError):
    """A tenant has used up what it may: `limit` says of what, and how much. `retry_after` is seconds."""

    code = "LIMIT_REACHED"

    def __init__(
        self, message: str, *, retry_after: float | None = None, fix: str = "", limit: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, fix=fix)
        self.retry_after = retry_after
        self.limit = limit
