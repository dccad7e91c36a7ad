"""Idle connections of webhooks, for reuse by later deliveries.

The key contains the tenant, so that tenants never share a connection; the address, so that a delivery uses only a
connection to an address that was checked for it; and the channel, so that it uses only a connection with its own proxy
and client certificate.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from timebell.http_client import Stream
from timebell.targets.address import Endpoint

MAX_IDLE_CONNECTIONS = 500
MAX_IDLE_SECONDS = 5.0
"""Shorter than the keep-alive timeout of common servers, which close idle connections after 5 s or more."""


class ConnectionKey(NamedTuple):
    """The tenant, endpoint, address and channel (proxy and TLS) of a connection."""

    tenant_id: str
    scheme: str
    host: str
    port: int
    address: str
    channel: Hashable

    @classmethod
    def of(cls, tenant_id: str, endpoint: Endpoint, address: str, channel: Hashable = None) -> ConnectionKey:
        """Return the key for a tenant's deliveries to an endpoint at a checked address, through a channel."""
        return cls(tenant_id, endpoint.scheme, endpoint.host, endpoint.port, address, channel)


class IdleConnections:
    """Idle connections, at most MAX_IDLE_CONNECTIONS, each for at most MAX_IDLE_SECONDS."""

    def __init__(self) -> None:
        self._since: OrderedDict[Stream, tuple[float, ConnectionKey]] = OrderedDict()
        self._by_key: dict[ConnectionKey, dict[Stream, None]] = {}
        """The connections of each key, in the order of their last use."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self, key: ConnectionKey) -> Stream | None:
        """Remove and return the connection that was used last; None if there is none."""
        while streams := self._by_key.get(key):
            stream = next(reversed(streams))
            self._remove(stream)
            if stream.is_idle:
                return stream
            stream.close()
        return None

    def put(self, key: ConnectionKey, stream: Stream) -> None:
        """Keep a connection for a later delivery, or close it if it cannot be used again."""
        if not stream.is_idle:
            stream.close()
            return
        loop = asyncio.get_running_loop()
        self._since[stream] = loop.time(), key
        self._by_key.setdefault(key, {})[stream] = None
        if len(self._since) > MAX_IDLE_CONNECTIONS:
            self._close_oldest()
        if self._timer is None:
            self._timer = loop.call_later(MAX_IDLE_SECONDS, self._close_expired)

    def close(self) -> None:
        """Close all connections."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._since:
            self._close_oldest()

    def _close_oldest(self) -> None:
        stream = next(iter(self._since))
        self._remove(stream)
        stream.close()

    def _close_expired(self) -> None:
        loop = asyncio.get_running_loop()
        expired = loop.time() - MAX_IDLE_SECONDS
        while self._since and next(iter(self._since.values()))[0] <= expired:
            self._close_oldest()
        self._timer = loop.call_later(MAX_IDLE_SECONDS / 2, self._close_expired) if self._since else None

    def _remove(self, stream: Stream) -> None:
        _, key = self._since.pop(stream)
        streams = self._by_key[key]
        del streams[stream]
        if not streams:
            del self._by_key[key]
