"""Reads in progress, shared by concurrent requests that need the same object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedReads(Generic[T]):
    """Reads in progress by key.

    Hundreds of requests can miss a cache at the same moment. Without sharing, their reads would occupy all connections
    to the database.
    """

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}

    async def get(self, key: Hashable, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `read`, or of the read of the same key in progress. Raises what the read raises."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(read())
            task.add_done_callback(lambda _: self._tasks.pop(key))
        return await asyncio.shield(task)
