"""Start a coroutine eagerly, without a task or timer: most deliveries finish in their first step."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class EagerCoroutine(Generic[T]):
    """A coroutine whose first step has run; if `done`, `result` is its value, otherwise await it for the rest."""

    __slots__ = ("_coroutine", "_pending", "done", "result")

    result: T

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Run the first step. Exceptions of that step propagate."""
        self._coroutine = coroutine
        self._pending: Any = None
        self.done = False
        try:
            self._pending = coroutine.send(None)
        except StopIteration as stop:
            self.result, self.done = stop.value, True

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine, awaited = self._coroutine, self._pending
        step: Callable[[Any], Any]
        while True:
            try:
                value = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as exc:
                step, argument = coroutine.throw, exc
            else:
                step, argument = coroutine.send, value
            try:
                awaited = step(argument)
            except StopIteration as stop:
                result: T = stop.value
                return result
