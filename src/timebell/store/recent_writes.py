"""The rows that this process committed in the last minutes.

A failover to an asynchronous standby, or a restore, can lose the end of the history although it was acknowledged. The
server cannot tell what it never received, but the processes that wrote it can.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

RECENT_SECONDS = 300.0
MAX_RECENT_ROWS = 50_000  # of each kind
MAX_CREATIONS = 10_000  # jobs with their contents, of about 1 KB each

JOBS = "jobs"  # created jobs
RESULTS = "results"  # final results of jobs, without cancels
CANCELS = "cancels"  # jobs cancelled before their start
SCHEDULES = "schedules"  # created, edited, paused, resumed and deleted schedules
KINDS = (JOBS, RESULTS, CANCELS, SCHEDULES)

# The contents of writes that can be reapplied. Their rows are counted by the kinds above.
CREATIONS = "creations"  # jobs that a client created, except in bulk
PAUSES = "pauses"  # paused and resumed schedules

Written = Mapping[str, Any]
"""Written rows by id: schedules with their `updated_at`, or None if deleted; creations with the `NewJob`; pauses with
the tenant, the reason and the instant, or None for a resume; the others with None."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one committed transaction; `at` is monotonic."""

    kind: str
    at: float
    rows: Written


@dataclass(slots=True)
class RecentWrites:
    """The recent commits of a store, and whether the server has changed since they were last compared with it.

    Thread-safe: MariaDB, and transactions of plain functions, commit in threads.
    """

    monotonic: Callable[[], float]
    is_unverified: bool = False
    reapplied_jobs: str = "hold"
    """What to do with lost jobs: the setting `lost_jobs`."""
    _batches: dict[str, deque[Batch]] = field(
        default_factory=lambda: {kind: deque() for kind in (*KINDS, CREATIONS, PAUSES)}
    )
    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*KINDS, CREATIONS, PAUSES), 0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, written: Collection[tuple[str, Written]]) -> None:
        """Add the rows of a committed transaction."""
        if not written:
            return
        now = self.monotonic()
        with self._lock:
            for kind, rows in written:
                batches = self._batches[kind]
                batches.append(Batch(kind, now, rows))
                self._counts[kind] += len(rows)
                limit = MAX_CREATIONS if kind == CREATIONS else MAX_RECENT_ROWS
                while batches and (batches[0].at < now - RECENT_SECONDS or self._counts[kind] > limit):
                    self._counts[kind] -= len(batches.popleft().rows)

    def snapshot(self) -> list[Batch]:
        """Return all batches, oldest first."""
        with self._lock:
            return sorted((each for batches in self._batches.values() for each in batches), key=lambda each: each.at)

    def discard(self, batches: Iterable[Batch]) -> None:
        """Remove batches that were compared, so that a loss is reported once."""
        compared = set(map(id, batches))
        with self._lock:
            for kind, kept in self._batches.items():
                self._batches[kind] = deque(batch for batch in kept if id(batch) not in compared)
                self._counts[kind] = sum(len(batch.rows) for batch in self._batches[kind])
