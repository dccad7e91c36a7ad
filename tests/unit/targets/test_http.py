"""The webhook target against real servers on loopback."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpcore2
import pytest
import standardwebhooks.webhooks
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from timebell.errors import InvalidInput, Refused
from timebell.targets import http
from timebell.targets.address import AddressGuard
from timebell.targets.base import Delivery, Outcome, cloudevent, facts
from timebell.targets.http import HttpTarget

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OLDER = "whsec_" + "QUJD" * 8
NOW = datetime(2027, 3, 14, 9, 26, 53, 589793, tzinfo=UTC)
MEGABYTES = 10 * 1024 * 1024
Run = Callable[[Any], Any]


@dataclass
class Request:
    line: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Sink:
    """A receiver that behaves as the path says, and remembers what it was sent."""

    port: int = 0
    requests: list[Request] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[Any] | None] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers["content-length"]))
            raw = dict(line.split(": ", 1) for line in head[1:] if line)
            self.requests.append(Request(head[0], {k.lower(): v for k, v in raw.items()}, body))
            await getattr(self, head[0].split("/")[1].split(" ")[0].split("?")[0])(reader, writer, head[0])
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()

    async def answer(self, writer: asyncio.StreamWriter, head: str, body: bytes = b"") -> None:
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def status(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        number = line.split("/")[2][:3]
        await self.answer(writer, f"{number} Whatever\r\nLocation: /status/200", b'{"said":"hi"}')

    async def later(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        number = line.split("/")[2][:3]
        wait = "7" if number == "429" else "Sun, 14 Mar 2027 09:27:53 GMT"
        await self.answer(writer, f"{number} Later\r\nRetry-After: {wait}")

    async def cookie(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self.answer(writer, "200 OK\r\nSet-Cookie: a=b")

    async def nul(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self.answer(writer, "200 OK", b"a\x00\xff")

    async def hang(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await reader.read()
        self.gone.set()

    async def drip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        await self.repeat(writer, b"x", 0.01)

    async def dripheader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nX: ")
        await self.repeat(writer, b"x", 0.01)

    async def hundred(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self.repeat(writer, b"HTTP/1.1 100 Continue\r\n\r\n")

    async def headers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        await self.repeat(writer, b"X-Filler: " + b"x" * 100 + b"\r\n")

    async def chunks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self.repeat(writer, b"1\r\nx\r\n")

    async def big(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self.answer(writer, "200 OK", b"x" * MEGABYTES)

    async def bomb(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        await self.answer(writer, "200 OK\r\nContent-Encoding: gzip", gzip.compress(bytes(MEGABYTES), mtime=0))

    async def cut(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello")
        await writer.drain()

    async def silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        """Close without a word."""

    async def reset(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async def garbage(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        await writer.drain()

    async def repeat(self, writer: asyncio.StreamWriter, data: bytes, pause: float = 0) -> None:
        while True:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(pause)


@asynccontextmanager
async def sink(tls: ssl.SSLContext | None = None) -> AsyncIterator[Sink]:
    made = Sink()
    if tls:
        tls.sni_callback = lambda _socket, name, _context: made.names.append(name)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in made.tasks:
            assert task
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*filter(None, made.tasks), return_exceptions=True), 5)


def resolver(*answers: str) -> Callable[[str, int], Awaitable[list[str]]]:
    async def resolve(host: str, port: int) -> list[str]:
        return list(answers)

    return resolve


def local(timeout: float = 10.0, secret: str = SECRET, tls: ssl.SSLContext | None = None) -> HttpTarget:
    """A target for which every name is this machine."""
    guard = AddressGuard(allow_private=True, allow_http=True, resolve=resolver("127.0.0.1"))
    return HttpTarget(secret, timeout=timeout, now=lambda: NOW, guard=guard, tls=tls)


@pytest.fixture
def post(run: Run, delivery: Delivery) -> Callable[..., tuple[Outcome, Sink]]:
    """Deliver once to a fresh sink."""

    def post(path: str, target: HttpTarget | None = None, **options: Any) -> tuple[Outcome, Sink]:
        async def main() -> tuple[Outcome, Sink]:
            async with sink() as server:
                used = target or local()
                checked = used.check({"url": f"http://hooks.example:{server.port}{path}", **options})
                outcome = await used.deliver(delivery, checked)
                await used.close()
                return outcome, server

        result: tuple[Outcome, Sink] = run(main())
        return result

    return post


Post = Callable[..., tuple[Outcome, Sink]]


@pytest.fixture
def frozen_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's verify reads the clock; here it is NOW."""

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Frozen:
            return cls.fromtimestamp(NOW.timestamp(), tz)

    monkeypatch.setattr(standardwebhooks.webhooks, "datetime", Frozen)


