"""The address of the client of a request, also behind reverse proxies."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address

from timebell.errors import InvalidInput

FORWARDED_FOR, FORWARDED = b"x-forwarded-for", b"forwarded"
IPV6_CLIENT_PREFIX = 64  # bits: a provider assigns at least a /64 to each client, which may use all of its addresses


class TrustedProxies:
    """The networks whose `X-Forwarded-For` (de facto) and `Forwarded` (RFC 7239) headers are believed.

    `networks` is a comma-separated list in CIDR notation. Raises InvalidInput (INVALID_NETWORKS).
    """

    def __init__(self, networks: str | None) -> None:
        try:
            self._networks = [
                ipaddress.ip_network(text.strip()) for text in (networks or "").split(",") if text.strip()
            ]
        except ValueError as error:
            raise InvalidInput(
                f"TIMEBELL_HTTP_TRUSTED_PROXIES: {error}.", code="INVALID_NETWORKS",
                fix='Specify networks such as "10.0.0.0/8, 192.0.2.7".',
            ) from error  # fmt: skip

    def trusts(self, address: str) -> bool:
        """Return whether an address belongs to a trusted proxy."""
        ip = _parse_address(address)
        return ip is not None and any(ip in network for network in self._networks)

    def find_client(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the address of the client that sent a request through trusted proxies; without any, the `peer`.

        Each proxy appends the address of its own peer. So the client is the last address that is not a trusted proxy:
        a client can invent the addresses before its own, but not those after it. A proxy may pass the header that it
        does not write itself unchanged from the client. So if both headers are present and differ, neither counts.
        """
        if not self.trusts(peer):
            return peer
        values = list(headers)
        clients = {
            self._last_untrusted(peer, list(addresses(value for name, value in values if name == header)))
            for header, addresses in ((FORWARDED_FOR, _forwarded_for_addresses), (FORWARDED, _forwarded_addresses))
            if any(name == header for name, _ in values)
        }
        return clients.pop() if len(clients) == 1 else peer

    def _last_untrusted(self, peer: str, addresses: list[str]) -> str:
        client = peer
        for text in reversed(addresses):
            ip = _parse_address(text)
            if ip is None:  # "unknown" or obfuscated: the nearest proxy that named an address stands for the client
                return client
            client = str(ip)
            if not self.trusts(client):
                return client
        return client


def has_forwarded_header(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a request has a header that names the client's address."""
    return any(name in (FORWARDED_FOR, FORWARDED) for name, _ in headers)


@lru_cache(maxsize=4096)
def client_network(address: str) -> str:
    """Return the network that throttling counts for an address: an IPv4 address itself, or the /64 of an IPv6 one."""
    ip = _parse_address(address)
    if isinstance(ip, IPv6Address):
        return str(ipaddress.ip_network((ip, IPV6_CLIENT_PREFIX), strict=False))
    return address if ip is None else str(ip)


def _forwarded_for_addresses(values: Iterable[bytes]) -> Iterator[str]:
    for value in values:
        yield from value.decode("latin-1").split(",")


def _forwarded_addresses(values: Iterable[bytes]) -> Iterator[str]:
    """Yield the `for` parameter of each element of `Forwarded`; an element without one yields an empty text."""
    for value in values:
        for element in value.decode("latin-1").split(","):
            pairs = [pair.partition("=") for pair in element.split(";")]
            yield next((text.strip().strip('"') for name, _, text in pairs if name.strip().lower() == "for"), "")


def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address with or without a port; None if it is not an address. IPv4-mapped addresses become IPv4."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip
