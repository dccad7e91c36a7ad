"""Detect handlers that block the event loop, by timing each step from one await to the next."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Generator
from typing import Any

log = logging.getLogger("timebell.handler")

BLOCKING_STEP_SECONDS = 1.0  # a longer step delays job starts and lease renewals of this node


class WatchedCoroutine:
    """Awaits a coroutine and logs a warning for steps that took too long.

    If its first step was already run (`first_step_done`), `awaited` is the awaitable that it returned.
    """

    __slots__ = ("awaited", "coroutine", "first_step_done", "function", "monotonic", "topic")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        monotonic: Callable[[], float],
        topic: str,
        function: Any,
        awaited: Any = None,
        *,
        first_step_done: bool = False,
    ) -> None:
        self.coroutine, self.monotonic = coroutine, monotonic
        self.topic, self.function = topic, function
        self.awaited, self.first_step_done = awaited, first_step_done

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, monotonic = self.coroutine, self.monotonic
        awaited, skip_step = self.awaited, self.first_step_done
        step: Callable[[Any], Any] = coroutine.send
        argument: Any = None
        while True:
            if not skip_step:
                started_at = monotonic()
                try:
                    awaited = step(argument)
                except StopIteration as stop:
                    return stop.value
                finally:
                    if (duration := monotonic() - started_at) >= BLOCKING_STEP_SECONDS:
                        warn_blocking(duration, self.topic, self.function)
            skip_step = False
            step, argument = coroutine.send, None
            try:
                argument = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as exc:
                step, argument = coroutine.throw, exc


def warn_blocking(seconds: float, topic: str, function: Any) -> None:
    """Log a warning about a handler step that took too long."""
    log.warning(
        "the handler of %s (%s) blocked the event loop for %.1f s, during which this node started no other job: make"
        " it a plain def, which runs in a thread, or use async I/O",
        topic, _source_location(function), seconds,
    )  # fmt: skip


def _source_location(function: Any) -> str:
    """Return `name at file:line` of a function, or its name if the location is unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name} at {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
