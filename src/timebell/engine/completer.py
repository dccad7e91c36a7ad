"""Write completions in batches: everything submitted while the previous batch was written.

There is no timer, so a single completion is written immediately and a burst in a few statements. If the store fails,
completions stay queued until it recovers; the fence then decides whether they still apply. Locked rows are skipped
(SKIP LOCKED) and written a little later, because the node that holds the locks may be frozen.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection

from timebell.engine.node import Node
from timebell.errors import StoreError
from timebell.model.job import Completion, JobState
from timebell.store.jobs import complete, external_reports, serial
from timebell.store.jobs.outcome_notices import complete_with_notices

log = logging.getLogger("timebell.completer")

MAX_BATCH_SIZE = 1000
# Pause before locked rows are written again; doubled up to the maximum.
MIN_LOCKED_RETRY_SECONDS, MAX_LOCKED_RETRY_SECONDS = 0.02, 0.3


class Completer:
    """The completer service: `submit` queues completions, `step` writes one batch."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._queue: list[Completion] = []
        self._deferred: list[Completion] = []
        self._retry_delay = MIN_LOCKED_RETRY_SECONDS
        self._wakeup: asyncio.Future[None] | None = None
        self._submitted = self._taken = 0
        """Numbers of completions: submitted, and taken from the queue to be written."""
        self._is_failing = False
        self._progress = asyncio.Event()
        """Set for a moment when the next batch is taken, or could not be written."""

    @property
    def skip_locked(self) -> bool:
        """True if the database has row locks, so that locked rows can be skipped."""
        return self.node.store.multi_node

    def submit(self, *completions: Completion) -> None:
        """Queue completions; their attempts stay in `node.running_attempts` until they are written."""
        self._queue += completions
        self._submitted += len(completions)
        if self._wakeup is not None:
            if not self._wakeup.done():
                self._wakeup.set_result(None)
            self._wakeup = None

    @property
    def is_empty(self) -> bool:
        """True if all submitted completions are written."""
        return not self._queue and not self._deferred

    async def wait_for_work(self) -> None:
        """Wait until a completion is queued. Supports one waiter."""
        if not self._queue:
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup

    async def wait_for_write(self) -> None:
        """Wait until all completions submitted so far are written or being written.

        Does not wait while the store is unreachable.
        """
        submitted = self._submitted
        while self._taken < submitted and not self._is_failing:
            await self._progress.wait()

    async def step(self) -> None:
        """Write one batch. On a StoreError, which propagates, the batch stays queued."""
        try:
            await self._write_next_batch()
            self._is_failing = False
        except BaseException:
            self._is_failing = True
            self._report_progress()
            raise

    def _report_progress(self) -> None:
        self._progress.set()
        self._progress.clear()

    async def _write_next_batch(self) -> None:
        batch = self._queue[:MAX_BATCH_SIZE]
        if not batch:
            return
        self._taken = self._submitted - len(self._queue) + len(batch)
        self._report_progress()
        try:
            locked = await self.write(batch)
        except StoreError:
            raise
        except Exception:
            locked = await self._write_individually(batch)
        del self._queue[: len(batch)]
        unwritten = {(completion.id, completion.attempt) for completion in locked}
        written = (
            [completion for completion in batch if (completion.id, completion.attempt) not in unwritten]
            if unwritten
            else batch
        )
        self.node.untrack_completed(written)
        self.node.counters.ended += len(written)
        if self.node.limited_tenants:
            self.node.wakeups.worker.wake()  # a tenant may have capacity for another job
        if locked:
            self._defer(locked)
        elif not self._deferred:
            self._retry_delay = MIN_LOCKED_RETRY_SECONDS

    def _defer(self, locked: list[Completion]) -> None:
        """Resubmit after a pause; by then the lock is released, or the heartbeat has terminated its session."""
        if not self._deferred:
            asyncio.get_running_loop().call_later(self._retry_delay, self._resubmit_deferred)
            self._retry_delay = min(2 * self._retry_delay, MAX_LOCKED_RETRY_SECONDS)
        self._deferred += locked

    def _resubmit_deferred(self) -> None:
        locked, self._deferred = self._deferred, []
        self.submit(*locked)

    async def _write_individually(self, batch: list[Completion]) -> list[Completion]:
        """Write a batch one by one after it failed, and drop the offending completion: that attempt's lease expires."""
        locked = []
        for completion in batch:
            try:
                locked += await self.write([completion])
            except StoreError:
                raise
            except Exception:
                log.exception("could not persist the result of job %s", completion.id)
        return locked

    async def write(self, batch: list[Completion]) -> list[Completion]:
        """Write completions of this node's or other nodes' attempts; a stale fence changes nothing.

        Returns the completions that were not written because their rows are locked; write them again later.
        """
        retries, dispatched, final = _group_by_state(batch)
        locked: set[str] = set()
        if dispatched:
            locked |= await self._write_dispatched(dispatched)
        if retries:
            locked_retries, cancelled = await self._write_retries(retries)
            locked |= locked_retries
            final += cancelled
        if final:
            locked |= await self._write_final(final)
        return [completion for completion in batch if completion.id in locked] if locked else []

    async def _write_dispatched(self, dispatched: list[Completion]) -> set[str]:
        """Mark jobs as dispatched; of those reported already, only the delivery record is stored. Return locked ids."""
        store = self.node.store
        written = await store.run_autocommit(complete.dispatch, dispatched, skip_locked=self.skip_locked)
        unwritten = [completion for completion in dispatched if completion.id not in written]
        locked = (await self._find_locked(unwritten)).keys()
        for completion in unwritten:
            if completion.id not in locked and completion.errors is not None:
                await store.run(external_reports.record_delivery, completion)
        return set(locked)

    async def _write_retries(self, retries: list[Completion]) -> tuple[set[str], list[Completion]]:
        """Reschedule jobs for another attempt.

        Return the locked ids, and final completions of those not rescheduled: a cancel was requested meanwhile (then
        the job ends here), or the fence is stale.
        """
        store = self.node.store
        grouped = [completion for completion in retries if completion.group_queue is not None]
        ungrouped = [completion for completion in retries if completion.group_queue is None]
        rescheduled: set[str] = set()
        if ungrouped:
            rescheduled |= await store.run_autocommit(
                complete.schedule_retries, ungrouped, skip_locked=self.skip_locked
            )
        if grouped:
            rescheduled |= await store.run(serial.schedule_group_retries, grouped)
        unwritten = [completion for completion in retries if completion.id not in rescheduled]
        found = await self._find_locked(unwritten)
        locked = {id_ for id_, cancel_requested in found.items() if not cancel_requested}
        return locked, [
            dataclasses.replace(completion, state=JobState.CANCELLED)
            for completion in unwritten
            if completion.id not in locked
        ]

    async def _write_final(self, final: list[Completion]) -> set[str]:
        """End jobs, and report completions with a stale fence. Return locked ids."""
        store, skip_locked = self.node.store, self.skip_locked
        watched, plain, serialized = _group_by_path(final)
        written: set[str] = set()
        if plain:
            rows = await (store.run_autocommit if store.dialect.complete_in_one_statement else store.run)(
                complete.complete_jobs, plain, skip_locked=skip_locked
            )
            all_written = len(rows) == len(plain)  # the usual case
            written |= {completion.id for completion in plain} if all_written else {str(row["id"]) for row in rows}
            if any(row["serial"] for row in rows):
                await store.run(serial.release_successors, rows, plain)
        if serialized:
            schedules = [completion.schedule_id for completion in serialized if completion.schedule_id]
            written |= await store.run(serial.complete_serial, serialized, schedules, skip_locked=skip_locked)
        if watched:
            written |= await store.run(complete_with_notices, watched, skip_locked=skip_locked)
        unwritten = [completion for completion in final if completion.id not in written]
        locked = (await self._find_locked(unwritten)).keys()
        self._report_stale([completion.id for completion in unwritten if completion.id not in locked])
        return set(locked)

    async def _find_locked(self, unwritten: Collection[Completion]) -> dict[str, bool]:
        """Return the ids of unwritten completions whose fence is current, with their cancel_requested flag."""
        if not unwritten or not self.skip_locked:
            return {}
        return await self.node.store.run_autocommit(
            complete.find_unchanged,
            [(completion.id, completion.attempt, completion.expected_state) for completion in unwritten],
        )

    def _report_stale(self, stale: list[str]) -> None:
        if stale:
            self.node.counters.fenced += len(stale)
            log.warning("%d stale completions were ignored: %s", len(stale), ", ".join(stale[:5]))


def _group_by_state(batch: list[Completion]) -> tuple[list[Completion], list[Completion], list[Completion]]:
    """Split completions into retries, dispatched and final ones."""
    retries: list[Completion] = []
    dispatched: list[Completion] = []
    final: list[Completion] = []
    for completion in batch:
        if completion.state is JobState.PENDING:
            retries.append(completion)
        elif completion.state is JobState.DISPATCHED:
            dispatched.append(completion)
        else:
            final.append(completion)
    return retries, dispatched, final


def _group_by_path(final: list[Completion]) -> tuple[list[Completion], list[Completion], list[Completion]]:
    """Split final completions into those with notices, plain ones, and those of serial schedules or groups."""
    watched: list[Completion] = []
    plain: list[Completion] = []
    serialized: list[Completion] = []
    for completion in final:
        if completion.state is JobState.FAILED or completion.watched:
            watched.append(completion)
        elif completion.schedule_id is None and completion.group_queue is None:
            plain.append(completion)
        else:
            serialized.append(completion)
    return watched, plain, serialized
