"""Connections that many deliveries share: one a place, made when it is first needed, and anew when it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")

CONNECT_SECONDS = 5.0
HANG_UP_SECONDS = 5.0


class Lines(Generic[K, C]):
    """`dial` makes a connection, `alive` says whether it still is one, `hang_up` gives it back.

    A delivery whose time is up leaves the making to the others that wait for it. A failure goes to all who waited;
    whoever comes later tries anew.
    """

    def __init__(
        self, dial: Callable[[K], Awaitable[C]], alive: Callable[[C], bool], hang_up: Callable[[C], Awaitable[object]]
    ) -> None:
        self._dial = dial
        self._alive = alive
        self._hang_up = hang_up
        self._lines: dict[K, asyncio.Task[C]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def get(self, place: K) -> C:
        """The connection to this place. Raises what `dial` raises, ConnectionError after `CONNECT_SECONDS`."""
        line = self._lines.get(place)
        if line is not None and line.done() and not self._alive(line.result()):
            self.drop(place, line.result())
            line = None
        if line is None:
            line = self._lines[place] = asyncio.create_task(self._open(place))
            line.add_done_callback(lambda opened: self._opened(place, opened))
        return await asyncio.shield(line)

    def drop(self, place: K, connection: C) -> None:
        """Do not use this connection again."""
        line = self._lines.get(place)
        if line is None or not line.done() or line.result() is not connection:
            return  # another has taken its place
        del self._lines[place]
        ending = asyncio.create_task(self._end(connection))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Give back all."""
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            if not line.cancel():
                await self._end(line.result())
        await asyncio.gather(*lines, *self._ending, return_exceptions=True)

    async def _open(self, place: K) -> C:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await self._dial(place)
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_SECONDS:g} s") from None

    def _opened(self, place: K, line: asyncio.Task[C]) -> None:
        failed = line.cancelled() or line.exception() is not None
        if failed and self._lines.get(place) is line:
            del self._lines[place]

    async def _end(self, connection: C) -> None:
        with suppress(Exception):  # a lost one has nothing to give back
            async with asyncio.timeout(HANG_UP_SECONDS):
                await self._hang_up(connection)
