"""Store wrapper that measures the duration of each operation."""

from __future__ import annotations

from typing import Any

from timebell.clock import Clock
from timebell.observe.counters import Histogram
from timebell.store.dialects.base import Operation, P, R, Store
from timebell.store.transaction import Dialect


class TimedStore:
    """Wrap a store; record durations, including waiting, in `histogram` by operation name."""

    def __init__(self, store: Store, clock: Clock, histogram: Histogram) -> None:
        self.store, self.clock, self.histogram = store, clock, histogram
        self.url, self.multi_node = store.url, store.multi_node
        self.open, self.close, self.read_clock = store.open, store.close, store.read_clock
        self.lock_engine, self.unlock_engine = store.lock_engine, store.unlock_engine
        self.handler_transaction, self.handler_transaction_in_thread = (
            store.handler_transaction,
            store.handler_transaction_in_thread,
        )
        self.begin, self.is_transient = store.begin, store.is_transient
        self.listen, self.subscribers, self.recent_writes = store.listen, store.subscribers, store.recent_writes

    @property
    def dialect(self) -> Dialect:
        return self.store.dialect

    async def run(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        started_at = self.clock.monotonic()
        try:
            return await self.store.run(operation, *args, **kwargs)
        finally:
            self.histogram.observe(self.clock.monotonic() - started_at, operation.__name__.lstrip("_"))

    async def run_autocommit(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        started_at = self.clock.monotonic()
        try:
            return await self.store.run_autocommit(operation, *args, **kwargs)
        finally:
            self.histogram.observe(self.clock.monotonic() - started_at, operation.__name__.lstrip("_"))

    async def join(self, connection: Any, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.store.join(connection, operation, *args, **kwargs)
