"""A minimal HTTP/1.1 client with one connection per exchange, for webhooks and for the APIs of other services.

It follows no redirects, decodes no bodies, stores no cookies, ignores proxy settings of the environment, and reads a
limited number of bytes. h11 implements the protocol and prevents header injection. `exchange` takes an open stream, so
that the address guard of webhooks can choose the address: Host, SNI and certificate use the name, the TCP connection
uses only the checked address. Since connections are not reused, none is stale. httpx or aiohttp would need the same
code to pin addresses, and add more than 100 ms to the start and three to eight packages.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

import h11

MAX_HEAD_BYTES = 16 * 1024
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


class HttpClientError(OSError):
    """No complete response was received."""


class ConnectError(HttpClientError):
    """The TCP connection failed."""


class TLSError(HttpClientError):
    """The TCP connection succeeded, but the TLS handshake failed."""


class ProtocolError(HttpClientError):
    """The response is incomplete, too long or not HTTP; or the request cannot be expressed in HTTP."""


class ResponseTimeout(HttpClientError):
    """The response did not arrive in time."""


class HttpResponse(NamedTuple):
    """A response. Header names are lower case; `is_complete` is false if the body was truncated."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    is_complete: bool

    def header(self, name: bytes) -> str:
        """Return the value of the last header of this lower-case name; empty if there is none."""
        return dict(self.headers).get(name, b"").decode("latin-1").strip()


class Stream:
    """A TCP connection, plain or with TLS; nothing is read or sent before `open`."""

    def __init__(self, connected: socket.socket | None = None) -> None:
        self._socket = connected
        self._reader: _ResetTolerantReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def peer_address(self) -> str | None:
        """The IP address of the peer before `open`; None afterwards, or if the peer has disconnected."""
        with suppress(OSError):
            return None if self._socket is None else str(self._socket.getpeername()[0])
        return None

    async def open(self, tls: ssl.SSLContext | None = None, server_name: str | None = None) -> None:
        """Start the stream; with `tls`, require a certificate for `server_name`. Raises TLSError, ProtocolError."""
        assert self._socket is not None
        sock, self._socket = self._socket, None  # from here on the transport owns and closes it
        loop = asyncio.get_running_loop()
        reader = _ResetTolerantReader(READ_SIZE_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, sock=sock, ssl=tls, server_hostname=server_name
            )
        except OSError as error:
            raise (ProtocolError if tls is None else TLSError)(type(error).__name__) from error
        self._reader, self._writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def read(self, max_bytes: int) -> bytes:
        """Return received data, at least one byte; empty at the end of the stream. Raises ProtocolError."""
        assert self._reader is not None
        data = await self._reader.read(max_bytes)
        if not data and self._reader.connection_error is not None:
            raise ProtocolError(type(self._reader.connection_error).__name__) from self._reader.connection_error
        return data

    async def write(self, data: bytes) -> None:
        """Send data. Raises ProtocolError."""
        assert self._writer is not None
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError for a connection lost just now
            raise ProtocolError(type(error).__name__) from error

    def close(self) -> None:
        """Abort the connection without waiting for the peer."""
        if self._writer is not None:
            self._writer.transport.abort()
        if self._socket is not None:
            self._socket.close()


class _ResetTolerantReader(asyncio.StreamReader):
    """Returns all data received before a connection reset: it may contain the peer's error response."""

    connection_error: Exception | None = None

    def set_exception(self, exc: Exception) -> None:
        self.connection_error = exc
        self.feed_eof()


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
    """Return the TLS context, with the CAs of SSL_CERT_FILE and SSL_CERT_DIR only, or those of the system.

    Cached, because loading the CAs is slow. Raises TLSError if they cannot be read.
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
    `idle_timeout` is the maximum time without received data, in seconds. Raises ProtocolError, ResponseTimeout.
    """
    connection = _HttpExchange(stream, idle_timeout)
    try:
        request = connection.request(method, target, headers, body)
        with suppress(ProtocolError):  # a peer that disconnects early may have sent an error response
            await stream.write(request)
        while not isinstance(head := await connection.next_event(), h11.Response):
            pass  # 100 Continue and other informational responses
        connection.remaining_bytes, connection.truncates = max_bytes, True
        content, complete = bytearray(), True
        while isinstance(part := await connection.next_event(), h11.Data):
            complete = complete and len(part.data) <= kept_bytes - len(content)
            content += part.data[: kept_bytes - len(content)]
    except (h11.ProtocolError, UnicodeError) as error:
        raise ProtocolError(str(error)) from error
    return HttpResponse(head.status_code, list(head.headers), bytes(content), complete and part is not None)


class _HttpExchange:
    """The h11 events of one exchange on a stream."""

    def __init__(self, stream: Stream, idle_timeout: float | None) -> None:
        self._stream = stream
        self._idle_timeout = idle_timeout
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=2 * MAX_HEAD_BYTES)
        self.remaining_bytes = MAX_HEAD_BYTES
        self.truncates = False
        """True while reading the body, which is truncated at the limit instead of being an error."""

    def request(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """Return the encoded request. Raises h11.LocalProtocolError, UnicodeError."""
        all_headers = [*headers.items(), ("content-length", str(len(body)))]
        head = h11.Request(method=method, target=target, headers=all_headers)
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(self._connection.send(event) or b"" for event in events)

    async def next_event(self) -> h11.Event | None:
        """Return the next event; None where the body is truncated.

        Raises ProtocolError, ResponseTimeout, h11.RemoteProtocolError.
        """
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            if self.remaining_bytes <= 0:
                if self.truncates:
                    return None
                raise ProtocolError("too long")
            data = await self._read()
            self.remaining_bytes -= len(data)
            self._connection.receive_data(data)
        if isinstance(event, h11.Event):
            return event
        raise ProtocolError("more than one response")

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(self._idle_timeout):
                return await self._stream.read(min(READ_SIZE_BYTES, self.remaining_bytes))
        except TimeoutError as error:
            raise ResponseTimeout(f"no data for {self._idle_timeout:g} s") from error


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
