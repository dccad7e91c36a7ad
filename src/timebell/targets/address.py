"""Restrict the addresses that webhooks may connect to: protection against server-side request forgery (SSRF).

There are two checks. `check_url` parses a URL by a strict grammar when a job is created, and again when it is due.
`resolve` then resolves its name once and checks every address. The caller connects to the returned addresses and never
to the name, so a DNS answer that changes between check and use (DNS rebinding) has no effect.

The table of refused networks follows the IANA special-purpose address registries (RFC 6890). It is explicit because
`ipaddress.is_global` and `is_private` differ between Python versions and miss NAT64, 6to4 and multicast.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from timebell.errors import InvalidInput, Refused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver = Callable[[str, int], Awaitable[list[str]]]


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


PRIVATE_NETWORKS = _networks(
    *("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
    *("::1/128", "fc00::/7"),
)
"""Networks that an operator may allow. Link-local is never allowed, because cloud metadata services are there."""

METADATA_NETWORKS = _networks("100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::/32", "fd20:ce::/32")
"""Metadata services of clouds (Alibaba, Azure, AWS, Google) outside of link-local: never allowed."""

REFUSED_NETWORKS = _networks(
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
    *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    # In IPv6 only 2000::/3 is allowed; the following networks lie within. Teredo (in 2001::/23) and 6to4 (2002::/16)
    # contain an IPv4 address to which a relay would forward, and have no legitimate use today: refused entirely.
    *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
)
GLOBAL_IPV6_NETWORK = ipaddress.IPv6Network("2000::/3")
NAT64_NETWORK = ipaddress.IPv6Network("64:ff9b::/96")

DENIED_PORTS = frozenset(  # databases, caches, brokers, directories, container and cluster control
    (1433, 1521, 2049, 2181, 2375, 2376, 2379, 2380, 3306, 3389, 4369, 5432, 5433, 5672, 5900, 6379, 6432, 6443)
) | {9042, 9092, 9200, 9300, 10250, 10255, 11211, 26379, 27017}
PROXY_SCHEME = "proxy"
"""The scheme of an endpoint that is a proxy."""
LOCAL_NAMES = ("localhost", "local", "internal")  # RFC 6761, RFC 6762, ICANN's private-use domain

_URL = re.compile(
    r"(?P<scheme>https?)://(?:\[(?P<v6>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9._-]{1,253}))"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<target>[/?][a-z0-9._~:/?\[\]@!$&'()*+,;=%-]*)?",
    re.IGNORECASE | re.ASCII,
)
_NETWORK_FIX = f"Specify networks such as 10.20.0.0/16, within {', '.join(map(str, PRIVATE_NETWORKS))}."
CACHE_SIZE = 4_096
"""Number of cached parsed URLs, and of addresses whose networks are cached.

