"""A TCP proxy before the database that can hold traffic in one or both directions, or drop replies.

Held traffic continues when the cut is healed, as TCP does after an interval of dropped packets.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

CUT_MODES = ("both", "up", "down", "replies")


class Proxy:
    """A proxy on one port, for one client.

    `affected_count` counts what a cut held or dropped; `ports` are the proxy's own ports at the database.
    """

    def __init__(self, host: str, port: int, rng: Random) -> None:
        self._upstream = host, port
        self._chance = rng
        self._server: asyncio.Server | None = None
        self._healed = asyncio.Event()
        self._healed.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stranded: list[asyncio.StreamWriter] = []
        self.port = 0
        self.mode: str | None = None
        self.affected_count = 0
        self.ports: set[int] = set()

    async def start(self) -> int:
        """Start listening and return the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=200)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    def cut(self, mode: str) -> None:
        """Hold traffic `up` to the database, `down` from it, or `both`; or drop `replies` and the connection."""
        self.mode, self.affected_count = mode, 0
        if mode != "replies":
            self._healed.clear()

    @property
    def connection_count(self) -> int:
        """The number of open connections."""
        return len(self._tasks) // 2

    def strand(self) -> None:
        """Never answer on the open connections again, nor on new ones until `heal`, as if their host were gone."""
        self.mode = "strand"
        for task in list(self._tasks):
            task.cancel()

    def heal(self) -> None:
        """Let all traffic through again."""
        self.mode = None
        self._healed.set()

    def point_at(self, port: int) -> None:
        """Connect new clients to another server."""
        self._upstream = self._upstream[0], port

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "strand":
            self._stranded.append(writer)  # stays open
            return
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        except OSError:
            writer.transport.abort()
            return
        port = upstream_writer.get_extra_info("sockname")[1]
        self.ports.add(port)
        committing = asyncio.Event()
        pumps = [
            asyncio.create_task(self._pump(reader, upstream_writer, "up", committing)),
            asyncio.create_task(self._pump(upstream_reader, writer, "down", committing)),
        ]
        self._tasks.update(pumps)
        done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        if any(pump.cancelled() for pump in done):
            self._stranded.append(writer)  # stays open
            upstream_writer.transport.abort()  # what a lost host had locked is not locked on another one
            self._tasks.difference_update(pumps)
            self.ports.discard(port)
            return
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._tasks.difference_update(pumps)
        self.ports.discard(port)
        for side in (writer, upstream_writer):
            side.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str, committing: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if self.mode in ("both", direction):
                    self.affected_count += 1
                    await self._healed.wait()
                elif self.mode == "replies" and direction == "up" and b"COMMIT" in data:
                    committing.set()
                elif self._should_drop(direction, committing):
                    self.affected_count += 1
                    return  # the statement was executed, but the client does not learn the result
                writer.write(data)
                await writer.drain()

    def _should_drop(self, direction: str, committing: asyncio.Event) -> bool:
        """Return whether to drop this reply: every reply to a commit, and 5% of the others."""
        return self.mode == "replies" and direction == "down" and (committing.is_set() or self._chance.random() < 0.05)

    async def close(self) -> None:
        """Stop listening and end every connection."""
        self.heal()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._stranded:
            writer.transport.abort()


class Switch:
    """A TCP proxy before several servers, of which one is in use; connections can be made silent forever."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port: int | None = upstream_port
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self._silent: list[asyncio.StreamWriter] = []
        self._connections = 0
        self.port = 0

    async def start(self) -> int:
        """Start listening and return the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=200)
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    def point_at(self, upstream_port: int) -> None:
        """Connect new clients to another server."""
        self._upstream_port = upstream_port

    @property
    def silent_count(self) -> int:
        """The number of connections that are never answered."""
        return len(self._silent)

    def strand(self, *, refuse: bool = False) -> None:
        """Never answer on the open connections again, as if their host were gone; with `refuse`, on new ones, too."""
        if refuse:
            self._upstream_port = None
        for relay in self._relays:
            relay.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            with suppress(asyncio.CancelledError):  # the loop ends; asyncio would log it
                await self._serve(reader, writer)
        finally:
            self._connections -= 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_port = self._upstream_port
        if upstream_port is None:
            self._silent.append(writer)
            return
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", upstream_port)
        except OSError:
            writer.transport.abort()
            return
        relays = [
            asyncio.create_task(self._relay(reader, upstream_writer)),
            asyncio.create_task(self._relay(upstream_reader, writer)),
        ]
        self._relays.update(relays)
        done, _ = await asyncio.wait(relays, return_when=asyncio.FIRST_COMPLETED)
        self._relays.difference_update(relays)
        if any(relay.cancelled() for relay in done):
            self._silent += [writer, upstream_writer]
            return
        for relay in relays:
            relay.cancel()
        for side in (writer, upstream_writer):
            side.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        self.strand()
        await asyncio.gather(*self._relays, return_exceptions=True)
        while self._connections:
            await asyncio.sleep(0)
        for writer in self._silent:
            writer.transport.abort()
        await asyncio.sleep(0)  # in which the transports are closed
