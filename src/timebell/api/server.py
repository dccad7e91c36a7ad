"""HTTP server that runs in the event loop of the engine and stops with it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import uvicorn
from fastapi import APIRouter, FastAPI, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from timebell import tracing
from timebell.api.authentication import Authenticator
from timebell.api.client_address import TrustedProxies, client_network, has_forwarded_header
from timebell.api.connections import (
    HEAD_TOO_LARGE,
    MAX_HEAD_BYTES,
    LimitedProtocol,
    OpenConnections,
    connection_limit,
)
from timebell.api.problems import allowed_methods, install_handlers, problem_for, problem_response
from timebell.api.route import API_PREFIX, BodyTooSlow
from timebell.app import Timebell
from timebell.errors import Conflict, InvalidInput, Refused
from timebell.ids import new_id

MAX_HEADERS = 64
SMALL_BODY_BYTES, SMALL_BODY_TIMEOUT_SECONDS = 1024, 5.0
SHUTDOWN_GRACE_SECONDS = 5  # for responses in progress when the server stops
CORS_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
CORS_REQUEST_HEADERS = (
    "Authorization", "Content-Type", "If-Match", "If-None-Match", "Idempotency-Key", "Last-Event-ID",
    "Timebell-Tenant",
)  # fmt: skip
CORS_RESPONSE_HEADERS = (
    "ETag", "Location", "Idempotency-Replayed", "RateLimit", "RateLimit-Policy", "Request-Id", "Retry-After",
)  # fmt: skip
SECURITY_HEADERS = (
    (b"content-security-policy", b"default-src 'none'; style-src 'self'; img-src data:; base-uri 'none';"
     b" form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)  # fmt: skip


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """Open a listening socket on a port that `option` sets.

    Raises Conflict (PORT_IN_USE), Refused (PORT_REFUSED), InvalidInput (INVALID_HOST).
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
        # Accepted sockets inherit TCP_NODELAY. asyncio sets it only on sockets created with an explicit protocol.
        # Without it, a response in two packets waits 40 ms for the delayed ACK of the first.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except socket.gaierror as error:
        raise InvalidInput(
            f"{host!r} is not an address of this machine.", code="INVALID_HOST",
            fix="Use 127.0.0.1, 0.0.0.0 or another address of this machine.",
        ) from error  # fmt: skip
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Conflict(
                f"Port {port} on {host} is in use by another program.", code="PORT_IN_USE",
                fix=f"Stop that program (possibly another Timebell), or choose another port with {option},"
                f" such as {port % 65535 + 1}.",
            ) from error  # fmt: skip
        if error.errno == errno.EACCES:
            raise Refused(f"This user may not use port {port}.", code="PORT_REFUSED",
                          fix="Choose a port above 1023.") from error  # fmt: skip
        raise InvalidInput(
            f"Cannot listen on {host}: {error.strerror}.", code="INVALID_HOST",
            fix="Use 127.0.0.1, 0.0.0.0 or another address of this machine.",
        ) from error  # fmt: skip


