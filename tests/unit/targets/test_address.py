"""The address guard against server-side request forgery."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.targets.vectors import ALLOWED, GOOD, REFUSED_V4, REFUSED_V6, SPELLINGS
from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.targets import address
from timebell.targets.address import AddressGuard, Endpoint

Run = Callable[[Any], Any]
ENDPOINT = Endpoint("https", "hooks.example.com", 443, "/")


def guard(*answers: str, allow_private: bool = False) -> AddressGuard:
    async def resolve(host: str, port: int) -> list[str]:
        return list(answers)

    return AddressGuard(allow_private, resolve=resolve)


@pytest.mark.parametrize("ip", REFUSED_V4 + REFUSED_V6)
def test_internal_addresses_are_refused_as_answers_and_as_literals(run: Run, ip: str) -> None:
    assert not AddressGuard().allows(ipaddress.ip_address(ip))
    with pytest.raises(Refused) as caught:
        run(guard(ip).resolve(ENDPOINT))
    assert caught.value.code == "ADDRESS_REFUSED"
    with pytest.raises(Refused) as caught:
        AddressGuard().check_url(f"https://[{ip}]/" if ":" in ip else f"https://{ip}/")
    assert caught.value.code == "PRIVATE_ADDRESS"


@pytest.mark.parametrize("ip", ALLOWED)
def test_public_addresses_are_allowed(run: Run, ip: str) -> None:
    assert run(guard(ip).resolve(ENDPOINT)) == [ip]


@pytest.mark.parametrize("url", SPELLINGS)
def test_unusual_spellings_are_always_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        AddressGuard(allow_private=True, allow_http=True).check_url(url)
    assert caught.value.code == "INVALID_URL"


@pytest.mark.parametrize("url", [None, 1, b"https://example.com/", ["https://example.com/"]])
def test_a_url_is_a_string(url: object) -> None:
    with pytest.raises(InvalidInput):
        AddressGuard().check_url(url)


@pytest.mark.parametrize(("url", "normal"), GOOD.items())
def test_urls_are_normalized(url: str, normal: str) -> None:
    endpoint = AddressGuard().check_url(url)
    assert endpoint.url == normal
    assert AddressGuard().check_url(normal) == endpoint


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "a.localhost", "printer.local", "metadata.google.internal"])
def test_names_that_are_never_public_are_refused_on_creation(host: str) -> None:
    with pytest.raises(Refused) as caught:
        AddressGuard().check_url(f"https://{host}/")
    assert caught.value.code == "PRIVATE_ADDRESS"
    assert "TIMEBELL_WEBHOOK_ALLOW" in caught.value.fix
    assert AddressGuard(allow_private=True).check_url(f"https://{host}/").host == host.lower()


@pytest.mark.parametrize("port", [1, 22, 25, 81, 444, 1023, 2375, 3306, 5432, 6379, 9200, 11211])
def test_ports_of_other_services_are_refused(port: int) -> None:
    with pytest.raises(Refused) as caught:
        AddressGuard(allow_private=True).check_url(f"https://example.com:{port}/")
    assert caught.value.code == "PORT_REFUSED"


def test_plain_http_is_refused_unless_allowed() -> None:
    with pytest.raises(Refused) as caught:
        AddressGuard().check_url("http://example.com/")
    assert caught.value.code == "HTTP_OFF"
    endpoint = AddressGuard(allow_http=True).check_url("http://example.com/")
    assert (endpoint.port, endpoint.authority) == (80, "example.com")


@pytest.mark.parametrize(
    "ip", ["127.0.0.1", "10.1.2.3", "192.168.1.1", "100.64.0.1", "::1", "fd00::1", "::ffff:10.0.0.1"]
)
def test_allow_private_opens_private_networks(run: Run, ip: str) -> None:
    assert run(guard(ip, allow_private=True).resolve(ENDPOINT)) == [ip]


@pytest.mark.parametrize(
    "ip", ["169.254.169.254", "0.0.0.0", "224.0.0.1", "fe80::1", "2002:7f00:1::", "255.255.255.255"]
)
def test_allow_private_opens_nothing_else(ip: str) -> None:
    assert not AddressGuard(allow_private=True).allows(ipaddress.ip_address(ip))


@pytest.mark.parametrize(
    "answers",
    [
        (),
        ("93.184.216.34", "127.0.0.1"),
        ("::1", "93.184.216.34"),
        ("93.184.216.34", "fe80::1%eth0"),
        ("garbage",),
    ],
)
def test_one_refused_address_refuses_the_whole_answer(run: Run, answers: tuple[str, ...]) -> None:
    with pytest.raises(Refused):
        run(guard(*answers).resolve(ENDPOINT))


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), OSError("down"), UnicodeError("label too long")])
def test_unknown_and_refused_names_have_the_same_error(run: Run, error: Exception) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise error

    with pytest.raises(Refused) as unknown:
        run(AddressGuard(resolve=resolve).resolve(ENDPOINT))
    with pytest.raises(Refused) as inside:
        run(guard("10.0.0.1").resolve(ENDPOINT))
    assert (str(unknown.value), unknown.value.code) == (str(inside.value), inside.value.code)


def test_an_address_is_not_looked_up(run: Run) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise AssertionError

    assert run(AddressGuard(resolve=resolve).resolve(Endpoint("https", "8.8.8.8", 443, "/"))) == ["8.8.8.8"]


def test_system_resolver_is_called_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[str] = []

    async def main() -> list[str]:
        async def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
            lookups.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
        return await AddressGuard().resolve(ENDPOINT)

    assert (run(main()), lookups) == (["93.184.216.34"], ["hooks.example.com"])


@settings(deadline=None)
@given(st.ip_addresses(v=4))
def test_ipv4_address_embedded_in_ipv6_is_treated_like_ipv4(ip: ipaddress.IPv4Address) -> None:
    guard = AddressGuard()
    for prefix in ("::ffff:", "64:ff9b::"):
        assert guard.allows(ipaddress.ip_address(f"{prefix}{ip}")) == guard.allows(ip)
    assert not guard.allows(ipaddress.ip_address(0x2002 << 112 | int(ip) << 80))


@settings(deadline=None)
@given(st.ip_addresses())
def test_allowed_addresses_are_global_in_the_standard_library(ip: address.Address) -> None:
    if AddressGuard().allows(ip):
        unwrapped = address._unwrap(ip)
        assert (unwrapped.is_global, unwrapped.is_multicast, unwrapped.is_private) == (True, False, False)


@settings(deadline=None)
@given(st.one_of(st.text(), st.text("https://[]@:.0x127#?%\\ \n").map("https://".__add__)))
def test_any_text_is_an_endpoint_or_is_refused(url: str) -> None:
    try:
        endpoint = AddressGuard(allow_private=True, allow_http=True).check_url(url)
    except TimebellError:
        return
    assert AddressGuard(allow_private=True, allow_http=True).check_url(endpoint.url) == endpoint
    assert endpoint.url.isascii()
    assert endpoint.url.isprintable()


def test_there_are_at_least_80_vectors() -> None:
    assert len(REFUSED_V4 + REFUSED_V6 + SPELLINGS) >= 80
