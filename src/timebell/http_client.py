"""HTTP/1.1, one connection an exchange: how webhooks are sent, and how services are asked for tokens and rows.

It follows no redirect, decodes no body, keeps no cookie, takes no proxy from the environment, and reads no more than it
is told to. h11 knows the protocol, and refuses headers that would be two. The network may be supplied, which is where
the address guard of webhooks sits: host, SNI and certificate go by a name, the TCP connection goes by an address and
nothing else. As no connection is used twice, none is met that its other end has given up.
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

HEAD_BYTES = 16 * 1024
AT_ONCE = 16 * 1024
CONNECT_SECONDS = 3.0  # for each address of a service
PORTS = {"http": 80, "https": 443}
PLAIN = "%/:?[]@!$&'()*+,;="
"""What a path and its query may have besides letters, digits and `-._~` (RFC 3986)."""
AUTHORITIES = (
    "/etc/ssl/cert.pem",  # macOS, Alpine, BSD
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
"""Where systems have them; the OpenSSL of a Python that was built elsewhere may not look there."""


class WireError(OSError):
    """There is no answer."""


class ConnectError(WireError):
    """No connection."""


class TLSError(WireError):
    """The TCP connection stood, the TLS handshake failed."""


class Broken(WireError):
    """The answer broke off, is too long, or is not HTTP; or the request cannot be said in HTTP."""


class TooSlow(WireError):
    """The answer did not come in time."""


class Answer(NamedTuple):
    """What came back. Names of headers are in lower case; `whole` says whether the body is all there was."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    whole: bool

    def header(self, name: bytes) -> str:
        """The last of that name; empty if there is none."""
        return dict(self.headers).get(name, b"").decode("latin-1").strip()


