"""Plan of the calls to an API whose calls are limited per day.

Full reads may use half of the calls. The rest is for reads of changed items, and of items that are due.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from timebell.errors import InvalidInput
from timebell.model.policy import parse_seconds

DEFAULT_DAILY_CALLS = 200
"""The limit of the smallest plan of monday.com. Others: 1,000 (Basic, Standard), 10,000 (Pro), 25,000 (Enterprise)."""
MAX_DAILY_CALLS = 10**9
FULL_READ_SHARE = 0.5
MIN_INTERVAL_SECONDS = 60.0
DAY_SECONDS = 86_400.0


class CallPlan(NamedTuple):
    """The calls of a source: at most `daily_calls`, and a full read of one page each `interval` seconds."""

    daily_calls: int
    interval: float

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> CallPlan:
        """Return the plan of a source's options. Raises InvalidInput (INVALID_SOURCE_OPTIONS)."""
        daily_calls = options.get("dailyCalls", DEFAULT_DAILY_CALLS)
        if isinstance(daily_calls, bool) or not isinstance(daily_calls, int) or not 2 <= daily_calls <= MAX_DAILY_CALLS:
            raise InvalidInput(
                f"dailyCalls is {daily_calls!r:.40}.", code="INVALID_SOURCE_OPTIONS",
                fix="Use the number of calls a day that the plan of the account allows: 200, 1000, 10000 or 25000.",
            )  # fmt: skip
        shortest = shortest_interval(daily_calls, 1)
        interval = parse_seconds(
            options.get("everySeconds", max(shortest, MIN_INTERVAL_SECONDS)), "everySeconds", minimum=0.001
        )
        if interval < shortest:
            raise InvalidInput(
                f"A full read every {interval:g} s takes at least {DAY_SECONDS / interval:,.0f} calls a day. Full reads"
                f" may use half of the {daily_calls:,} daily calls.",
                code="INVALID_SOURCE_OPTIONS",
                fix=f"Use everySeconds of at least {shortest:g}, or set dailyCalls to the limit of the account.",
            )  # fmt: skip
        return cls(daily_calls, interval)

    def interval_of(self, pages: int) -> float:
        """Return the seconds between full reads if all boards of the account have `pages` pages together."""
        return max(self.interval, shortest_interval(self.daily_calls, pages))

    @property
    def full_reads(self) -> int:
        """The number of full reads a day, each of which takes a call for each page."""
        return round(DAY_SECONDS / self.interval)


def shortest_interval(daily_calls: int, pages: int) -> float:
    """Return the shortest interval in seconds of full reads of `pages` pages, within their share of the calls."""
    return DAY_SECONDS * pages / (daily_calls * FULL_READ_SHARE)


def account_id(tenant_id: str, options: Mapping[str, Any]) -> str:
    """Return the account of a source, whose calls are counted together: the tenant, the URL and the token."""
    identity = [tenant_id, options.get("url"), options.get("token")]
    return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
