"""The `handler` target: Python functions that listen to topics, and the event they are given."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Generic

from orjson import loads

from timebell.errors import InvalidInput, InvalidPayload, TimebellError
from timebell.model.job import Attempt
from timebell.model.payload import decode, encode
from timebell.model.policy import Retry, seconds
from timebell.model.routes import Routes
from timebell.targets import payloads
from timebell.targets.base import Block, Completion, Delivery, Outcome
from timebell.targets.event_loop_watch import Timed
from timebell.targets.payloads import PayloadType

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    P = TypeVar("P", default=Any)  # so that `Arrived` alone is a whole type, also under mypy --strict
else:
    from typing import TypeVar

    P = TypeVar("P")

log = logging.getLogger("timebell.handler")
_new = object.__new__

SCHEDULE_ARRIVED = "schedule.arrived"
NEWER_PAUSE = 5.0  # seconds until a payload that is too new for this node is tried again, perhaps elsewhere
_TOPIC = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", re.ASCII)


def arrived_event_name(topic: str) -> str:
    """The name of a topic's own arrived event, `schedule.<topic>.arrived`."""
    return f"schedule.{topic}.arrived"


@dataclass(slots=True, kw_only=True)
class Arrived(Generic[P]):
    """A job that is due, as its handler sees it. Datetimes are aware UTC.

    `occurrence_key` is the same for every attempt at the same occurrence: de-duplicate on it. A handler that takes
    `Arrived[Reminder]` has its payload checked and given as a Reminder: a pydantic model, dataclass or TypedDict.
    """

    topic: str
    payload: P
    metadata: dict[str, Any]
    timezone: str
    scheduled_at: datetime
    fired_at: datetime
    late_by: timedelta
    job_id: str
    schedule_id: str | None
    occurrence_key: str
    attempt: int
    upcoming: list[datetime] = field(default_factory=list)
    state: Any = None
    """What the app's lifespan opened for its handlers."""
    result: Any = None
    """Set inside `transaction`, it is kept with the job."""
    _completion: Completion | None = field(default=None, repr=False, compare=False)

    def transaction(self) -> Block:
        """A transaction on Timebell's own database in which the handler writes rows of its own: they exist if and
        only if this attempt completed the job.

        `async with event.transaction() as connection:` gives a SQLAlchemy AsyncConnection; in a plain function `with`
        gives a Connection. When the block ends the job is completed in the same transaction; an error in it rolls
        back and is one of the attempt. Raises Conflict (ATTEMPT_OVER) at the end if another attempt took over, and
        TimebellError (TRANSACTION_NOT_ALONE).
        """
        return self._completes().transaction(lambda: self.result)

    def _completes(self) -> Completion:
        if self._completion is None:
            raise TimebellError(
                f"This event of {self.topic} cannot complete its job.", code="TRANSACTION_NOT_ALONE",
                fix="That takes one handler of the topic, called by the engine; what observes ('*') does not count.",
            )  # fmt: skip
        return self._completion


class Snooze(Exception):
    """Raise it in a handler to run the job again after `delay` (seconds or timedelta); uses up no try."""

    def __init__(self, delay: float | timedelta) -> None:
        self.delay = seconds(delay, "snooze delay")
        super().__init__(f"again in {self.delay:g} s")


