"""Who blocks the event loop: each step of a handler, from one await to the next, is timed while it runs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Generator
from typing import Any

log = logging.getLogger("timebell.handler")

TOO_LONG = 1.0  # seconds in which this node starts nothing and renews no lease


class Timed:
    """Awaits a coroutine in the place of `await coroutine`; warns of steps that took too long.

    One whose first step was taken already awaits what that gave, `awaited`.
    """

    __slots__ = ("awaited", "begun", "coroutine", "function", "monotonic", "topic")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        monotonic: Callable[[], float],
        topic: str,
        function: Any,
        awaited: Any = None,
        *,
        begun: bool = False,
    ) -> None:
        self.coroutine, self.monotonic = coroutine, monotonic
        self.topic, self.function = topic, function
        self.awaited, self.begun = awaited, begun

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, monotonic = self.coroutine, self.monotonic
        awaited, begun = self.awaited, self.begun
        step: Callable[[Any], Any] = coroutine.send
        given: Any = None
        while True:
            if not begun:
                began = monotonic()
                try:
                    awaited = step(given)
                except StopIteration as stop:
                    return stop.value
                finally:
                    if (took := monotonic() - began) >= TOO_LONG:
                        warn(took, self.topic, self.function)
            begun = False
            step, given = coroutine.send, None
            try:
                given = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as thrown:
                step, given = coroutine.throw, thrown


def warn(took: float, topic: str, function: Any) -> None:
    """Say that a step of a handler took too long."""
    log.warning(
        "the handler of %s (%s) blocked the event loop for %.1f s, in which this node started no other job: make"
        " it a plain def, which runs in a thread, or await what it waits for",
        topic, _place(function), took,
    )  # fmt: skip


def _place(function: Any) -> str:
    """`name at file:line` of a function, or its name alone."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name if code is None else f"{name} at {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
