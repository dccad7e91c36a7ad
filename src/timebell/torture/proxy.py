"""A TCP proxy in front of the database that can hold what goes through it, one way or both, or lose replies.

What is held goes on when the cut heals, as TCP does it after a stretch of dropped packets.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

MODES = ("both", "up", "down", "replies")


class Proxy:
    """One port, for one client. `bit` counts what a cut held or lost; `ports` are those that it has at the database."""

    def __init__(self, host: str, port: int, chance: Random) -> None:
        self._to = host, port
        self._chance = chance
        self._server: asyncio.Server | None = None
        self._healed = asyncio.Event()
        self._healed.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.mode: str | None = None
        self.bit = 0
        self.ports: set[int] = set()

    async def start(self) -> int:
        """The port."""
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", 0, backlog=200)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    def cut(self, mode: str) -> None:
        """Hold what goes `up` to the database, `down` from it, or `both`; or lose `replies`, and the connection."""
        self.mode, self.bit = mode, 0
        if mode != "replies":
            self._healed.clear()

    def heal(self) -> None:
        """Let everything through again."""
        self.mode = None
        self._healed.set()

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_connection(*self._to)
        except OSError:
            writer.transport.abort()
            return
        port = their_writer.get_extra_info("sockname")[1]
        self.ports.add(port)
        committing = asyncio.Event()
        ways = [
            asyncio.create_task(self._pump(reader, their_writer, "up", committing)),
            asyncio.create_task(self._pump(their_reader, writer, "down", committing)),
        ]
        self._tasks.update(ways)
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        self._tasks.difference_update(ways)
        self.ports.discard(port)
        for end in (writer, their_writer):
            end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str, committing: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if self.mode in ("both", way):
                    self.bit += 1
                    await self._healed.wait()
                elif self.mode == "replies" and way == "up" and b"COMMIT" in data:
                    committing.set()
                elif self._loses(way, committing):
                    self.bit += 1
                    return  # the statement was executed, and nobody hears of it
                writer.write(data)
                await writer.drain()

    def _loses(self, way: str, committing: asyncio.Event) -> bool:
        """Whether this reply is one to be lost: of commits every one, of others some."""
        return self.mode == "replies" and way == "down" and (committing.is_set() or self._chance.random() < 0.05)

    async def close(self) -> None:
        """Everything is cut off."""
        self.heal()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
