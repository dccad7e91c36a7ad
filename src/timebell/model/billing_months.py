"""Billing months of a tenant, in its time zone. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from timebell.recurrence import resolve_local, zone


def billing_month(now: datetime, timezone: str | None) -> str:
    """Return the month of an instant, such as `2027-03`. A `timezone` of None means UTC."""
    return f"{zone(timezone or 'UTC').local(now):%Y-%m}"


def month_start(now: datetime, timezone: str | None) -> datetime:
    """Return the instant at which the month of `now` began."""
    return resolve_local(_local_month_start(now, timezone), zone(timezone or "UTC"))[0]


def next_month_start(now: datetime, timezone: str | None) -> datetime:
    """Return the instant at which the next month begins."""
    local = _local_month_start(now, timezone)
    following = (local.replace(day=28) + timedelta(days=4)).replace(day=1)
    return resolve_local(following, zone(timezone or "UTC"))[0]


def forecast_exhaustion(used: int, limit: int | None, now: datetime, timezone: str | None) -> datetime | None:
    """Forecast when the month's limit will be reached, at the average rate of the month so far.

    Returns `now` if it is reached already, None if it lasts until the end of the month.
    """
    if limit is None or used <= 0:
        return None
    if used >= limit:
        return now
    started = month_start(now, timezone)
    at = now + (now - started) * ((limit - used) / used)
    return at if at < next_month_start(now, timezone) else None


def _local_month_start(now: datetime, timezone: str | None) -> datetime:
    local = zone(timezone or "UTC").local(now)
    return local.replace(day=1, hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
