"""The webhook target: requests, and outcomes of responses."""

from __future__ import annotations

import asyncio
import json
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import standardwebhooks.webhooks
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tests.unit.targets.sink import NOW, OLDER, SECRET, Post, Request, Run, deliver_once, local, resolver, sink
from timebell import http_client
from timebell.targets import http_connections, webhook_signatures
from timebell.targets.address import AddressGuard
from timebell.targets.base import Delivery, Outcome, cloudevent, event_fields
from timebell.targets.http import HttpTarget


@pytest.fixture
def frozen_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze the clock that the verification of the library reads at NOW."""

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Frozen:
            return cls.fromtimestamp(NOW.timestamp(), tz)

    monkeypatch.setattr(standardwebhooks.webhooks, "datetime", Frozen)


def test_signed_cloudevent_is_sent(post: Post, delivery: Delivery, frozen_library: None) -> None:
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


def test_plain_body_is_sent_signed(post: Post, delivery: Delivery, frozen_library: None) -> None:
    _, server = post("/status/200", body="plain")
    assert json.loads(server.requests[0].body) == event_fields(delivery)
    assert server.requests[0].headers["content-type"] == "application/json"
    Webhook(SECRET).verify(server.requests[0].body, server.requests[0].headers)


@pytest.mark.parametrize("separator", [" ", ",", ", ", "\n"])
def test_each_secret_verifies_during_rotation(post: Post, frozen_library: None, separator: str) -> None:
    _, server = post("/status/200", local(secret=f"{SECRET}{separator}{OLDER}"))
    (request,) = server.requests
    assert len(request.headers["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, OLDER):
        Webhook(secret).verify(request.body, request.headers)


def test_signature_matches_the_standard_webhooks_vector() -> None:
    at = datetime.fromtimestamp(1614265330, UTC)
    (key,) = webhook_signatures.signing_keys([SECRET])
    signature = webhook_signatures.sign_webhook(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", at, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_attempts_share_the_id_and_have_their_own_timestamp(run: Run, delivery: Delivery) -> None:
    async def main() -> list[Request]:
        times = iter([NOW, NOW, NOW + timedelta(minutes=9), NOW + timedelta(minutes=9)])
        guard = AddressGuard(True, True, resolve=resolver("127.0.0.1"))
        target = HttpTarget(SECRET, now=lambda: next(times), guard=guard)
        async with sink() as server:
            options = target.check({"url": f"http://hooks.example:{server.port}/status/500"})
            await target.deliver(delivery, options)
            delivery.attempt = 3
            await target.deliver(delivery, options)
            await target.close()
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
                assert (await deliver_once(target, delivery, options)).delivered
            return server.requests

    for request in run(main()):
        assert not {"cookie", "authorization", "proxy-authorization"} & set(request.headers)


# --- Responses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 206, 299])
def test_2xx_is_delivered(post: Post, status: int) -> None:
    assert post(f"/status/{status}")[0] == Outcome.ok({"status": status, "body": '{"said":"hi"}'})


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 422, 425, 429, 500, 502, 503, 504, 599])
def test_other_statuses_are_retryable_failures(post: Post, status: int) -> None:
    outcome, _ = post(f"/status/{status}")
    assert (outcome.delivered, outcome.retryable, outcome.code) == (False, True, "HTTP_STATUS")
    assert outcome.result == {"status": status, "body": '{"said":"hi"}'}
    assert outcome.error == f"The receiver answered {status}."


def test_410_gone_is_a_final_failure(post: Post) -> None:
    outcome, _ = post("/status/410")
    assert (outcome.delivered, outcome.retryable, outcome.code) == (False, False, "HTTP_STATUS")


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_redirects_are_never_followed(post: Post, status: int) -> None:
    outcome, server = post(f"/status/{status}")
    assert (outcome.delivered, outcome.retryable, outcome.code) == (False, True, "HTTP_STATUS")
    assert "not followed" in (outcome.error or "")
    assert len(server.requests) == 1


@pytest.mark.parametrize(("status", "seconds"), [(429, 7.0), (503, 59.410207), (500, None)])
def test_retry_after_is_returned(post: Post, status: int, seconds: float | None) -> None:
    assert post(f"/later/{status}")[0].retry_after == seconds


@pytest.mark.parametrize("path", ["/hang", "/drip", "/dripheader"])
def test_deadline_applies_to_silent_and_dripping_receivers(post: Post, path: str) -> None:
    outcome, _ = post(path, local(timeout=0.2))
    assert (outcome.code, outcome.retryable, outcome.result) == ("TIMEOUT", True, None)
    assert outcome.error == "The receiver sent no complete response within 0.2 s."


@pytest.mark.parametrize("path", ["/reset", "/silent", "/garbage", "/cut", "/headers", "/hundred"])
def test_unreadable_response_is_a_retryable_failure(post: Post, path: str) -> None:
    outcome, server = post(path)
    assert (outcome.code, outcome.retryable) == ("RESPONSE_UNREADABLE", True)
    assert len(server.requests) == 1


@pytest.mark.parametrize("path", ["/big", "/chunks"])
def test_long_response_bodies_are_cut(post: Post, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    seen: list[int] = []
    read = http_client.Stream.read

    async def counted(self: http_client.Stream, limit: int) -> bytes:
        data = await read(self, limit)
        seen.append(len(data))
        return data

    monkeypatch.setattr(http_client.Stream, "read", counted)
    outcome, _ = post(path, local(timeout=25.0))
    assert outcome.delivered
    assert outcome.result == {"status": 200, "body": "x" * 4096}
    assert sum(seen) <= http_client.MAX_HEAD_BYTES + http_connections.MAX_RESPONSE_BYTES


def test_response_is_not_decompressed(post: Post) -> None:
    outcome, _ = post("/bomb")
    assert outcome.delivered
    assert outcome.result["body"].startswith("\x1f")
    assert len(outcome.result["body"]) <= 4096


def test_binary_response_body_can_be_stored(post: Post) -> None:
    assert post("/nul")[0].result["body"] == "a\ufffd\ufffd"


def test_refused_connection_is_a_retryable_failure(run: Run, delivery: Delivery) -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        url = f"http://hooks.example:{bound_socket.getsockname()[1]}/"
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
