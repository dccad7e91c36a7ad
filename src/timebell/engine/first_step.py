"""A coroutine whose first step is taken at once: most deliveries are over with it, and need neither timer nor turn."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """`over` says whether the first step was the last, with its `result`; else await it for the rest."""

    __slots__ = ("_awaited", "_coroutine", "over", "result")

    result: T

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Raises what the first step raises."""
        self._coroutine = coroutine
        self._awaited: Any = None
        self.over = False
        try:
            self._awaited = coroutine.send(None)
        except StopIteration as stop:
            self.result, self.over = stop.value, True

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine, awaited = self._coroutine, self._awaited
        step: Callable[[Any], Any]
        while True:
            try:
                sent = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as thrown:
                step, given = coroutine.throw, thrown
            else:
                step, given = coroutine.send, sent
            try:
                awaited = step(given)
            except StopIteration as stop:
                result: T = stop.value
                return result
