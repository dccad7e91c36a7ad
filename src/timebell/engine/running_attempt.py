"""A running attempt and its state: every start, stop, drain, lease loss and completion is a transition of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import TYPE_CHECKING, Any

from timebell.model.job import Attempt, Hold
from timebell.targets.base import TransactionBlock
from timebell.targets.handler import FastHandler

if TYPE_CHECKING:
    from timebell.engine.transactional_completion import TransactionalCompletion


class AttemptState(StrEnum):
    """The state of an attempt on the node that claimed it."""

    CLAIMED = "claimed"
    """Its task has not reached it yet."""
    RUNNING = "running"
    """It is checked or delivered."""
    COMMITTING = "committing"
    """A transaction of its handler is completing it. The fence protects the commit, so the lease no longer matters."""
    STOPPING = "stopping"
    """It was superseded by a later occurrence, or cancelled with `stop=True`; its job ends as cancelled."""
    DRAINING = "draining"
    """Its node shuts down; its job becomes pending again."""
    LOST = "lost"
    """Its lease was lost, so another node may run its job. If the delivery is interrupted, nothing is written."""
    CANCELLED = "cancelled"
    """Other code cancelled its task, which is a failure."""
    COMPLETED = "completed"
    """Its completion is committed by its handler, or handed to the completer."""


class AttemptEvent(StrEnum):
    """A change that affects a running attempt."""

    START = "start"
    COMMIT = "commit"
    """A transaction of its handler begins to write the completion."""
    ROLL_BACK = "roll back"
    """That transaction failed."""
    STOP = "stop"
    """A later occurrence supersedes it, or a caller cancels it."""
    DRAIN = "drain"
    """The node shuts down and waits no longer."""
    LOSE_LEASE = "lose lease"
    CANCEL = "cancel"
    """Its task was cancelled, for one of the three reasons above or by other code."""
    COMPLETE = "complete"


# An event that is missing here has no effect in that state.
TRANSITIONS: dict[AttemptState, dict[AttemptEvent, AttemptState]] = {
    AttemptState.CLAIMED: {
        AttemptEvent.START: AttemptState.RUNNING,
        AttemptEvent.STOP: AttemptState.STOPPING,
        AttemptEvent.DRAIN: AttemptState.DRAINING,
        AttemptEvent.LOSE_LEASE: AttemptState.LOST,
    },
    AttemptState.RUNNING: {
        AttemptEvent.COMMIT: AttemptState.COMMITTING,
        AttemptEvent.STOP: AttemptState.STOPPING,
        AttemptEvent.DRAIN: AttemptState.DRAINING,
        AttemptEvent.LOSE_LEASE: AttemptState.LOST,
        AttemptEvent.CANCEL: AttemptState.CANCELLED,
        AttemptEvent.COMPLETE: AttemptState.COMPLETED,
    },
    AttemptState.COMMITTING: {
        AttemptEvent.ROLL_BACK: AttemptState.RUNNING,
        AttemptEvent.STOP: AttemptState.STOPPING,
        AttemptEvent.DRAIN: AttemptState.DRAINING,
        AttemptEvent.CANCEL: AttemptState.CANCELLED,
        AttemptEvent.COMPLETE: AttemptState.COMPLETED,
    },
    AttemptState.STOPPING: {
        AttemptEvent.DRAIN: AttemptState.STOPPING,
        AttemptEvent.LOSE_LEASE: AttemptState.LOST,
        AttemptEvent.COMPLETE: AttemptState.COMPLETED,
    },
    AttemptState.DRAINING: {
        AttemptEvent.LOSE_LEASE: AttemptState.LOST,
        AttemptEvent.COMPLETE: AttemptState.COMPLETED,
    },
    AttemptState.LOST: {
        AttemptEvent.DRAIN: AttemptState.LOST,
        AttemptEvent.LOSE_LEASE: AttemptState.LOST,
        AttemptEvent.COMPLETE: AttemptState.COMPLETED,
    },
    AttemptState.CANCELLED: {AttemptEvent.COMPLETE: AttemptState.COMPLETED},
    # A handler may still run after its transaction has completed the job; a drain does not wait for it.
    AttemptState.COMPLETED: {AttemptEvent.DRAIN: AttemptState.COMPLETED},
}
_transition_lock = Lock()  # a sync handler commits in its thread


@dataclass(slots=True, eq=False)
class RunningAttempt:
    """An attempt of this node, from claim until its completion is written. `lease_until` is in monotonic seconds."""

    attempt: Attempt
    lease_until: float
    completion_factory: Callable[[RunningAttempt], TransactionalCompletion]
    progress_reporter: Callable[[RunningAttempt, float | None, str | None], None]
    state: AttemptState = AttemptState.CLAIMED
    task: asyncio.Task[Any] | None = None
    """The task that runs it, from its start until its handler has ended."""
    transactional_completion: TransactionalCompletion | None = None
    """Created when the handler first calls `event.transaction()`."""
    stop_cause: Hold | None = None
    """Set when a stop was requested, also of a plain function, which cannot be interrupted."""
    fast_handler: FastHandler | None = None
    """The handler, if the attempt qualifies for the fast path."""
    progress_is_queued: bool = False
    """True while the progress that its handler reported waits to be written."""
    is_timed_out: bool = False
    """True if its task was cancelled because the attempt exceeded its timeout."""
    is_reportable: bool = False
    """True if its receiver may report the result, which may end the job before the delivery itself has ended."""

    def start(self, task: asyncio.Task[Any] | None) -> None:
        """Start it in a task. An attempt that was stopped before stays stopped: check `state` before the delivery."""
        self.task = task
        self.transition(AttemptEvent.START)

    def interrupt(self, event: AttemptEvent) -> bool:
        """Apply STOP, DRAIN or LOSE_LEASE, and cancel the task. Returns False if the event has no effect.

        An attempt that has not started has no task yet; it checks its state when it starts, and frees its slot.
        """
        if not self.transition(event):
            return False
        if self.task is not None:
            self.task.cancel()
        return True

    def time_out(self) -> None:
        """Cancel the task because the attempt has exceeded its timeout."""
        if self.task is not None:
            self.is_timed_out = True
            self.task.cancel()

    def transition(self, event: AttemptEvent) -> bool:
        """Enter the state that follows an event. Returns False if the event has no effect in the current state."""
        with _transition_lock:
            state = TRANSITIONS[self.state].get(event)
            if state is None:
                return False
            self.state = state
            return True

    @property
    def should_stop(self) -> bool:
        """True if its handler should stop: a stop was requested, or another node may run its job."""
        return self.stop_cause is not None or self.state is AttemptState.LOST

    @property
    def needs_lease(self) -> bool:
        """True while its lease has to be renewed."""
        return self.state not in (AttemptState.COMMITTING, AttemptState.LOST)

    def report_progress(self, fraction: float | None, text: str | None) -> None:
        self.progress_reporter(self, fraction, text)

    def transaction(self, result: Callable[[], Any]) -> TransactionBlock:
        return self._get_completion().transaction(result)

    def join_transaction(
        self, result: Callable[[], Any], connection: Any, atomic: AbstractContextManager[Any]
    ) -> AbstractContextManager[None]:
        return self._get_completion().join_transaction(result, connection, atomic)

    def _get_completion(self) -> TransactionalCompletion:
        if self.transactional_completion is None:
            self.transactional_completion = self.completion_factory(self)
        return self.transactional_completion
