"""A minimal HTTP/1.1 client, for webhooks and for the APIs of other services.

It follows no redirects, decodes no bodies, stores no cookies, ignores proxy settings of the environment, and reads a
limited number of bytes. llhttp, the parser of Node.js, parses responses. `exchange` takes an open stream, so that the
address guard of webhooks can choose the address: Host, SNI and certificate use the name, the TCP connection uses only
the checked address. httpx or aiohttp would need the same code to pin addresses, use more CPU, and add more than 100 ms
to the start and three to eight packages.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from functools import cache
from typing import NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

import httptools

MAX_HEAD_BYTES = 16 * 1024
KEEPALIVE_SECONDS = 60
"""Idle time before keep-alive probes. Firewalls forget connections that are idle for a few minutes."""
READ_SIZE_BYTES = 16 * 1024
CONNECT_TIMEOUT_SECONDS = 3.0  # for each address of a service
DEFAULT_PORTS = {"http": 80, "https": 443}
URL_SAFE_CHARACTERS = "%/:?[]@!$&'()*+,;="
"""Characters allowed in a path and query in addition to letters, digits and `-._~` (RFC 3986)."""
CA_BUNDLE_PATHS = (
    "/etc/ssl/cert.pem",  # macOS, Alpine, BSD
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
"""System locations of CA bundles, which the OpenSSL of a Python built elsewhere may not search."""
_TUNNEL_ANSWER = re.compile(rb"HTTP/1\.[01] ([0-9]{3})\b")
_METHODS_WITHOUT_CONTENT = frozenset(("GET", "HEAD", "DELETE", "OPTIONS"))
"""Methods whose requests have no content-length if they have no body (RFC 9110, 8.6)."""
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_HEAD = re.compile(rb"[A-Z]+ [!-~]+ HTTP/1\.1\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [\t -~]*\r\n)+\r\n")


class HttpClientError(OSError):
    """No complete response was received."""


class ConnectError(HttpClientError):
    """The TCP connection failed."""


class TLSError(HttpClientError):
    """The TCP connection succeeded, but the TLS handshake failed."""


class ProxyRefused(ConnectError):
    """The proxy did not connect to the destination; the text is its answer."""


class ProtocolError(HttpClientError):
    """The response is incomplete, too long or not HTTP; or the request cannot be expressed in HTTP."""


class NoResponse(ProtocolError):
    """The connection ended before any part of the response."""


class ResponseTimeout(HttpClientError):
    """The response did not arrive in time."""


class HttpResponse(NamedTuple):
    """A response. Header names are lower case; `is_complete` is false if the body was truncated.

    `keeps_connection` is true if the connection can be used for another exchange.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    is_complete: bool
    keeps_connection: bool

    def header(self, name: bytes) -> str:
        """Return the value of the last header of this lower-case name; empty if there is none."""
        return dict(self.headers).get(name, b"").decode("latin-1").strip()


class Stream(asyncio.Protocol):
    """A TCP connection, plain or with TLS; nothing is read or sent before `open`."""

    def __init__(self, connected: socket.socket | None = None) -> None:
        self._socket = connected
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._is_paused = False
        self._is_at_end = False
        """True if the peer sends nothing more. What it sent before may be its error response, so that is still read."""
        self._lost: Exception | None = None

    @property
    def peer_address(self) -> str | None:
        """The IP address of the peer before `open`; None afterwards, or if the peer has disconnected."""
        with suppress(OSError):
            return None if self._socket is None else str(self._socket.getpeername()[0])
        return None

    @property
    def is_idle(self) -> bool:
        """True if the connection is open and nothing unread was received."""
        return self._transport is not None and not (self._is_at_end or self._received or self._transport.is_closing())

    async def open(self, tls: ssl.SSLContext | None = None, server_name: str | None = None) -> None:
        """Start the stream; with `tls`, require a certificate for `server_name`. Raises TLSError, ProtocolError."""
        assert self._socket is not None
        sock, self._socket = self._socket, None  # from here on the transport owns and closes it
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: self, sock=sock, ssl=tls, server_hostname=server_name
            )
        except OSError as error:
            raise (ProtocolError if tls is None else TLSError)(type(error).__name__) from error

    async def start_tls(self, tls: ssl.SSLContext, server_name: str) -> None:
        """Continue an open stream with TLS; require a certificate for `server_name`. Raises TLSError."""
        assert self._transport is not None
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                self._transport, self, tls, server_hostname=server_name
            )
        except OSError as error:
            raise TLSError(type(error).__name__) from error
        self._transport = cast("asyncio.Transport", encrypted)

    async def read(self, max_bytes: int) -> bytes:
        """Return received data, at least one byte; empty at the end of the stream.

        Raises ProtocolError, or TLSError if the peer ended the stream with a TLS alert.
        """
        if not self._received and not self._is_at_end:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = bytes(self._received[:max_bytes])
        del self._received[:max_bytes]
        if not data and self._lost is not None:
            error = TLSError if isinstance(self._lost, ssl.SSLError) else ProtocolError
            raise error(type(self._lost).__name__) from self._lost
        if self._is_paused and not self._received and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def write(self, data: bytes) -> None:
        """Send data. Raises ProtocolError."""
        assert self._transport is not None
        try:
            if self._transport.is_closing():
                raise ConnectionResetError
            self._transport.write(data)
            if self._writable is not None:
                await self._writable
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError for a connection lost just now
            raise ProtocolError(type(error).__name__) from error

    def close(self) -> None:
        """Abort the connection without waiting for the peer."""
        if self._transport is not None:
            self._transport.abort()
        if self._socket is not None:
            self._socket.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # the class of uvloop is not derived from it

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) >= READ_SIZE_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._is_at_end = True  # the connection closes: nothing more can be received
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_at_end, self._lost = True, exc
        self._wake()
        if self._writable is not None and not self._writable.done():
            self._writable.set_exception(exc or ConnectionResetError())
            self._writable.exception()  # there may be no writer

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Network:
    """Opens TCP connections."""

    async def connect(self, address: str, port: int, timeout: float) -> Stream:
        """Connect to an IP address (never a name) within `timeout` seconds. Raises ConnectError."""
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if hasattr(socket, "TCP_KEEPIDLE"):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
                async with asyncio.timeout(timeout):
                    await asyncio.get_running_loop().sock_connect(sock, (address, port))
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise ConnectError(type(error).__name__) from error
        return Stream(sock)


