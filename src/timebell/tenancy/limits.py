"""Usage limits of a tenant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from timebell.errors import InvalidInput, TimebellError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one tenant. None means unlimited."""

    requests_per_second: int | None = None
    """Enforced per node."""
    schedules: int | None = None
    pending_jobs: int | None = None
    payload_bytes_per_day: int | None = None
    jobs_at_once: int | None = None
    """Running or dispatched to external workers, across all nodes."""
    starts_per_minute: int | None = None
    """Attempts started in any minute, across all nodes."""
    jobs_per_month: int | None = None
    """Jobs delivered in a calendar month of the tenant's time zone, across all nodes."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Build limits from a mapping of field names to values. Raises InvalidInput (INVALID_LIMITS)."""
        valid_names = [field.name for field in fields(cls)]
        for name, value in values.items():
            is_positive_int = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53
            if name not in valid_names or not (value is None or is_positive_int):
                raise InvalidInput(
                    f"Invalid limit {name!s:.40}: {value!r:.40}.", code="INVALID_LIMITS",
                    fix=f"Specify integers greater than 0 for {', '.join(valid_names)}.",
                )  # fmt: skip
        return cls(**values)

    @property
    def has_execution_limits(self) -> bool:
        """True if limits can delay due jobs of the tenant."""
        return self.jobs_at_once is not None or self.starts_per_minute is not None

    @property
    def has_usage_limits(self) -> bool:
        """True if limits are compared with the usage of the tenant after each change."""
        limits = (self.schedules, self.pending_jobs, self.payload_bytes_per_day)
        return any(limit is not None for limit in limits)

    def to_json(self) -> dict[str, int]:
        """Return the limits that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class LimitReached(TimebellError):
    """A tenant has reached one of its limits.

    `limit` is the name and value of the limit, `retry_after` the number of seconds until a retry can succeed.
    """

    code = "LIMIT_REACHED"

    def __init__(
        self, message: str, *, retry_after: float | None = None, fix: str = "", limit: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, fix=fix)
        self.retry_after = retry_after
        self.limit = limit
