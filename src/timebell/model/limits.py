"""Queue limits: concurrent jobs, starts per interval, and concurrent jobs per group.

Pure functions, called by the claim while it holds the lock on the queue's row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from timebell.durations import Duration
from timebell.errors import InvalidInput
from timebell.model.policy import parse_seconds

RATE_BUCKETS = 50
MAX_LIMIT = 1_000_000

StartHistory = Sequence[tuple[int, int]]
"""Starts of a queue's jobs, oldest first: (microseconds since 1970, number of jobs)."""
GroupKey = tuple[str, str]
"""A group of a queue: (tenant id, group name)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a queue over all nodes; None means no limit.

    At most `concurrency` jobs run simultaneously, at most `concurrency_per_group` of each group, and at most `rate`
    start in any `per` seconds.
    """

    concurrency: int | None = None
    rate: int | None = None
    per: float = 1.0
    concurrency_per_group: int | None = None

    @classmethod
    def parse(
        cls, concurrency: int | None, rate: int | None, per: Duration, concurrency_per_group: int | None
    ) -> Limits:
        """Validate limits. Raises InvalidInput (INVALID_CONCURRENCY, INVALID_RATE, INVALID_DURATION, ...)."""
        if not _is_valid_limit(concurrency):
            raise InvalidInput(f"concurrency is {concurrency!r}; it must be at least 1.", code="INVALID_CONCURRENCY")
        if not _is_valid_limit(concurrency_per_group):
            raise InvalidInput(
                f"concurrency_per_group is {concurrency_per_group!r}; it must be at least 1.",
                code="INVALID_CONCURRENCY_PER_GROUP",
            )
        if not _is_valid_limit(rate):
            raise InvalidInput(
                f"rate is {rate!r}; it must be an integer from 1 to {MAX_LIMIT:,}.", code="INVALID_RATE",
                fix="For one job every ten seconds use rate=1, per=10.",
            )  # fmt: skip
        return cls(
            concurrency=concurrency, rate=rate, per=parse_seconds(per, "per", minimum=0.001),
            concurrency_per_group=concurrency_per_group,
        )  # fmt: skip


def _is_valid_limit(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_LIMIT)


def recent_starts(starts: StartHistory, per: int, now: int) -> list[tuple[int, int]]:
    """Return the starts of the last `per` microseconds; future ones (of a fast clock) are set to `now`."""
    return [(min(at, now), count) for at, count in starts if at > now - per]


def available_starts(starts: StartHistory, rate: int, per: int, now: int) -> int:
    """Return how many jobs may start now, so that no interval of `per` microseconds has more than `rate` starts."""
    return max(0, rate - sum(count for _, count in recent_starts(starts, per, now)))


def next_start(starts: StartHistory, rate: int, per: int, now: int) -> int:
    """Return the earliest instant of the next start: now, or when enough earlier starts are `per` ago."""
    recent = recent_starts(starts, per, now)
    excess = sum(count for _, count in recent) - rate
    at = now
    for started, count in recent:
        if excess < 0:
            break
        excess, at = excess - count, started + per
    return at


def record_starts(starts: StartHistory, rate: int, per: int, now: int, count: int) -> list[tuple[int, int]]:
    """Return the history after `count` more starts at `now`, without starts that no longer count.

    With a `rate` above RATE_BUCKETS, starts within the same `per / RATE_BUCKETS` are merged at the instant of the last
    one. This bounds the history, and never makes a start appear earlier than it was.
    """
    history = recent_starts(starts, per, now)
    bucket = per // RATE_BUCKETS if rate > RATE_BUCKETS else 1
    if history and history[-1][0] // bucket == now // bucket:
        count += history.pop()[1]
    return [*history, (now, count)]


def admit_by_group(
    groups: Iterable[GroupKey | None], running: Counter[GroupKey], per_group: int, limit: int
) -> tuple[list[int], list[int]]:
    """Return the indexes of the due jobs that start, and of those that wait because their group is full.

    `groups` has the group of each due job (None: no group), in claim order. At most `limit` start; the jobs after
    those are in neither list. `running` counts the running jobs of each group and is updated.
    """
    start: list[int] = []
    wait: list[int] = []
    for index, group in enumerate(groups):
        if len(start) == limit:
            break
        if group is None:
            start.append(index)
        elif running[group] < per_group:
            running[group] += 1
            start.append(index)
        else:
            wait.append(index)
    return start, wait


def round_robin(tenants: Sequence[str]) -> list[int]:
    """Return job indexes in round-robin order: one job of each tenant before the second of any.

    `tenants` has the tenant id of each job, in claim order.
    """
    counts: Counter[str] = Counter()
    rounds = []
    for index, tenant in enumerate(tenants):
        rounds.append((counts[tenant], index))
        counts[tenant] += 1
    return [index for _, index in sorted(rounds)]
