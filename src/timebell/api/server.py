"""HTTP server that runs in the event loop of the engine and stops with it."""

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
from timebell.api.authentication import Authenticator
from timebell.api.problems import install_handlers, problem_response
from timebell.app import Timebell
from timebell.errors import Conflict, InvalidInput, Refused
from timebell.ids import new_id

MAX_HEADERS = 64
MAX_HEAD_BYTES = 16 * 1024  # of an incomplete request head
MAX_WAITING_CHANGES = 500  # concurrent requests that change data; each uses about 40 kB while it waits
READ_METHODS = ("GET", "HEAD", "OPTIONS")
HEAD_TIMEOUT_SECONDS = 10.0
SHUTDOWN_GRACE_SECONDS = 2  # for responses in progress when the server stops
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises Conflict (PORT_IN_USE), Refused (PORT_REFUSED), InvalidInput (INVALID_HOST)."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
        # Accepted sockets inherit TCP_NODELAY. asyncio sets it only on sockets created with an explicit protocol.
        # Without it, a response in two packets waits 40 ms for the delayed ACK of the first.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except socket.gaierror as error:
        raise InvalidInput(f"{host!r} is not an address of this machine.", code="INVALID_HOST") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Conflict(
                f"Port {port} on {host} is in use by another program.", code="PORT_IN_USE",
                fix=f"Stop that program (possibly another Timebell), or choose another port: --port {port % 65535 + 1}",
            ) from error  # fmt: skip
        if error.errno == errno.EACCES:
            raise Refused(f"This user may not use port {port}.", code="PORT_REFUSED",
                          fix="Choose a port above 1023.") from error  # fmt: skip
        raise InvalidInput(f"Cannot listen on {host}: {error.strerror}.", code="INVALID_HOST") from error


class HttpApp:
    """ASGI application of several routers, with common headers and error responses.

    With `allow_local`, requests from this machine need no key.
    """

    def __init__(self, app: Timebell, routers: Iterable[APIRouter], *, allow_local: bool = False) -> None:
        self._clock = app.clock
        self._active_changes = 0
        self._fastapi = FastAPI(title="Timebell", docs_url=None, redoc_url=None, openapi_url=None)
        self.authenticator = self._fastapi.state.authenticator = Authenticator(app, allow_local=allow_local)
        install_handlers(self._fastapi)
        for router in routers:
            self._fastapi.router.routes.extend(router.routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: add common headers and enforce the limits on headers and waiting changes."""
        response_headers = {"Request-Id": new_id(self._clock.now())}
        scope.setdefault("state", {}).update(id=response_headers["Request-Id"], headers=response_headers)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in (SECURITY_HEADERS | response_headers).items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] == "http" and len(scope["headers"]) > MAX_HEADERS:
            refused = problem_response(
                431, "TOO_MANY_HEADERS", f"The request has more than {MAX_HEADERS} headers.",
                requestId=response_headers["Request-Id"],
            )  # fmt: skip
            await refused(scope, receive, with_headers)
            return
        is_change = scope["type"] == "http" and scope["method"] not in READ_METHODS
        if is_change and self._active_changes >= MAX_WAITING_CHANGES:
            busy = problem_response(
                503, "TOO_BUSY", "Too many requests are waiting.", {"Retry-After": "1"},
                fix="Retry later, with fewer concurrent requests.", requestId=response_headers["Request-Id"],
            )  # fmt: skip
            await busy(scope, receive, with_headers)
            return
        self._active_changes += is_change
        try:
            with tracing.incoming_trace(scope.get("headers", ())):
                await self._fastapi(scope, receive, with_headers)
        finally:
            self._active_changes -= is_change


class _HeadTimeoutProtocol(H11Protocol):
    """Close connections that do not send a complete request head in time.

    HEAD_TIMEOUT_SECONDS count from the start of the connection, and from the first byte of each further request.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and self.conn.their_state is h11.IDLE:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self.transport.close)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        super().connection_lost(exc)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(uvicorn.Server):
    """Server without signal handlers: the engine handles signals and drains."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(web: HttpApp, listening: socket.socket) -> AsyncIterator[None]:
    """Serve HTTP while the block runs."""
    config = uvicorn.Config(
        web, log_config=None, access_log=False, lifespan="off", loop="none", ws="none", server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS, http=_HeadTimeoutProtocol,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="timebell-http")
    try:
        yield
    finally:
        web.authenticator.stop()
        server.should_exit = True
        await asyncio.wait([task], timeout=SHUTDOWN_GRACE_SECONDS + 3)
        task.cancel()
        listening.close()
