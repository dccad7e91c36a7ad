"""The `handler` target: Python functions registered for topics."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from orjson import loads

from timebell.errors import InvalidInput, InvalidPayload
from timebell.model.job import Attempt
from timebell.model.payload import decode, encode
from timebell.model.policy import Retry
from timebell.model.routes import Routes
from timebell.targets import payloads
from timebell.targets.arrived import Arrived, Cancel, Fail, NoFreeThread, Snooze
from timebell.targets.base import AttemptHandle, Delivery, Outcome
from timebell.targets.event_loop_watch import WatchedCoroutine
from timebell.targets.exceptions import ProcessDied, failed_outcome
from timebell.targets.function_path import FunctionPath, check_executor
from timebell.targets.payloads import PayloadType
from timebell.targets.thread_pool import NotStarted, ThreadPool

if TYPE_CHECKING:
    from timebell.targets.process_pool import ProcessPool

log = logging.getLogger("timebell.handler")
_new = object.__new__

NEWER_PAYLOAD_SNOOZE_SECONDS = 5.0  # pause before a payload newer than this node's code is retried, perhaps elsewhere

HandlerFunction = Callable[[Arrived], Awaitable[Any] | Any]
CallNext = Callable[[Arrived], Awaitable[Any]]
Executor = Literal["process"]
"""Where a plain function runs instead of in a thread."""
RunsIn = Literal["loop", "thread", "process"]
Middleware = Callable[[Arrived, CallNext], Awaitable[Any]]
"""Wraps every handler call: `await call_next(event)` calls the next one or the handler and returns its result."""


@dataclass(frozen=True, slots=True)
class Handler:
    """A function and its topic pattern: exact, `prefix.*`, or `*` (which observes every firing)."""

    pattern: str
    function: HandlerFunction
    retry: Retry | None = None
    timeout: float | None = None
    handles: bool = True
    payload: PayloadType | None = None
    queue: str | None = None
    priority: int | None = None
    expires_after: float | None = None
    """`queue`, `priority` and `expires_after` (seconds) are for new jobs without their own."""
    executor: Executor | None = None
    runs_in: RunsIn = field(init=False)
    """Async handlers run on the event loop, sync ones in threads or worker processes."""

    def __post_init__(self) -> None:
        if not callable(self.function) or not _accepts_event(self.function):
            raise InvalidInput(
                f"{self.function!r:.100} cannot be a handler of {self.pattern}.", code="INVALID_HANDLER",
                fix="A handler takes the event: async def handle(event: Arrived) -> None.",
            )  # fmt: skip
        if _is_generator(self.function):
            raise InvalidInput(
                f"{self.function!r:.100} contains yield, so calling it would not run it.", code="INVALID_HANDLER",
                fix="Return the result instead. To process items one by one, use a loop inside the handler.",
            )  # fmt: skip
        if self.executor is not None:
            check_executor(self.executor, self.function)
        runs_in = self.executor or ("loop" if _is_async(self.function) else "thread")
        object.__setattr__(self, "runs_in", runs_in)

    @property
    def is_async(self) -> bool:
        """True if it runs on the event loop."""
        return self.runs_in == "loop"

    def matches(self, topic: str) -> bool:
        """True if the pattern matches the topic."""
        if self.pattern == "*" or self.pattern == topic:
            return True
        return self.pattern.endswith(".*") and topic.startswith(self.pattern[:-1])

    def is_redefinition_of(self, other: Handler) -> bool:
        """True if both are one function of a module, defined again for the same pattern."""
        return self.pattern == other.pattern and is_redefinition(self.function, other.function)


class JobDefaults(NamedTuple):
    """Defaults of the new jobs of a topic, from its handlers in this process; `expires_after` is in seconds."""

    queue: str = "default"
    priority: int = 0
    expires_after: float | None = None


@dataclass(slots=True)
class FastHandler:
    """The only handler of a topic without middleware, if it is a coroutine or plain function."""

    function: Callable[[Arrived], Any]
    timeout: float | None
    payload: PayloadType | None
    retry: Retry | None = None
    finishes_immediately: bool = True
    """True if its last call finished in the first step; always False for a plain function, which runs in a thread."""
    is_async: bool = True


class Handlers:
    """The handler registry of an app, and the target that calls the handlers."""

    kind = "handler"

    def __init__(self) -> None:
        self._handlers: list[Handler] = []
        self._middleware: list[Middleware] = []
        self.state: Any = None
        self.handlers_for = functools.lru_cache(maxsize=10_000)(self._find_handlers)
        """Return the handlers that match a topic, most specific first (cached)."""
        self.fast_path_handler = functools.lru_cache(maxsize=10_000)(self._find_fast_path_handler)
        """Return the fast-path handler of a topic, or None (cached)."""
        self.job_defaults = functools.lru_cache(maxsize=10_000)(self._find_job_defaults)
        """Return the defaults of new jobs of a topic (cached)."""
        self.threads: ThreadPool | None = None
        self.processes: ProcessPool | None = None
        self.monotonic: Callable[[], float] | None = None
        """The node's clock, for detecting blocking handlers."""

    def add(self, handler: Handler) -> None:
        """Register a handler; it replaces the same function, of a notebook cell or module that was run before."""
        self._handlers = [each for each in self._handlers if not handler.is_redefinition_of(each)]
        self._handlers.append(handler)
        self.handlers_for.cache_clear()
        self.job_defaults.cache_clear()
        self.fast_path_handler.cache_clear()

    def add_middleware(self, middleware: Middleware) -> None:
        """Add a middleware inside the existing ones, or replace the same function of a cell that was run before.

        Raises InvalidInput (INVALID_MIDDLEWARE).
        """
        if not _is_async(middleware):
            raise InvalidInput(
                f"{middleware!r:.60} is not an async function.", code="INVALID_MIDDLEWARE",
                fix="Write async def middleware(event, call_next): return await call_next(event).",
            )  # fmt: skip
        for place, each in enumerate(self._middleware):
            if is_redefinition(middleware, each):
                self._middleware[place] = middleware
                break
        else:
            self._middleware.append(middleware)
        self.fast_path_handler.cache_clear()

    def copy(self) -> Handlers:
        """Return a copy for another node, which calls sync handlers in its own threads and processes."""
        copied = Handlers()
        copied._handlers, copied._middleware = list(self._handlers), list(self._middleware)
        return copied

    def functions(self) -> list[HandlerFunction]:
        """Return the registered functions."""
        return [handler.function for handler in self._handlers]

    def __len__(self) -> int:
        return len(self._handlers)

    def _find_handlers(self, topic: str) -> list[Handler]:
        matching = [handler for handler in self._handlers if handler.matches(topic)]
        return sorted(matching, key=lambda handler: (handler.pattern.endswith("*"), -len(handler.pattern)))

    def _find_job_defaults(self, topic: str) -> JobDefaults:
        handlers = self.handlers_for(topic)[::-1]  # the most specific one last: it decides
        names = JobDefaults._fields
        chosen = {
            name: value for handler in handlers for name in names if (value := getattr(handler, name)) is not None
        }
        return JobDefaults(**chosen)

    def _find_fast_path_handler(self, topic: str) -> FastHandler | None:
        matching = self.handlers_for(topic)
        if len(matching) != 1 or self._middleware:
            return None
        handler = matching[0]
        if handler.runs_in == "process":
            return None
        code = getattr(handler.function, "__code__", None)
        # Callable objects and wrappers with an async function inside may not be coroutine functions.
        if handler.is_async and (code is None or not code.co_flags & inspect.CO_COROUTINE):
            return None
        return FastHandler(
            handler.function, handler.timeout, handler.payload, handler.retry, handler.is_async, handler.is_async
        )

    def process_modules(self) -> list[str]:
        """Return the modules of the functions that run in processes.

        Raises InvalidInput (INVALID_EXECUTOR) if a process would not find one of them.
        """
        functions = [handler.function for handler in self._handlers if handler.runs_in == "process"]
        return sorted({FunctionPath.of(function).module for function in functions})

    def routes(self, runs_in: RunsIn) -> Routes:
        """Return the routes of the handlers that run there."""
        handlers = [handler for handler in self._handlers if handler.handles and handler.runs_in == runs_in]
        patterns = [handler.pattern for handler in handlers]
        return Routes(
            frozenset(pattern for pattern in patterns if not pattern.endswith("*")),
            frozenset(pattern[:-1] for pattern in patterns if pattern.endswith(".*")),
            "*" in patterns,
        )

    def encode_payload(self, topic: str, payload: Any, metadata: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Encode and validate the payload of a new job.

        The payload must fit the payload types of all matching handlers. Returns its JSON text, and the metadata with
        the payload version unless that is 1. Raises InvalidPayload.
        """
        text = encode(payloads.to_json_value(payload))
        payload_types = [handler.payload for handler in self.handlers_for(topic) if handler.payload is not None]
        if payload_types and payload_types[0].version > 1:
            metadata = {payloads.VERSION_KEY: payload_types[0].version, **metadata}
        for payload_type in payload_types:
            if (version := payloads.payload_version(metadata)) <= payload_type.version:
                payload_type.parse(topic, decode(text), version)
        if payload_types and metadata.get(payloads.VERSION_KEY) == 1:
            metadata = {name: value for name, value in metadata.items() if name != payloads.VERSION_KEY}
        return text, metadata

    def has_payload_type(self, topic: str) -> bool:
        """True if any handler of the topic has a payload type."""
        return any(handler.payload is not None for handler in self.handlers_for(topic))

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """Refuse any option; this target has none."""
        if options:
            raise InvalidInput("A handler target has no options.", code="INVALID_TARGET_OPTIONS")
        return {}

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Call all handlers of the topic, most specific first; any failure fails the attempt.

        All handlers run, even after a failure; the first exception determines the outcome. Snooze and Cancel propagate.
        The result is the return value of the most specific handler.
        """
        handlers = self.handlers_for(delivery.topic)
        try:
            events = _build_events(delivery, handlers, self.state)
        except InvalidPayload as error:
            return Outcome.failed(error.code, error.message, retryable=False)
        results: list[Any] = []
        first_error: BaseException | None = None
        retry: Retry | None = None
        for handler, event in zip(handlers, events, strict=True):
            try:
                results.append(await self._start_call(handler, event))
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as exc:  # sys.exit() in a handler must not stop the engine
                if first_error is None:
                    first_error, retry = exc, handler.retry
        if first_error is None:
            return Outcome.ok(results[0] if results else None)
        if isinstance(first_error, Snooze | Cancel):
            raise first_error
        return _failure_of(first_error, retry)

    def _start_call(self, handler: Handler, event: Arrived) -> Awaitable[Any]:
        is_direct = handler.is_async and not self._middleware  # called directly, without an intermediate coroutine
        call = handler.function(event) if is_direct else self._wrap_with_middleware(handler)(event)
        if self.monotonic is None or type(call) is not CoroutineType:
            return call
        return WatchedCoroutine(call, self.monotonic, event.topic, handler.function)

    def _wrap_with_middleware(self, handler: Handler) -> CallNext:
        """Return a function that calls the handler through all middleware."""
        call: CallNext = functools.partial(self._call, handler)
        for middleware in reversed(self._middleware):
            call = functools.partial(_call_middleware, middleware, call)
        return call

    async def _call(self, handler: Handler, event: Arrived) -> Any:
        if handler.runs_in == "thread":
            return await self.call_in_thread(handler.function, event)
        if handler.runs_in == "process":
            return await self._call_in_process(handler.function, event)
        returned = handler.function(event)
        return await returned if inspect.isawaitable(returned) else returned

    async def call_in_thread(self, function: HandlerFunction, event: Arrived) -> Any:
        """Call a plain function in a thread. Raises Snooze if the call could not start in time."""
        assert self.threads is not None
        try:
            returned = await self.threads.call(functools.partial(call_sync, function, event, self.monotonic))
        except NotStarted:
            raise NoFreeThread from None
        return await returned if returned is not None and inspect.isawaitable(returned) else returned

    async def _call_in_process(self, function: HandlerFunction, event: Arrived) -> Any:
        assert self.processes is not None
        try:
            return await self.processes.call(FunctionPath.of(function), event)
        except NotStarted:
            raise NoFreeThread from None

    async def close(self) -> None:
        """Do nothing: handlers hold no resources."""


def build_event(
    attempt: Attempt, now: datetime, upcoming: list[datetime], payload: PayloadType | None, state: Any,
    handle: AttemptHandle,
) -> Arrived | None:  # fmt: skip
    """Build the event for the fast-path handler of an attempt; None if the payload is invalid or too new."""
    metadata = {} if attempt.metadata is None else decode(attempt.metadata) or {}
    typed_payload = loads(attempt.payload)
    if payload is not None:
        try:
            version = payloads.payload_version(metadata)
            if version > payload.version:
                return None
            typed_payload = payload.parse(attempt.topic, typed_payload, version)
        except Exception:  # the full path reports the error
            return None
    if attempt.tenant_id != "default":
        metadata["tenant_id"] = attempt.tenant_id
    event: Arrived = _new(Arrived)  # its keyword-only constructor takes four times as long
    event.topic, event.payload, event.metadata = attempt.topic, typed_payload, metadata
    event.timezone, event.scheduled_at, event.fired_at = attempt.timezone, attempt.scheduled_at, now
    event.late_by, event.job_id, event.schedule_id = now - attempt.scheduled_at, attempt.id, attempt.schedule_id
    event.occurrence_key = attempt.id if attempt.schedule_id is None else attempt.occurrence_key
    event.attempt = attempt.number
    event.upcoming, event.state, event.result = upcoming, state, None
    event._attempt, event._is_exclusive = handle, True
    return event


def _failure_of(error: BaseException, retry: Retry | None) -> Outcome:
    """Return the outcome of an attempt whose handler, with this retry policy, raised an exception."""
    is_retryable = retry is None or isinstance(error, ProcessDied) or retry.is_retryable(error)
    retryable = not isinstance(error, Fail) and is_retryable
    return failed_outcome(error, retryable=retryable)


async def call_outcome(call: Awaitable[Any], retry: Retry | None) -> Outcome:
    """Await a call of a handler with this retry policy, and return its outcome. Snooze and Cancel propagate."""
    try:
        return Outcome.ok(await call)
    except (Snooze, Cancel, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as exc:  # sys.exit() in a handler must not stop the engine
        return _failure_of(exc, retry)


def _accepts_event(function: Callable[..., Any]) -> bool:
    """True if the function accepts one positional argument, or if its signature is unknown."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except (ValueError, NameError):
        return True
    return True


def is_redefinition(function: Any, other: Any) -> bool:
    """True if a function of a module, such as a notebook cell, was defined again; not for local functions."""
    if getattr(function, "__self__", None) is not getattr(other, "__self__", None):
        return False  # methods of two objects
    name, module = getattr(function, "__qualname__", "<"), getattr(function, "__module__", None)
    same = (name, module) == (getattr(other, "__qualname__", None), getattr(other, "__module__", None))
    return same and "<" not in name


async def _call_middleware(middleware: Middleware, call_next: CallNext, event: Arrived) -> Any:
    return await middleware(event, call_next)


def _is_async(function: Any) -> bool:
    """True if calling it returns a coroutine; also for callable objects with an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _is_generator(function: Any) -> bool:
    """True if calling it returns a generator; also for callable objects with such a `__call__`."""
    return any(
        inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each)
        for each in (function, getattr(function, "__call__", None))  # noqa: B004
    )


def _build_events(delivery: Delivery, handlers: list[Handler], state: Any) -> list[Arrived]:
    """Build the event of each handler. Raises InvalidPayload, and Snooze if the payload is newer than the code."""
    tenant = {} if delivery.tenant_id == "default" else {"tenant_id": delivery.tenant_id}
    # With several handlers there is no transaction: one could commit, then another fail.
    allows_transaction = len(handlers) == 1 or sum(handler.handles for handler in handlers) <= 1
    events = []
    for handler in handlers:
        event: Arrived = Arrived(
            topic=delivery.topic, payload=delivery.payload, metadata={**delivery.metadata, **tenant},
            timezone=delivery.timezone, scheduled_at=delivery.scheduled_at, fired_at=delivery.fired_at,
            late_by=delivery.fired_at - delivery.scheduled_at, job_id=delivery.job_id,
            schedule_id=delivery.schedule_id, occurrence_key=delivery.occurrence_key,
            attempt=delivery.attempt, upcoming=delivery.upcoming, state=state,
            _attempt=delivery.handle,
            _is_exclusive=allows_transaction and (handler.handles or len(handlers) == 1),
        )  # fmt: skip
        if handler.payload is not None:
            version = payloads.payload_version(delivery.metadata)
            if version > handler.payload.version:
                log.warning("job %s has a payload of version %d, newer than this node's code", delivery.job_id, version)
                raise Snooze(NEWER_PAYLOAD_SNOOZE_SECONDS)
            event = replace(event, payload=handler.payload.parse(delivery.topic, delivery.payload, version))
        events.append(event)
    return events


def call_sync(function: HandlerFunction, event: Arrived, monotonic: Callable[[], float] | None) -> Any:
    """Call a sync handler. A StopIteration, which a future cannot carry, becomes a RuntimeError.

    Raises NotStarted if its lease has expired meanwhile, so that another node may run the job: this node may have been
    frozen while the call waited for a thread.
    """
    handle = event._attempt
    if handle is not None and monotonic is not None and monotonic() >= handle.lease_until:
        raise NotStarted
    try:
        return function(event)
    except StopIteration as stop:
        raise RuntimeError("StopIteration: next() found nothing") from stop
