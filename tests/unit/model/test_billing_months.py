"""Billing months begin at midnight in the tenant's time zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from timebell.model.billing_months import billing_month, forecast_exhaustion, month_start, next_month_start


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("now", "timezone", "month", "start", "end"),
    [
        (utc(2027, 1, 31, 23, 59, 59), None, "2027-01", utc(2027, 1, 1), utc(2027, 2, 1)),
        (utc(2027, 2, 1, 0, 0, 0), "UTC", "2027-02", utc(2027, 2, 1), utc(2027, 3, 1)),
        (utc(2028, 2, 29, 12), None, "2028-02", utc(2028, 2, 1), utc(2028, 3, 1)),
        (utc(2027, 12, 15, 9, 8, 7, 6), None, "2027-12", utc(2027, 12, 1), utc(2028, 1, 1)),
        (utc(2027, 3, 31, 15), "Asia/Seoul", "2027-04", utc(2027, 3, 31, 15), utc(2027, 4, 30, 15)),
        (utc(2027, 3, 31, 14, 59), "Asia/Seoul", "2027-03", utc(2027, 2, 28, 15), utc(2027, 3, 31, 15)),
        # The clocks change within the month, at its first midnight (a gap), or back to it (a fold: the first one).
        (utc(2027, 3, 20), "America/New_York", "2027-03", utc(2027, 3, 1, 5), utc(2027, 4, 1, 4)),
        (utc(2027, 11, 7, 6, 30), "America/New_York", "2027-11", utc(2027, 11, 1, 4), utc(2027, 12, 1, 5)),
        (utc(2022, 10, 20), "Asia/Amman", "2022-10", utc(2022, 9, 30, 21), utc(2022, 10, 31, 21)),
        (utc(2011, 4, 15), "Asia/Amman", "2011-04", utc(2011, 3, 31, 22), utc(2011, 4, 30, 21)),
    ],
)
def test_a_month_begins_at_the_local_midnight_of_its_first_day(
    now: datetime, timezone: str | None, month: str, start: datetime, end: datetime
) -> None:
    assert billing_month(now, timezone) == month
    assert (month_start(now, timezone), next_month_start(now, timezone)) == (start, end)


NOW = utc(2027, 4, 11)  # ten of thirty days have passed


@pytest.mark.parametrize(
    ("used", "limit", "forecast"),
    [
        (10, None, None),  # no limit
        (0, 5, None),
        (-1, 5, None),
        (5, 5, NOW),
        (6, 5, NOW),
        (1, 2, utc(2027, 4, 21)),
        (100, 250, utc(2027, 4, 26)),
        (100, 300, None),  # lasts until the end of the month exactly
        (100, 299, utc(2027, 4, 11) + timedelta(days=19.9)),
    ],
)
def test_exhaustion_is_forecast_at_the_average_rate_of_the_month(
    used: int, limit: int | None, forecast: datetime | None
) -> None:
    assert forecast_exhaustion(used, limit, NOW, None) == forecast


def test_the_forecast_uses_the_month_of_the_time_zone() -> None:
    now = utc(2027, 4, 10, 15)  # ten days since midnight in Seoul
    assert forecast_exhaustion(1, 2, now, "Asia/Seoul") == now + timedelta(days=10)
    assert forecast_exhaustion(100, 300, now, "Asia/Seoul") is None
