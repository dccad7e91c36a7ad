"""The HTTP target: bearer, basic, OAuth 2 and OIDC tokens, from a real token endpoint."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc import jwt
from joserfc.jwk import RSAKey

from tests.unit.targets.http_servers import TokenSink
from tests.unit.targets.sink import NOW, SECRET, Run, resolver, sink
from timebell.errors import InvalidInput, Refused
from timebell.targets.address import AddressGuard
from timebell.targets.base import Delivery, Outcome
from timebell.targets.http import HttpTarget


@dataclass
class Stand:
    """A target, and the server of its API and tokens. `clock` is the time that both use."""

    target: HttpTarget
    server: TokenSink
    clock: list[datetime]

    def auth(self, **members: Any) -> dict[str, Any]:
        url = f"http://tokens.example:{self.server.port}/token"
        return {"type": "oauth2", "tokenUrl": url, "clientId": "app", "clientSecret": "s3cret/word", **members}

    async def deliver(self, delivery: Delivery, auth: dict[str, Any], **options: Any) -> Outcome:
        url = f"http://api.example:{self.server.port}/api"
        checked = self.target.check({"url": url, "auth": auth, **options})
        return await self.target.deliver(delivery, checked)


@pytest.fixture
def stand(run: Run) -> Callable[[Any], Any]:
    """Run a test function with a stand."""

    def stand(test: Callable[[Stand], Any], **options: Any) -> Any:
        async def main() -> Any:
            clock = [NOW]
            guard = AddressGuard(True, True, resolve=resolver("127.0.0.1"))
            target = HttpTarget(SECRET, now=lambda: clock[0], guard=guard)
            server_state = TokenSink(**options)
            async with sink(server_state=server_state):
                try:
                    return await test(Stand(target, server_state, clock))
                finally:
                    await target.close()

        return run(main())

    return stand


@pytest.mark.parametrize(
    ("auth", "header", "secret"),
    [
        ({"type": "bearer", "token": "token-123"}, "Bearer token-123", "token-123"),
        ({"type": "basic", "username": "app", "password": "p:ä"}, "Basic YXBwOnA6w6Q=", "YXBwOnA6w6Q="),
        ({"type": "basic", "username": "key", "password": ""}, "Basic a2V5Og==", "a2V5Og=="),
        ({"type": "basic", "username": "", "password": "key"}, "Basic OmtleQ==", "OmtleQ=="),
    ],
)
def test_static_credentials_are_sent_and_masked(
    stand: Any, delivery: Delivery, auth: dict[str, str], header: str, secret: str
) -> None:
    async def test(stand: Stand) -> None:
        outcome = await stand.deliver(delivery, auth)
        assert stand.server.requests[0].headers["authorization"] == header
        assert outcome.result["body"] == f"you sent {header.split()[0]} ***"
        assert secret not in repr((outcome.sent_request, outcome.received_response, outcome.record, outcome.result))

    stand(test)


@pytest.mark.parametrize("place", ["header", "body"])
def test_a_client_authenticates_in_the_header_or_the_body(stand: Any, delivery: Delivery, place: str) -> None:
    async def test(stand: Stand) -> None:
        auth = stand.auth(scope="a b", parameters={"audience": "https://api"}, clientAuthentication=place)
        assert (await stand.deliver(delivery, auth)).delivered
        form = {"grant_type": "client_credentials", "audience": "https://api", "scope": "a b"}
        header = stand.server.requests[0].headers.get("authorization")
        if place == "body":
            assert (form | {"client_id": "app", "client_secret": "s3cret/word"}, None) == (
                stand.server.forms[0], header
            )  # fmt: skip
        else:
            assert (form, header) == (
                stand.server.forms[0], "Basic " + base64.b64encode(b"app:s3cret%2Fword").decode()
            )  # fmt: skip

    stand(test)


def test_a_token_is_cached_and_refreshed_before_it_expires(stand: Any, delivery: Delivery) -> None:
    async def test(stand: Stand) -> None:
        for seconds, issued in ((0, 1), (3539, 1), (3541, 2), (3541 + 3539, 2), (3541 + 3541, 3)):
            stand.clock[0] = NOW + timedelta(seconds=seconds)
            assert (await stand.deliver(delivery, stand.auth())).delivered
            assert len(stand.server.forms) == issued

    stand(test)


@pytest.mark.parametrize(("lifetime", "seconds"), [(10, 9), (None, 270), (0, 270)])
def test_short_and_unknown_lifetimes_are_respected(
    stand: Any, delivery: Delivery, lifetime: int | None, seconds: int
) -> None:
    async def test(stand: Stand) -> None:
        for at, issued in ((0, 1), (seconds - 1, 1), (seconds + 1, 2)):
            stand.clock[0] = NOW + timedelta(seconds=at)
            await stand.deliver(delivery, stand.auth())
            assert len(stand.server.forms) == issued

    stand(test, lifetime=lifetime)


def test_concurrent_deliveries_request_one_token(stand: Any, delivery: Delivery) -> None:
    async def test(stand: Stand) -> None:
        outcomes = await asyncio.gather(*(stand.deliver(delivery, stand.auth()) for _ in range(20)))
        assert all(outcome.delivered for outcome in outcomes)
        assert len(stand.server.forms) == 1

    stand(test)


def test_tokens_are_not_shared_between_tenants_or_credentials(stand: Any, delivery: Delivery) -> None:
    async def test(stand: Stand) -> None:
        await stand.deliver(delivery, stand.auth())
        await stand.deliver(replace(delivery, tenant_id="other"), stand.auth())
        await stand.deliver(delivery, stand.auth(clientSecret="another"))
        await stand.deliver(delivery, stand.auth(scope="more"))
        assert len(stand.server.forms) == 4

    stand(test)


def test_a_revoked_token_is_replaced_once(stand: Any, delivery: Delivery) -> None:
    async def test(stand: Stand) -> None:
        assert (await stand.deliver(delivery, stand.auth())).delivered
        stand.server.accepted.clear()
        assert (await stand.deliver(delivery, stand.auth())).delivered
        assert stand.server.paths == ["/token", "/api", "/api", "/token", "/api"]

    stand(test)


def test_a_new_token_that_is_rejected_is_not_replaced(stand: Any, delivery: Delivery) -> None:
    async def test(stand: Stand) -> None:
        stand.server.accepted = _NothingAccepted()
        outcome = await stand.deliver(delivery, stand.auth())
        assert (outcome.code, outcome.retryable, outcome.result["status"]) == ("HTTP_STATUS", True, 401)
        assert stand.server.paths == ["/token", "/api"]
        await stand.deliver(delivery, stand.auth())
        assert stand.server.paths[2:] == ["/api", "/token", "/api"]  # the cached one is

    stand(test)


class _NothingAccepted(set[str]):
    def add(self, element: str) -> None: ...


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        ("400 Bad Request", "answered 400 invalid_client."),
        ("503 Busy", "answered 503 invalid_client."),
        ("200 OK", "contains no access_token."),
    ],
)
def test_a_refused_token_is_a_retryable_failure_without_secrets(
    stand: Any, delivery: Delivery, refusal: str, error: str
) -> None:
    async def test(stand: Stand) -> None:
        outcome = await stand.deliver(delivery, stand.auth())
        assert (outcome.code, outcome.retryable) == ("TOKEN_FAILED", True)
        assert outcome.error.endswith(error)
        assert "hunter2" not in repr(outcome)
        assert stand.server.paths == ["/token"]

    stand(test, refusal=refusal)


def test_issued_tokens_are_masked_everywhere(stand: Any, delivery: Delivery) -> None:
    async def test(stand: Stand) -> None:
        outcome = await stand.deliver(delivery, stand.auth())
        assert outcome.result["body"] == "you sent Bearer ***"
        assert outcome.sent_request["headers"]["authorization"] == "Bearer ***"
        assert "issued-token" not in repr((outcome, outcome.record, outcome.received_response))

    stand(test)


def test_an_identity_token_is_requested_with_a_signed_assertion(stand: Any, delivery: Delivery) -> None:
    async def test(stand: Stand) -> None:
        private = rsa.generate_private_key(65537, 2048)
        pem = private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        token_uri = f"http://tokens.example:{stand.server.port}/identity"
        credentials = {
            "type": "service_account", "client_email": "cron@project.example", "private_key_id": "key-1",
            "private_key": pem.decode(), "token_uri": token_uri,
        }  # fmt: skip
        auth = {"type": "oidc", "audience": "https://run.example", "credentials": json.dumps(credentials)}
        assert (await stand.deliver(delivery, auth)).delivered
        assert (await stand.deliver(delivery, auth)).delivered
        (form,) = stand.server.forms
        assert form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
        assertion = jwt.decode(form["assertion"], RSAKey.import_key(pem), algorithms=["RS256"])
        assert assertion.header["kid"] == "key-1"
        issued_at = int(NOW.timestamp())
        assert assertion.claims == {
            "iss": "cron@project.example", "sub": "cron@project.example", "aud": token_uri, "iat": issued_at,
            "exp": issued_at + 3600, "target_audience": "https://run.example",
        }  # fmt: skip

    stand(test)


# --- The guard ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["https://169.254.169.254/token", "http://tokens.example/", "https://127.0.0.1/", "https://a.example:5432/"]
)
def test_the_guard_checks_token_endpoints(url: str) -> None:
    target = HttpTarget(SECRET, now=lambda: NOW)
    auth = {"type": "oauth2", "tokenUrl": url, "clientId": "a", "clientSecret": "b"}
    with pytest.raises((Refused, InvalidInput)):
        target.check({"url": "https://api.example/", "auth": auth})


def test_the_guard_checks_the_addresses_of_token_endpoints(run: Run, delivery: Delivery) -> None:
    dialed: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        dialed.append(host)
        return ["10.0.0.1"]

    target = HttpTarget(SECRET, now=lambda: NOW, guard=AddressGuard(resolve=resolve))
    auth = {"type": "oauth2", "tokenUrl": "https://t.example/", "clientId": "a", "clientSecret": "b"}
    outcome = run(target.deliver(delivery, {"url": "https://api.example/", "auth": auth}))
    assert (outcome.code, dialed) == ("ADDRESS_REFUSED", ["t.example"])