Whether an address belongs to this machine is not cached, because its addresses may change.
"""
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed URL. `host` is a lower-case name or an address without brackets."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """The Host header: the port is omitted if it is the default of the scheme (RFC 9110, 7.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _default_port(self.scheme) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


class _Networks(NamedTuple):
    """The kinds of networks that contain an address."""

    is_always_refused: bool
    is_allowed_by_operator: bool
    is_public: bool


async def resolve_host(host: str, port: int) -> list[str]:
    """Resolve a host with the system resolver, in a thread. Raises OSError or UnicodeError."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in entries]


class AddressGuard:
    """Decides which URLs and addresses are allowed.

    `allow_private` allows loopback and all private networks, `allow_http` allows plain http to all addresses, and
    `allow` allows single private networks (CIDR), also for plain http. Addresses of this machine are allowed only by
    these options. `listeners`, the (host, port) pairs of Timebell and its database, are never allowed. `resolve`
    replaces the resolver in tests. Raises InvalidInput (INVALID_NETWORK).
    """

    def __init__(
        self,
        allow_private: bool = False,
        allow_http: bool = False,
        *,
        allow: Iterable[str] = (),
        listeners: Iterable[tuple[str, int]] = (),
        resolve: Resolver = resolve_host,
    ) -> None:
        self._allow = (*(PRIVATE_NETWORKS if allow_private else ()), *map(_parse_private_network, allow))
        self._allow_http = allow_http
        self._listeners = tuple(listeners)
        self._resolve = resolve
        self._networks_of = lru_cache(CACHE_SIZE)(self._find_networks)

    def check_url(self, url: object) -> Endpoint:
        """Parse and check a URL, without resolving its name.

        Raises InvalidInput (INVALID_URL) or Refused (HTTP_OFF, PORT_REFUSED, PRIVATE_ADDRESS).
        """
        return self._check_endpoint(_parse(url))

    def check_proxy(self, url: object) -> Endpoint:
        """Check the URL of an HTTP proxy like `check_url`. The connection to it is plain, the tunnel need not be."""
        endpoint = _parse(url)
        if endpoint.scheme != "http" or endpoint.target != "/":
            raise InvalidInput("The URL of a proxy is http://host:port.", code="INVALID_URL")
        return self._check_endpoint(replace(endpoint, scheme=PROXY_SCHEME))

    def _check_endpoint(self, endpoint: Endpoint) -> Endpoint:
        literal = _parse_address(endpoint.host)
        if not self._is_scheme_allowed(endpoint, literal):
            raise Refused("Plain http is disabled.", code="HTTP_OFF", fix="Use an https URL.")
        if endpoint.port in DENIED_PORTS or (endpoint.port < 1024 and endpoint.port not in (80, 443)):
            message = f"Webhooks must not use port {endpoint.port}."
            raise Refused(message, code="PORT_REFUSED", fix="Use port 443, or 1024 and above.")
        is_local_name = endpoint.host.rpartition(".")[2] in LOCAL_NAMES and not self._allow
        if is_local_name or (literal is not None and not self.allows(literal)):
            raise Refused(
                f"{endpoint.host} is a private or reserved address.",
                code="PRIVATE_ADDRESS",
                fix="To allow a private network for webhooks, add it to TIMEBELL_WEBHOOK_ALLOW.",
            )
        listener_addresses = [_parse_address(host) for host, port in self._listeners if port == endpoint.port]
        if literal is not None and _matches_listener(
            literal, [address for address in listener_addresses if address is not None]
        ):
            raise Refused(f"{endpoint.authority} is Timebell itself or its database.", code="PORT_REFUSED")
        return endpoint

    async def resolve(self, endpoint: Endpoint) -> list[str]:
        """Resolve the host of an endpoint once, and return its addresses if all of them are allowed.

        Raises Refused (ADDRESS_REFUSED). The message is the same for unknown names and for private addresses, because
        a difference would let attackers map a private network.
        """
        try:
            hosts = (
                [endpoint.host] if _parse_address(endpoint.host) else await self._resolve(endpoint.host, endpoint.port)
            )
            listener_addresses = await self._listener_addresses(endpoint.port)
            addresses = [_parse_address(host) or ipaddress.ip_address(host) for host in hosts]
            if addresses and all(
                self._is_scheme_allowed(endpoint, address)
                and self.allows(address)
                and not _matches_listener(address, listener_addresses)
                for address in addresses
            ):
                return hosts
        except (OSError, ValueError):  # includes UnicodeError, for names that DNS cannot represent
            pass
        raise Refused(
            f"{endpoint.host} has no address that may be used.", code="ADDRESS_REFUSED",
            fix="Check the name. To allow a private network, add it to TIMEBELL_WEBHOOK_ALLOW.",
        )  # fmt: skip

    def allows(self, address: Address) -> bool:
        """True if connections to this address are allowed."""
        networks = self._networks_of(address)
        if networks.is_always_refused:
            return False
        return networks.is_allowed_by_operator or (networks.is_public and not _is_own_address(_unwrap(address)))

    def _find_networks(self, address: Address) -> _Networks:
        inner = _unwrap(address)
        return _Networks(
            bool(getattr(address, "scope_id", None)) or any(inner in network for network in METADATA_NETWORKS),
            any(inner in network for network in self._allow),
            (inner.version == 4 or inner in GLOBAL_IPV6_NETWORK)
            and not any(inner in network for network in REFUSED_NETWORKS),
        )

    def _is_scheme_allowed(self, endpoint: Endpoint, address: Address | None) -> bool:
        """True if the scheme is allowed to this address, or, for a name (None), to any address."""
        if endpoint.scheme in ("https", PROXY_SCHEME) or self._allow_http:
            return True
        return bool(self._allow) if address is None else self._networks_of(address).is_allowed_by_operator

    async def _listener_addresses(self, port: int) -> list[Address]:
        """Return the addresses on which Timebell or its database listens at this port."""
        hosts = []
        for host, listener_port in self._listeners:
            if listener_port == port:
                hosts += [host] if _parse_address(host) else await self._resolve(host, port)
        return [_parse_address(host) or ipaddress.ip_address(host) for host in hosts]


def _matches_listener(address: Address, listener_addresses: list[Address]) -> bool:
    """True if the address equals a listener's, or both belong to this machine: `0.0.0.0` and `::` listen on all."""
    if not listener_addresses:
        return False
    inner, listeners = _unwrap(address), [_unwrap(listener) for listener in listener_addresses]
    return inner in listeners or (_is_own_address(inner) and any(map(_is_own_address, listeners)))


def _is_own_address(address: Address) -> bool:
    """True if the address belongs to this machine: the kernel then sends from it to itself. No packet is sent."""
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:  # no route
        return False


def _parse_private_network(text: str) -> Network:
    """Parse a network that an operator allows. Raises InvalidInput (INVALID_NETWORK)."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise InvalidInput(
            f"{text!r:.60} is not a network: {error}.", code="INVALID_NETWORK", fix=_NETWORK_FIX
        ) from error
    if not any(network.version == private.version and network.subnet_of(private) for private in PRIVATE_NETWORKS):  # type: ignore[arg-type]
        raise InvalidInput(f"{text} is not within a private network.", code="INVALID_NETWORK", fix=_NETWORK_FIX)
    return network


def _unwrap(address: Address) -> Address:
    """Return the IPv4 address inside an IPv4-mapped (RFC 4291) or NAT64 (RFC 6052) address; others unchanged."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in NAT64_NETWORK:
            return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _parse(url: object) -> Endpoint:
    return _parse_text(url if isinstance(url, str) and len(url) <= 2048 else "")


@lru_cache(CACHE_SIZE)
def _parse_text(url: str) -> Endpoint:
    match = _URL.fullmatch(url)
    host = _normalize_host(match["v6"], match["name"]) if match else None
    if match is None or host is None:
        raise InvalidInput(
            "url is not a plain http or https URL.",
            code="INVALID_URL",
            fix="Use https://host/path: no user and password, no fragment, at most 2,048 characters, an international "
            "name in its xn-- form, an IPv4 address as four decimal numbers.",
        )
    scheme = match["scheme"].lower()
    port = int(match["port"] or _default_port(scheme))
    if not 0 < port < 65536:
        raise InvalidInput("The port of url is not in 1 to 65535.", code="INVALID_URL")
    target = match["target"] or "/"
    return Endpoint(scheme, host, port, target if target.startswith("/") else f"/{target}")


def _normalize_host(v6: str | None, name: str | None) -> str | None:
    """Return the host in normal form, or None if it is invalid.

    A host that ends in a number is an IPv4 address (WHATWG URL, 3.5). It is valid only as four decimal numbers, because
    resolvers also accept 127.1, 0x7f.1, 017700000001 and 2130706433 as loopback.
    """
    if name is None:
        literal = _parse_address(v6 or "")
        return literal.compressed if literal is not None and literal.version == 6 else None
    labels = name.lower().split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return name if _parse_address(name) else None
    return ".".join(labels) if all(map(_LABEL.fullmatch, labels)) else None


@lru_cache(CACHE_SIZE)
def _parse_address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80