class Cancel(Exception):
    """Raise it in a handler to end the job as cancelled, with a reason."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason)


Function = Callable[[Arrived], Awaitable[Any] | Any]
CallNext = Callable[[Arrived], Awaitable[Any]]
Middleware = Callable[[Arrived, CallNext], Awaitable[Any]]
"""Around every call of a handler: `await call_next(event)` goes on inwards and gives what the handler returns."""


@dataclass(frozen=True, slots=True)
class Handler:
    """One function and the topics it listens to: exact, `prefix.*`, or `*` (which observes every firing)."""

    pattern: str
    function: Function
    retry: Retry | None = None
    timeout: float | None = None
    handles: bool = True
    payload: PayloadType | None = None
    is_async: bool = field(init=False)
    """Whether it runs on the event loop; plain functions run in threads."""

    def __post_init__(self) -> None:
        if not callable(self.function) or not _takes_one(self.function):
            raise InvalidInput(
                f"{self.function!r:.100} cannot be a handler of {self.pattern}.", code="HANDLER_INVALID",
                fix="A handler takes the event: async def handle(event: Arrived) -> None.",
            )  # fmt: skip
        object.__setattr__(self, "is_async", _is_async(self.function))

    def hears(self, topic: str) -> bool:
        """Whether a job of this topic is for it."""
        if self.pattern == "*" or self.pattern == topic:
            return True
        return self.pattern.endswith(".*") and topic.startswith(self.pattern[:-1])


@dataclass(slots=True)
class Lone:
    """The one handler that hears a topic, where it is a coroutine function and nothing is around it."""

    function: Callable[[Arrived], Coroutine[Any, Any, Any]]
    timeout: float | None
    payload: PayloadType | None
    at_once: bool = True
    """Whether it was over with its first step when it was called last."""


class Handlers:
    """All functions of an app, and the target that calls them."""

    kind = "handler"

    def __init__(self) -> None:
        self._all: list[Handler] = []
        self._around: list[Middleware] = []
        self.state: Any = None
        self.matching = functools.lru_cache(maxsize=10_000)(self._match)
        """All that hear a topic, the most specific first."""
        self.lone = functools.lru_cache(maxsize=10_000)(self._lone)
        """The only one that hears a topic, if it can be called without a detour."""
        self.threads: Executor | None = None
        self.monotonic: Callable[[], float] | None = None
        """The clock of the node that runs, to tell who blocks it."""

    def add(self, handler: Handler) -> None:
        """Listen."""
        self._all.append(handler)
        self.matching.cache_clear()
        self.lone.cache_clear()

    def wrap(self, middleware: Middleware) -> None:
        """Put it around every call, inside of those that came before. Raises InvalidInput (MIDDLEWARE_INVALID)."""
        if not _is_async(middleware):
            raise InvalidInput(
                f"{middleware!r:.60} is no async function.", code="MIDDLEWARE_INVALID",
                fix="Write async def middleware(event, call_next): return await call_next(event).",
            )  # fmt: skip
        self._around.append(middleware)
        self.lone.cache_clear()

    def copy(self) -> Handlers:
        """The same functions, for another node: they are called in threads of its own."""
        copied = Handlers()
        copied._all, copied._around = list(self._all), list(self._around)
        return copied

    def __len__(self) -> int:
        return len(self._all)

    def _match(self, topic: str) -> list[Handler]:
        heard = [handler for handler in self._all if handler.hears(topic)]
        return sorted(heard, key=lambda handler: (handler.pattern.endswith("*"), -len(handler.pattern)))

    def _lone(self, topic: str) -> Lone | None:
        heard = self.matching(topic)
        if len(heard) != 1 or self._around:
            return None
        function: Any = heard[0].function
        code = getattr(function, "__code__", None)  # of an object that is called: not known to be a coroutine's
        if code is None or not code.co_flags & inspect.CO_COROUTINE:
            return None
        return Lone(function, heard[0].timeout, heard[0].payload)

    def routes(self, *, is_async: bool) -> Routes:
        """What the async or the plain functions can take."""
        mine = [handler for handler in self._all if handler.handles and handler.is_async is is_async]
        patterns = [handler.pattern for handler in mine]
        return Routes(
            frozenset(pattern for pattern in patterns if not pattern.endswith("*")),
            frozenset(pattern[:-1] for pattern in patterns if pattern.endswith(".*")),
            "*" in patterns,
        )

    def accepted(self, topic: str, payload: Any, metadata: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """A new job's payload as JSON, which fits every handler here that says what it takes; and its metadata, with
        the payload's version unless that is 1. Raises InvalidPayload."""
        text = encode(payloads.plain(payload))
        takers = [handler.payload for handler in self.matching(topic) if handler.payload is not None]
        if takers and takers[0].version > 1:
            metadata = {payloads.VERSION: takers[0].version, **metadata}
        for taker in takers:
            if (version := payloads.version_of(metadata)) <= taker.version:
                taker.read(topic, decode(text), version)
        return text, metadata

    def typed(self, topic: str) -> bool:
        """Whether any handler here says what payloads of a topic are."""
        return any(handler.payload is not None for handler in self.matching(topic))

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """As in Target: a handler has no options."""
        if options:
            raise InvalidInput("A handler target has no options.", code="TARGET_OPTIONS_INVALID")
        return {}

    async def deliver(self, delivery: Delivery, options: dict[str, Any]) -> Outcome:
        """Call every function that hears the topic, the most specific first; any failure fails the attempt.

        All run; the first that raises decides. Snooze and Cancel pass through. What the most specific function
        returns is the result.
        """
        heard = self.matching(delivery.topic)
        try:
            events = _events(delivery, heard, self.state)
        except InvalidPayload as unfit:
            return Outcome.failed(unfit.code, unfit.message, retryable=False)
        results: list[Any] = []
        raised: BaseException | None = None
        for handler, event in zip(heard, events, strict=True):
            try:
                results.append(await self._timed(handler, event))
            except (Exception, SystemExit) as failed:  # a script's sys.exit() must not end the engine
                raised = failed if raised is None else raised
        if raised is None:
            return Outcome.ok(results[0] if results else None)
        if isinstance(raised, Snooze | Cancel):
            raise raised
        return Outcome.failed(type(raised).__name__, _words(raised))

    def _timed(self, handler: Handler, event: Arrived) -> Awaitable[Any]:
        plain = handler.is_async and not self._around  # nothing is around it: no coroutine in between
        call = handler.function(event) if plain else self._through(handler)(event)
        if self.monotonic is None or type(call) is not CoroutineType:
            return call
        return Timed(call, self.monotonic, event.topic, handler.function)

    def _through(self, handler: Handler) -> CallNext:
        """A call of the handler, through all middleware."""
        call: CallNext = functools.partial(self._call, handler)
        for middleware in reversed(self._around):
            call = functools.partial(_within, middleware, call)
        return call

    async def _call(self, handler: Handler, event: Arrived) -> Any:
        if not handler.is_async:
            call = functools.partial(contextvars.copy_context().run, _called, handler.function, event)
            returned = await asyncio.get_running_loop().run_in_executor(self.threads, call)
        else:
            returned = handler.function(event)
        return await returned if inspect.isawaitable(returned) else returned

    async def close(self) -> None:
        """As in Target."""


