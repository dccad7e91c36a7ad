"""Which addresses a webhook may go to: the guard against server-side request forgery.

Two gates. `place` reads a URL by a strict grammar when a job is made, and again when it is due; `addresses` then
looks its name up, once, and checks every answer. The caller connects to what `addresses` returned and never to
the name, so an answer that changes between check and use (DNS rebinding) has no effect.

The table follows the IANA special-purpose address registries (RFC 6890). It is written out because
`ipaddress.is_global` and `is_private` differ between Python versions and miss NAT64, 6to4 and multicast.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from timebell.errors import InvalidInput, Refused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver = Callable[[str, int], Awaitable[list[str]]]


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(each) for each in texts)


PRIVATE = _networks(
    *("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
    *("::1/128", "fc00::/7"),
)
"""What an operator may open. Link-local stays shut: cloud metadata lives there."""

METADATA = _networks("100.100.100.200/32", "168.63.129.16/32", "fd00:ec2::/32", "fd20:ce::/32")
"""Where clouds (Alibaba, Azure, AWS, Google) answer their own machines outside of link-local: shut always."""

REFUSED = _networks(
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
    *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    # Of IPv6 only 2000::/3 passes at all; these lie within. Teredo (in 2001::/23) and 6to4 (2002::/16) carry
    # an IPv4 address that a relay would go on to, and have no honest use any more: refused as a whole.
    *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
)
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

DENIED_PORTS = frozenset(  # databases, caches, brokers, directories, container and cluster control
    (1433, 1521, 2049, 2181, 2375, 2376, 2379, 2380, 3306, 3389, 4369, 5432, 5433, 5672, 5900, 6379, 6432, 6443)
) | {9042, 9092, 9200, 9300, 10250, 10255, 11211, 26379, 27017}
LOCAL_NAMES = ("localhost", "local", "internal")  # RFC 6761, RFC 6762, ICANN's private-use domain

_URL = re.compile(
    r"(?P<scheme>https?)://(?:\[(?P<v6>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9._-]{1,253}))"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<target>[/?][a-z0-9._~:/?\[\]@!$&'()*+,;=%-]*)?",
    re.IGNORECASE | re.ASCII,
)
_NETWORK = f"Give networks such as 10.20.0.0/16, within {', '.join(map(str, PRIVATE))}."
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Place:
    """A URL that passed the grammar. `host` is a lower-case name or an address without brackets."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """The Host header: the port only where it is not the scheme's own (RFC 9110, 7.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _default_port(self.scheme) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


async def look_up(host: str, port: int) -> list[str]:
    """The system resolver, in a thread. Raises OSError or UnicodeError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class AddressGuard:
    """Decides where requests may go.

    `allow_private` opens loopback and all private networks, `allow_http` plain http to everywhere; `allow` opens
    single private networks (CIDR), for plain http too. This machine's own addresses are open only so. `listeners`,
    (host, port) of the product and its database, are shut always. `resolve` is for tests.
    Raises InvalidInput (NETWORK_INVALID).
    """

    def __init__(
        self,
        allow_private: bool = False,
        allow_http: bool = False,
        *,
        allow: Iterable[str] = (),
        listeners: Iterable[tuple[str, int]] = (),
        resolve: Resolver = look_up,
    ) -> None:
        self._allow = (*(PRIVATE if allow_private else ()), *map(_private, allow))
        self._allow_http = allow_http
        self._listeners = tuple(listeners)
        self._resolve = resolve

    def place(self, url: object) -> Place:
        """Raises InvalidInput (URL_INVALID) or Refused (HTTP_OFF, PORT_REFUSED, PRIVATE_ADDRESS)."""
        place = _parse(url)
        literal = _literal(place.host)
        if not self._speaks(place, literal):
            raise Refused("Plain http is off.", code="HTTP_OFF", fix="Use an https URL.")
        if place.port in DENIED_PORTS or (place.port < 1024 and place.port not in (80, 443)):
            why = f"Webhooks may not go to port {place.port}."
            raise Refused(why, code="PORT_REFUSED", fix="Use 443, or 1024 and up.")
        local = place.host.rpartition(".")[2] in LOCAL_NAMES and not self._allow
        if local or (literal is not None and not self.allows(literal)):
            raise Refused(
                f"{place.host} is a private or reserved address.",
                code="PRIVATE_ADDRESS",
                fix="To open a private network to webhooks, name it in TIMEBELL_WEBHOOK_ALLOW.",
            )
        ours = [_literal(host) for host, port in self._listeners if port == place.port]
        if literal is not None and _meets(literal, [each for each in ours if each is not None]):
            raise Refused(f"{place.authority} is Timebell itself, or its database.", code="PORT_REFUSED")
        return place

    async def addresses(self, place: Place) -> list[str]:
        """Every address of a place's host, after one look-up; all of them allowed.

        Raises Refused (ADDRESS_REFUSED), with one text whether the name is unknown or points inside: the
        difference would let strangers map a private network.
        """
        try:
            found = [place.host] if _literal(place.host) else await self._resolve(place.host, place.port)
            ours = await self._listening(place.port)
            read = [ipaddress.ip_address(each) for each in found]
            if read and all(
                self._speaks(place, each) and self.allows(each) and not _meets(each, ours) for each in read
            ):
                return found
        except (OSError, ValueError):  # UnicodeError, from names that no DNS can carry, is a ValueError
            pass
        raise Refused(f"{place.host} has no address that may be used.", code="ADDRESS_REFUSED")

    def allows(self, address: Address) -> bool:
        """Whether this very address may be connected to."""
        inner = _unwrap(address)
        if getattr(address, "scope_id", None) or any(inner in network for network in METADATA):
            return False
        if self._opened(inner):
            return True
        public = (inner.version == 4 or inner in GLOBAL_V6) and not any(inner in network for network in REFUSED)
        return public and not _is_own(inner)

    def _opened(self, address: Address) -> bool:
        """Whether the operator has opened this address's network."""
        return any(_unwrap(address) in network for network in self._allow)

    def _speaks(self, place: Place, address: Address | None) -> bool:
        """Whether the scheme is allowed, to this address or, of a name, to any."""
        if place.scheme == "https" or self._allow_http:
            return True
        return bool(self._allow) if address is None else self._opened(address)

    async def _listening(self, port: int) -> list[Address]:
        """The addresses on which the product or its database listens at this port."""
        found = []
        for host, listening in self._listeners:
            if listening == port:
                found += [host] if _literal(host) else await self._resolve(host, port)
        return [ipaddress.ip_address(each) for each in found]


