"""Threads of one source for a driver that blocks, so a server that does not answer holds up only its own source."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MAX_THREADS = 4


class DriverThreads:
    """A few threads, started when they are needed."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in a thread."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="timebell-source")
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Let the threads end, without waiting for calls that are still running."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
