"""What a program declares before its app runs: handlers, schedules in code, queues, what opens with the engine."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar, overload

from timebell.client.schedules import Schedules
from timebell.client.validation import queue_name
from timebell.clock import Clock
from timebell.engine.service import Service
from timebell.errors import InvalidInput
from timebell.model.limits import Limits
from timebell.model.policy import Retry, seconds
from timebell.recurrence import Every, RRule, Spec, parse_cron
from timebell.targets.handler import Function, Handler, Handlers, Middleware, check_pattern
from timebell.targets.payloads import Upgrade, payload_type

F = TypeVar("F", bound=Function)
M = TypeVar("M", bound=Middleware)
L = TypeVar("L", bound=Callable[[], AsyncIterator[Any] | AbstractAsyncContextManager[Any]])


class Declared(ABC):
    """The part of `Timebell` that decorates."""

    handlers: Handlers
    schedules: Schedules
    clock: Clock
    _schedules: list[tuple[str, Spec, dict[str, Any]]]
    _queues: dict[str, Limits]
    _resources: Callable[[], AbstractAsyncContextManager[Any]]

    @abstractmethod
    def running(self, **options: Any) -> AbstractAsyncContextManager[Service]:
        """Plan and work until the block ends."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of the store and the targets."""

    def on(
        self,
        topic: str,
        *,
        retry: Retry | Mapping[str, Any] | None = None,
        timeout: float | timedelta | None = None,
        handles: bool | None = None,
        version: int = 1,
        upgrade: Mapping[int, Upgrade] | None = None,
    ) -> Callable[[F], F]:
        """Listen to a topic, a prefix (`billing.*`) or everything (`*`, which alone makes no topic heard).

        The function takes an `Arrived`; async ones run on the event loop, plain ones in threads. `retry` and
        `timeout` (seconds) hold for jobs that bring none of their own. One that takes `Arrived[Reminder]` has its
        payloads checked, when jobs are made here and when they are due; `version` is that of the type as it is now,
        and `upgrade` has a function for each step of older payloads: `{1: from_1_to_2}`. Raises InvalidInput.
        """
        check_pattern(topic)
        handler_retry = Retry.read(retry)
        limit = None if timeout is None else seconds(timeout, "timeout", least=0.001)
        heard = topic != "*" if handles is None else handles

        def listen(function: F) -> F:
            taken = payload_type(function, version, upgrade)
            self.handlers.add(Handler(topic, function, handler_retry, limit, heard, taken))
            return function

        return listen

    def schedule(
        self,
        name: str,
        *,
        cron: str | None = None,
        every: str | timedelta | Every | None = None,
        rrule: str | None = None,
        topic: str | None = None,
        **options: Any,
    ) -> Callable[[F], F]:
        """Define a schedule in code; it is written when the app starts, and again only when the code changed.

        The decorated function listens to its topic (by default the schedule's name). Other options are those
        of `schedule_repeat`. Code that is gone deletes nothing. Raises InvalidInput.
        """
        if sum(given is not None for given in (cron, every, rrule)) != 1:
            raise InvalidInput("A schedule needs one of cron, every and rrule.", code="RECURRENCE_MISSING")
        spec: Spec
        if every is not None:
            spec = every if isinstance(every, Every) else Every(every)
        else:
            spec = RRule(rrule) if rrule is not None else parse_cron(cron or "")
        heard = topic or name
        self._schedules.append((heard, spec, {**options, "name": name}))
        self.schedules.draft(heard, spec, {**options, "name": name}, self.clock.now())

        def listen(function: F) -> F:
            return self.on(heard)(function)

        return listen

    def middleware(self, function: M) -> M:
        """Put `async def around(event, call_next)` around every call of a handler, in the order of registration:
        it sees the event, what the handler returns and what it raises. Raises InvalidInput."""
        self.handlers.wrap(function)
        return function

    @overload
    def lifespan(self, opens: L) -> L: ...  # type: ignore[overload-overlap]  # an application takes arguments
    @overload
    def lifespan(self, opens: object) -> AbstractAsyncContextManager[None]: ...
    def lifespan(self, opens: Any) -> Any:
        """Decorate an async generator that opens what handlers need, yields it once and closes it: `event.state`.

        It is entered before the engine starts and left after it has drained, on every node. Called with an ASGI
        application, it is the lifespan of that one: `FastAPI(lifespan=app.lifespan)` runs the engine beside it.
        Raises InvalidInput (LIFESPAN_INVALID).
        """
        if not inspect.isroutine(opens):
            return self._hosted()
        if not inspect.isasyncgenfunction(inspect.unwrap(opens)) or self._resources is not contextlib.nullcontext:
            raise InvalidInput(
                f"{opens.__name__} cannot be the lifespan of the app.", code="LIFESPAN_INVALID",
                fix="Give one async generator function, which yields once.",
            )  # fmt: skip
        self._resources = asynccontextmanager(opens) if inspect.isasyncgenfunction(opens) else opens
        return opens

    @asynccontextmanager
    async def _hosted(self) -> AsyncIterator[None]:
        try:
            async with self.running():
                yield
        finally:
            await self.close()

    def queue(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        rate: int | None = None,
        per: float | timedelta = 1.0,
        concurrency_per_group: int | None = None,
    ) -> None:
        """Limit a queue over all nodes; written when the app starts. What is left out is not limited.

        At most `concurrency` of its jobs run at once, and at most `concurrency_per_group` of those with the same
        `group`; at most `rate` start in any `per` seconds (or timedelta). Raises InvalidInput.
        """
        self._queues[queue_name(name)] = Limits.read(concurrency, rate, per, concurrency_per_group)
