"""The client of a request behind proxies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timebell.api.client_address import TrustedProxies, client_network, has_forwarded_header
from timebell.errors import InvalidInput

PROXIES = TrustedProxies("127.0.0.0/8, 10.0.0.0/8, 2001:db8:1::/48")


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        ("203.0.113.9", {"x-forwarded-for": "198.51.100.7"}, "203.0.113.9"),  # not a proxy
        ("127.0.0.1", {}, "127.0.0.1"),
        ("127.0.0.1", {"x-forwarded-for": "198.51.100.7"}, "198.51.100.7"),
        ("::ffff:127.0.0.1", {"x-forwarded-for": "198.51.100.7"}, "198.51.100.7"),
        ("127.0.0.1", {"x-forwarded-for": "1.1.1.1, 198.51.100.7"}, "198.51.100.7"),  # the first one is invented
        ("127.0.0.1", {"x-forwarded-for": "198.51.100.7, 10.2.3.4"}, "198.51.100.7"),  # through two proxies
        ("127.0.0.1", {"x-forwarded-for": "198.51.100.7:4711"}, "198.51.100.7"),
        ("127.0.0.1", {"x-forwarded-for": "[2001:db8:9::1]:4711"}, "2001:db8:9::1"),
        ("127.0.0.1", {"x-forwarded-for": "10.2.3.4"}, "10.2.3.4"),  # a client inside the network of the proxies
        ("127.0.0.1", {"x-forwarded-for": "198.51.100.7, unknown"}, "127.0.0.1"),
        ("127.0.0.1", {"x-forwarded-for": "198.51.100.7, unknown, 10.2.3.4"}, "10.2.3.4"),
        ("127.0.0.1", {"x-forwarded-for": ""}, "127.0.0.1"),
        ("127.0.0.1", {"forwarded": "for=198.51.100.7;proto=https;by=10.0.0.1"}, "198.51.100.7"),
        ("127.0.0.1", {"forwarded": 'by=_x; For="[2001:db8:9::1]:4711"'}, "2001:db8:9::1"),
        ("127.0.0.1", {"forwarded": "for=1.1.1.1, for=198.51.100.7, for=10.2.3.4"}, "198.51.100.7"),
        ("127.0.0.1", {"forwarded": "for=198.51.100.7, proto=https"}, "127.0.0.1"),
        ("2001:db8:1::5", {"forwarded": "for=_hidden"}, "2001:db8:1::5"),
        ("127.0.0.1", {"x-forwarded-for": "198.51.100.7", "forwarded": "for=198.51.100.7"}, "198.51.100.7"),
        # One of the headers comes unchanged from the client.
        ("127.0.0.1", {"x-forwarded-for": "198.51.100.7", "forwarded": "for=1.1.1.1"}, "127.0.0.1"),
    ],
)
def test_the_client_is_the_last_address_that_is_not_a_trusted_proxy(
    peer: str, headers: dict[str, str], client: str
) -> None:
    raw = [(name.encode(), text.encode()) for name, text in headers.items()]
    assert PROXIES.find_client(peer, raw) == client


@given(invented=st.lists(st.text(st.characters(codec="latin-1", exclude_characters="\r\n")), max_size=5))
def test_a_client_cannot_invent_its_address(invented: list[str]) -> None:
    sent = ", ".join([*invented, "203.0.113.9"])  # the proxy appends the address of its peer
    assert PROXIES.find_client("10.0.0.1", [(b"x-forwarded-for", sent.encode("latin-1"))]) == "203.0.113.9"


def test_repeated_headers_are_one_list() -> None:
    headers = [(b"x-forwarded-for", b"1.1.1.1"), (b"x-forwarded-for", b"203.0.113.9")]
    assert PROXIES.find_client("10.0.0.1", headers) == "203.0.113.9"


@pytest.mark.parametrize(
    ("names", "found"), [([b"x-forwarded-for"], True), ([b"host", b"forwarded"], True), ([b"host"], False), ([], False)]
)
def test_headers_of_proxies_are_found(names: list[bytes], found: bool) -> None:
    assert has_forwarded_header([(name, b"") for name in names]) is found


def test_an_ipv6_client_is_counted_by_its_64_bit_network() -> None:
    assert client_network("2001:db8::1") == client_network("2001:db8::ffff") == "2001:db8::/64"
    assert client_network("2001:db8:0:1::1") != client_network("2001:db8::1")
    assert client_network("192.0.2.1") == client_network("::ffff:192.0.2.1") == "192.0.2.1"


@pytest.mark.parametrize("networks", ["10.0.0.1/8", "localhost", "10.0.0.0/40"])
def test_invalid_networks_are_refused(networks: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        TrustedProxies(networks)
    assert refused.value.code == "INVALID_NETWORKS"