class HttpApp:
    """ASGI application of several routers, with common headers and error responses.

    With `allow_local`, requests from this machine need no key.
    """

    def __init__(self, app: Timebell, routers: Iterable[APIRouter], *, allow_local: bool = False) -> None:
        self._clock = app.clock
        self._proxies = TrustedProxies(app.settings.http_trusted_proxies)
        # Redirects to URLs without or with a slash at the end would contain the Host of the request, and `http`.
        self._fastapi = FastAPI(
            title="Timebell", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
        )
        self.authenticator = self._fastapi.state.authenticator = Authenticator(app, allow_local=allow_local)
        install_handlers(self._fastapi, app.clock)
        for router in routers:
            self._fastapi.router.routes.extend(router.routes)
        origins = [origin.strip() for origin in (app.settings.http_cors_origins or "").split(",") if origin.strip()]
        self._cors: ASGIApp = self._fastapi
        if origins:
            # Without credentials: cookies are never sent, so a page of another site can use only a key that it has.
            self._cors = CORSMiddleware(
                self._fastapi, allow_origins=origins, allow_methods=CORS_METHODS, allow_headers=CORS_REQUEST_HEADERS,
                expose_headers=CORS_RESPONSE_HEADERS,
            )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: find its client, add common headers, and enforce the limits on its head."""
        response_headers = {"Request-Id": new_id(self._clock.now())}
        scope.setdefault("state", {}).update(id=response_headers["Request-Id"], headers=response_headers)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = list(message.get("headers", ()))
                names = {name for name, _ in sent}
                own = [(name.lower().encode(), value.encode("latin-1")) for name, value in response_headers.items()]
                message["headers"] = sent + [each for each in (*SECURITY_HEADERS, *own) if each[0] not in names]
            await send(message)

        if scope["type"] == "http":
            url_size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
            refused = _refuse_head(url_size, scope["headers"], response_headers["Request-Id"])
            if refused is not None:
                await refused(scope, receive, with_headers)
                return
            self._find_client(scope)
        with tracing.incoming_trace(scope.get("headers", ())):
            request = self._handle(scope, receive, with_headers)
            client = scope.get("client")
            network = None if client is None else client_network(client[0])
            await self.authenticator.capacity.steps.run(network, request)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the body of a request if it is small, and pass it on, also as `body` in the state of the request.

        Most requests have small bodies, which arrive with their heads. Those that do not arrive cost nothing more than
        a timer, as they are not authenticated. Larger bodies are read later, within the limits of `ArrivingBodies`.
        """
        size = _small_body_size(scope["headers"]) if scope["type"] == "http" else None
        if size == 0:
            scope["state"]["body"] = b""
        elif size is not None:
            try:
                async with asyncio.timeout(SMALL_BODY_TIMEOUT_SECONDS):
                    body = await _receive_body(receive)
            except TimeoutError:
                error = BodyTooSlow(
                    f"The body did not arrive within {SMALL_BODY_TIMEOUT_SECONDS:g} s.", fix="Send it at once."
                )
                await problem_for(error, scope["state"]["id"])(scope, receive, send)
                return
            if body is None:  # the client has disconnected
                return
            scope["state"]["body"] = body
            receive = _receive_again(body, receive)
        await self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle HEAD as GET without the body, and OPTIONS here; pass everything else on."""
        method = scope["method"] if scope["type"] == "http" else None
        application = self._cors if scope.get("path", "").startswith(API_PREFIX) else self._fastapi
        if method == "OPTIONS" and not (application is self._cors and _is_preflight(scope)):
            allowed = allowed_methods(self._fastapi.router.routes, scope)
            if allowed:
                await Response(status_code=204, headers={"Allow": allowed})(scope, receive, send)
                return
        if method == "HEAD" and "GET" in allowed_methods(self._fastapi.router.routes, scope):
            # `_receive_head` does not tell whether the client has disconnected.
            scope["state"].update(body=b"", is_head=True)
            await application({**scope, "method": "GET"}, _receive_head(), _without_body(send))
            return
        await application(scope, receive, send)

    def _find_client(self, scope: Scope) -> None:
        """Replace the peer of a request by the client that sent it through trusted proxies."""
        client, headers = scope.get("client"), scope["headers"]
        if client is None or not has_forwarded_header(headers):
            return
        if self._proxies.trusts(client[0]):
            scope["client"] = (self._proxies.find_client(client[0], headers), client[1])
        else:
            self.authenticator.count_ignored_header()


def _refuse_head(url_size: int, headers: Sequence[tuple[bytes, bytes]], request_id: str) -> Response | None:
    """Return the response to a request head that is not accepted; None if it is."""
    if len(headers) > MAX_HEADERS:
        return problem_response(
            431, "TOO_MANY_HEADERS", f"The request has more than {MAX_HEADERS} headers.", requestId=request_id
        )
    if url_size + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
        return problem_response(431, "HEAD_TOO_LARGE", HEAD_TOO_LARGE, requestId=request_id)
    names = {name for name, _ in headers}
    if b"content-length" in names and b"transfer-encoding" in names:
        # A proxy might believe the one that this server ignores, and take the rest of the body for another request
        # (RFC 9112, section 6.1). The rest of the connection is not read.
        return problem_response(
            400, "AMBIGUOUS_BODY_LENGTH", "The request has both Content-Length and Transfer-Encoding.",
            {"Connection": "close"}, fix="Send one of them.", requestId=request_id,
        )  # fmt: skip
    return None


def _is_preflight(scope: Scope) -> bool:
    return any(name == b"access-control-request-method" for name, _ in scope["headers"])


def _receive_head() -> Receive:
    """Return the messages of a request without a body, whose client wants no event stream."""
    return _receive_again(b"", _receive_disconnect)


async def _receive_disconnect() -> Message:
    return {"type": "http.disconnect"}


def _small_body_size(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Return the size of the body of a request; None if it is not known to be at most SMALL_BODY_BYTES."""
    lengths = []
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            lengths.append(value)
    if not lengths:
        return 0
    if len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > len(str(SMALL_BODY_BYTES)):
        return None
    size = int(lengths[0])
    return size if size <= SMALL_BODY_BYTES else None


async def _receive_body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if the client disconnects before it is complete."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
    return None


def _receive_again(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives a body, and then what `receive` does."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_next() -> Message:
        return next(messages, None) or await receive()

    return receive_next


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head


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
        proxy_headers=False, timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
        http=partial(LimitedProtocol, OpenConnections(connection_limit())),  # type: ignore[arg-type]
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
