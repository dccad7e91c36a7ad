"""Write the progress that handlers report, in one batch per second and node.

A report is only noted, so it never delays its handler, and attempts that end before the next batch cost no write: their
last progress is in their attempt record.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime, timedelta

from timebell.engine.node import Node
from timebell.engine.running_attempt import AttemptState, RunningAttempt
from timebell.errors import StoreError
from timebell.model.progress import Progress, encode_progress
from timebell.store.jobs.progress import write_progress

WRITE_INTERVAL_SECONDS = 1.0
ENDED = (AttemptState.LOST, AttemptState.COMPLETED)


class ProgressWriter:
    """The progress service: `report` notes the progress of an attempt, `step` writes one batch."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._queued: deque[RunningAttempt] = deque()  # appended to by the threads of plain handlers
        self._next_write_at = 0.0  # monotonic seconds

    def report(self, running: RunningAttempt, fraction: float | None, text: str | None) -> None:
        """Note the progress of an attempt; ignored after its end. Thread-safe."""
        if running.state in ENDED:
            return
        running.attempt.progress = Progress(fraction, text, self.node.clock.now())
        if not running.progress_is_queued:
            running.progress_is_queued = True
            self._queue(running)

    async def step(self) -> datetime | None:
        """Write the progress reported since the last batch; return when the next one may be written."""
        clock, store = self.node.clock, self.node.store
        if not self._queued:
            return None
        if (pause := self._next_write_at - clock.monotonic()) > 0:
            # At least 1 ms: a shorter pause rounds to 0 us, and virtual time would never reach its end.
            return clock.now() + timedelta(seconds=max(0.001, pause))
        batch = [self._queued.popleft() for _ in range(len(self._queued))]
        reports = []
        for running in batch:
            # Before the progress is read: a report in between is queued again, and none is lost.
            running.progress_is_queued = False
            attempt, progress = running.attempt, running.attempt.progress
            if progress is not None and running.state not in ENDED:
                reports.append((attempt.id, attempt.number, encode_progress(progress, attempt.number)))
        if not reports:
            return None
        self._next_write_at = clock.monotonic() + WRITE_INTERVAL_SECONDS
        try:
            written = await store.run(write_progress, reports, skip_locked=store.multi_node)
        except StoreError:
            self._retry(batch, set())
            raise
        self._retry(batch, written)
        return clock.now() if self._queued else None

    def _retry(self, batch: list[RunningAttempt], written: set[str]) -> None:
        """Queue the attempts again that still run and were not written, because their rows were locked."""
        for running in batch:
            if running.attempt.id not in written and running.state not in ENDED and not running.progress_is_queued:
                running.progress_is_queued = True
                self._queue(running)

    def _queue(self, running: RunningAttempt) -> None:
        self._queued.append(running)
        self.node.wakeups.progress.wake_threadsafe()
