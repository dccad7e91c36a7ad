"""What a queue allows: how many jobs at once, how many starts in a time, how many at once of each group.

Pure functions; the claim asks them while it has the queue's row locked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from timebell.errors import InvalidInput
from timebell.model.policy import seconds

GRAINS = 50
MOST = 1_000_000

Starts = Sequence[tuple[int, int]]
"""When jobs of a queue started (microseconds since 1970) and how many then, oldest first."""
Group = tuple[str, str]
"""A group of a queue: its tenant, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a queue over all nodes; None: no limit.

    `concurrency` jobs run at once, of which `concurrency_per_group` of each group; `rate` start in any `per` seconds.
    """

    concurrency: int | None = None
    rate: int | None = None
    per: float = 1.0
    concurrency_per_group: int | None = None

    @classmethod
    def read(
        cls, concurrency: int | None, rate: int | None, per: float | timedelta, concurrency_per_group: int | None
    ) -> Limits:
        """Limits as a person gives them. Raises InvalidInput."""
        if not _counts(concurrency):
            raise InvalidInput(f"concurrency is {concurrency!r}; it is at least 1.", code="INVALID_CONCURRENCY")
        if not _counts(concurrency_per_group):
            raise InvalidInput(
                f"concurrency_per_group is {concurrency_per_group!r}; it is at least 1.",
                code="INVALID_CONCURRENCY_PER_GROUP",
            )
        if not _counts(rate):
            raise InvalidInput(
                f"rate is {rate!r}; it is a whole number from 1 to {MOST:,}.", code="INVALID_RATE",
                fix="For one job in ten seconds give rate=1, per=10.",
            )  # fmt: skip
        return cls(
            concurrency=concurrency, rate=rate, per=seconds(per, "per", least=0.001),
            concurrency_per_group=concurrency_per_group,
        )  # fmt: skip


def _counts(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST)


def recent(starts: Starts, per: int, now: int) -> list[tuple[int, int]]:
    """The starts of the last `per` microseconds. Those of a clock that was ahead count as of now."""
    return [(min(at, now), count) for at, count in starts if at > now - per]


def allowed(starts: Starts, rate: int, per: int, now: int) -> int:
    """How many may start now, so that in no time of this length more than `rate` do."""
    return max(0, rate - sum(count for _, count in recent(starts, per, now)))


def next_start(starts: Starts, rate: int, per: int, now: int) -> int:
    """When the next may start: now, or as soon as enough of those before are `per` ago."""
    counted = recent(starts, per, now)
    over = sum(count for _, count in counted) - rate
    at = now
    for began, count in counted:
        if over < 0:
            break
        over, at = over - count, began + per
    return at


def started(starts: Starts, rate: int, per: int, now: int, count: int) -> list[tuple[int, int]]:
    """The starts to remember after `count` more.

    Of a large rate, those within a fiftieth of the time are kept as one, at the instant of the last: what is
    remembered stays small, and is never earlier than it was.
    """
    kept = recent(starts, per, now)
    grain = per // GRAINS if rate > GRAINS else 0
    if kept and (kept[-1][0] == now or (grain and kept[-1][0] // grain == now // grain)):
        count += kept.pop()[1]
    return [*kept, (now, count)]


def admitted(
    groups: Iterable[Group | None], running: Counter[Group], per_group: int, most: int
) -> tuple[list[int], list[int]]:
    """Of due jobs in order, given by their groups, which start and which wait for one of their group to end.

    At most `most` start; those after them do neither. `running` counts each group and is brought up to date.
    """
    start: list[int] = []
    wait: list[int] = []
    for at, group in enumerate(groups):
        if len(start) == most:
            break
        if group is None:
            start.append(at)
        elif running[group] < per_group:
            running[group] += 1
            start.append(at)
        else:
            wait.append(at)
    return start, wait


def in_turns(tenants: Sequence[str]) -> list[int]:
    """The order in which jobs, given by their tenants, are taken so that each tenant has one before any has two."""
    nth: Counter[str] = Counter()
    turns = []
    for at, tenant in enumerate(tenants):
        turns.append((nth[tenant], at))
        nth[tenant] += 1
    return [at for _, at in sorted(turns)]