def event_of(
    attempt: Attempt, now: datetime, upcoming: list[datetime], payload: PayloadType | None, state: Any,
    completion: Completion,
) -> Arrived | None:  # fmt: skip
    """What the lone handler of an attempt's topic is given; None if its payload does not fit, or is too new."""
    metadata = {} if attempt.metadata is None else decode(attempt.metadata) or {}
    given = loads(attempt.payload)
    if payload is not None:
        try:
            version = payloads.version_of(metadata)
            if version > payload.version:
                return None
            given = payload.read(attempt.topic, given, version)
        except Exception:  # the way that all others take says what is wrong
            return None
    if attempt.tenant_id != "default":
        metadata["tenant_id"] = attempt.tenant_id
    event: Arrived = _new(Arrived)  # by its constructor, which takes keywords only, it costs four times as much
    event.topic, event.payload, event.metadata = attempt.topic, given, metadata
    event.timezone, event.scheduled_at, event.fired_at = attempt.timezone, attempt.scheduled_at, now
    event.late_by, event.job_id, event.schedule_id = now - attempt.scheduled_at, attempt.id, attempt.schedule_id
    event.occurrence_key = attempt.id if attempt.schedule_id is None else attempt.occurrence_key
    event.attempt = attempt.number
    event.upcoming, event.state, event.result, event._completion = upcoming, state, None, completion
    return event