def _meets(address: Address, listening: list[Address]) -> bool:
    """Whether it is one of these addresses, or both are this machine's: `0.0.0.0` and `::` listen on all it has."""
    inner, ours = _unwrap(address), [_unwrap(each) for each in listening]
    return inner in ours or (_is_own(inner) and any(map(_is_own, ours)))


def _is_own(address: Address) -> bool:
    """Whether this machine has the address: then the kernel would also send from it. Nothing is sent."""
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:  # no way there
        return False


def _private(text: str) -> Network:
    """A network that an operator opens. Raises InvalidInput (NETWORK_INVALID)."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError as bad:
        raise InvalidInput(f"{text!r:.60} is no network: {bad}.", code="NETWORK_INVALID", fix=_NETWORK) from bad
    if not any(network.version == each.version and network.subnet_of(each) for each in PRIVATE):  # type: ignore[arg-type]
        raise InvalidInput(f"{text} does not lie in a private network.", code="NETWORK_INVALID", fix=_NETWORK)
    return network


def _unwrap(address: Address) -> Address:
    """The IPv4 address that an IPv4-mapped (RFC 4291) or NAT64 (RFC 6052) address leads to."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _parse(url: object) -> Place:
    match = _URL.fullmatch(url) if isinstance(url, str) and len(url) <= 2048 else None
    host = _host(match["v6"], match["name"]) if match else None
    if match is None or host is None:
        raise InvalidInput(
            "url is not a plain http or https URL.",
            code="URL_INVALID",
            fix="Use https://host/path: no user and password, no fragment, at most 2,048 characters, a name "
            "in another script in its xn-- form, an IPv4 address as four decimal numbers.",
        )
    scheme = match["scheme"].lower()
    port = int(match["port"] or _default_port(scheme))
    if not 0 < port < 65536:
        raise InvalidInput("The port of url is not in 1 to 65535.", code="URL_INVALID")
    target = match["target"] or "/"
    return Place(scheme, host, port, target if target.startswith("/") else f"/{target}")


def _host(v6: str | None, name: str | None) -> str | None:
    """The host in normal form, or None.

    A host that ends in a number is an IPv4 address (WHATWG URL, 3.5): it counts only as four decimal numbers,
    because resolvers also read 127.1, 0x7f.1, 017700000001 and 2130706433 as loopback.
    """
    if name is None:
        literal = _literal(v6 or "")
        return literal.compressed if literal is not None and literal.version == 6 else None
    labels = name.lower().split(".")
    if _NUMBER.fullmatch(labels[-1]):
        return name if _literal(name) else None
    return ".".join(labels) if all(map(_LABEL.fullmatch, labels)) else None


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80