# --- What is sent ---------------------------------------------------------------------------------------


def test_a_signed_cloudevent_goes_out(post: Post, delivery: Delivery, frozen_library: None) -> None:
    outcome, server = post("/status/200?a=b")
    assert outcome == Outcome.ok({"status": 200, "body": '{"said":"hi"}'})
    (request,) = server.requests
    assert request.line == "POST /status/200?a=b HTTP/1.1"
    assert json.loads(request.body) == cloudevent(delivery)
    headers = request.headers
    assert headers["host"] == f"hooks.example:{server.port}"
    assert headers["content-type"] == "application/cloudevents+json"
    assert headers["webhook-id"] == delivery.occurrence_key
    assert headers["webhook-timestamp"] == str(int(NOW.timestamp()))
    assert headers["timebell-attempt"] == "2"
    assert headers["accept-encoding"] == "identity"
    assert Webhook(SECRET).verify(request.body, headers)["id"] == delivery.occurrence_key
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(request.body + b" ", headers)


def test_a_plain_body(post: Post, delivery: Delivery, frozen_library: None) -> None:
    _, server = post("/status/200", body="plain")
    assert json.loads(server.requests[0].body) == facts(delivery)
    assert server.requests[0].headers["content-type"] == "application/json"
    Webhook(SECRET).verify(server.requests[0].body, server.requests[0].headers)


