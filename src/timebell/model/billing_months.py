"""A tenant's months, in its zone. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from timebell.recurrence import resolve_local, zone


def month_of(now: datetime, timezone: str | None) -> str:
    """The month that an instant is in, as `2027-03`. None: of UTC."""
    return f"{zone(timezone or 'UTC').local(now):%Y-%m}"


def first_of(now: datetime, timezone: str | None) -> datetime:
    """The instant at which the month began."""
    return resolve_local(_begin(now, timezone), zone(timezone or "UTC"))[0]


def first_of_next(now: datetime, timezone: str | None) -> datetime:
    """The instant at which the next month begins."""
    local = _begin(now, timezone)
    following = (local.replace(day=28) + timedelta(days=4)).replace(day=1)
    return resolve_local(following, zone(timezone or "UTC"))[0]


def forecast(used: int, limit: int | None, now: datetime, timezone: str | None) -> datetime | None:
    """When a month will be used up, at the pace of what is past of it: now if it is, None if it lasts."""
    if limit is None or used <= 0:
        return None
    if used >= limit:
        return now
    began = first_of(now, timezone)
    at = now + (now - began) * ((limit - used) / used)
    return at if at < first_of_next(now, timezone) else None


def _begin(now: datetime, timezone: str | None) -> datetime:
    local = zone(timezone or "UTC").local(now)
    return local.replace(day=1, hour=0, minute=0, second=0, microsecond=0, tzinfo=None, fold=0)
