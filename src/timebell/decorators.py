"""Declarations of a program before its app runs: handlers, schedules in code, queue limits, middleware, lifespan."""

from __future__ import annotations

import contextlib
import inspect
import sys
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, cast, overload

from timebell.bound_handler import BoundHandler
from timebell.client.validation import check_priority, check_queue_name
from timebell.durations import Duration
from timebell.errors import InvalidInput, InvalidRecurrence, InvalidTimezone
from timebell.facade import FacadeMixin
from timebell.model.policy import OnUnhandled, Retry, parse_seconds
from timebell.model.routes import check_pattern
from timebell.targets.arrived import Arrived
from timebell.targets.handler import Executor, Handler, Handlers, Middleware, is_redefinition
from timebell.targets.payloads import Upgrade
from timebell.targets.signatures import payload_type_of

if TYPE_CHECKING:
    from timebell.app import Timebell
    from timebell.client.options import RunOptions, ScheduleOptions
    from timebell.engine.service import Service
    from timebell.model.limits import Limits
    from timebell.recurrence import Cron, Every, RRule, Spec

P = TypeVar("P")
R = TypeVar("R")
M = TypeVar("M", bound=Middleware)
L = TypeVar("L", bound=Callable[[], AsyncIterator[Any] | AbstractAsyncContextManager[Any]])


class CodeSchedule(NamedTuple):
    """A schedule defined in code: the arguments of `schedule_repeat`, and the function that it decorates."""

    topic: str
    spec: Spec
    options: dict[str, Any]
    function: Callable[..., Any]

    @property
    def identity(self) -> tuple[str, str]:
        """The tenant and the name."""
        return self.options.get("tenant_id") or "default", self.options["name"]


def program_name(function: Any) -> str:
    """Return the program of a function: the package or script that contains it, however that was started."""
    module = getattr(function, "__module__", None) or "__main__"
    if module == "__main__":
        main = sys.modules.get("__main__")
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else module
    return str(module).partition(".")[0]


