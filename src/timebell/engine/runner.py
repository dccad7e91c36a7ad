"""Run one attempt: check its lease and deadline, deliver it to its target, and build its completion."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from datetime import datetime, timedelta
from types import CoroutineType
from typing import Any

from timebell import tracing
from timebell.engine import named_targets
from timebell.engine.first_step import EagerCoroutine
from timebell.engine.named_targets import ResolvedOrError, TargetResolver, lookup_failed
from timebell.engine.node import (
    DEFAULT_SCHEDULE_TIMEOUT_SECONDS,
    DEFAULT_TIMEOUT_SECONDS,
    CachedRevision,
    Node,
)
from timebell.engine.pre_delivery_check import PreDeliveryCheck
from timebell.engine.running_attempt import AttemptEvent, AttemptState, PendingCall, RunningAttempt
from timebell.engine.transactional_completion import TransactionalCompletion
from timebell.errors import InvalidPayload, TimebellError
from timebell.model import attempts, decide
from timebell.model.job import Attempt, Completion, JobState, Kind
from timebell.model.payload import decode, encode, sanitize_text
from timebell.model.schedule import Policies
from timebell.recurrence import Recurrence
from timebell.targets.base import Delivery, Outcome, message_id
from timebell.targets.event_loop_watch import BLOCKING_STEP_SECONDS, WatchedCoroutine, warn_blocking
from timebell.targets.handler import Cancel, FastHandler, Snooze, build_event, call_outcome

log = logging.getLogger("timebell.runner")

UPCOMING_COUNT = 3
STATE_LOGGING = {
    JobState.COMPLETED: (logging.DEBUG, "completed"),
    JobState.PENDING: (logging.INFO, "postponed"),
    JobState.DISPATCHED: (logging.DEBUG, "dispatched"),
    JobState.FAILED: (logging.WARNING, "dead"),
}
DEFAULT_TOLERANCE = Policies().tolerance
TRIGGER_KIND = Kind.TRIGGER.value
CLOCK_REUSE_SECONDS = 50e-6  # how long the fast path reuses one reading of the clock


class Runner:
    """Runs the attempts of a node. Its only state is a cache of upcoming occurrence times."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.target_resolver = TargetResolver(node)
        self.pre_delivery_check = PreDeliveryCheck(node)
        self._upcoming_cache: dict[tuple[str, int], list[datetime]] = {}

    def transactional_completion(self, running: RunningAttempt) -> TransactionalCompletion:
        """Return the completion used by `event.transaction()` of an attempt."""
        return TransactionalCompletion(self.node, running, self._success_completion)

    def fast_path_handler(self, attempt: Attempt) -> FastHandler | None:
        """Return the handler of an attempt that qualifies for the fast path, otherwise None."""
        if (
            attempt.target is not None or attempt.conditions is not None or attempt.kind == TRIGGER_KIND
            or attempt.tenant_id in self.node.metered_tenants or tracing.is_enabled()
            or self.node.targets["handler"] is not self.node.handlers  # the target is wrapped
        ):  # fmt: skip
            return None
        return self.node.handlers.fast_path_handler(attempt.topic)

    def run_fast_path(
        self, group: deque[RunningAttempt], clean_context: Context, completions: list[Completion]
    ) -> bool | PendingCall:
        """Run attempts one after another in the current task, as long as each finishes in its first step.

        Finished attempts are removed from `group`, and their completions appended to `completions`. Returns True if
        the first attempt of `group` needs the full path (`run`), or the rest of its call if that has begun. Returns
        False at the end of the group, or after a handler that cancelled the shared task or changed the context
        (`clean_context`).
        """
        node, monotonic, state = self.node, self.node.clock.monotonic, self.node.handlers.state
        step_clock = self.node.handlers.monotonic or monotonic
        publish = None if node.arrivals is None or not node.arrivals.has_listeners else node.arrivals.publish
        task = asyncio.current_task()
        started_at, step_started_at, now = monotonic(), step_clock(), node.clock.now()
        stale = started_at + CLOCK_REUSE_SECONDS
        while group:
            running = group[0]
            attempt = running.attempt
            handler = running.fast_handler
            if (
                handler is None or running.state is not AttemptState.CLAIMED or started_at >= running.lease_until
                or (attempt.expires_at is not None and attempt.expires_at <= now)
            ):  # fmt: skip
                return True
            revision = None if attempt.schedule_id is None else self._cached_revision(attempt)
            upcoming = [] if revision is None else self._upcoming_times(attempt, revision.recurrence)
            event = build_event(attempt, now, upcoming, handler.payload, state, running)
            if event is None:
                return True
            running.start(task)
            self._record_start(attempt, now, revision, publish)
            rest: Awaitable[Any] | None = None
            try:
                call = handler.function(event)
                is_coroutine = type(call) is CoroutineType  # otherwise a wrapper returned another awaitable
                awaited = call.send(None) if is_coroutine else None
            except StopIteration as finished:
                result = finished.value
                if running.transactional_completion is not None:
                    rest = _return(result)
            except BaseException as exc:
                rest = _raise(exc)
            else:
                rest = (
                    WatchedCoroutine(call, step_clock, attempt.topic, handler.function, awaited, first_step_done=True)
                    if is_coroutine
                    else call
                )
            step_ended_at = step_clock()
            if (step_duration := step_ended_at - step_started_at) >= BLOCKING_STEP_SECONDS:
                warn_blocking(step_duration, attempt.topic, handler.function)
            if rest is not None:
                return PendingCall(rest, started_at)
            started_at, step_started_at = monotonic(), step_ended_at
            if started_at >= stale:
                now, stale = node.clock.now(), started_at + CLOCK_REUSE_SECONDS
            completions.append(self._fast_completion(attempt, handler, result, now, step_duration))
            running.transition(AttemptEvent.COMPLETE)
            running.task = None
            group.popleft()
            handler.finishes_immediately = _left_clean(task, clean_context)
            if not handler.finishes_immediately:
                break
        return False

    def _fast_completion(
        self, attempt: Attempt, handler: FastHandler, result: object, now: datetime, duration: float
    ) -> Completion:
        """Build the completion of an attempt whose handler finished in its first step. `duration` is in seconds."""
        completion = Completion(attempt.id, attempt.number, JobState.COMPLETED, now)
        if result is not None:
            completion.result, completion.reason = _encode_result(result)
        timeout = handler.timeout if attempt.timeout is None else attempt.timeout
        if timeout is None:
            timeout = DEFAULT_TIMEOUT_SECONDS if attempt.schedule_id is None else DEFAULT_SCHEDULE_TIMEOUT_SECONDS
        self.node.counters.record_success(attempt.topic, duration, timeout)
        if attempt.schedule_id is None:
            finalize_completion(attempt, completion, self.node.id)
        else:
            self._finalize(attempt, completion)
        if log.isEnabledFor(logging.DEBUG):
            self._log_completion(attempt, completion)
        return completion

    async def run(self, running: RunningAttempt, call: PendingCall | None = None) -> Completion | None:
        """Run one attempt, or the rest of its call. Returns None if nothing has to be written.

        That is the case if its delivery was interrupted after its lease was lost, or if a transaction of its handler
        has completed it.
        """
        completion = await self._execute(running, call)
        running.task = None
        committed = None
        if (transactional := running.transactional_completion) is not None:
            committed = transactional.completed
        if transactional is not None and committed is not None:
            self._record_completion(running.attempt, committed)
            transactional.report_outcome(committed, completion)
            return None
        if completion is not None:
            running.transition(AttemptEvent.COMPLETE)
            self._record_completion(running.attempt, completion)
        return completion

    async def _execute(self, running: RunningAttempt, pending_call: PendingCall | None) -> Completion | None:
        attempt, clock = running.attempt, self.node.clock
        delivery = None
        coroutine: Coroutine[Any, Any, Outcome | Completion | None]
        if pending_call is None:
            running.start(asyncio.current_task())
            delivery = self._build_delivery(running)
            coroutine = self._check_and_deliver(running, delivery)
        else:
            coroutine = self._finish_call(attempt, pending_call)
        try:
            outcome = await coroutine
            if not isinstance(outcome, Outcome):
                return None if outcome is None else self._finalize(attempt, outcome)
            completion = self._completion_for(attempt, outcome)
        except Snooze as snooze:
            later = clock.now() + timedelta(seconds=snooze.delay)
            completion = self._postpone(attempt, later)
        except Cancel as cancel:
            completion = Completion(
                attempt.id, attempt.number, JobState.CANCELLED, clock.now(), reason=cancel.reason or None
            )
        except asyncio.CancelledError:
            running.transition(AttemptEvent.CANCEL)
            if running.state is AttemptState.STOPPING:
                completion = decide.complete_superseded(attempt.id, attempt.number, clock.now())
            elif running.state is AttemptState.DRAINING:
                completion = self._postpone(attempt, clock.now())
            elif running.state is not AttemptState.CANCELLED:
                return None
            elif self.node.stopping:
                raise
            else:
                failure = Outcome.failed("CancelledError", "CancelledError: its task was cancelled")
                completion = self._completion_for(attempt, failure)
        if delivery is not None and completion.state is not JobState.COMPLETED:
            completion.progress = delivery.progress
        return self._finalize(attempt, completion)

    def _build_delivery(self, running: RunningAttempt) -> Delivery:
        attempt = running.attempt
        revision, now = self._cached_revision(attempt), self.node.clock.now()
        upcoming = [] if revision is None else self._upcoming_times(attempt, revision.recurrence)
        delivery = build_delivery(self.node, attempt, now, None if revision is None else revision.name, upcoming)
        delivery.completion = running
        return delivery

    async def _check_and_deliver(self, running: RunningAttempt, delivery: Delivery) -> Outcome | Completion | None:
        """Deliver an attempt, after the checks that may replace the delivery.

        Returns the outcome of the delivery; or a completion, if the attempt has expired or the pre-delivery check
        withholds it; or None, if its lease is lost.
        """
        attempt, now = running.attempt, delivery.fired_at
        if attempt.expires_at is not None and attempt.expires_at <= now:
            return decide.complete_expired(attempt.id, attempt.number, now)
        if running.state is not AttemptState.RUNNING:
            raise asyncio.CancelledError
        if (
            self.pre_delivery_check.applies_to(attempt)
            and (replacement := await self.pre_delivery_check.check(attempt)) is not None
        ):
            return replacement
        target = None if attempt.target is None else decode(attempt.target)
        name = None if target is None else target.get("name")
        resolved = None if name is None else await self.target_resolver.resolve(attempt.tenant_id, name)
        if self.node.clock.monotonic() >= running.lease_until:  # another node may run it already: do not deliver
            running.transition(AttemptEvent.LOSE_LEASE)
            return None
        return await self._deliver(attempt, target, resolved, delivery)

    def _deliver(
        self, attempt: Attempt, target: dict[str, Any] | None, resolved: ResolvedOrError | None, delivery: Delivery
    ) -> Coroutine[Any, Any, Outcome]:
        """Deliver to the `resolved` named target if there is one, otherwise to the inline target."""
        kind = "handler" if target is None else target["kind"]
        arrivals = self.node.arrivals
        self._record_start(
            attempt, delivery.fired_at, self._cached_revision(attempt), None if arrivals is None else arrivals.publish
        )
        coroutine = self._deliver_to_target(attempt, target, resolved, delivery, kind)
        return self._deliver_traced(attempt, delivery, kind, coroutine) if tracing.is_enabled() else coroutine

    def _record_start(
        self,
        attempt: Attempt,
        now: datetime,
        revision: CachedRevision | None,
        publish: Callable[[Attempt, datetime], None] | None,
    ) -> None:
        """Record the start lag of a first attempt and publish its start. Later attempts are delayed on purpose."""
        if attempt.number != 1:
            return
        if publish is not None:
            publish(attempt, now)
        lag = (now - attempt.run_at).total_seconds()
        self.node.counters.record_lag(lag, DEFAULT_TOLERANCE if revision is None else revision.tolerance)

    async def _finish_call(self, attempt: Attempt, call: PendingCall) -> Outcome:
        """Finish a handler call that the fast path started."""
        timeout, outcome = self.node.timeout_for(attempt), None
        try:
            outcome = await self._run_with_timeout(
                timeout, call.started_at, "handler", call_outcome(call.awaitable), attempt.id
            )
        finally:
            duration = self.node.clock.monotonic() - call.started_at
            self._record_delivery("handler", attempt.topic, duration, timeout, outcome)
        return outcome

    async def _deliver_traced(
        self, attempt: Attempt, delivery: Delivery, kind: str, coroutine: Coroutine[Any, Any, Outcome]
    ) -> Outcome:
        attributes: dict[str, str | int | float | None] = {
            "attempt": attempt.number, "tenant": attempt.tenant_id, "schedule": delivery.schedule_name,
            "queue": attempt.queue, "scheduled_at": delivery.scheduled_at.isoformat(),
        }  # fmt: skip
        with tracing.delivery_span(kind, attempt.topic, attempt.id, delivery.metadata, attributes) as span:
            attempt.trace_id = None if span is None else span.trace_id
            outcome = await coroutine
            if span is not None:
                span.record_outcome(outcome.code, delivered=outcome.delivered)
        return outcome

    async def _deliver_to_target(
        self,
        attempt: Attempt,
        target: dict[str, Any] | None,
        resolved: ResolvedOrError | None,
        delivery: Delivery,
        kind: str,
    ) -> Outcome:
        timeout = self.node.timeout_for(attempt)
        started_at = self.node.clock.monotonic()
        outcome = None
        try:
            if resolved is None:
                options = {} if target is None else target["options"]
                coroutine = self.node.targets[kind].deliver(delivery, options)
                outcome = await self._run_with_timeout(timeout, started_at, kind, coroutine, attempt.id)
            elif isinstance(resolved, TimebellError):
                outcome = lookup_failed(resolved)
            else:
                attempt.target_used = resolved.summary
                coroutine = named_targets.deliver(self.node.named_targets[kind], resolved, delivery)
                outcome = await self._run_with_timeout(timeout, started_at, kind, coroutine, attempt.id)
                if outcome.receiver_gone:
                    await self.target_resolver.disable_target(attempt.tenant_id, resolved, outcome.error or "")
        finally:
            duration = self.node.clock.monotonic() - started_at
            self._record_delivery(kind, attempt.topic, duration, timeout, outcome)
        if kind != "handler":
            outcome.record = {
                "kind": kind, "messageId": message_id(delivery), "durationMs": round(duration * 1000, 1),
                **(outcome.record or {}), **({} if attempt.target_used is None else {"target": attempt.target_used}),
            }  # fmt: skip
        return outcome

    def _record_delivery(self, kind: str, topic: str, duration: float, timeout: float, outcome: Outcome | None) -> None:
        """Count a delivery; without an outcome it was snoozed, cancelled or stopped."""
        counters = self.node.counters
        counters.run_durations.observe(duration, topic)
        counters.timeout_ratios.observe(duration / timeout, topic)
        counters.delivery_durations.observe(duration, kind)
        counters.deliveries.add(kind, "stopped" if outcome is None else _code_class(kind, outcome))

    async def _run_with_timeout(
        self, timeout: float, started_at: float, kind: str, coroutine: Coroutine[Any, Any, Outcome], job_id: str
    ) -> Outcome:
        """Run a delivery until `timeout` seconds after `started_at` (monotonic seconds)."""
        deadline: asyncio.Timeout | None = None
        try:
            eager = EagerCoroutine(coroutine)
            if eager.done:  # the usual case, and a timer would cost as much as the delivery
                return eager.result
            async with asyncio.timeout(timeout - (self.node.clock.monotonic() - started_at)) as deadline:
                return await eager
        except TimeoutError:
            if deadline is None or not deadline.expired():
                raise
            return Outcome.failed("TIMEOUT", f"The attempt exceeded its timeout of {timeout:g} s.")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return Outcome.failed("CancelledError", "CancelledError: an awaited task or future was cancelled")
        except (Snooze, Cancel):
            raise
        except Exception as exc:  # report a bug in a target as an outcome
            log.exception("target %s crashed on job %s", kind, job_id)
            return Outcome.failed("TARGET_BROKE", f"{type(exc).__name__}: {exc}"[:500])

    def _upcoming_times(self, attempt: Attempt, recurrence: Recurrence) -> list[datetime]:
        """Return the occurrence times after this attempt's own. Reuses those of the schedule's previous attempt."""
        key, at = (attempt.schedule_id or "", attempt.revision or 0), attempt.scheduled_at
        cached = self._upcoming_cache.get(key)
        upcoming = cached[1:] if cached and cached[0] == at else []
        effective = recurrence.effective()
        for _ in range(UPCOMING_COUNT - len(upcoming)):
            next_time, _ = decide.next_cursor(effective, upcoming[-1] if upcoming else at)
            if next_time is None:
                break
            upcoming.append(next_time)
        if cached is None and len(self._upcoming_cache) > 10_000:
            self._upcoming_cache.clear()
        self._upcoming_cache[key] = upcoming
        return list(upcoming)

    def _success_completion(self, attempt: Attempt, result: object) -> Completion:
        return self._finalize(attempt, self._completion_for(attempt, Outcome.ok(result)))

    def _completion_for(self, attempt: Attempt, outcome: Outcome) -> Completion:
        now = self.node.clock.now()
        result, encode_error = (None, None) if outcome.result is None else _encode_result(outcome.result)
        if outcome.awaits_report:
            report_by = now + timedelta(seconds=self.node.timeout_for(attempt))
            return Completion(
                attempt.id, attempt.number, JobState.DISPATCHED, now, run_at=report_by, delivery_record=outcome.record
            )
        if outcome.delivered:
            completion = Completion(
                attempt.id, attempt.number, JobState.COMPLETED, now, result=result, reason=encode_error
            )
        else:
            completion = decide.complete_after_failure(
                attempt.id, attempt.number, attempt.attempts_used,
                self.node.retry_policy_for(attempt, decode(attempt.retry)), now,
                outcome.code or "FAILED", outcome.error or "The delivery failed.", retryable=outcome.retryable,
                retry_after=outcome.retry_after, uses_attempt=outcome.uses_attempt,
            )  # fmt: skip
            completion.result = result
        completion.delivery_record = outcome.record
        return completion

    def _postpone(self, attempt: Attempt, at: datetime) -> Completion:
        """Build a completion that returns the job to pending without using up an attempt."""
        now = self.node.clock.now()
        return Completion(attempt.id, attempt.number, JobState.PENDING, now, run_at=at, uses_attempt=False)

    def _finalize(self, attempt: Attempt, completion: Completion) -> Completion:
        if completion.state is JobState.COMPLETED and attempt.schedule_id is not None:
            revision = self._cached_revision(attempt)
            completion.watched = revision is not None and bool(revision.notify)
        return finalize_completion(attempt, completion, self.node.id)

    def _cached_revision(self, attempt: Attempt) -> CachedRevision | None:
        return self.node.revision_cache.get((attempt.schedule_id or "", attempt.revision or 0))

    def _record_completion(self, attempt: Attempt, completion: Completion) -> None:
        """Count and log a completion; only dead letters are logged as warnings."""
        self.node.counters.record_completion(attempt.topic, completion)
        self._log_completion(attempt, completion)

    def _log_completion(self, attempt: Attempt, completion: Completion) -> None:
        level, word = STATE_LOGGING.get(completion.state, (logging.DEBUG, "ended"))
        if not log.isEnabledFor(level):
            return
        error = "" if completion.error is None else f": {completion.code}: {completion.error}"
        lag, revision = attempt.started_at - attempt.run_at, self._cached_revision(attempt)
        fields = {
            "event": f"job.{word}", "job_id": attempt.id, "schedule": revision.name if revision else None,
            "topic": attempt.topic, "tenant": attempt.tenant_id, "attempt": attempt.number,
            "lag_ms": round(lag.total_seconds() * 1000, 3), "trace_id": attempt.trace_id,
        }  # fmt: skip
        log.log(level, "job %s of %s %s%s", attempt.id, attempt.topic, word, error, extra=fields)


