"""Connections of the target `http`: guarded, through a proxy if there is one, with the TLS of the target.

The address guard checks every address that a request uses: of the receiver, of its proxy, of a token endpoint, and of
each redirect. Host, SNI and certificate verification use the name in the URL; only the TCP connection uses the checked
address. A proxy is asked to connect to the checked address, too, so it has no name to resolve otherwise.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from timebell import http_client
from timebell.errors import Refused
from timebell.targets.address import AddressGuard, Endpoint
from timebell.targets.client_tls import create_context
from timebell.targets.idle_connections import ConnectionKey, IdleConnections

CONNECT_SECONDS = 5.0
MAX_RESPONSE_BYTES = 64 * 1024
MAX_ADDRESSES_TRIED = 4


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; `authorization` is the value of its header, if it requires one."""

    endpoint: Endpoint
    authorization: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Channel:
    """How to reach a receiver. `authorities`, `certificate` and `key` are PEM.

    Part of the key of idle connections: two targets share a connection only if their channels are equal.
    """

    proxy: Proxy | None = None
    authorities: str | None = field(default=None, repr=False)
    certificate: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)

    def without_certificate(self) -> Channel:
        """Return the channel to another server, which must not learn who the client is."""
        return replace(self, certificate=None, key=None)


class HttpConnections:
    """Sends requests to checked addresses, and keeps connections of a tenant for its next request."""

    def __init__(self, guard: AddressGuard, tls: ssl.SSLContext | None = None) -> None:
        self.guard = guard
        self.network: http_client.Network = http_client.Network()
        self._idle_connections = IdleConnections()
        self._tls = tls  # created on first use, because loading the system's CA certificates is slow

    async def exchange(
        self,
        tenant_id: str,
        endpoint: Endpoint,
        channel: Channel,
        method: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        kept_bytes: int,
    ) -> http_client.HttpResponse:
        """Send a request and return its response.

        Raises Refused (ADDRESS_REFUSED), ConnectError, TLSError, ProtocolError.
        """
        request = (endpoint, method, headers, body, kept_bytes)
        stream, key, is_reused = await self._connect(tenant_id, endpoint, channel)
        if is_reused:
            try:
                return await self._exchange_on(stream, key, *request)
            except http_client.NoResponse:
                stream, key, _ = await self._connect(tenant_id, endpoint, channel, reuse=False)
        try:
            await self._open(stream, endpoint, channel)
        except BaseException:
            stream.close()
            raise
        return await self._exchange_on(stream, key, *request)

    def close(self) -> None:
        """Close the idle connections."""
        self._idle_connections.close()

    async def _open(self, stream: http_client.Stream, endpoint: Endpoint, channel: Channel) -> None:
        if endpoint.scheme != "https":
            if channel.proxy is None:
                await stream.open()
            return
        if channel.authorities is None and channel.certificate is None:
            self._tls = self._tls or http_client.tls_context()
            tls = self._tls
        else:
            tls = create_context(channel.authorities, channel.certificate, channel.key)
        if channel.proxy is None:
            await stream.open(tls, endpoint.host)
        else:
            await stream.start_tls(tls, endpoint.host)

    async def _exchange_on(
        self,
        stream: http_client.Stream,
        key: ConnectionKey,
        endpoint: Endpoint,
        method: str,
        headers: Mapping[str, str],
        body: bytes,
        kept_bytes: int,
    ) -> http_client.HttpResponse:
        """Send the request on an open connection, and keep that if the receiver allows it."""
        keeps_connection = False
        try:
            response = await http_client.exchange(
                stream,
                method,
                endpoint.target,
                {"host": endpoint.authority, **headers},
                body,
                max_bytes=MAX_RESPONSE_BYTES,
                kept_bytes=kept_bytes,
            )
            keeps_connection = response.keeps_connection
        finally:
            if keeps_connection:
                self._idle_connections.put(key, stream)
            else:
                stream.close()
        return response

    async def _connect(
        self, tenant_id: str, endpoint: Endpoint, channel: Channel, *, reuse: bool = True
    ) -> tuple[http_client.Stream, ConnectionKey, bool]:
        """Connect to a checked address, or take an open connection to one; the last value tells which.

        All addresses share the time equally, so that one dead route cannot use it up. A failure is always reported
        after the whole time. Otherwise the duration would reveal whether a port is closed or filtered, or whether a
        name is unknown or private.
        """
        failure: Refused | http_client.HttpClientError | None = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                try:
                    return await self._try_addresses(tenant_id, endpoint, channel, reuse=reuse)
                except (Refused, http_client.HttpClientError) as error:
                    failure = error
                await asyncio.Event().wait()
        except TimeoutError as error:
            raise failure or http_client.ConnectError from error
        raise AssertionError("only the timeout ends the wait")

    async def _try_addresses(
        self, tenant_id: str, endpoint: Endpoint, channel: Channel, *, reuse: bool
    ) -> tuple[http_client.Stream, ConnectionKey, bool]:
        """Return the result of `_connect`. Raises Refused, HttpClientError as soon as it has failed."""
        addresses = (await self.guard.resolve(endpoint))[:MAX_ADDRESSES_TRIED]
        keys = [ConnectionKey.of(tenant_id, endpoint, address, channel) for address in addresses]
        for key in keys if reuse else ():
            if (stream := self._idle_connections.take(key)) is not None:
                return stream, key, True
        if channel.proxy is not None:
            key = min(keys, key=lambda each: ":" in each.address)  # many proxies have no IPv6
            return await self._connect_through(channel.proxy, key), key, False
        for address, key in zip(addresses, keys, strict=True):
            with suppress(http_client.ConnectError):
                stream = await self._connect_verified(address, endpoint.port, CONNECT_SECONDS / len(addresses))
                return stream, key, False
        raise http_client.ConnectError

    async def _connect_through(self, proxy: Proxy, key: ConnectionKey) -> http_client.Stream:
        """Return an open stream to the address of `key` through a proxy.

        Raises Refused, ConnectError, ProtocolError.
        """
        addresses = (await self.guard.resolve(proxy.endpoint))[:MAX_ADDRESSES_TRIED]
        for address in addresses:
            with suppress(http_client.ConnectError):
                stream = await self._connect_verified(
                    address, proxy.endpoint.port, CONNECT_SECONDS / (len(addresses) + 1)
                )
                break
        else:
            raise http_client.ConnectError("no connection to the proxy")
        destination = f"[{key.address}]" if ":" in key.address else key.address
        try:
            await stream.open()
            await http_client.open_tunnel(
                stream,
                f"{destination}:{key.port}",
                {} if proxy.authorization is None else {"proxy-authorization": proxy.authorization},
            )
        except BaseException:
            stream.close()
            raise
        return stream

    async def _connect_verified(self, address: str, port: int, timeout: float) -> http_client.Stream:
        stream = await self.network.connect(address, port, timeout)
        if stream.peer_address is not None and ipaddress.ip_address(stream.peer_address) == ipaddress.ip_address(
            address
        ):
            return stream
        stream.close()
        raise http_client.ConnectError("the peer address is not the checked address")
