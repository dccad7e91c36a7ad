"""The runner carries one attempt through: lease, deadline, target, and what it came to."""

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
from timebell.engine.first_step import Begun
from timebell.engine.named_targets import Found, Names, unusable
from timebell.engine.node import DEFAULT_SCHEDULE_TIMEOUT, DEFAULT_TIMEOUT, Call, Held, Known, Node
from timebell.engine.pre_delivery_check import Gate
from timebell.engine.transactional_completion import Within
from timebell.errors import InvalidPayload, TimebellError
from timebell.model import attempts, decide
from timebell.model.job import Attempt, Ending, JobState, Kind
from timebell.model.payload import decode, encode, legible
from timebell.model.schedule import Policies
from timebell.recurrence import Recurrence
from timebell.targets.base import Delivery, Outcome, message_id
from timebell.targets.event_loop_watch import TOO_LONG, Timed, warn
from timebell.targets.handler import Cancel, Lone, Snooze, event_of, outcome_of

log = logging.getLogger("timebell.runner")

UPCOMING = 3
LINES = {
    JobState.COMPLETED: (logging.DEBUG, "completed"),
    JobState.PENDING: (logging.INFO, "postponed"),
    JobState.DISPATCHED: (logging.DEBUG, "dispatched"),
    JobState.FAILED: (logging.WARNING, "dead"),
}
DEFAULT_TOLERANCE = Policies().tolerance
TRIGGER = Kind.TRIGGER.value
FRESH = 50e-6  # seconds for which handlers that are over at once go by one reading of the clock


class Runner:
    """Runs attempts; remembers only what is upcoming after them."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.names = Names(node)
        self.gate = Gate(node)
        self._told: dict[tuple[str, int], list[datetime]] = {}

    def completes(self, held: Held) -> Within:
        """The completion of an attempt by its handler."""
        return Within(self.node, held, self._completed)

    def lone(self, attempt: Attempt) -> Lone | None:
        """The handler of an attempt that can be called without a detour."""
        if (
            attempt.target is not None or attempt.conditions is not None or attempt.kind == TRIGGER
            or attempt.tenant_id in self.node.metered or tracing.on()
            or self.node.targets["handler"] is not self.node.handlers  # something is around all of it
        ):  # fmt: skip
            return None
        return self.node.handlers.lone(attempt.topic)

    def at_once(self, waiting: deque[Held], clean: Context, endings: list[Ending]) -> bool:
        """Run attempts whose handlers are over with their first step, one after another; true where it met another.

        That is then the first of those that wait, for `run`. It also stops after a handler that was not tidy: that
        cancelled the task, which is not its own, or left something in the context.
        """
        node, monotonic, state = self.node, self.node.clock.monotonic, self.node.handlers.state
        timed = self.node.handlers.monotonic or monotonic
        told = None if node.arrivals is None or not node.arrivals.wanted else node.arrivals.told
        task = asyncio.current_task()
        began, step_began, now = monotonic(), timed(), node.clock.now()
        stale = began + FRESH
        while waiting:
            held = waiting[0]
            attempt = held.attempt
            lone = held.lone
            if (
                lone is None or held.drop is not None or began >= held.lease_until
                or (attempt.expires_at is not None and attempt.expires_at <= now)
            ):  # fmt: skip
                return True
            known = None if attempt.schedule_id is None else self._known(attempt)
            upcoming = [] if known is None else self._upcoming(attempt, known.recurrence)
            event = event_of(attempt, now, upcoming, lone.payload, state, held)
            if event is None:
                return True
            held.begun = True
            self._arrived(attempt, now, known, told)
            rest: Awaitable[Any] | None = None
            try:
                call = lone.function(event)
                plain = type(call) is CoroutineType  # else what is around it gives something to wait for
                awaited = call.send(None) if plain else None
            except StopIteration as stop:
                result = stop.value
                if held.within is not None:
                    rest = _return(result)
            except BaseException as raised:
                rest = _raise(raised)
            else:
                rest = Timed(call, timed, attempt.topic, lone.function, awaited, begun=True) if plain else call
            step_ended = timed()
            if (took := step_ended - step_began) >= TOO_LONG:
                warn(took, attempt.topic, lone.function)
            if rest is not None:
                held.call = Call(rest, began)
                return True
            began, step_began = monotonic(), step_ended
            if began >= stale:
                now, stale = node.clock.now(), began + FRESH
            endings.append(self._well(attempt, lone, result, now, took))
            held.task = None
            waiting.popleft()
            lone.at_once = _tidy(task, clean)
            if not lone.at_once:
                break
        return False

    def _well(self, attempt: Attempt, lone: Lone, result: object, now: datetime, took: float) -> Ending:
        """The ending of an attempt whose handler was over with its first step."""
        ending = Ending(attempt.id, attempt.number, JobState.COMPLETED, now)
        if result is not None:
            ending.result, ending.reason = _keep(result)
        timeout = lone.timeout if attempt.timeout is None else attempt.timeout
        if timeout is None:
            timeout = DEFAULT_TIMEOUT if attempt.schedule_id is None else DEFAULT_SCHEDULE_TIMEOUT
        self.node.counters.went_well(attempt.topic, took, timeout)
        if attempt.schedule_id is None:
            mark(attempt, ending, self.node.id)
        else:
            self._mark(attempt, ending)
        if log.isEnabledFor(logging.DEBUG):
            self._log(attempt, ending)
        return ending

    async def run(self, held: Held) -> Ending | None:
        """One attempt; None when it is no longer this node's to end, or has been ended by its handler."""
        held.begun = True
        ending = await self._carry(held)
        within = held.within
        if within is None or (within.completed is None and not within.lost):
            if ending is not None:
                self._count(held.attempt, ending)
            return ending
        if within.completed is not None:
            self._count(held.attempt, within.completed)
        within.report(ending)
        return None

    async def _carry(self, held: Held) -> Ending | None:
        attempt, clock = held.attempt, self.node.clock
        call, held.call, delivery = held.call, None, None
        carrying: Coroutine[Any, Any, Outcome | Ending | None]
        if call is None:
            delivery = self._delivery(held)
            carrying = self._delivered(held, delivery)
        else:
            carrying = self._rest(attempt, call)
        try:
            outcome = await carrying
            if not isinstance(outcome, Outcome):
                return None if outcome is None else self._mark(attempt, outcome)
            ending = self._ending(attempt, outcome)
        except Snooze as snooze:
            later = clock.now() + timedelta(seconds=snooze.delay)
            ending = self._again(attempt, later)
        except Cancel as cancel:
            ending = Ending(attempt.id, attempt.number, JobState.CANCELLED, clock.now(), reason=cancel.reason or None)
        except asyncio.CancelledError:
            if held.drop == "lost":
                return None
            if held.drop == "stop":
                ending = decide.superseded(attempt.id, attempt.number, clock.now())
            elif held.drop == "drain":
                ending = self._again(attempt, clock.now())
            elif not self.node.stopping:  # by somebody who kept a task that was lent to him
                failed = Outcome.failed("CancelledError", "CancelledError: its task was cancelled")
                ending = self._ending(attempt, failed)
            else:
                raise
        if delivery is not None and ending.state is not JobState.COMPLETED:
            ending.progress = delivery.progress
        return self._mark(attempt, ending)

    def _delivery(self, held: Held) -> Delivery:
        attempt = held.attempt
        known, now = self._known(attempt), self.node.clock.now()
        upcoming = [] if known is None else self._upcoming(attempt, known.recurrence)
        delivery = delivery_of(self.node, attempt, now, None if known is None else known.name, upcoming)
        delivery.completion = held
        return delivery

    async def _delivered(self, held: Held, delivery: Delivery) -> Outcome | Ending | None:
        """What a delivery comes to; the ending of an attempt that is void, or that the gate holds back; None if its
        lease is lost."""
        attempt, now = held.attempt, delivery.fired_at
        if attempt.expires_at is not None and attempt.expires_at <= now:
            return decide.expired(attempt.id, attempt.number, now)
        if held.drop is not None:
            raise asyncio.CancelledError
        if self.gate.asks(attempt) and (held_back := await self.gate.of(attempt)) is not None:
            return held_back
        target = None if attempt.target is None else decode(attempt.target)
        name = None if target is None else target.get("name")
        found = None if name is None else await self.names.of(attempt.tenant_id, name)
        if self.node.clock.monotonic() >= held.lease_until:  # another node may have it already: send nothing
            held.drop = "lost"
            return None
        return await self._deliver(attempt, target, found, delivery)

    def _deliver(
        self, attempt: Attempt, target: dict[str, Any] | None, found: Found | None, delivery: Delivery
    ) -> Coroutine[Any, Any, Outcome]:
        """Deliver to what was `found` under the name that the target has, else to the target itself."""
        kind = "handler" if target is None else target["kind"]
        arrivals = self.node.arrivals
        self._arrived(attempt, delivery.fired_at, self._known(attempt), None if arrivals is None else arrivals.told)
        sending = self._sent(attempt, target, found, delivery, kind)
        return self._traced(attempt, delivery, kind, sending) if tracing.on() else sending

    def _arrived(
        self, attempt: Attempt, now: datetime, known: Known | None, told: Callable[[Attempt, datetime], None] | None
    ) -> None:
        """Count how late a job starts, and tell who wants to know that it does: later attempts are late on purpose."""
        if attempt.number != 1:
            return
        if told is not None:
            told(attempt, now)
        lag = (now - attempt.run_at).total_seconds()
        self.node.counters.late(lag, DEFAULT_TOLERANCE if known is None else known.tolerance)

    async def _rest(self, attempt: Attempt, call: Call) -> Outcome:
        """What is left of a handler's call."""
        timeout, outcome = self.node.timeout_of(attempt), None
        try:
            outcome = await self._limited(timeout, call.began, "handler", outcome_of(call.rest), attempt.id)
        finally:
            took = self.node.clock.monotonic() - call.began
            self._measured("handler", attempt.topic, took, timeout, outcome)
        return outcome

    async def _traced(
        self, attempt: Attempt, delivery: Delivery, kind: str, sending: Coroutine[Any, Any, Outcome]
    ) -> Outcome:
        known: dict[str, str | int | float | None] = {
            "attempt": attempt.number, "tenant": attempt.tenant_id, "schedule": delivery.schedule_name,
            "queue": attempt.queue, "scheduled_at": delivery.scheduled_at.isoformat(),
        }  # fmt: skip
        with tracing.delivering(kind, attempt.topic, attempt.id, delivery.metadata, known) as span:
            attempt.trace_id = None if span is None else span.trace_id
            outcome = await sending
            if span is not None:
                span.ended(outcome.code, delivered=outcome.delivered)
        return outcome

    async def _sent(
        self, attempt: Attempt, target: dict[str, Any] | None, found: Found | None, delivery: Delivery, kind: str
    ) -> Outcome:
        timeout = self.node.timeout_of(attempt)
        began = self.node.clock.monotonic()
        outcome = None
        try:
            if found is None:
                options = {} if target is None else target["options"]
                sending = self.node.targets[kind].deliver(delivery, options)
                outcome = await self._limited(timeout, began, kind, sending, attempt.id)
            elif isinstance(found, TimebellError):
                outcome = unusable(found)
            else:
                attempt.used = found.used
                sending = named_targets.deliver(self.node.named[kind], found, delivery)
                outcome = await self._limited(timeout, began, kind, sending, attempt.id)
                if outcome.gone:
                    await self.names.gone(attempt.tenant_id, found, outcome.error or "")
        finally:
            took = self.node.clock.monotonic() - began
            self._measured(kind, attempt.topic, took, timeout, outcome)
        if kind != "handler":
            outcome.record = {
                "kind": kind, "messageId": message_id(delivery), "durationMs": round(took * 1000, 1),
                **(outcome.record or {}), **({} if attempt.used is None else {"target": attempt.used}),
            }  # fmt: skip
        return outcome

    def _measured(self, kind: str, topic: str, took: float, timeout: float, outcome: Outcome | None) -> None:
        """Count a delivery; without an outcome it was postponed, cancelled or stopped."""
        counters = self.node.counters
        counters.runs.observe(took, topic)
        counters.ratios.observe(took / timeout, topic)
        counters.delivering.observe(took, kind)
        counters.deliveries.add(kind, "stopped" if outcome is None else _code_class(kind, outcome))

    async def _limited(
        self, timeout: float, began: float, kind: str, delivering: Coroutine[Any, Any, Outcome], job_id: str
    ) -> Outcome:
        """Deliver, for at most `timeout` seconds since `began` (monotonic)."""
        deadline: asyncio.Timeout | None = None
        try:
            begun = Begun(delivering)
            if begun.over:  # most are, and a timer costs as much
                return begun.result
            async with asyncio.timeout(timeout - (self.node.clock.monotonic() - began)) as deadline:
                return await begun
        except TimeoutError:
            if deadline is None or not deadline.expired():
                raise
            return Outcome.failed("TIMEOUT", f"It took longer than its timeout of {timeout:g} s.")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return Outcome.failed("CancelledError", "CancelledError: something it waited for was cancelled")
        except (Snooze, Cancel):
            raise
        except Exception as broken:  # a target's own fault is still an outcome of the attempt
            log.exception("target %s broke on job %s", kind, job_id)
            return Outcome.failed("TARGET_BROKE", f"{type(broken).__name__}: {broken}"[:500])

    def _upcoming(self, attempt: Attempt, recurrence: Recurrence) -> list[datetime]:
        """The instants after its own; most were found already for the attempt before it."""
        key, at = (attempt.schedule_id or "", attempt.revision or 0), attempt.scheduled_at
        before = self._told.get(key)
        found = before[1:] if before and before[0] == at else []
        fired = recurrence.fired()
        for _ in range(UPCOMING - len(found)):
            following, _ = decide.next_of(fired, found[-1] if found else at)
            if following is None:
                break
            found.append(following)
        if before is None and len(self._told) > 10_000:
            self._told.clear()
        self._told[key] = found
        return list(found)

    def _completed(self, attempt: Attempt, result: object) -> Ending:
        return self._mark(attempt, self._ending(attempt, Outcome.ok(result)))

    def _ending(self, attempt: Attempt, outcome: Outcome) -> Ending:
        now = self.node.clock.now()
        result, lost = (None, None) if outcome.result is None else _keep(outcome.result)
        if outcome.reports:
            until = now + timedelta(seconds=self.node.timeout_of(attempt))
            return Ending(attempt.id, attempt.number, JobState.DISPATCHED, now, run_at=until, record=outcome.record)
        if outcome.delivered:
            ending = Ending(attempt.id, attempt.number, JobState.COMPLETED, now, result=result, reason=lost)
        else:
            ending = decide.after_failure(
                attempt.id, attempt.number, attempt.tries, self.node.retry_of(attempt, decode(attempt.retry)), now,
                outcome.code or "FAILED", outcome.error or "It failed.", retryable=outcome.retryable,
                retry_after=outcome.retry_after, counts=outcome.counts,
            )  # fmt: skip
            ending.result = result
        ending.record = outcome.record
        return ending

    def _again(self, attempt: Attempt, at: datetime) -> Ending:
        """Back to pending without using up a try."""
        now = self.node.clock.now()
        return Ending(attempt.id, attempt.number, JobState.PENDING, now, run_at=at, counts=False)

    def _mark(self, attempt: Attempt, ending: Ending) -> Ending:
        if ending.state is JobState.COMPLETED and attempt.schedule_id is not None:
            known = self._known(attempt)
            ending.watched = known is not None and bool(known.notify)
        return mark(attempt, ending, self.node.id)

    def _known(self, attempt: Attempt) -> Known | None:
        return self.node.known.get((attempt.schedule_id or "", attempt.revision or 0))

    def _count(self, attempt: Attempt, ending: Ending) -> None:
        """Count what an attempt came to, and log it: loudly only dead letters."""
        self.node.counters.came_to(attempt.topic, ending)
        self._log(attempt, ending)

    def _log(self, attempt: Attempt, ending: Ending) -> None:
        level, word = LINES.get(ending.state, (logging.DEBUG, "ended"))
        if not log.isEnabledFor(level):
            return
        said = "" if ending.error is None else f": {ending.code}: {ending.error}"
        lag, known = attempt.started_at - attempt.run_at, self._known(attempt)
        fields = {
            "event": f"job.{word}", "job_id": attempt.id, "schedule": known.name if known else None,
            "topic": attempt.topic, "tenant": attempt.tenant_id, "attempt": attempt.number,
            "lag_ms": round(lag.total_seconds() * 1000, 3), "trace_id": attempt.trace_id,
        }  # fmt: skip
        log.log(level, "job %s of %s %s%s", attempt.id, attempt.topic, word, said, extra=fields)