def build_delivery(
    node: Node, attempt: Attempt, now: datetime, name: str | None = None, upcoming: list[datetime] | None = None
) -> Delivery:
    """Build the delivery of an attempt, as passed to its target."""
    metadata = {} if attempt.metadata is None else decode(attempt.metadata) or {}
    retry = None if attempt.retry is None else decode(attempt.retry)
    return Delivery(
        attempt.id, attempt.tenant_id, attempt.topic, decode(attempt.payload), metadata, attempt.timezone,
        attempt.scheduled_at, now, attempt.schedule_id, name, attempt.occurrence_key, attempt.number, upcoming or [],
        manual_retries=attempt.manual_retries, retry=node.retry_policy_for(attempt, retry), priority=attempt.priority,
        expires_at=attempt.expires_at, previous_attempts=[] if attempt.errors is None else decode(attempt.errors) or [],
    )  # fmt: skip


def finalize_completion(attempt: Attempt, completion: Completion, node_id: str) -> Completion:
    """Fill in the fields of a completion that come from its attempt: serial order, group, fence and attempt log."""
    completion.schedule_id = attempt.schedule_id if attempt.serial else None
    completion.expected_state = attempt.state
    completion.group_queue = attempt.queue if attempt.group is not None else None
    completion.errors = attempt.errors
    if (
        completion.state is JobState.COMPLETED and attempt.errors is None and attempt.verdict is None
        and completion.reason is None and completion.delivery_record is None and completion.progress is None
        and completion.error is None
    ):  # fmt: skip
        return completion  # the usual case: nothing to add to the attempt log
    completion.reason = None if completion.reason is None else sanitize_text(completion.reason, 200)
    completion.code = None if completion.code is None else sanitize_text(completion.code, 100)
    completion.error = None if completion.error is None else sanitize_text(completion.error, 4000)
    lines = [] if attempt.errors is None else decode(attempt.errors) or []
    if completion.run_at is not None and completion.state is JobState.PENDING:
        completion.run_at = max(completion.run_at, attempt.scheduled_at)  # the database's clock may have been set back
    if lines and (completion.progress is not None or completion.state is JobState.COMPLETED):
        lines = [_without_progress(line) for line in lines]  # superseded by the latest progress or by the result
    has_verdict = attempt.verdict is not None and completion.state in (JobState.COMPLETED, JobState.DISPATCHED)
    if (
        has_verdict
        or completion.error is not None
        or completion.delivery_record is not None
        or completion.progress is not None
    ):
        line = {
            "attempt": completion.attempt, "startedAt": attempt.started_at.isoformat(),
            "endedAt": completion.at.isoformat(),
            "node": node_id, "code": completion.code, "error": completion.error and completion.error[:1000],
            **(completion.delivery_record or {}),
        }  # fmt: skip
        if attempt.target_used is not None:
            line["target"] = attempt.target_used
        if attempt.verdict is not None:
            line["condition"] = attempt.verdict
        if completion.progress is not None:
            line["progress"] = completion.progress
            if completion.error is None:
                line |= {"code": "POSTPONED", "error": "The attempt was postponed; its progress is stored."}
        if lines and lines[-1].get("attempt") == completion.attempt:  # merge the report with its dispatch
            line = {**lines.pop(), **line}
        completion.errors = attempts.encode_recent([*lines, line])
    elif lines and completion.state is JobState.COMPLETED and '"progress"' in (attempt.errors or ""):
        completion.errors = attempts.encode_recent(lines)
    return completion


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


def _without_progress(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "progress"}


def _code_class(kind: str, outcome: Outcome) -> str:
    """Return the metric label of an outcome: `2xx` to `5xx` for HTTP, otherwise `ok`, `timeout` or `error`."""
    if kind == "http" and isinstance(outcome.result, dict):
        return f"{outcome.result['status'] // 100}xx"
    return "ok" if outcome.delivered else "timeout" if outcome.code == "TIMEOUT" else "error"


def _encode_result(result: object) -> tuple[str | None, str | None]:
    """Return a result as JSON to store with the job, or None and the reason why it cannot be stored."""
    try:
        return encode(result, "result"), None
    except InvalidPayload as error:
        return None, f"result not stored: {error.message}"
