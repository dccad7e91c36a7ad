"""Run one attempt as a pipeline: prepare, check, deliver, outcome, complete.

`fast_path.py` has the same five steps for handlers that finish in their first step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import nullcontext
from datetime import timedelta

from timebell.engine.completions import Completions
from timebell.engine.delivery import Deliverer, PreparedDelivery, StartedCall
from timebell.engine.node import Node
from timebell.engine.pre_delivery_check import PreDeliveryCheck, WaitContext
from timebell.engine.running_attempt import AttemptEvent, AttemptState, RunningAttempt
from timebell.engine.transactional_completion import TransactionalCompletion
from timebell.model import decide
from timebell.model.job import Completion, Hold, JobState
from timebell.targets.arrived import Cancel, Snooze
from timebell.targets.base import Outcome


class Runner:
    """Runs the attempts of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.deliverer = Deliverer(node)
        self.completions = Completions(node)
        self.pre_delivery_check = PreDeliveryCheck(node)

    def transactional_completion(self, running: RunningAttempt) -> TransactionalCompletion:
        """Return the completion used by `event.transaction()` of an attempt."""
        return TransactionalCompletion(self.node, running, self.completions.success)

    async def run(
        self, running: RunningAttempt, call: StartedCall | None = None, without_slot: WaitContext = nullcontext
    ) -> Completion | None:
        """Run an attempt, or the rest of the call that the fast path started; return the completion to write.

        The attempt waits for external data in the context `without_slot`, in which it occupies no slot of the worker.
        Returns None if nothing has to be written: a transaction of the handler has completed the job, or the delivery
        was interrupted because the lease is lost.
        """
        prepared = None
        result: Completion | Outcome | BaseException
        try:
            if call is None:
                prepared = self.prepare(running)
                result = await self.check(running, prepared, without_slot) or await self.deliver(running, prepared)
            else:
                result = await self.deliverer.finish_call(running, call)
        except (Snooze, Cancel, asyncio.CancelledError) as exc:
            result = exc
        completion = self.outcome(running, result)
        return self.complete(running, prepared, completion)

    def prepare(self, running: RunningAttempt) -> PreparedDelivery:
        """Start the attempt and build its delivery."""
        running.start(asyncio.current_task())
        prepared = self.deliverer.build(running.attempt)
        prepared.delivery.handle = running
        return prepared

    async def check(
        self, running: RunningAttempt, prepared: PreparedDelivery, without_slot: WaitContext = nullcontext
    ) -> Completion | None:  # fmt: skip
        """Check that the attempt may be delivered. Returns the completion that replaces the delivery, if any.

        The lease is checked last, immediately before the delivery: another node may run the job already. Raises
        CancelledError if the attempt was stopped before it started, or if its lease is lost.
        """
        attempt, now = running.attempt, prepared.delivery.fired_at
        if attempt.expires_at is not None and attempt.expires_at <= now:
            return decide.complete_expired(attempt.id, attempt.number, now)
        if running.state is not AttemptState.RUNNING:
            raise asyncio.CancelledError
        if self.pre_delivery_check.applies_to(attempt):
            replacement = await self.pre_delivery_check.check(attempt, without_slot)
            if replacement is not None:
                return replacement
        if prepared.target_name is not None:  # its latest version is used
            prepared.resolved = await self.deliverer.target_resolver.resolve(attempt.tenant_id, prepared.target_name)
        if self.node.clock.monotonic() >= running.lease_until:
            running.transition(AttemptEvent.LOSE_LEASE)
            raise asyncio.CancelledError
        return None

    def deliver(self, running: RunningAttempt, prepared: PreparedDelivery) -> Awaitable[Outcome]:
        """Deliver the attempt to its target."""
        return self.deliverer.deliver(running, prepared)

    def outcome(self, running: RunningAttempt, result: Completion | Outcome | BaseException) -> Completion | None:
        """Return the completion that follows from the result of the previous steps; None if there is none."""
        attempt, now = running.attempt, self.node.clock.now()
        match result:
            case Completion():
                return result
            case Outcome():
                return self.completions.from_outcome(attempt, result)
            case Snooze():
                return self.completions.postponed(attempt, now + timedelta(seconds=result.delay), result.reason)
            case Cancel():
                return Completion(attempt.id, attempt.number, JobState.CANCELLED, now, reason=result.reason or None)
        running.transition(AttemptEvent.CANCEL)
        match running.state:
            case AttemptState.STOPPING:
                return decide.complete_stopped(attempt.id, attempt.number, now, running.stop_cause or Hold.STOPPING)
            case AttemptState.DRAINING:
                return self.completions.postponed(attempt, now, "The node stopped during the attempt.")
            case AttemptState.CANCELLED:
                if self.node.stopping:
                    raise result
                failure = Outcome.failed("CancelledError", "CancelledError: its task was cancelled")
                return self.completions.from_outcome(attempt, failure)
        return None

    def complete(
        self, running: RunningAttempt, prepared: PreparedDelivery | None, completion: Completion | None
    ) -> Completion | None:
        """Finalize, count and log the completion, unless a transaction of the handler has completed the job."""
        attempt, transactional = running.attempt, running.transactional_completion
        running.task = None
        if completion is not None:
            if prepared is not None and completion.state is not JobState.COMPLETED:
                completion.progress = prepared.delivery.progress
            self.completions.finalize(attempt, completion)
        if transactional is not None and transactional.completed is not None:
            self.completions.record_committed(attempt, transactional.completed, completion)
            return None
        if completion is not None:
            running.transition(AttemptEvent.COMPLETE)
            self.completions.record(attempt, completion)
        return completion