@pytest.mark.parametrize("separator", [" ", ",", ", ", "\n"])
def test_during_rotation_each_secret_verifies(post: Post, frozen_library: None, separator: str) -> None:
    _, server = post("/status/200", local(secret=f"{SECRET}{separator}{OLDER}"))
    (request,) = server.requests
    assert len(request.headers["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, OLDER):
        Webhook(secret).verify(request.body, request.headers)


def test_the_published_vector_of_standard_webhooks() -> None:
    at = datetime.fromtimestamp(1614265330, UTC)
    signature = http._signer(SECRET).sign("msg_p5jXN8AQM9LWM0D4loKWxJek", at, '{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_id_stays_and_the_timestamp_moves_between_attempts(run: Run, delivery: Delivery) -> None:
    async def main() -> list[Request]:
        times = iter([NOW, NOW, NOW + timedelta(minutes=9), NOW + timedelta(minutes=9)])
        guard = AddressGuard(True, True, resolve=resolver("127.0.0.1"))
        target = HttpTarget(SECRET, now=lambda: next(times), guard=guard)
        async with sink() as server:
            options = target.check({"url": f"http://hooks.example:{server.port}/status/500"})
            await target.deliver(delivery, options)
            delivery.attempt = 3
            await target.deliver(delivery, options)
            return server.requests

    first, second = run(main())
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert int(second.headers["webhook-timestamp"]) - int(first.headers["webhook-timestamp"]) == 540
    assert (first.headers["timebell-attempt"], second.headers["timebell-attempt"]) == ("2", "3")


def test_extra_headers_are_sent(post: Post) -> None:
    _, server = post("/status/200", headers={"Authorization": "Bearer x y", "User-Agent": "mine"})
    headers = server.requests[0].headers
    assert (headers["authorization"], headers["user-agent"]) == ("Bearer x y", "mine")


def test_environment_proxies_netrc_and_cookies_are_ignored(
    run: Run, delivery: Delivery, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine hooks.example login me password secret\n")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))

    async def main() -> list[Request]:
        async with sink() as server:
            target = local()
            options = target.check({"url": f"http://hooks.example:{server.port}/cookie"})
            for _ in range(2):
                assert (await target.deliver(delivery, options)).delivered
            return server.requests

    for request in run(main()):
        assert not {"cookie", "authorization", "proxy-authorization"} & set(request.headers)


# --- What comes back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 206, 299])
def test_2xx_is_delivered(post: Post, status: int) -> None:
    assert post(f"/status/{status}")[0] == Outcome.ok({"status": status, "body": '{"said":"hi"}'})


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 422, 425, 429, 500, 502, 503, 504, 599])
def test_other_statuses_are_tried_again(post: Post, status: int) -> None:
    outcome, _ = post(f"/status/{status}")
    assert (outcome.delivered, outcome.retryable, outcome.code) == (False, True, "HTTP_STATUS")
    assert outcome.result == {"status": status, "body": '{"said":"hi"}'}
    assert outcome.error == f"The receiver answered {status}."


def test_410_gone_is_final(post: Post) -> None:
    outcome, _ = post("/status/410")
    assert (outcome.delivered, outcome.retryable, outcome.code) == (False, False, "HTTP_STATUS")


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_redirects_are_never_followed(post: Post, status: int) -> None:
    outcome, server = post(f"/status/{status}")
    assert (outcome.delivered, outcome.retryable, outcome.code) == (False, True, "HTTP_STATUS")
    assert "not followed" in (outcome.error or "")
    assert len(server.requests) == 1


@pytest.mark.parametrize(("status", "seconds"), [(429, 7.0), (503, 59.410207), (500, None)])
def test_retry_after_is_kept(post: Post, status: int, seconds: float | None) -> None:
    assert post(f"/later/{status}")[0].retry_after == seconds


@pytest.mark.parametrize("path", ["/hang", "/drip", "/dripheader"])
def test_the_deadline_holds_against_silence_and_drips(post: Post, path: str) -> None:
    outcome, _ = post(path, local(timeout=0.2))
    assert (outcome.code, outcome.retryable, outcome.result) == ("TIMEOUT", True, None)
    assert outcome.error == "No full answer from the receiver within 0.2 s."


@pytest.mark.parametrize("path", ["/reset", "/silent", "/garbage", "/cut", "/headers", "/hundred"])
def test_answers_that_cannot_be_read(post: Post, path: str) -> None:
    outcome, server = post(path)
    assert (outcome.code, outcome.retryable) == ("RESPONSE_UNREADABLE", True)
    assert len(server.requests) == 1


@pytest.mark.parametrize("path", ["/big", "/chunks"])
def test_long_bodies_are_cut(post: Post, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    seen: list[int] = []
    read = http._Bounded.read

    async def counted(self: http._Bounded, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await read(self, max_bytes, timeout)
        seen.append(len(data))
        return data

    monkeypatch.setattr(http._Bounded, "read", counted)
    outcome, _ = post(path)
    assert outcome.delivered
    assert outcome.result == {"status": 200, "body": "x" * 4096}
    assert sum(seen) <= http.HEADER_BYTES + http.BODY_BYTES


def test_nothing_is_decompressed(post: Post) -> None:
    outcome, _ = post("/bomb")
    assert outcome.delivered
    assert outcome.result["body"].startswith("\x1f")
    assert len(outcome.result["body"]) <= 4096


def test_a_body_can_be_stored(post: Post) -> None:
    assert post("/nul")[0].result["body"] == "a\ufffd\ufffd"


def test_nobody_listening(run: Run, delivery: Delivery) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://hooks.example:{held.getsockname()[1]}/"
        outcome = run(local().deliver(delivery, {"url": url}))
    assert (outcome.code, outcome.retryable) == ("CONNECT_FAILED", True)
    assert "127.0.0.1" not in outcome.error


def test_cancellation_closes_the_connection(run: Run, delivery: Delivery) -> None:
    async def main() -> None:
        async with sink() as server:
            target = local()
            url = f"http://hooks.example:{server.port}/hang"
            attempt = asyncio.create_task(target.deliver(delivery, {"url": url}))
            while not server.requests:
                await asyncio.sleep(0)
            attempt.cancel()
            with pytest.raises(asyncio.CancelledError):
                await attempt
            await server.gone.wait()

    run(main())


# --- Where it goes --------------------------------------------------------------------------------------


def test_an_answer_that_flips_between_check_and_use_has_no_effect(run: Run, delivery: Delivery) -> None:
    asked: list[str] = []

    async def flip(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) % 2 else ["169.254.169.254"]

    async def main() -> tuple[list[Outcome], Sink]:
        guard = AddressGuard(allow_private=True, allow_http=True, resolve=flip)
        target = HttpTarget(SECRET, now=lambda: NOW, guard=guard)
        async with sink() as server:
            options = target.check({"url": f"http://hooks.example:{server.port}/status/200"})
            return [await target.deliver(delivery, options) for _ in range(1000)], server

    outcomes, server = run(main())
    assert len(asked) == 1000  # one look-up each: a second would have met the other answer
    assert [outcome.code for outcome in outcomes] == [None, "ADDRESS_REFUSED"] * 500
    assert len(server.requests) == 500


def test_only_checked_addresses_are_dialled_and_none_by_name(run: Run, delivery: Delivery) -> None:
    dialled: list[str] = []
    answers = iter([["93.184.216.34"], ["127.0.0.1"], ["1.1.1.1", "10.0.0.1"], ["8.8.8.8", "1.1.1.1"]])

    async def resolve(host: str, port: int) -> list[str]:
        return next(answers)

    class Recorder(httpcore2.AsyncNetworkBackend):
        async def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> httpcore2.AsyncNetworkStream:
            dialled.append(host)
            raise httpcore2.ConnectError

    target = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(resolve=resolve))
    target._network.inner = Recorder()
    codes = [run(target.deliver(delivery, {"url": "https://hooks.example/"})).code for _ in range(4)]
    assert codes == ["CONNECT_FAILED", "ADDRESS_REFUSED", "ADDRESS_REFUSED", "CONNECT_FAILED"]
    assert dialled == ["93.184.216.34", "8.8.8.8", "1.1.1.1"]


def test_the_system_is_never_asked_for_a_name_again(
    run: Run, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **_: asked.append(given))

    async def main() -> Outcome:
        async with sink() as server:
            return await local().deliver(delivery, {"url": f"http://hooks.example:{server.port}/status/200"})

    assert run(main()).delivered
    assert asked == []


def test_a_connection_to_another_address_is_dropped_before_a_byte_is_sent(run: Run, delivery: Delivery) -> None:
    closed: list[bool] = []

    class Elsewhere(httpcore2.AsyncNetworkStream):
        def get_extra_info(self, info: str) -> Any:
            return ("10.0.0.1", 443)

        async def write(self, buffer: bytes, timeout: float | None = None) -> None:
            raise AssertionError

        async def aclose(self) -> None:
            closed.append(True)

    class Backend(httpcore2.AsyncNetworkBackend):
        async def connect_tcp(self, *_: Any, **__: Any) -> httpcore2.AsyncNetworkStream:
            return Elsewhere()

    target = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(resolve=resolver("93.184.216.34")))
    target._network.inner = Backend()
    assert run(target.deliver(delivery, {"url": "https://hooks.example/"})).code == "CONNECT_FAILED"
    assert closed == [True]


def test_the_next_address_is_tried(run: Run, delivery: Delivery) -> None:
    async def main() -> Outcome:
        guard = AddressGuard(True, True, resolve=resolver("127.0.0.2", "127.0.0.1"))
        async with sink() as server:
            url = f"http://hooks.example:{server.port}/status/200"
            return await HttpTarget(SECRET, now=lambda: NOW, guard=guard).deliver(delivery, {"url": url})

    assert run(main()).delivered


def test_a_resolver_that_hangs_is_a_failed_connection(
    run: Run, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.05)
    target = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(resolve=resolve))
    assert run(target.deliver(delivery, {"url": "https://hooks.example/"})).code == "CONNECT_FAILED"


def test_rules_that_became_stricter_hold_for_jobs_made_before(run: Run, delivery: Delivery) -> None:
    target = HttpTarget(SECRET, now=lambda: NOW)
    outcome = run(target.deliver(delivery, {"url": "http://127.0.0.1:8080/"}))
    assert (outcome.code, outcome.retryable) == ("ADDRESS_REFUSED", False)


# --- TLS ------------------------------------------------------------------------------------------------


@dataclass
class Authority:
    """A certificate authority of its own."""

    folder: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def sign(self, name: str, public: ec.EllipticCurvePublicKey, ca: bool) -> bytes:
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
        subject = issuer if ca else x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        start = datetime(2020, 1, 1, tzinfo=UTC)
        made = (
            x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(datetime(2120, 1, 1, tzinfo=UTC))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    def client(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self.sign("ca.example", self.key.public_key(), True).decode())
        return context

    def server(self, name: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = self.folder / f"{name}.pem"
        path.write_bytes(pem + self.sign(name, key.public_key(), False))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def post_tls(run: Run, delivery: Delivery) -> Callable[..., tuple[Outcome, Sink]]:
    def post_tls(client: ssl.SSLContext | None, server: ssl.SSLContext) -> tuple[Outcome, Sink]:
        async def main() -> tuple[Outcome, Sink]:
            async with sink(server) as made:
                url = f"https://hooks.example:{made.port}/status/200"
                return await local(tls=client).deliver(delivery, {"url": url}), made

        result: tuple[Outcome, Sink] = run(main())
        return result

    return post_tls


def test_name_not_address_is_what_tls_goes_by(post_tls: Post, authority: Authority) -> None:
    outcome, server = post_tls(authority.client(), authority.server("hooks.example"))
    assert outcome.delivered
    assert server.names == ["hooks.example"]
    assert server.requests[0].headers["host"] == f"hooks.example:{server.port}"


@pytest.mark.parametrize("name", ["other.example", "127.0.0.1"])
def test_a_certificate_of_another_name_is_refused(post_tls: Post, authority: Authority, name: str) -> None:
    outcome, server = post_tls(authority.client(), authority.server(name))
    assert (outcome.code, outcome.retryable) == ("TLS_FAILED", True)
    assert server.requests == []


def test_an_unknown_authority_is_refused(post_tls: Post, authority: Authority) -> None:
    assert post_tls(None, authority.server("hooks.example"))[0].code == "TLS_FAILED"


def test_a_server_without_tls(run: Run, delivery: Delivery) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main() -> Outcome:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await local().deliver(delivery, {"url": f"https://hooks.example:{port}/"})

    assert run(main()).code == "TLS_FAILED"


# --- Options and settings -------------------------------------------------------------------------------


def test_options_are_filled_in() -> None:
    target = HttpTarget(SECRET, now=lambda: NOW)
    assert target.check({"url": "HTTPS://Example.com", "headers": {"X-A": "b"}}) == {
        "url": "https://example.com/",
        "headers": {"x-a": "b"},
        "body": "cloudevents",
    }
    assert target.check({"url": "https://example.com"})["headers"] == {}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "URL_INVALID"),
        ({"url": "https://u:p@example.com/"}, "URL_INVALID"),
        ({"url": "https://example.com/", "body": "template"}, "TARGET_OPTIONS_INVALID"),
        ({"url": "https://example.com/", "body": ["plain"]}, "TARGET_OPTIONS_INVALID"),
        ({"url": "https://example.com/", "verify": False}, "TARGET_OPTIONS_INVALID"),
        ({"url": "https://example.com/", "headers": ["a"]}, "HEADER_INVALID"),
        ({"url": "https://example.com/", "headers": {f"x-{n}": "1" for n in range(21)}}, "HEADER_INVALID"),
    ],
)
def test_bad_options(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        HttpTarget(SECRET, now=lambda: NOW).check(options)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, "x") for name in ("Host", "CONNECTION", "Keep-Alive", "TE", "Trailer", "Transfer-Encoding", "Upgrade")]
    + [(name, "x") for name in ("Expect", "Content-Length", "content-type", "Content-Encoding", "Webhook-Id")]
    + [(name, "x") for name in ("webhook-signature", "webhook-other", "Timebell-Attempt", "Proxy-Authorization")]
    + [(name, "x") for name in ("Accept-Encoding", "", "a b", "a:b", "a\r\nb", "é", "-a", "a" * 65, 1)]
    + [("x-a", value) for value in ("", "a\r\nHost: b", "a\nb", "a\x00", "é", " a", "a ", "\ta", "a" * 1025, 1, None)],
)
def test_headers_that_cannot_be_set(name: Any, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        HttpTarget(SECRET, now=lambda: NOW).check({"url": "https://example.com/", "headers": {name: value}})
    assert caught.value.code == "HEADER_INVALID"


@pytest.mark.parametrize("secret", [None, "", "  "])
def test_without_a_secret_nothing_is_made_or_sent(run: Run, delivery: Delivery, secret: str | None) -> None:
    target = HttpTarget(secret, now=lambda: NOW)
    with pytest.raises(Refused) as caught:
        target.check({"url": "https://example.com/"})
    assert caught.value.code == "SIGNING_SECRET_MISSING"
    assert re.search(r"TIMEBELL_WEBHOOK_SIGNING_SECRET.*whsec_", caught.value.fix)
    outcome = run(target.deliver(delivery, {"url": "https://example.com/"}))
    assert (outcome.code, outcome.retryable) == ("SIGNING_SECRET_MISSING", False)


@pytest.mark.parametrize(
    "secret",
    [
        "hunter2hunter2",
        "whsec_",
        "whsec_c2hvcnQ=",
        "whsec_" + "QUJD" * 22,
        "whsec_!!!",
        "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    ],
)
def test_a_bad_secret_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        HttpTarget(f"{SECRET} {secret}", now=lambda: NOW)
    assert caught.value.code == "SIGNING_SECRET_INVALID"
    assert secret == "whsec_" or secret not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("timeout", [0, -1, 30.5, float("nan")])
def test_a_bad_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(InvalidInput):
        HttpTarget(SECRET, timeout=timeout, now=lambda: NOW)