@cache
def tls_context() -> ssl.SSLContext:
    """Return the shared TLS context. Cached, because loading the CAs is slow. Raises TLSError."""
    return create_tls_context()


def create_tls_context() -> ssl.SSLContext:
    """Create a TLS context, with the CAs of SSL_CERT_FILE and SSL_CERT_DIR only, or those of the system.

    Raises TLSError if they cannot be read.
    """
    file, folder = os.environ.get("SSL_CERT_FILE") or None, os.environ.get("SSL_CERT_DIR") or None
    try:
        if file is None and folder is None and not _openssl_has_authorities():
            file = next(filter(os.path.isfile, CA_BUNDLE_PATHS), None)
        context = ssl.create_default_context(cafile=file, capath=folder)
    except OSError as error:
        raise TLSError(f"the CA certificates cannot be read: {error}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def _openssl_has_authorities() -> bool:
    paths = ssl.get_default_verify_paths()  # each is None if it does not exist
    hashed = os.listdir(paths.capath) if paths.capath is not None else []
    return paths.cafile is not None or any(name.endswith(".0") for name in hashed)


async def exchange(
    stream: Stream,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    max_bytes: int,
    kept_bytes: int,
    idle_timeout: float | None = None,
) -> HttpResponse:
    """Send a request and return its response.

    Reads at most `max_bytes` of the body and returns its first `kept_bytes`. `headers` must contain the host.
    `idle_timeout` is the maximum time without received data, in seconds. Raises ProtocolError, ResponseTimeout;
    NoResponse, a ProtocolError, if the connection ended before the response began.
    """
    request = _encode_request(method, target, headers, body)
    with suppress(ProtocolError):  # a peer that disconnects early may have sent an error response
        await stream.write(request)
    response = _ResponseReader(kept_bytes, has_body=method != "HEAD")
    remaining_bytes = MAX_HEAD_BYTES
    try:
        data = await _read(stream, READ_SIZE_BYTES, idle_timeout)
    except ProtocolError as error:
        raise NoResponse(str(error)) from error
    if not data:
        raise NoResponse("no response")
    while True:
        in_head = not response.has_head
        response.feed(data)
        remaining_bytes = max_bytes if in_head and response.has_head else remaining_bytes - len(data)
        if response.is_finished or remaining_bytes <= 0:
            break
        data = await _read(stream, min(READ_SIZE_BYTES, remaining_bytes), idle_timeout)
    if not response.has_head:
        raise ProtocolError("too long")
    return HttpResponse(
        response.status, response.headers, bytes(response.body), response.is_finished and response.is_kept_whole,
        response.is_finished and response.keeps_connection,
    )  # fmt: skip


async def open_tunnel(stream: Stream, authority: str, headers: Mapping[str, str]) -> None:
    """Let an HTTP proxy connect an open stream to `authority`, an address and a port (RFC 9110, 9.3.6).

    Raises ProxyRefused, ProtocolError.
    """
    lines = [
        f"CONNECT {authority} HTTP/1.1",
        f"host: {authority}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    await stream.write("\r\n".join((*lines, "", "")).encode("ascii"))
    head = b""
    while b"\r\n\r\n" not in head:
        data = await stream.read(READ_SIZE_BYTES)
        head += data
        if not data or len(head) > MAX_HEAD_BYTES:
            raise ProtocolError("the proxy sent no complete answer")
    answer = _TUNNEL_ANSWER.match(head)
    if answer is None or not head.endswith(b"\r\n\r\n"):
        raise ProtocolError("the answer of the proxy is not HTTP")
    if not answer[1].startswith(b"2"):
        raise ProxyRefused(answer[1].decode())


def _read(stream: Stream, max_bytes: int, idle_timeout: float | None) -> Awaitable[bytes]:
    return stream.read(max_bytes) if idle_timeout is None else _read_within(stream, max_bytes, idle_timeout)


async def _read_within(stream: Stream, max_bytes: int, idle_timeout: float) -> bytes:
    try:
        async with asyncio.timeout(idle_timeout):
            return await stream.read(max_bytes)
    except TimeoutError as error:
        raise ResponseTimeout(f"no data for {idle_timeout:g} s") from error


def _encode_request(method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Encode a request. Raises ProtocolError for a name or value that is not plain ASCII or contains a line break."""
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    try:
        if body or method not in _METHODS_WITHOUT_CONTENT:
            lines.append(f"content-length: {len(body)}")
        head = "\r\n".join((*lines, "\r\n")).encode("ascii")
    except UnicodeError as error:
        raise ProtocolError(str(error)) from error
    if head.count(b"\n") != len(lines) + 1 or not _HEAD.fullmatch(head):
        raise ProtocolError("the request cannot be expressed in HTTP")
    return head + body


class _ResponseReader:
    """Parses one response. Informational responses before it are skipped."""

    def __init__(self, kept_bytes: int, *, has_body: bool) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.has_head = self.is_finished = self.keeps_connection = False
        self.is_kept_whole = True
        """True if no part of the body was dropped."""
        self._kept_bytes = kept_bytes
        self._has_body = has_body
        self._unparsed = b""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse received data; empty at the end of the connection. Raises ProtocolError."""
        if not data:
            if not self.has_head or not self._ends_with_connection():
                raise ProtocolError("the response is incomplete")
            self.is_finished = True
            return
        if not self.has_head:
            self._unparsed += data
            if not _END_OF_HEAD.search(self._unparsed):
                return
            data, self._unparsed = self._unparsed, b""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.is_finished:  # what follows the response is ignored
                raise ProtocolError(type(error).__name__) from error
            self.keeps_connection = False

    def _ends_with_connection(self) -> bool:
        """True if the response has neither a length nor chunks, so that the end of the connection ends it."""
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def on_message_begin(self) -> None:
        self.keeps_connection = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_finished:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.is_finished:
            return
        self.status = self._parser.get_status_code()
        self.has_head = self.status >= 200
        if not self.has_head:
            self.headers.clear()
        elif not self._has_body:  # the parser would wait for the announced length
            self.is_finished = True

    def on_body(self, body: bytes) -> None:
        if not self.is_finished:
            kept = body[: self._kept_bytes - len(self.body)]
            self.is_kept_whole = self.is_kept_whole and len(kept) == len(body)
            self.body += kept

    def on_message_complete(self) -> None:
        if self.has_head and not self.is_finished:
            self.is_finished, self.keeps_connection = True, self._parser.should_keep_alive()


async def send_request(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    timeout: float,
    max_bytes: int,
    idle_timeout: float | None = None,
) -> HttpResponse:
    """Send a request over a new connection and return the response. Raises HttpClientError.

    Header names must be lower case. `timeout` is the total time in seconds, `idle_timeout` the maximum time without
    received data. A body of more than `max_bytes` is truncated, and `is_complete` is then false.
    """
    try:
        async with asyncio.timeout(timeout):
            return await _send_request(method, url, headers, body, max_bytes, idle_timeout)
    except TimeoutError as error:
        raise ResponseTimeout(f"no response within {timeout:g} s") from error


async def _send_request(
    method: str, url: str, headers: Mapping[str, str], body: bytes, max_bytes: int, idle_timeout: float | None
) -> HttpResponse:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme not in DEFAULT_PORTS or not host or not host.isascii():
            raise ValueError("not an http or https URL with an ASCII host name (internationalized names as xn--)")
        port = parts.port or DEFAULT_PORTS[parts.scheme]
        resolved = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # includes UnicodeError, raised for an invalid host name
        raise ConnectError(str(error)) from error
    authority = (f"[{host}]" if ":" in host else host) + ("" if parts.port is None else f":{port}")
    defaults = {"host": authority, "user-agent": "timebell", "accept-encoding": "identity", "connection": "close"}
    if parts.username is not None:
        defaults["authorization"] = _basic_auth(parts.username, parts.password or "")
    target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=URL_SAFE_CHARACTERS)
    stream = await _connect_first([str(address[4][0]) for address in resolved], port)
    try:
        tls = parts.scheme == "https"
        await stream.open(tls_context() if tls else None, host if tls else None)
        return await exchange(
            stream,
            method,
            target,
            defaults | dict(headers),
            body,
            max_bytes=max_bytes,
            kept_bytes=max_bytes,
            idle_timeout=idle_timeout,
        )
    finally:
        stream.close()


async def _connect_first(addresses: list[str], port: int) -> Stream:
    """Connect to the first address that accepts a connection. Raises ConnectError."""
    last_error = ConnectError("no address")
    for address in dict.fromkeys(addresses):
        try:
            return await Network().connect(address, port, CONNECT_TIMEOUT_SECONDS)
        except ConnectError as error:
            last_error = error
    raise last_error


def _basic_auth(user: str, password: str) -> str:
    """Return an Authorization header value for the credentials of a URL (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