class Stream:
    """A TCP connection, of which nothing is read before it is opened: plain, or with TLS."""

    def __init__(self, connected: socket.socket | None = None) -> None:
        self._socket = connected
        self._reader: _Reader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def peer(self) -> str | None:
        """The address of the other end; None if there is none any more."""
        with suppress(OSError):
            return None if self._socket is None else str(self._socket.getpeername()[0])
        return None

    async def open(self, tls: ssl.SSLContext | None = None, name: str | None = None) -> None:
        """With `tls` the other end shows a certificate of that name. Raises TLSError, Broken."""
        assert self._socket is not None
        handed, self._socket = self._socket, None  # the event loop closes what it has
        loop = asyncio.get_running_loop()
        reader = _Reader(AT_ONCE, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            made, _ = await loop.create_connection(lambda: protocol, sock=handed, ssl=tls, server_hostname=name)
        except OSError as error:
            raise (Broken if tls is None else TLSError)(type(error).__name__) from error
        self._reader, self._writer = reader, asyncio.StreamWriter(made, protocol, reader, loop)

    async def read(self, most: int) -> bytes:
        """What has come, at least a byte, or nothing at the end. Raises Broken."""
        assert self._reader is not None
        data = await self._reader.read(most)
        if not data and self._reader.lost is not None:
            raise Broken(type(self._reader.lost).__name__) from self._reader.lost
        return data

    async def write(self, data: bytes) -> None:
        """Raises Broken."""
        assert self._writer is not None
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:  # uvloop's, of a connection that was lost just now
            raise Broken(type(error).__name__) from error

    def close(self) -> None:
        """At once: nothing is waited for, whatever the other end does."""
        if self._writer is not None:
            self._writer.transport.abort()
        if self._socket is not None:
            self._socket.close()


class _Reader(asyncio.StreamReader):
    """Gives all that came before the connection was lost: who resets one may have said why."""

    lost: Exception | None = None

    def set_exception(self, exc: Exception) -> None:
        self.lost = exc
        self.feed_eof()


class Network:
    """Makes connections."""

    async def connect(self, address: str, port: int, timeout: float) -> Stream:
        """To an address, never to a name, within `timeout` seconds. Raises ConnectError."""
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        try:
            made = socket.socket(family, socket.SOCK_STREAM)
            try:
                made.setblocking(False)
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(timeout):
                    await asyncio.get_running_loop().sock_connect(made, (address, port))
            except BaseException:
                made.close()
                raise
        except OSError as error:
            raise ConnectError(type(error).__name__) from error
        return Stream(made)


@cache
def trusted() -> ssl.SSLContext:
    """What checks certificates: by the authorities of SSL_CERT_FILE and SSL_CERT_DIR alone, or by the system's.

    They take a while to load. Raises TLSError."""
    file, folder = os.environ.get("SSL_CERT_FILE") or None, os.environ.get("SSL_CERT_DIR") or None
    try:
        if file is None and folder is None and not _found_by_openssl():
            file = next(filter(os.path.isfile, AUTHORITIES), None)
        context = ssl.create_default_context(cafile=file, capath=folder)
    except OSError as error:
        raise TLSError(f"the authorities of certificates cannot be read: {error}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def _found_by_openssl() -> bool:
    paths = ssl.get_default_verify_paths()  # None for what does not exist
    hashed = os.listdir(paths.capath) if paths.capath is not None else []
    return paths.cafile is not None or any(name.endswith(".0") for name in hashed)


async def exchange(
    stream: Stream,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    most: int,
    kept: int,
    quiet: float | None = None,
) -> Answer:
    """A request and its answer: `most` bytes of the body are read, then the line is cut, and the first `kept` are kept.

    `headers` names the host; `quiet` is how many seconds may pass in which nothing comes. Raises Broken, TooSlow."""
    line = _Line(stream, quiet)
    try:
        request = line.request(method, target, headers, body)
        with suppress(Broken):  # who hangs up early may have said why
            await stream.write(request)
        while not isinstance(head := await line.next(), h11.Response):
            pass  # 100 Continue and the like
        line.allowance, line.cut = most, True
        found, whole = bytearray(), True
        while isinstance(part := await line.next(), h11.Data):
            whole = whole and len(part.data) <= kept - len(found)
            found += part.data[: kept - len(found)]
    except (h11.ProtocolError, UnicodeError) as error:
        raise Broken(str(error)) from error
    return Answer(head.status_code, list(head.headers), bytes(found), whole and part is not None)


class _Line:
    """What h11 makes of a stream."""

    def __init__(self, stream: Stream, quiet: float | None) -> None:
        self._stream = stream
        self._quiet = quiet
        self._state = h11.Connection(h11.CLIENT, max_incomplete_event_size=2 * HEAD_BYTES)
        self.allowance = HEAD_BYTES
        self.cut = False
        """Whether there may be more than is read."""

    def request(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """What to send. Raises h11.LocalProtocolError, UnicodeError."""
        named = [*headers.items(), ("content-length", str(len(body)))]
        events = (h11.Request(method=method, target=target, headers=named), h11.Data(data=body), h11.EndOfMessage())
        return b"".join(self._state.send(event) or b"" for event in events)

    async def next(self) -> h11.Event | None:
        """The next event; None where the line is cut. Raises Broken, TooSlow, h11.RemoteProtocolError."""
        while (event := self._state.next_event()) is h11.NEED_DATA:
            if self.allowance <= 0:
                if self.cut:
                    return None
                raise Broken("too long")
            data = await self._read()
            self.allowance -= len(data)
            self._state.receive_data(data)
        if isinstance(event, h11.Event):
            return event
        raise Broken("more than an answer")

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(self._quiet):
                return await self._stream.read(min(AT_ONCE, self.allowance))
        except TimeoutError as error:
            raise TooSlow(f"nothing for {self._quiet:g} s") from error


async def ask(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    within: float,
    most: int,
    quiet: float | None = None,
) -> Answer:
    """The answer of a service, over a connection of its own, within so many seconds. Raises WireError.

    Names of headers are in lower case. `quiet` is how many seconds may pass in which nothing comes. A body of more than
    `most` bytes is cut, and `whole` says so."""
    try:
        async with asyncio.timeout(within):
            return await _ask(method, url, headers, body, most, quiet)
    except TimeoutError as error:
        raise TooSlow(f"no answer within {within:g} s") from error


async def _ask(
    method: str, url: str, headers: Mapping[str, str], body: bytes, most: int, quiet: float | None
) -> Answer:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme not in PORTS or not host or not host.isascii():
            raise ValueError("it is no URL of http or https, with a name of another script in its xn-- form")
        port = parts.port or PORTS[parts.scheme]
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # UnicodeError, of a name that is none, is a ValueError
        raise ConnectError(str(error)) from error
    authority = (f"[{host}]" if ":" in host else host) + ("" if parts.port is None else f":{port}")
    named = {"host": authority, "user-agent": "timebell", "accept-encoding": "identity", "connection": "close"}
    if parts.username is not None:
        named["authorization"] = _basic(parts.username, parts.password or "")
    target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=PLAIN)
    stream = await _first([str(where[4][0]) for where in found], port)
    try:
        tls = parts.scheme == "https"
        await stream.open(trusted() if tls else None, host if tls else None)
        return await exchange(stream, method, target, named | dict(headers), body, most=most, kept=most, quiet=quiet)
    finally:
        stream.close()


async def _first(addresses: list[str], port: int) -> Stream:
    """A connection to the first of them that takes one. Raises ConnectError."""
    failed = ConnectError("no address")
    for address in dict.fromkeys(addresses):
        try:
            return await Network().connect(address, port, CONNECT_SECONDS)
        except ConnectError as why:
            failed = why
    raise failed


def _basic(user: str, password: str) -> str:
    """What a URL has before its @, as a header (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
