"""The HTTP server of a process: in the engine's own event loop, and stopped by it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

import h11
import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from timebell import tracing
from timebell.api.authentication import Door
from timebell.api.problems import install, problem
from timebell.app import Timebell
from timebell.errors import Conflict, InvalidInput, Refused
from timebell.ids import new_id

MOST_HEADERS = 64
MOST_HEAD = 16 * 1024  # bytes that an unfinished head may have
MOST_CHANGES = 500  # requests that change something, at once: each takes some 40 kB while it waits for its turn
READS = ("GET", "HEAD", "OPTIONS")
HEAD_WITHIN = 10.0  # seconds
GRACE = 2  # seconds that answers under way have when it stops
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or the reason why not: PORT_IN_USE, PORT_REFUSED, HOST_INVALID."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
        # What it accepts is like it. asyncio sees to this only where a socket names its protocol, and an answer in two
        # parts would wait 40 ms for the receiver to acknowledge the first.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except socket.gaierror as unknown:
        raise InvalidInput(f"{host!r} is no address of this machine.", code="HOST_INVALID") from unknown
    except OSError as failed:
        if failed.errno == errno.EADDRINUSE:
            raise Conflict(
                f"Port {port} on {host} is in use by another program.", code="PORT_IN_USE",
                fix=f"Stop that one (perhaps another Timebell), or choose another port: --port {port % 65535 + 1}",
            ) from failed  # fmt: skip
        if failed.errno == errno.EACCES:
            raise Refused(f"Port {port} may not be used by this user.", code="PORT_REFUSED",
                          fix="Choose one above 1023.") from failed  # fmt: skip
        raise InvalidInput(f"Cannot listen on {host}: {failed.strerror}.", code="HOST_INVALID") from failed


class Site:
    """The application of some routers, with the headers and errors that all answers share. With `open_here`,
    requests from this machine need no key."""

    def __init__(self, app: Timebell, routers: Iterable[APIRouter], *, open_here: bool = False) -> None:
        self._clock = app.clock
        self._changing = 0
        self._web = FastAPI(title="Timebell", docs_url=None, redoc_url=None, openapi_url=None)
        self.door = self._web.state.door = Door(app, open_here=open_here)
        install(self._web)
        for router in routers:
            self._web.router.routes.extend(router.routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        own = {"Request-Id": new_id(self._clock.now())}
        scope.setdefault("state", {}).update(id=own["Request-Id"], headers=own)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in (HEADERS | own).items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] == "http" and len(scope["headers"]) > MOST_HEADERS:
            refused = problem(
                431, "HEADERS_TOO_MANY", f"The request has more than {MOST_HEADERS} headers.",
                requestId=own["Request-Id"],
            )  # fmt: skip
            await refused(scope, receive, with_headers)
            return
        changes = scope["type"] == "http" and scope["method"] not in READS
        if changes and self._changing >= MOST_CHANGES:
            busy = problem(
                503, "TOO_BUSY", "Too many requests wait for their turn.", {"Retry-After": "1"},
                fix="Send it again a little later, and fewer at once.", requestId=own["Request-Id"],
            )  # fmt: skip
            await busy(scope, receive, with_headers)
            return
        self._changing += changes
        try:
            with tracing.incoming(scope.get("headers", ())):
                await self._web(scope, receive, with_headers)
        finally:
            self._changing -= changes


class _Impatient(H11Protocol):
    """Waits so long for the head of a request, from its first byte or the connection's first moment, and no longer."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As in H11Protocol."""
        super().connection_made(transport)
        self._waiting = self.loop.call_later(HEAD_WITHIN, transport.close)

    def data_received(self, data: bytes) -> None:
        """As in H11Protocol."""
        if self._waiting is None and self.conn.their_state is h11.IDLE:
            self._waiting = self.loop.call_later(HEAD_WITHIN, self.transport.close)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._patient()

    def connection_lost(self, exc: Exception | None) -> None:
        """As in H11Protocol."""
        self._patient()
        super().connection_lost(exc)

    def _patient(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Server(uvicorn.Server):
    """Leaves signals to the engine, which drains on them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn.Server, but none."""
        yield


@asynccontextmanager
async def serving(web: Site, listening: socket.socket) -> AsyncIterator[None]:
    """Answer HTTP while the block runs."""
    config = uvicorn.Config(
        web, log_config=None, access_log=False, lifespan="off", loop="none", ws="none", server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=GRACE, http=_Impatient,
        h11_max_incomplete_event_size=MOST_HEAD,
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="timebell-http")
    try:
        yield
    finally:
        web.door.stop()
        server.should_exit = True
        await asyncio.wait([task], timeout=GRACE + 3)
        task.cancel()
        listening.close()
