"""Run attempts of async handlers: the steps of `runner.py` without everything that only some attempts need.

Attempts whose handlers are likely to finish in their first step share a task and run one after another. The others have
a task each. Attempts that need more than this path has take the full path.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from datetime import datetime
from types import CoroutineType
from typing import Any

from timebell import tracing
from timebell.engine.completions import Completions, encode_result, warn_result_not_stored
from timebell.engine.delivery import Deliverer, StartedCall
from timebell.engine.node import DEFAULT_SCHEDULE_TIMEOUT_SECONDS, DEFAULT_TIMEOUT_SECONDS, Node
from timebell.engine.running_attempt import AttemptEvent, AttemptState, RunningAttempt
from timebell.engine.time_slice import TimeSlice
from timebell.model.attempts import finalize_completion
from timebell.model.job import Attempt, Completion, JobState, Kind
from timebell.targets.arrived import Arrived
from timebell.targets.event_loop_watch import BLOCKING_STEP_SECONDS, WatchedCoroutine, warn_blocking
from timebell.targets.handler import FastHandler, build_event

log = logging.getLogger("timebell.runner")

TRIGGER_KIND = Kind.TRIGGER.value
CLOCK_REUSE_SECONDS = 50e-6  # how long one reading of the clock is reused


class FastPath:
    """The fast path of a node's attempts."""

    def __init__(self, node: Node, deliverer: Deliverer, completions: Completions, time_slice: TimeSlice) -> None:
        self.node = node
        self.deliverer = deliverer
        self.completions = completions
        self.time_slice = time_slice

    def handler_for(self, attempt: Attempt) -> FastHandler | None:
        """Return the handler of an attempt that qualifies for the fast path, otherwise None."""
        if (
            attempt.target is not None or attempt.conditions is not None or attempt.kind == TRIGGER_KIND
            or attempt.tenant_id in self.node.metered_tenants or tracing.is_enabled()
            or self.node.targets["handler"] is not self.node.handlers  # the target is wrapped
        ):  # fmt: skip
            return None
        return self.node.handlers.fast_path_handler(attempt.topic)

    def run(
        self, group: deque[RunningAttempt], clean_context: Context, completions: list[Completion]
    ) -> tuple[RunningAttempt, StartedCall | None] | None:
        """Run attempts one after another in the current task, as long as each finishes in its first step.

        Finished attempts are removed from `group`, and their completions appended to `completions`. Removes and returns
        an attempt that needs the full path, with its call if that has started. Returns None at the end of the group or
        of the time slice, or after a handler that cancelled the shared task or changed the context (`clean_context`).
        """
        node, monotonic = self.node, self.node.clock.monotonic
        step_clock, publish = node.handlers.monotonic or monotonic, self._publisher()
        task = asyncio.current_task()
        started_at, step_started_at, now = monotonic(), step_clock(), node.clock.now()
        stale = started_at + CLOCK_REUSE_SECONDS
        slice_ends_at = self.time_slice.ends_at
        while group and started_at < slice_ends_at:
            running = group[0]
            handler = running.fast_handler
            if handler is None or not self.check(running, now, started_at):
                return group.popleft(), None
            event = self.prepare(running, handler, now)
            if event is None:
                return group.popleft(), None
            running.start(task)
            result, rest = self.deliver(running, handler, event, publish)
            step_ended_at = step_clock()
            if (duration := step_ended_at - step_started_at) >= BLOCKING_STEP_SECONDS:
                warn_blocking(duration, running.attempt.topic, handler.function)
            if rest is not None:
                # The attempts after it probably do not finish either: each gets its own task.
                handler.finishes_immediately = False
                return group.popleft(), StartedCall(
                    rest, started_at, _timeout_of(running.attempt, handler), handler.retry
                )
            started_at, step_started_at = monotonic(), step_ended_at
            if started_at >= stale:
                now, stale = node.clock.now(), started_at + CLOCK_REUSE_SECONDS
            completion = self.outcome(running.attempt, result, now)
            self.complete(running, handler, completion, duration)
            completions.append(completion)
            group.popleft()
            handler.finishes_immediately = _left_clean(task, clean_context)
            if not handler.finishes_immediately:
                break
        return None

    async def run_alone(self, running: RunningAttempt, handler: FastHandler) -> Completion | StartedCall | None:
        """Run an attempt in the current task, which it does not share.

        Returns its completion, or the rest of a call that raised, was cancelled or used a transaction, or None if the
        attempt has not started; the latter two need the full path.
        """
        node, attempt, monotonic = self.node, running.attempt, self.node.clock.monotonic
        started_at, now = monotonic(), node.clock.now()
        if not self.check(running, now, started_at) or (event := self.prepare(running, handler, now)) is None:
            return None
        running.start(task := asyncio.current_task())
        clean_context = copy_context()
        if handler.is_async:
            result, rest = self.deliver(running, handler, event, self._publisher())
        else:
            result, rest = None, self.deliver_to_thread(running, handler, event)
        if (duration := monotonic() - started_at) >= BLOCKING_STEP_SECONDS:
            warn_blocking(duration, attempt.topic, handler.function)
        if rest is None:
            handler.finishes_immediately = _left_clean(task, clean_context)
        else:
            deadlines, timeout = self.deliverer.deadlines, _timeout_of(attempt, handler)
            deadlines.add(running, started_at + timeout)
            try:
                result = await rest
            except BaseException as exc:
                return StartedCall(_raise(exc), started_at, timeout, handler.retry)
            finally:
                deadlines.remove(running)
            if running.transactional_completion is not None:
                return StartedCall(_return(result), started_at, timeout, handler.retry)
            duration = monotonic() - started_at
        completion = self.outcome(attempt, result, node.clock.now())
        self.complete(running, handler, completion, duration)
        return completion

    def _publisher(self) -> Callable[[Attempt, datetime], None] | None:
        """Return the function that publishes the start of an attempt; None without listeners."""
        arrivals = self.node.arrivals
        return None if arrivals is None or not arrivals.has_listeners else arrivals.publish

    def prepare(self, running: RunningAttempt, handler: FastHandler, now: datetime) -> Arrived | None:
        """Build the event of an attempt; None if its payload is invalid, which the full path reports."""
        attempt = running.attempt
        revision = None if attempt.schedule_id is None else self.node.cached_revision(attempt)
        upcoming = [] if revision is None else self.deliverer.upcoming_times(attempt, revision.recurrence)
        return build_event(attempt, now, upcoming, handler.payload, self.node.handlers.state, running)

    def check(self, running: RunningAttempt, now: datetime, monotonic_now: float) -> bool:
        """Return whether an attempt may be delivered: it is not stopped or expired, and its lease is valid."""
        expires_at = running.attempt.expires_at
        return (
            running.state is AttemptState.CLAIMED
            and monotonic_now < running.lease_until
            and (expires_at is None or expires_at > now)
        )

    def deliver(
        self,
        running: RunningAttempt,
        handler: FastHandler,
        event: Arrived,
        publish: Callable[[Attempt, datetime], None] | None,
    ) -> tuple[Any, Awaitable[Any] | None]:
        """Call the handler. Returns its result, or the rest of the call if its first step did not finish it."""
        attempt = running.attempt
        revision = None if attempt.schedule_id is None else self.node.cached_revision(attempt)
        self.deliverer.record_start(attempt, event.fired_at, revision, publish)
        try:
            call = handler.function(event)
            if type(call) is not CoroutineType:  # a wrapper returned another awaitable
                return None, call
            awaited = call.send(None)
        except StopIteration as finished:
            is_complete = running.transactional_completion is None
            return finished.value, None if is_complete else _return(finished.value)
        except BaseException as exc:
            return None, _raise(exc)
        step_clock = self.node.handlers.monotonic or self.node.clock.monotonic
        return None, WatchedCoroutine(call, step_clock, attempt.topic, handler.function, awaited, first_step_done=True)

    def deliver_to_thread(self, running: RunningAttempt, handler: FastHandler, event: Arrived) -> Awaitable[Any]:
        """Hand the call of a plain function over to a thread; return the rest of the call."""
        attempt = running.attempt
        revision = None if attempt.schedule_id is None else self.node.cached_revision(attempt)
        self.deliverer.record_start(attempt, event.fired_at, revision, self._publisher())
        return self.node.handlers.call_in_thread(handler.function, event)

    def outcome(self, attempt: Attempt, result: object, now: datetime) -> Completion:
        """Return the completion of an attempt whose handler returned `result`."""
        completion = Completion(attempt.id, attempt.number, JobState.COMPLETED, now)
        if result is not None:
            completion.result, completion.reason = encode_result(result)
            if completion.reason is not None:
                warn_result_not_stored(attempt, completion)
        return completion

    def complete(self, running: RunningAttempt, handler: FastHandler, completion: Completion, duration: float) -> None:
        """Finalize, count and log the completion of a handler that ran for `duration` seconds."""
        attempt = running.attempt
        self.node.counters.record_success(attempt.topic, duration, _timeout_of(attempt, handler))
        if attempt.schedule_id is None:
            finalize_completion(attempt, completion, self.node.id)
        else:
            self.completions.finalize(attempt, completion)
        if log.isEnabledFor(logging.DEBUG):
            self.completions.log(attempt, completion)
        running.transition(AttemptEvent.COMPLETE)
        running.task = None


def _timeout_of(attempt: Attempt, handler: FastHandler) -> float:
    """Return the timeout of an attempt in seconds, like `Node.timeout_for`."""
    timeout = handler.timeout if attempt.timeout is None else attempt.timeout
    if timeout is None:
        timeout = DEFAULT_TIMEOUT_SECONDS if attempt.schedule_id is None else DEFAULT_SCHEDULE_TIMEOUT_SECONDS
    return timeout


async def _return(result: object) -> object:
    return result


async def _raise(exc: BaseException) -> object:
    raise exc


def _left_clean(task: asyncio.Task[Any] | None, clean_context: Context) -> bool:
    """True if a handler neither cancelled the shared task nor changed its context."""
    try:
        return (task is None or not task.cancelling()) and copy_context() == clean_context
    except Exception:  # a context value cannot be compared
        return False
