"""The HTTP server of a process: in the engine's own event loop, and stopped by it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from timebell.api.door import Door
from timebell.api.problems import install
from timebell.app import Timebell
from timebell.errors import Conflict, InvalidInput, Refused
from timebell.ids import new_id

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
        return socket.create_server((host, port), family=family, backlog=1024)
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


def asgi(app: Timebell, routers: Iterable[APIRouter], *, open_here: bool = False) -> ASGIApp:
    """The application of these routers, with the headers and errors that all answers share. With `open_here`,
    requests from this machine need no key."""
    web = FastAPI(title="Timebell", docs_url=None, redoc_url=None, openapi_url=None)
    web.state.door = Door(app, open_here=open_here)
    install(web)
    for router in routers:
        web.include_router(router)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        own = {"Request-Id": new_id(app.clock.now())}
        scope.setdefault("state", {}).update(id=own["Request-Id"], headers=own)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in (HEADERS | own).items():
                    headers.setdefault(name, value)
            await send(message)

        await web(scope, receive, with_headers)

    return guarded


class _Server(uvicorn.Server):
    """Leaves signals to the engine, which drains on them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in uvicorn.Server, but none."""
        yield


@asynccontextmanager
async def serving(web: ASGIApp, listening: socket.socket) -> AsyncIterator[None]:
    """Answer HTTP while the block runs."""
    config = uvicorn.Config(
        web, log_config=None, access_log=False, lifespan="off", loop="none", ws="none", server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="timebell-http")
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait([task], timeout=5)
        task.cancel()
        listening.close()
