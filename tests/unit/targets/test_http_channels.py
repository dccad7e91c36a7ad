"""The HTTP target: client certificates, custom authorities and proxies, on loopback."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.tls import Authority
from tests.unit.targets.http_servers import ForwardProxy, TokenSink, forward_proxy
from tests.unit.targets.sink import NOW, SECRET, Run, Sink, deliver_once, local, resolver, sink
from tests.unit.targets.ssrf import HOSTS
from timebell.errors import InvalidInput, Refused
from timebell.targets.address import AddressGuard
from timebell.targets.base import Delivery, Outcome
from timebell.targets.http import HttpTarget


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def client_options(authority: Authority, name: str = "client") -> dict[str, str]:
    pem = authority.certificate(name).read_text()
    key, certificate = pem[: pem.index("-----BEGIN CERTIFICATE")], pem[pem.index("-----BEGIN CERTIFICATE") :]
    return {"ca": authority.root.read_text(), "certificate": certificate, "key": key}


def requiring_certificates(authority: Authority) -> ssl.SSLContext:
    """Return the TLS context of a server that accepts only clients of this authority."""
    context = authority.server("hooks.example")
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # asyncio sends no alert after the handshake of TLS 1.3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.root)
    return context


def deliver_tls(run: Run, delivery: Delivery, server: ssl.SSLContext, tls: Any) -> tuple[Outcome, Sink]:
    async def main() -> tuple[Outcome, Sink]:
        async with sink(server) as receiver:
            url = f"https://hooks.example:{receiver.port}/status/200"
            return await deliver_once(local(), delivery, {"url": url, "tls": tls}), receiver

    result: tuple[Outcome, Sink] = run(main())
    return result


def test_a_private_authority_is_trusted_by_its_target_only(run: Run, delivery: Delivery, authority: Authority) -> None:
    server = authority.server("hooks.example")
    assert deliver_tls(run, delivery, server, {"ca": authority.root.read_text()})[0].delivered
    assert (
        deliver_tls(run, delivery, server, client_options(Authority(_folder(authority, "b"))))[0].code == "TLS_FAILED"
    )


def _folder(authority: Authority, name: str) -> Path:
    folder = authority.folder / name
    folder.mkdir()
    return folder


def test_a_client_certificate_is_presented(run: Run, delivery: Delivery, authority: Authority) -> None:
    server = requiring_certificates(authority)
    outcome, receiver = deliver_tls(run, delivery, server, client_options(authority))
    assert (outcome.code, len(receiver.requests)) == (None, 1)
    for tls in ({"ca": authority.root.read_text()}, _of_another_authority(authority)):
        outcome, receiver = deliver_tls(run, delivery, server, tls)
        assert (outcome.code, outcome.retryable, receiver.requests) == ("TLS_FAILED", True, [])


def test_an_alert_of_tls_1_3_is_a_tls_failure(run: Run, delivery: Delivery, authority: Authority) -> None:
    context = requiring_certificates(authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_3

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection.dup() as raw, suppress(OSError):  # closing it with unread data would discard the alert
            with suppress(ssl.SSLError):
                context.wrap_socket(connection, server_side=True)
            while raw.recv(4096):
                pass

    async def main() -> Outcome:
        with socket.create_server(("127.0.0.1", 0)) as server:
            serving = asyncio.create_task(asyncio.to_thread(serve, server))
            url = f"https://hooks.example:{server.getsockname()[1]}/"
            tls = {"ca": authority.root.read_text()}
            outcome = await deliver_once(local(), delivery, {"url": url, "tls": tls})
            await serving
            return outcome

    assert run(main()).code == "TLS_FAILED"


def _of_another_authority(authority: Authority) -> dict[str, str]:
    return client_options(Authority(_folder(authority, "other"))) | {"ca": authority.root.read_text()}


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    options = client_options(authority) | {"key": client_options(authority, "second")["key"]}
    with pytest.raises(InvalidInput) as caught:
        local().check({"url": "https://hooks.example/", "tls": options})
    assert caught.value.code == "INVALID_CERTIFICATE"
    assert "PRIVATE KEY" not in str(caught.value)


def test_no_key_is_left_on_disk(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _folder(authority, "temporary")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    written: list[bytes] = []
    load = ssl.SSLContext.load_cert_chain

    def read(self: ssl.SSLContext, certfile: str, *args: Any, **options: Any) -> None:
        written.append(Path(certfile).read_bytes())
        load(self, certfile, *args, **options)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", read)
    local().check({"url": "https://hooks.example/", "tls": client_options(authority, "unique")})
    assert list(folder.iterdir()) == []
    assert b"ENCRYPTED PRIVATE KEY" in written[0]


def test_targets_with_different_certificates_share_no_connection(
    run: Run, delivery: Delivery, authority: Authority
) -> None:
    async def main() -> list[str | None]:
        async with sink(requiring_certificates(authority)) as receiver:
            target = local()
            url = f"https://hooks.example:{receiver.port}/status/200"
            codes = []
            for tls in (client_options(authority), {"ca": authority.root.read_text()}):
                codes.append((await target.deliver(delivery, {"url": url, "tls": tls})).code)
            await target.close()
            return codes

    assert run(main()) == [None, "TLS_FAILED"]


# --- Proxies --------------------------------------------------------------------------------------------


def deliver_through(
    run: Run, delivery: Delivery, proxy_answer: str = "200 OK", tls: Authority | None = None, **proxy_options: str
) -> tuple[Outcome, Sink, ForwardProxy]:
    async def main() -> tuple[Outcome, Sink, ForwardProxy]:
        async with sink(tls and tls.server("hooks.example")) as receiver, forward_proxy(proxy_answer) as proxy:
            target = local(tls=tls and tls.client())
            options: dict[str, Any] = {
                "url": f"http{'s' if tls else ''}://hooks.example:{receiver.port}/status/200",
                "proxy": {"url": f"http://proxy.example:{proxy.port}", **proxy_options},
            }
            outcomes = [await target.deliver(delivery, options) for _ in range(2)]
            await target.close()
            assert outcomes[0] == outcomes[1]
            return outcomes[0], receiver, proxy

    result: tuple[Outcome, Sink, ForwardProxy] = run(main())
    return result


@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
def test_requests_go_through_the_proxy_to_the_checked_address(
    run: Run, delivery: Delivery, authority: Authority, encrypted: bool
) -> None:
    outcome, receiver, proxy = deliver_through(run, delivery, tls=authority if encrypted else None)
    assert outcome.delivered, outcome
    assert [request.headers["host"] for request in receiver.requests] == [f"hooks.example:{receiver.port}"] * 2
    assert set(proxy.destinations) == {f"127.0.0.1:{receiver.port}"}
    assert receiver.names == (["hooks.example"] * len(receiver.names))


def test_the_proxy_learns_its_password_and_the_receiver_does_not(run: Run, delivery: Delivery) -> None:
    outcome, receiver, proxy = deliver_through(run, delivery, username="app", password="hunter2")
    assert outcome.delivered
    expected = base64.b64encode(b"app:hunter2").decode().lower()
    assert proxy.headers[0]["proxy-authorization"] == f"basic {expected}"
    assert "proxy-authorization" not in receiver.requests[0].headers
    assert "hunter2" not in repr((outcome, outcome.sent_request))


def test_a_refusal_of_the_proxy_is_reported(run: Run, delivery: Delivery) -> None:
    outcome, receiver, _ = deliver_through(run, delivery, "407 Proxy Authentication Required")
    assert outcome.code == "CONNECT_FAILED"
    assert (outcome.error or "").endswith("the proxy answered 407.")
    assert receiver.requests == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:3128", "http://169.254.169.254:80", "http://a.example:6379"])
def test_the_guard_checks_proxies(url: str) -> None:
    with pytest.raises(Refused):
        HttpTarget(SECRET, now=lambda: NOW).check({"url": "https://a.example/", "proxy": {"url": url}})


@pytest.mark.parametrize(("proxy", "receiver"), [("10.0.0.1", "93.184.216.34"), ("93.184.216.34", "10.0.0.1")])
def test_the_guard_checks_the_addresses_of_proxy_and_receiver(
    run: Run, delivery: Delivery, proxy: str, receiver: str
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return [proxy if host == "proxy.example" else receiver]

    class Unreachable:
        async def connect(self, address: str, port: int, timeout: float) -> Any:
            raise AssertionError(address)

    target = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(resolve=resolve))
    target.connections.network = Unreachable()  # type: ignore[assignment]
    options = {"url": "https://a.example/", "proxy": {"url": "http://proxy.example:3128"}}
    assert run(target.deliver(delivery, options)).code == "ADDRESS_REFUSED"


def test_only_one_address_of_the_receiver_is_used_and_ipv4_is_preferred(run: Run, delivery: Delivery) -> None:
    async def main() -> list[str]:
        async with sink() as receiver, forward_proxy() as proxy:
            answers = {"proxy.example": ["127.0.0.1"], "a.example": ["::1", "127.0.0.1"]}

            async def resolve(host: str, port: int) -> list[str]:
                return answers[host]

            target = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(True, True, resolve=resolve))
            options = {"url": f"http://a.example:{receiver.port}/status/200",
                       "proxy": {"url": f"http://proxy.example:{proxy.port}"}}  # fmt: skip
            assert (await deliver_once(target, delivery, options)).delivered
            assert proxy.destinations == [f"127.0.0.1:{receiver.port}"]
            return proxy.destinations

    run(main())


def test_a_token_endpoint_is_reached_through_the_proxy_without_the_client_certificate(
    run: Run, delivery: Delivery, authority: Authority
) -> None:
    async def main() -> None:
        tokens, issuing = TokenSink(), authority.server("tokens.example")
        issuing.verify_mode = ssl.CERT_OPTIONAL
        issuing.load_verify_locations(authority.root)
        async with (
            sink(issuing, tokens) as issuer,
            sink(requiring_certificates(authority)) as receiver,
            forward_proxy() as proxy,
        ):
            guard = AddressGuard(True, True, resolve=resolver("127.0.0.1"))
            target = HttpTarget(SECRET, now=lambda: NOW, guard=guard)
            auth = {"type": "oauth2", "tokenUrl": f"https://tokens.example:{issuer.port}/token", "clientId": "a",
                    "clientSecret": "b"}  # fmt: skip
            outcome = await deliver_once(target, delivery, {
                "url": f"https://hooks.example:{receiver.port}/status/200", "auth": auth,
                "proxy": {"url": f"http://proxy.example:{proxy.port}"}, "tls": client_options(authority),
            })  # fmt: skip
            assert outcome.delivered, outcome
            assert proxy.destinations == [f"127.0.0.1:{issuer.port}", f"127.0.0.1:{receiver.port}"]
            assert receiver.requests[0].headers["authorization"] == "Bearer issued-token-1"
            assert tokens.certificates == [None]

    run(main())


@pytest.mark.parametrize("host", HOSTS)
def test_no_spelling_of_a_private_host_is_accepted_as_proxy_or_token_endpoint(host: str) -> None:
    target = HttpTarget(SECRET, now=lambda: NOW)
    auth = {"type": "oauth2", "tokenUrl": f"https://{host}/", "clientId": "a", "clientSecret": "b"}
    for options in ({"proxy": {"url": f"http://{host}:3128"}}, {"auth": auth}):
        with pytest.raises((Refused, InvalidInput)):
            target.check({"url": "https://a.example/", **options})
