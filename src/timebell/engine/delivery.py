"""Build the delivery of an attempt and send it to its target, with timeout, trace and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from timebell import tracing
from timebell.durations import parse_duration
from timebell.engine import named_targets
from timebell.engine.deadlines import Deadlines
from timebell.engine.named_targets import ResolvedOrError, TargetResolver, lookup_failed
from timebell.engine.node import CachedRevision, Node
from timebell.engine.running_attempt import RunningAttempt
from timebell.errors import TimebellError
from timebell.model import decide
from timebell.model.job import Attempt
from timebell.model.payload import decode
from timebell.model.policy import Retry
from timebell.model.schedule import Policies
from timebell.model.target import ResolvedTarget
from timebell.recurrence import Recurrence
from timebell.targets.arrived import Cancel, Snooze
from timebell.targets.base import Delivery, Outcome, message_id
from timebell.targets.handler import call_outcome

log = logging.getLogger("timebell.runner")

UPCOMING_COUNT = 3
REQUEST_TIMEOUT_MARGIN_SECONDS = 5.0
"""An attempt may take this much longer than its request, so that the request reports its own timeout."""
DEFAULT_TOLERANCE = Policies().tolerance


@dataclass(slots=True)
class PreparedDelivery:
    """A delivery and its target: an inline one with `options`, or the one called `target_name`."""

    delivery: Delivery
    kind: str
    options: dict[str, Any]
    target_name: str | None
    resolved: ResolvedOrError | None = None
    """The named target, as of the check before the delivery."""


class StartedCall(NamedTuple):
    """The rest of a handler call whose first step did not finish it; it may take `timeout` seconds in all."""

    awaitable: Awaitable[Any]
    started_at: float
    """In monotonic seconds."""
    timeout: float
    retry: Retry | None
    """The retry policy of the handler."""


class Deliverer:
    """Delivers the attempts of a node. Its only state is a cache of upcoming occurrence times."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.target_resolver = TargetResolver(node)
        self.deadlines = Deadlines(node.clock.monotonic)
        self._upcoming_cache: dict[tuple[str, int], list[datetime]] = {}

    def build(self, attempt: Attempt) -> PreparedDelivery:
        """Build the delivery of an attempt that starts now."""
        target: dict[str, Any] = {"kind": "handler"} if attempt.target is None else decode(attempt.target)
        revision, now = self.node.cached_revision(attempt), self.node.clock.now()
        upcoming = [] if revision is None else self.upcoming_times(attempt, revision.recurrence)
        delivery = build_delivery(self.node, attempt, now, None if revision is None else revision.name, upcoming)
        return PreparedDelivery(delivery, target["kind"], target.get("options", {}), target.get("name"))

    def upcoming_times(self, attempt: Attempt, recurrence: Recurrence) -> list[datetime]:
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

    def record_start(
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

    def deliver(self, running: RunningAttempt, prepared: PreparedDelivery) -> Awaitable[Outcome]:
        """Deliver an attempt. Snooze, Cancel and the cancellation of its task propagate."""
        arrivals, attempt = self.node.arrivals, running.attempt
        self.record_start(
            attempt, prepared.delivery.fired_at, self.node.cached_revision(attempt),
            None if arrivals is None else arrivals.publish,
        )  # fmt: skip
        coroutine = self._deliver_to_target(running, prepared)
        return self._deliver_traced(attempt, prepared, coroutine) if tracing.is_enabled() else coroutine

    async def finish_call(self, running: RunningAttempt, call: StartedCall) -> Outcome:
        """Finish a handler call that the fast path started."""
        timeout, outcome = call.timeout, None
        try:
            outcome = await self._run_with_timeout(
                running, timeout, call.started_at, "handler", call_outcome(call.awaitable, call.retry)
            )
        finally:
            duration = self.node.clock.monotonic() - call.started_at
            self.record_delivery("handler", running.attempt.topic, duration, timeout, outcome)
        return outcome

    async def _deliver_traced(
        self, attempt: Attempt, prepared: PreparedDelivery, coroutine: Coroutine[Any, Any, Outcome]
    ) -> Outcome:
        delivery = prepared.delivery
        attributes: dict[str, str | int | float | None] = {
            "attempt": attempt.number, "tenant": attempt.tenant_id, "schedule": delivery.schedule_name,
            "queue": attempt.queue, "scheduled_at": delivery.scheduled_at.isoformat(),
        }  # fmt: skip
        with tracing.delivery_span(prepared.kind, attempt.topic, attempt.id, delivery.metadata, attributes) as span:
            attempt.trace_id = None if span is None else span.trace_id
            outcome = await coroutine
            if span is not None:
                span.record_outcome(outcome.code, delivered=outcome.delivered)
        return outcome

    async def _deliver_to_target(self, running: RunningAttempt, prepared: PreparedDelivery) -> Outcome:
        kind, delivery, resolved, attempt = prepared.kind, prepared.delivery, prepared.resolved, running.attempt
        options = resolved.options if isinstance(resolved, ResolvedTarget) else prepared.options
        running.is_reportable = options.get("reportsBack", False) or options.get("ack") == "reported"
        timeout = self._timeout_for(attempt, kind, options)
        started_at = self.node.clock.monotonic()
        outcome = None
        try:
            if resolved is None:
                coroutine = self.node.targets[kind].deliver(delivery, prepared.options)
                outcome = await self._run_with_timeout(running, timeout, started_at, kind, coroutine)
            elif isinstance(resolved, TimebellError):
                outcome = lookup_failed(resolved)
            else:
                attempt.target_used = resolved.summary
                coroutine = named_targets.deliver(self.node.named_targets[kind], resolved, delivery)
                outcome = await self._run_with_timeout(running, timeout, started_at, kind, coroutine)
                if outcome.receiver_gone:
                    await self.target_resolver.disable_target(attempt.tenant_id, resolved, outcome.error or "")
        finally:
            duration = self.node.clock.monotonic() - started_at
            self.record_delivery(kind, attempt.topic, duration, timeout, outcome)
        if kind != "handler":
            outcome.record = {
                "kind": kind, "messageId": message_id(delivery), "durationMs": round(duration * 1000, 1),
                **(outcome.record or {}), **({} if attempt.target_used is None else {"target": attempt.target_used}),
            }  # fmt: skip
        return outcome

    def _timeout_for(self, attempt: Attempt, kind: str, options: Mapping[str, Any]) -> float:
        """Return the timeout of an attempt in seconds; the default one leaves time for the timeout of a request."""
        timeout = self.node.timeout_for(attempt)
        if attempt.timeout is not None or kind != "http" or "timeout" not in options:
            return timeout
        return max(timeout, (parse_duration(options["timeout"]) or 0.0) + REQUEST_TIMEOUT_MARGIN_SECONDS)

    async def _run_with_timeout(
        self, running: RunningAttempt, timeout: float, started_at: float, kind: str,
        coroutine: Coroutine[Any, Any, Outcome],
    ) -> Outcome:  # fmt: skip
        """Run a delivery until `timeout` seconds after `started_at` (monotonic seconds)."""
        self.deadlines.add(running, started_at + timeout)
        try:
            return await coroutine
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if running.is_timed_out and task is not None and task.uncancel() == 0:
                return Outcome.failed("TIMEOUT", f"The attempt exceeded its timeout of {timeout:g} s.")
            if task is None or task.cancelling():
                raise
            return Outcome.failed("CancelledError", "CancelledError: an awaited task or future was cancelled")
        except (Snooze, Cancel):
            raise
        except Exception as exc:  # report a bug in a target as an outcome
            log.exception("target %s crashed on job %s", kind, running.attempt.id)
            return Outcome.failed("TARGET_ERROR", f"{type(exc).__name__}: {exc}"[:500])
        finally:
            self.deadlines.remove(running)

    def record_delivery(self, kind: str, topic: str, duration: float, timeout: float, outcome: Outcome | None) -> None:
        """Count a delivery; without an outcome it was snoozed, cancelled or stopped."""
        counters = self.node.counters
        counters.run_durations.observe(duration, topic)
        counters.timeout_ratios.observe(duration / timeout, topic)
        counters.delivery_durations.observe(duration, kind)
        counters.deliveries.add(kind, "stopped" if outcome is None else _outcome_label(kind, outcome))


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


def _outcome_label(kind: str, outcome: Outcome) -> str:
    """Return the metric label of an outcome: `2xx` to `5xx` for HTTP, otherwise `ok`, `timeout` or `error`."""
    if kind == "http" and isinstance(outcome.result, dict) and "status" in outcome.result:
        return f"{outcome.result['status'] // 100}xx"
    return "ok" if outcome.delivered else "timeout" if outcome.code == "TIMEOUT" else "error"