def _location(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return repr(function) if code is None else f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


class DecoratorMixin(FacadeMixin):
    """The decorators and other declarations of `Timebell`."""

    _handlers: Handlers
    _on_unhandled: OnUnhandled
    _schedules: list[CodeSchedule]
    _queues: dict[str, Limits]
    _lifespan: Callable[[], AbstractAsyncContextManager[Any]]

    @abstractmethod
    def running(self, **options: Unpack[RunOptions]) -> AbstractAsyncContextManager[Service]:
        """Run the engine until the block ends."""

    @abstractmethod
    async def close(self) -> None:
        """Close the store and the targets."""

    def on(
        self,
        topic: str,
        *,
        retry: Retry | Mapping[str, Any] | None = None,
        timeout: Duration | None = None,
        queue: str | None = None,
        priority: int | None = None,
        expires_after: Duration | None = None,
        executor: Executor | None = None,
        handles: bool | None = None,
        version: int = 1,
        upgrade: Mapping[int, Upgrade] | None = None,
    ) -> Callable[[Callable[[Arrived[P]], R]], BoundHandler[P, R]]:
        """Register the decorated function for a topic, a prefix (`billing.*`) or all topics (`*`).

        The function takes an `Arrived`; async functions run on the event loop, others in threads, or with
        `executor="process"` in worker processes, which import its module. It becomes a handler object: called like the
        function, and with methods that create its jobs, such as `remind.schedule_at(...)`.
        `retry` and `timeout` (a duration; numbers are seconds) are the defaults of jobs without their own. So are
        `queue`, `priority` and `expires_after`, but those are decided when a job or schedule is created, so the program
        that creates it must define the handler. `handles` is
        whether this node counts as handling the topic; the default is True except for `*`. For a function that takes
        `Arrived[Reminder]`, payloads are validated when jobs are created here and when they are due: `version` is the
        current version of that type, and `upgrade` maps each older version to a function that converts its payloads to
        the next one, such as `{1: from_1_to_2}`. Raises InvalidInput.
        """
        check_pattern(topic)
        handler_retry = Retry.parse(retry)
        timeout_seconds = None if timeout is None else parse_seconds(timeout, "timeout", minimum=0.001)
        new_job_defaults = (
            None if queue is None else check_queue_name(queue),
            None if priority is None else check_priority(priority),
            None if expires_after is None else parse_seconds(expires_after, "expires_after", minimum=0.001),
        )
        handles_topic = topic != "*" if handles is None else handles

        def register(function: Callable[[Arrived[P]], R]) -> BoundHandler[P, R]:
            if isinstance(function, BoundHandler):  # decorated twice: each topic has an object of its own
                function = function.__wrapped__
            payload_type = payload_type_of(function, version, upgrade)
            handler = Handler(
                topic,
                function,
                handler_retry,
                timeout_seconds,
                handles_topic,
                payload_type,
                *new_job_defaults,
                executor,
            )
            self._handlers.add(handler)
            return BoundHandler(cast("Timebell", self), topic, function)

        return register

    @overload
    def schedule(
        self, name: str, *, cron: str | Cron, topic: str | None = None, payload: Any = None,
        executor: Executor | None = None, **options: Unpack[ScheduleOptions],
    ) -> Callable[[Callable[[Arrived[P]], R]], BoundHandler[P, R]]: ...  # fmt: skip
    @overload
    def schedule(
        self, name: str, *, every: Duration | Every, topic: str | None = None, payload: Any = None,
        executor: Executor | None = None, **options: Unpack[ScheduleOptions],
    ) -> Callable[[Callable[[Arrived[P]], R]], BoundHandler[P, R]]: ...  # fmt: skip
    @overload
    def schedule(
        self, name: str, *, rrule: str | RRule, topic: str | None = None, payload: Any = None,
        executor: Executor | None = None, **options: Unpack[ScheduleOptions],
    ) -> Callable[[Callable[[Arrived[P]], R]], BoundHandler[P, R]]: ...  # fmt: skip
    def schedule(
        self,
        name: str,
        *,
        cron: str | Cron | None = None,
        every: Duration | Every | None = None,
        rrule: str | RRule | None = None,
        topic: str | None = None,
        payload: Any = None,
        executor: Executor | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> Callable[[Callable[[Arrived[P]], R]], BoundHandler[P, R]]:
        """Define a schedule in code; it is written when the engine starts, if the code changed since.

        The decorated function handles its topic (by default the schedule's name). Exactly one of `cron`, `every` (a
        duration; numbers are seconds) and `rrule` is specified. `executor` is that of `on`; other options are those of
        `schedule_repeat`. Raises InvalidInput.
        """
        if sum(value is not None for value in (cron, every, rrule)) != 1:
            raise InvalidInput(
                "A schedule needs exactly one of cron, every and rrule.", code="RECURRENCE_MISSING",
                fix='For example: @app.schedule("report", cron="0 9 * * *"). For dates, use app.schedule_repeat.',
            )  # fmt: skip
        from timebell.recurrence import Cron, Every, RRule, parse_cron

        schedule_topic = topic or name
        definition = {**options, "payload": payload, "name": name}
        # A change of a default of the app changes the schedule, too.
        defaults = {"timezone": self.settings.default_timezone, "on_unhandled": self._on_unhandled}
        definition |= {option: value for option, value in defaults.items() if definition.get(option) is None}
        spec: Spec
        try:
            if every is not None:
                spec = every if isinstance(every, Every) else Every(every)
            elif rrule is not None:
                spec = rrule if isinstance(rrule, RRule) else RRule(rrule)
            else:
                spec = cron if isinstance(cron, Cron) else parse_cron(cron or "")
            self.schedules.draft(schedule_topic, spec, definition, self.clock.now())  # validates
        except (InvalidRecurrence, InvalidTimezone) as error:  # an app has many schedules
            error.message = f"Schedule {name!r:.60}: {error.message}"
            raise
        on_topic: Callable[[Callable[[Arrived[P]], R]], BoundHandler[P, R]] = self.on(schedule_topic, executor=executor)

        def register(function: Callable[[Arrived[P]], R]) -> BoundHandler[P, R]:
            handler = on_topic(function)
            self._define_schedule(CodeSchedule(schedule_topic, spec, definition, handler.__wrapped__))
            return handler

        return register

    def _define_schedule(self, defined: CodeSchedule) -> None:
        """Add a schedule; it replaces the definition of the same function, which was run before."""
        for other in self._schedules:
            if other.identity == defined.identity and not is_redefinition(defined.function, other.function):
                raise InvalidInput(
                    f"Two functions define the schedule {defined.options['name']!r}: {_location(other.function)} and"
                    f" {_location(defined.function)}.",
                    code="SCHEDULE_DEFINED_TWICE", fix="Rename one of them.",
                )  # fmt: skip
        self._schedules[:] = [each for each in self._schedules if each.identity != defined.identity]
        self._schedules.append(defined)

    def middleware(self, function: M) -> M:
        """Wrap every handler call in `async def middleware(event, call_next)`, in the order of registration.

        The function sees the event, and the result or exception of the handler. Raises InvalidInput.
        """
        self._handlers.add_middleware(function)
        return function

    @overload
    def lifespan(self, target: L) -> L: ...  # type: ignore[overload-overlap]  # an application takes arguments
    @overload
    def lifespan(self, target: object) -> AbstractAsyncContextManager[None]: ...
    def lifespan(self, target: Any) -> Any:
        """Decorate an async generator that opens resources for handlers, yields them once and closes them.

        The yielded value is `event.state`. The generator is entered before the engine starts and exited after it has
        drained, on every node. Called with an ASGI application, this is that application's lifespan instead:
        `FastAPI(lifespan=app.lifespan)` runs the engine in the same process. Raises InvalidInput (INVALID_LIFESPAN).
        """
        if not inspect.isroutine(target):
            return self._run_in_host()
        if not inspect.isasyncgenfunction(inspect.unwrap(target)) or self._lifespan is not contextlib.nullcontext:
            raise InvalidInput(
                f"{target.__name__} cannot be the lifespan of the app.", code="INVALID_LIFESPAN",
                fix="Use one async generator function that yields once.",
            )  # fmt: skip
        self._lifespan = asynccontextmanager(target) if inspect.isasyncgenfunction(target) else target
        return target

    @asynccontextmanager
    async def _run_in_host(self) -> AsyncIterator[None]:
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
        per: Duration = 1.0,
        concurrency_per_group: int | None = None,
    ) -> None:
        """Limit a queue over all nodes; written when the engine starts. None means no limit.

        At most `concurrency` of its jobs run simultaneously, and at most `concurrency_per_group` of those with the same
        `group`; at most `rate` start in any `per` (a duration; numbers are seconds). Raises InvalidInput.
        """
        from timebell.model.limits import Limits

        self._queues[check_queue_name(name)] = Limits.parse(concurrency, rate, per, concurrency_per_group)
