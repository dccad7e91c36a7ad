"""The keyword options of `triggers.put`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict
from zoneinfo import ZoneInfo

from timebell.durations import Duration
from timebell.features.triggers.model.trigger import Offset
from timebell.model.policy import Retry


class TriggerOptions(TypedDict, total=False):
    """When a trigger fires, and the fields of its jobs. Numbers as durations are seconds."""

    offsets: str | Sequence[str | Offset]
    """Durations before or after the instant in the column, such as "-15m" (default: the instant itself)."""
    timezone: str | ZoneInfo | None
    """IANA time zone of values without a UTC offset."""
    zone_column: str | None
    """A column with the time zone of the row; `timezone` applies if it is empty or invalid."""
    edge: Literal["start", "end"]
    """The edge of a range (default: start)."""
    recipients: str | None
    """A column; one job is created per recipient."""
    condition: Any
    """Comparisons of fields that must hold when the job is due."""
    unless: Mapping[str, str] | None
    """A query to a source of kind sql that prevents firing if it returns a row; its parameters are :item, :recipient,
    :offset and the item's fields."""
    grace: Duration
    """Instants that became known later than this do not fire (default: 300 s, or twice the interval of full reads)."""
    payload: Any
    metadata: Mapping[str, Any] | None
    owner_id: str | None
    target: Mapping[str, Any] | str | None
    queue: str
    priority: int
    group: str | None
    retry: Retry | Mapping[str, Any] | None
    timeout: Duration | None
    expires_after: Duration | None
