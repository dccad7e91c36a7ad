"""A store that notes how long each operation takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from timebell.clock import Clock
from timebell.observe.counters import Spread
from timebell.store.dialects.base import Operation, P, R, Store
from timebell.store.transaction import Dialect


class TimedStore:
    """As the store it is around; times, waiting included, go to `spread` by the operation's name."""

    def __init__(self, store: Store, clock: Clock, spread: Spread) -> None:
        self.store, self.clock, self.spread = store, clock, spread
        self.url, self.many_nodes = store.url, store.many_nodes
        self.open, self.close, self.reading = store.open, store.close, store.reading
        self.lock_engine, self.unlock_engine = store.lock_engine, store.unlock_engine
        self.lend, self.lend_to_thread = store.lend, store.lend_to_thread
        self.begin, self.passes = store.begin, store.passes

    @property
    def dialect(self) -> Dialect:
        """As in Store."""
        return self.store.dialect

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        began = self.clock.monotonic()
        try:
            return await self.store.run(operation, *args, **kwargs)
        finally:
            self.spread.observe(self.clock.monotonic() - began, operation.__name__.lstrip("_"))

    async def hot(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        began = self.clock.monotonic()
        try:
            return await self.store.hot(operation, *args, **kwargs)
        finally:
            self.spread.observe(self.clock.monotonic() - began, operation.__name__.lstrip("_"))

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As in Store."""
        return await self.store.join(connection, operation, *args, **kwargs)

    async def listen(self, poke: Callable[[str], None]) -> bool:
        """As in Store."""
        return await self.store.listen(poke)
