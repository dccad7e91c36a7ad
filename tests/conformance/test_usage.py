"""Limits of tenants on what they send in a day."""

from __future__ import annotations

import pytest

from timebell.store.tenancy import usage
from timebell.tenancy.limits import LimitReached, Limits

from .helpers import T0, Store, stored


@stored
async def test_the_limit_of_payload_bytes_counts_all_requests_of_the_day(store: Store) -> None:
    for number in range(9):  # in different rows
        await store.run(usage.add_usage, "acme", T0, payload_bytes=10, shard_key=f"request {number}")
    checked = usage.check_limits, "acme", Limits(payload_bytes_per_day=100), T0, None
    await store.run(*checked, 10)
    with pytest.raises(LimitReached):
        await store.run(*checked, 11)
