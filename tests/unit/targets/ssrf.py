"""Vectors of server-side request forgery, and a canary server that counts the connections it receives."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field

from tests.unit.targets.sink import NOW, SECRET
from tests.unit.targets.vectors import REFUSED_V4, REFUSED_V6, SPELLINGS
from timebell import http_client
from timebell.targets.address import AddressGuard
from timebell.targets.http import HttpTarget

HOSTS = [  # of URLs: spellings of this machine or its network that resolvers and browsers accept
    *REFUSED_V4,
    *(f"[{each}]" for each in REFUSED_V6),
    *("localhost", "LocalHost", "localhost.localdomain.localhost", "a.b.localhost", "localhost.", "printer.local"),
    *("metadata.google.internal", "metadata.internal", "100.100.100.200", "168.63.129.16", "[fd00:ec2::254]"),
    *("2130706433", "0x7f000001", "0X7F000001", "0x7f.1", "0x7f.0x0.0x0.0x1", "127.1", "127.0.1", "0", "00", "0x0"),
    *("017700000001", "0177.0.0.1", "0177.0.0.01", "127.0.0.01", "127.000.000.001", "0127.0.0.1", "127.0.0.1."),
    *("169.254.43518", "0xA9FEA9FE", "2852039166", "0251.0376.0251.0376", "169.0376.43518", "4294967295", "4294967296"),
    *("127.0.0.1.1", "127..0.1", ".127.0.0.1", "127.0.0.256", "127.0.0.1%00", "127.0.0.1%2f", "127.0.0.1%20"),
    *("①②⑦.⓪.⓪.①", "１２７.０.０.１", "127。0。0。1", "127．0．0．1", "127｡0｡0｡1", "١٢٧.٠.٠.١", "127.0.0.①"),
    *("127.0.0.⓪①", "⑯⑨。②⑤④。⑯⑨｡②⑤④"),
    *("ⓛⓞⓒⓐⓛⓗⓞⓢⓣ", "loca\u017fhost", "loca\u212ahost", "local\u00adhost", "local\u200bhost", "ｌｏｃａｌｈｏｓｔ"),
    *("%31%32%37.0.0.1", "%6c%6f%63%61%6c%68%6f%73%74", "127.0.0.1%0d%0a", "127%2e0%2e0%2e1", "%5b::1%5d"),
    *("[127.0.0.1]", "[localhost]", "[example.com]", "[::1%25lo]", "[::1%lo]", "[fe80::1%eth0]", "[fe80::1%25eth0]"),
    *("[::1", "::1]", "::1", "[]", "[[::1]]", "[::1].example.com", "[::ffff:7f00:1]", "[::ffff:127.1]"),
    "[::ffff:0x7f.1]",
    *("[0:0:0:0:0:ffff:127.0.0.1]", "[0000:0000:0000:0000:0000:0000:0000:0001]", "[::1:0:0:0:127.0.0.1:0]", "[v1.::1]"),
    *("[::７f00:1]", "[::ffff:１２７.0.0.1]", "[2606:4700::1111%lo]", "[64:ff9b::127.0.0.1]", "[2002:7f00:1::1]"),
    *("user@127.0.0.1", "user:pass@127.0.0.1", "example.com@127.0.0.1", "example.com:443@127.0.0.1", "@127.0.0.1"),
    *("127.0.0.1@example.com", "example.com%40127.0.0.1", "example.com;@127.0.0.1", "example.com#@127.0.0.1"),
    *("example.com\\@127.0.0.1", "127.0.0.1\\@example.com", "127.0.0.1\\.example.com", "example.com&@127.0.0.1#"),
    *("127.0.0.1\t", "127.0.0.1\r\n", "127.0\n.0.1", "127.0.0.1\x00.example.com", "\x00127.0.0.1", " 127.0.0.1"),
    "127.0.0.1 ",
    *("127.0.0.1 example.com", "127.0.0.1,example.com", "127.0.0.1:80@example.com", "*.localhost", "{}", "$HOST"),
    *("", "-", "."),
]  # fmt: skip
URLS = [  # complete URLs, with the port of the canary
    *SPELLINGS,
    *(f"{scheme}://127.0.0.1:{{port}}/" for scheme in (
        "http", "HTTP", "ws", "wss", "ftp", "gopher", "file", "dict", "ldap", "tftp", "sftp", "smb", "jar", "netdoc",
        "unix", "https+unix", "blob:https", "view-source:https", "httpss", "h", "",
    )),
    *("https:127.0.0.1:{port}/", "https:/127.0.0.1:{port}/", "https:///127.0.0.1:{port}/"),
    "https:////127.0.0.1:{port}/",
    *("//127.0.0.1:{port}/", "127.0.0.1:{port}", "\\\\127.0.0.1:{port}\\", "https:\\\\127.0.0.1:{port}\\"),
    "https:/\\127.0.0.1",
    *("https://127.0.0.1:{port}:443/", "https://127.0.0.1:+{port}/", "https://127.0.0.1:0{port}/"),
    "https://127.0.0.1: {port}/",
    "https://127.0.0.1:{port}\r\nHost: example.com/",
    "https://example.com/\r\n\r\nPOST http://127.0.0.1:{port}/ HTTP/1.1",
    *("https://example.com/ HTTP/1.1\r\nHost: 127.0.0.1:{port}", "\thttps://127.0.0.1:{port}/"),
    "https://127.0.0.1:{port}/\x0b",
    *("https://127.0.0.1:{port}/\u2028", "\ufeffhttps://127.0.0.1:{port}/", "ht\ntps://127.0.0.1:{port}/"),
    *("https://127.0.0.1:{port}?@example.com/", "https://127.0.0.1:{port}#@example.com/"),
    "https://127.0.0.1:{port}/@example.com",
]  # fmt: skip
PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:4700:4700::1111"]
ANSWERS = [  # of resolvers, for harmless names
    *([each] for each in REFUSED_V4 + REFUSED_V6),
    *(["100.100.100.200"], ["168.63.129.16"], ["fd00:ec2::254"], ["fd20:ce::254"], ["::ffff:100.100.100.200"]),
    *(["93.184.216.34", "127.0.0.1"], ["127.0.0.1", "93.184.216.34"], ["2606:4700:4700::1111", "::1"]),
    *(["93.184.216.34", "2606:4700:4700::1111", "::ffff:127.0.0.1"], PUBLIC * 40 + ["127.0.0.1"]),
    *(["8.8.8.8", "0.0.0.0"], ["8.8.8.8", "224.0.0.1"]),
    *(["fe80::1%1"], ["fe80::1%lo"], ["::1%1"], ["2606:4700:4700::1111%lo"], ["127.0.0.1", "::1"]),
    *([], [""], ["garbage"], ["127.1"], ["localhost"], ["127.0.0.1/8"], ["93.184.216.34", "not an address"]),
]  # fmt: skip
TLS = http_client.tls_context()  # created once, because it is slow
CLASSES = {"HTTP_STATUS", "CONNECT_FAILED", "TLS_FAILED", "TIMEOUT", "ADDRESS_REFUSED", "RESPONSE_UNREADABLE"}


@dataclass
class Canary(http_client.Network):
    """Counts connections on loopback, records each dialed address, and connects to loopback only."""

    port: int = 0
    hits: int = 0
    dialed: list[str] = field(default_factory=list)

    async def connect(self, address: str, port: int, timeout: float) -> http_client.Stream:
        self.dialed.append(address)
        if ipaddress.ip_address(address).is_loopback:
            return await super().connect(address, port, timeout)
        raise http_client.ConnectError

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hits += 1
        with closing(writer):
            await reader.read(65536)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


@asynccontextmanager
async def canary() -> AsyncIterator[Canary]:
    server_state = Canary()
    server = await asyncio.start_server(server_state.serve, "127.0.0.1", 0)
    server_state.port = server.sockets[0].getsockname()[1]
    async with server:
        yield server_state


def target_for(network: http_client.Network, guard: AddressGuard, timeout: float = 10.0) -> HttpTarget:
    """Return a webhook target that connects through `network`."""
    target = HttpTarget(SECRET, timeout, now=lambda: NOW, guard=guard, tls=TLS)
    target.connections.network = network
    return target


async def resolve_numeric_host(host: str, port: int) -> list[str]:
    """Resolve a numeric spelling as the system does, without DNS: 127.1 and 0x7f.1 are 127.0.0.1."""
    if host.lower().split(".")[-1] == "localhost":
        return ["127.0.0.1", "::1"]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    return [str(address[0]) for *_, address in found]