def delivery_of(
    node: Node, attempt: Attempt, now: datetime, name: str | None = None, upcoming: list[datetime] | None = None
) -> Delivery:
    """What a target is given of an attempt."""
    metadata = {} if attempt.metadata is None else decode(attempt.metadata) or {}
    retry = None if attempt.retry is None else decode(attempt.retry)
    return Delivery(
        attempt.id, attempt.tenant_id, attempt.topic, decode(attempt.payload), metadata, attempt.timezone,
        attempt.scheduled_at, now, attempt.schedule_id, name, attempt.occurrence_key, attempt.number, upcoming or [],
        replays=attempt.replays, retry=node.retry_of(attempt, retry), priority=attempt.priority,
        expires_at=attempt.expires_at, earlier=[] if attempt.errors is None else decode(attempt.errors) or [],
    )  # fmt: skip


def mark(attempt: Attempt, ending: Ending, node_id: str) -> Ending:
    """Complete an ending with what the job remembers: its failed attempts, and whose turn comes next."""
    ending.schedule_id = attempt.schedule_id if attempt.serial else None
    ending.was = attempt.state
    ending.grouped = attempt.queue if attempt.group is not None else None
    ending.errors = attempt.errors
    if (
        ending.state is JobState.COMPLETED and attempt.errors is None and attempt.verdict is None
        and ending.reason is None and ending.record is None and ending.progress is None and ending.error is None
    ):  # fmt: skip
        return ending  # as most do, it leaves nothing to say
    ending.reason = None if ending.reason is None else legible(ending.reason, 200)
    ending.code = None if ending.code is None else legible(ending.code, 100)
    ending.error = None if ending.error is None else legible(ending.error, 4000)
    lines = [] if attempt.errors is None else decode(attempt.errors) or []
    if ending.run_at is not None and ending.state is JobState.PENDING:
        ending.run_at = max(ending.run_at, attempt.scheduled_at)  # the database's clock may have been set back
    if lines and (ending.progress is not None or ending.state is JobState.COMPLETED):
        lines = [_without_progress(line) for line in lines]  # the newest, or the result, says it all
    ruled = attempt.verdict is not None and ending.state in (JobState.COMPLETED, JobState.DISPATCHED)
    if ruled or ending.error is not None or ending.record is not None or ending.progress is not None:
        line = {
            "attempt": ending.attempt, "startedAt": attempt.started_at.isoformat(), "endedAt": ending.at.isoformat(),
            "node": node_id, "code": ending.code, "error": ending.error and ending.error[:1000],
            **(ending.record or {}),
        }  # fmt: skip
        if attempt.used is not None:
            line["target"] = attempt.used
        if attempt.verdict is not None:
            line["condition"] = attempt.verdict
        if ending.progress is not None:
            line["progress"] = ending.progress
            if ending.error is None:
                line |= {"code": "POSTPONED", "error": "It was postponed; what was done is kept."}
        if lines and lines[-1].get("attempt") == ending.attempt:  # it was handed over, and this is what was reported
            line = {**lines.pop(), **line}
        ending.errors = attempts.kept([*lines, line])
    elif lines and ending.state is JobState.COMPLETED and '"progress"' in (attempt.errors or ""):
        ending.errors = attempts.kept(lines)
    return ending


async def _return(result: object) -> object:
    return result


async def _raise(raised: BaseException) -> object:
    raise raised


def _tidy(task: asyncio.Task[Any] | None, clean: Context) -> bool:
    """Whether a handler left the task as it was: not cancelled, and with nothing of its own in the context."""
    try:
        return (task is None or not task.cancelling()) and copy_context() == clean
    except Exception:  # what it left there cannot be compared
        return False


def _without_progress(line: dict[str, Any]) -> dict[str, Any]:
    return {name: said for name, said in line.items() if name != "progress"}


def _code_class(kind: str, outcome: Outcome) -> str:
    """How a delivery went, in one word: of HTTP `2xx` to `5xx`, otherwise `ok`, `timeout` or `error`."""
    if kind == "http" and isinstance(outcome.result, dict):
        return f"{outcome.result['status'] // 100}xx"
    return "ok" if outcome.delivered else "timeout" if outcome.code == "TIMEOUT" else "error"


def _keep(result: object) -> tuple[str | None, str | None]:
    """A result as JSON to keep with the job, or why it could not be kept."""
    try:
        return encode(result, "result"), None
    except InvalidPayload as unfit:
        return None, f"result not kept: {unfit.message}"
