"""The specification of one job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal
from zoneinfo import ZoneInfo

from timebell.client.validation import unknown_options
from timebell.durations import Duration

if TYPE_CHECKING:
    from timebell.model.policy import Retry


@dataclass(slots=True, kw_only=True)
class JobSpec:
    """Specification of a job; the fields are the arguments of `Timebell.schedule_at`."""

    topic: str
    run_at: datetime | str | None = None
    timezone: str | ZoneInfo | None = None
    payload: Any = None
    owner_id: str | None = None
    tenant_id: str | None = None
    correlation_id: str | None = None
    client_request_id: str | None = None
    metadata: Mapping[str, Any] | None = None
    key: str | None = None
    retry: Retry | Mapping[str, Any] | None = None
    timeout: Duration | None = None
    queue: str | None = None
    priority: int | None = None
    group: str | None = None
    condition: Any = None
    unless: Mapping[str, str] | None = None
    expires_after: Duration | None = None
    target: Mapping[str, Any] | str | None = None
    on_gap: Literal["shift", "error"] = "shift"
    on_fold: Literal["first", "error"] = "first"


def build_spec(**fields: Any) -> JobSpec:
    """Return a JobSpec from the arguments of `schedule_at`. Raises InvalidInput (UNKNOWN_OPTION)."""
    known = JobSpec.__slots__
    if unknown := [name for name in fields if name not in known]:
        raise unknown_options("schedule_at", unknown, known)
    return JobSpec(**fields)
