"""Process concurrent calls in batches, one batch at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from timebell.errors import StoreError, TimebellError

log = logging.getLogger("timebell.engine")
T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Collects the calls that arrive while a batch is processed into the next batch.

    `process` receives up to `max_size` calls by key and returns their results by key. Concurrent calls must have
    different keys.
    """

    def __init__(self, process: Callable[[Mapping[str, T]], Awaitable[Mapping[str, R]]], max_size: int) -> None:
        self._process = process
        self._max_size = max_size
        self._pending: dict[str, tuple[T, asyncio.Future[R]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def run(self, key: str, call: T) -> R:
        """Return the result of a call. Raises the TimebellError with which its batch failed."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending[key] = call, future
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._process_pending())
        return await asyncio.shield(future)

    async def _process_pending(self) -> None:
        while self._pending:
            batch = dict(list(self._pending.items())[: self._max_size])
            for key in batch:
                del self._pending[key]
            results: Mapping[str, R] = {}
            failure: TimebellError | None = None
            try:
                results = await self._process({key: call for key, (call, _) in batch.items()})
            except TimebellError as error:
                failure = error
            except Exception:  # the callers must not wait forever
                log.exception("could not process a batch of %d calls", len(batch))
            for key, (_, future) in batch.items():
                if future.done():
                    continue
                if key in results:
                    future.set_result(results[key])
                else:
                    future.set_exception(failure or StoreError("The pre-delivery check could not be run."))
                    future.exception()  # its caller may be gone