async def outcome_of(call: Awaitable[Any]) -> Outcome:
    """What a call of a lone handler comes to. Snooze and Cancel pass through."""
    try:
        return Outcome.ok(await call)
    except (Snooze, Cancel):
        raise
    except (Exception, SystemExit) as failed:  # a script's sys.exit() must not end the engine
        return Outcome.failed(type(failed).__name__, _words(failed))


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether it can be called with an event; yes where nothing is known of its parameters."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except (ValueError, NameError):
        return True
    return True


async def _within(middleware: Middleware, call_next: CallNext, event: Arrived) -> Any:
    return await middleware(event, call_next)


def _is_async(function: Any) -> bool:
    """Whether calling it gives a coroutine; callable objects may be async, too."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _events(delivery: Delivery, heard: list[Handler], state: Any) -> list[Arrived]:
    """What each handler is given. Raises InvalidPayload; Snooze when the payload is newer than the code here."""
    tenant = {} if delivery.tenant_id == "default" else {"tenant_id": delivery.tenant_id}
    # What one handler commits cannot be undone when another fails.
    alone = len(heard) == 1 or sum(handler.handles for handler in heard) <= 1
    events = []
    for handler in heard:
        mine: Arrived = Arrived(
            topic=delivery.topic, payload=delivery.payload, metadata={**delivery.metadata, **tenant},
            timezone=delivery.timezone, scheduled_at=delivery.scheduled_at, fired_at=delivery.fired_at,
            late_by=delivery.fired_at - delivery.scheduled_at, job_id=delivery.job_id,
            schedule_id=delivery.schedule_id, occurrence_key=delivery.occurrence_key,
            attempt=delivery.attempt, upcoming=delivery.upcoming, state=state,
            _completion=delivery.completion if alone and (handler.handles or len(heard) == 1) else None,
        )  # fmt: skip
        if handler.payload is not None:
            version = payloads.version_of(delivery.metadata)
            if version > handler.payload.version:
                log.warning("job %s has a payload of version %d, newer than this node's code", delivery.job_id, version)
                raise Snooze(NEWER_PAUSE)
            mine = replace(mine, payload=handler.payload.read(delivery.topic, delivery.payload, version))
        events.append(mine)
    return events


def check_pattern(pattern: str) -> str:
    """A topic, `prefix.*` or `*`. Raises InvalidInput (TOPIC_INVALID)."""
    if pattern != "*":
        check_topic(pattern.removesuffix(".*") if isinstance(pattern, str) else pattern)
    return pattern


def check_topic(topic: str) -> str:
    """A dotted name of letters, digits, `_` and `-`, at most 200 characters. Raises InvalidInput."""
    if not isinstance(topic, str) or len(topic) > 200 or not _TOPIC.fullmatch(topic):
        raise InvalidInput(
            f"{topic!r:.100} is not a topic.", code="TOPIC_INVALID",
            fix="Topics are dotted names of letters, digits, _ and -, such as billing.invoice-due.",
        )  # fmt: skip
    return topic


def _called(function: Function, event: Arrived) -> Any:
    """CallNext a plain function; a StopIteration, which no future can carry, becomes a RuntimeError."""
    try:
        return function(event)
    except StopIteration as stop:
        raise RuntimeError("StopIteration: next() found nothing") from stop


def _words(raised: BaseException) -> str:
    """An exception as one line that can be kept: its type, what it says, where it was raised."""
    where = ""
    trace = raised.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        code = trace.tb_frame.f_code
        where = f" ({code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} in {code.co_name})"
    return f"{type(raised).__name__}: {raised}"[:2000].replace("\x00", "") + where
