"""The FCM provider over HTTP/2: error codes, quotas, credentials, closed connections, and the official client."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest

from timebell.errors import InvalidInput
from timebell.features.campaigns.push import fcm as fcm_module
from timebell.features.campaigns.push.fcm import FcmProvider
from timebell.features.campaigns.push.message import Content, EncodedContent, Message
from timebell.features.campaigns.push.provider import PushResult, SendOutcome
from timebell.features.campaigns.testing import NOW, messages, run, send, tokens
from timebell_fcm_emulator import FakeFcm

Make = Callable[..., FcmProvider]

CODES = {
    "UNSPECIFIED_ERROR": (SendOutcome.UNKNOWN, False),
    "INVALID_ARGUMENT": (SendOutcome.REFUSED, False),
    "UNREGISTERED": (SendOutcome.REFUSED, True),
    "SENDER_ID_MISMATCH": (SendOutcome.REFUSED, False),
    "QUOTA_EXCEEDED": (SendOutcome.RETRY, False),
    "UNAVAILABLE": (SendOutcome.RETRY, False),
    "INTERNAL": (SendOutcome.UNKNOWN, False),
    "THIRD_PARTY_AUTH_ERROR": (SendOutcome.REFUSED, False),
}


def outcomes(answers: list[PushResult]) -> Counter[str]:
    return Counter(answer.outcome.value for answer in answers)


@pytest.mark.parametrize("code", CODES)
def test_each_fcm_error_code_has_a_fate(fcm: FakeFcm, provider: Make, code: str) -> None:
    fcm.rules({"do": code})

    async def body() -> None:
        one = provider()
        (answer,) = await send(one, messages(tokens(1)))
        await one.close()
        assert (answer.outcome, answer.token_is_dead) == CODES[code]
        assert answer.code == code

    run(body)


def test_a_503_without_details_is_sent_again_but_a_proxy_page_is_unknown(fcm: FakeFcm, provider: Make) -> None:
    fcm.rules({"do": "UNAVAILABLE", "details": False, "match": "^bare"}, {"do": "HTML", "match": "^page"})

    async def body() -> None:
        one = provider()
        answers = await send(one, messages(["bare-token", "page-token"]))
        await one.close()
        assert [(answer.outcome, answer.code) for answer in answers] == [
            (SendOutcome.RETRY, "UNAVAILABLE"), (SendOutcome.UNKNOWN, "UNEXPLAINED_5XX"),
        ]  # fmt: skip

    run(body)


def test_a_bad_token_is_removed_but_a_bad_message_removes_no_token(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        one = provider()
        bad = EncodedContent(Content("t", data={"google.x": "1"}), NOW)  # check() would refuse it
        batch = [*messages(["odd/token!!"]), Message("token", "good-token", bad)]
        token, message = await send(one, batch)
        await one.close()
        assert (token.code, token.token_is_dead) == ("INVALID_ARGUMENT", True)
        assert (message.code, message.token_is_dead) == ("INVALID_ARGUMENT", False)

    run(body)


def test_topics_and_conditions_are_accepted(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        one = provider()
        content = EncodedContent(Content("t"), NOW)
        condition = "'news' in topics && !('sports' in topics)"
        answers = await send(one, [Message("topic", "news", content), Message("condition", condition, content)])
        await one.close()
        assert outcomes(answers) == {"accepted": 2}
        assert set(fcm.received()) == {"news", condition}

    run(body)


def test_over_the_quota_nothing_is_sent_until_retry_after(fcm: FakeFcm, provider: Make) -> None:
    fcm.quota(30)

    async def body() -> None:
        one = provider()
        first = outcomes(await send(one, messages(tokens(100, "first"))))
        later = await send(one, messages(tokens(100, "later")))
        await one.close()
        assert first == {"accepted": 30, "retry": 70}
        assert {(answer.outcome, answer.uncounted) for answer in later} == {(SendOutcome.RETRY, True)}
        assert 50 < min(answer.retry_after or 0 for answer in later) <= 60
        assert fcm.counts()["requests"] <= 100, "requests were sent before the end of Retry-After"

    run(body)


def test_sending_stays_within_the_quota(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        one = provider(per_minute=6_000)  # a burst of 96, then 96 a second
        began = asyncio.get_running_loop().time()
        assert outcomes(await send(one, messages(tokens(192)))) == {"accepted": 192}
        assert asyncio.get_running_loop().time() - began > 0.9
        await one.close()

    run(body)


def test_an_expired_access_token_is_replaced_and_the_message_sent(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        one = provider()
        assert outcomes(await send(one, messages(tokens(3, "before")))) == {"accepted": 3}
        fcm.expire_tokens()
        assert outcomes(await send(one, messages(tokens(150, "after")))) == {"accepted": 150}
        await one.close()
        assert fcm.counts()["twice"] == 0
        assert fcm.counts()["answered"]["UNAUTHENTICATED"] > 0

    run(body)


def test_an_access_token_near_expiry_is_replaced_while_in_use(fcm: FakeFcm, provider: Make) -> None:
    fcm.expire_tokens(200)  # seconds, less than the margin at which a token is replaced

    async def body() -> None:
        one = provider()
        before = fcm.counts()["exchanges"]
        for _ in range(3):
            assert outcomes(await send(one, messages(tokens(2)))) == {"accepted": 2}
        await one.close()
        assert fcm.counts()["exchanges"] - before >= 2
        assert "UNAUTHENTICATED" not in fcm.counts()["answered"]

    run(body)
    fcm.expire_tokens()


def test_a_refused_service_account_sends_nothing(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        account = json.loads(fcm.credentials) | {"client_email": "other@timebell-test.iam.gserviceaccount.com"}
        one = provider(credentials=json.dumps(account))
        answers = await send(one, messages(tokens(3)))
        await one.close()
        assert {(answer.outcome, answer.code, answer.retry_after) for answer in answers} == {
            (SendOutcome.RETRY, "FCM_TOKEN_UNAVAILABLE", None)
        }
        assert fcm.counts()["requests"] == 0

    run(body)


class TokenEndpointResponse:
    """A response of the token endpoint."""

    status, headers = 200, dict[str, str]()

    def __init__(self, content: bytes | Exception) -> None:
        self.content = content

    def __enter__(self) -> TokenEndpointResponse:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self) -> bytes:
        if isinstance(self.content, Exception):
            raise self.content
        return self.content


@pytest.mark.parametrize("content", [IncompleteRead(b"{"), b"[]", b'{"expires_in": null}'])
def test_an_invalid_token_endpoint_response_sends_nothing(
    content: bytes | Exception, fcm: FakeFcm, provider: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: TokenEndpointResponse(content))

    async def body() -> None:
        one = provider()
        await one.ready()
        answers = await send(one, messages(tokens(3)))
        await one.close()
        assert {(answer.outcome, answer.code) for answer in answers} == {(SendOutcome.RETRY, "FCM_TOKEN_UNAVAILABLE")}
        assert fcm.counts()["requests"] == 0

    run(body)


def test_a_refused_connection_sends_nothing(provider: Make) -> None:
    async def body() -> None:
        one = provider(url="https://localhost:1")
        answers = await send(one, messages(tokens(300)))
        await one.close()
        assert {(answer.outcome, answer.code) for answer in answers} == {(SendOutcome.RETRY, "CONNECT_FAILED")}

    run(body)


def test_a_server_that_closes_every_connection_gets_few_attempts(fcm: FakeFcm, provider: Make) -> None:
    hung_up = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hung_up
        hung_up += 1
        writer.close()

    async def body() -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(fcm.ca, Path(fcm.ca).with_name("key.pem"))
        tls.set_alpn_protocols(["h2"])
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=tls) as server:
            one = provider(url=f"https://localhost:{server.sockets[0].getsockname()[1]}", connections=2)
            answers = await send(one, messages(tokens(300)))
            answers += await send(one, messages(tokens(300)))
            await one.close()
        assert {(answer.outcome, answer.code) for answer in answers} == {(SendOutcome.RETRY, "CONNECT_FAILED")}
        assert hung_up <= 6

    run(body)


def test_closing_an_unused_connection_is_not_a_failure(
    provider: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        one, loop, may_connect = provider(), asyncio.get_running_loop(), asyncio.Event()
        connect = loop.create_connection

        async def connect_later(*args: Any, **options: Any) -> Any:
            await may_connect.wait()
            return await connect(*args, **options)

        monkeypatch.setattr(loop, "create_connection", connect_later)
        await one.ready()  # opens a connection ahead of the first message
        first_check = one._check_timer
        async with asyncio.timeout(30):
            while one._check_timer is first_check:  # it takes longer than until the first check
                await asyncio.sleep(0.01)
            may_connect.set()
            while not one._active_connections:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(fcm_module, "IDLE_SECONDS", 0.0)
            while one._active_connections:
                await asyncio.sleep(0.01)
        await one.close()

    run(body)
    assert "could not connect" not in caplog.text


def test_a_server_with_an_untrusted_certificate_gets_nothing(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        one = provider()
        await send(one, messages(tokens(1)))  # obtains the access token
        while one._active_connections:
            one._active_connections.pop().close()
        one._tls = one._ca = None  # the system's authorities
        (answer,) = await send(one, messages(["token-unsafe"]))
        await one.close()
        assert (answer.outcome, answer.code) == (SendOutcome.RETRY, "CONNECT_FAILED")
        assert "certificate" in str(answer.error)

    run(body)


def test_refused_streams_are_sent_again_exactly_once(fcm: FakeFcm, provider: Make) -> None:
    # Each message at most four times; the fifth refusal would be returned.
    fcm.rules(*({"do": "REFUSE", "times": 4, "match": f"{digit}$"} for digit in range(10)))

    async def body() -> None:
        one = provider()
        assert outcomes(await send(one, messages(tokens(200)))) == {"accepted": 200}
        await one.close()
        assert (fcm.counts()["targets"], fcm.counts()["twice"]) == (200, 0)

    run(body)


def test_permanently_refused_streams_are_returned_for_a_later_attempt(fcm: FakeFcm, provider: Make) -> None:
    fcm.rules({"do": "REFUSE"})

    async def body() -> None:
        one = provider()
        answers = await send(one, messages(tokens(3)))
        await one.close()
        assert {(answer.outcome, answer.code) for answer in answers} == {(SendOutcome.RETRY, "STREAM_REFUSED")}

    run(body)


def test_streams_above_a_goaway_use_another_connection(fcm: FakeFcm, provider: Make) -> None:
    fcm.rules({"do": "GOAWAY", "times": 3, "match": "7$"})

    async def body() -> None:
        one = provider()
        answers = await send(one, messages(tokens(400)))
        await one.close()
        assert outcomes(answers) == {"accepted": 400}
        assert (fcm.counts()["targets"], fcm.counts()["twice"]) == (400, 0)

    run(body)


def test_streams_before_a_goaway_still_complete(fcm: FakeFcm, provider: Make) -> None:
    fcm.rules({"do": "ACCEPT", "delay": 6, "match": "^slow"})

    async def body() -> None:
        one = provider(connections=1)
        slow = asyncio.create_task(send(one, messages(tokens(20, "slow"))))
        while fcm.counts()["requests"] < 20:
            await asyncio.wait([slow], timeout=0.01)
        fcm.goaway()
        quick = await send(one, messages(tokens(20, "quick")))
        assert not slow.done()
        assert outcomes(quick) == outcomes(await slow) == {"accepted": 20}
        await one.close()
        assert fcm.counts()["twice"] == 0

    run(body)


def test_the_stream_limit_of_the_server_is_respected() -> None:
    with FakeFcm(streams=3) as small:

        async def body() -> None:
            one = FcmProvider(small.credentials, now=lambda: NOW, url=small.url, ca=small.ca, connections=2)
            assert outcomes(await send(one, messages(tokens(100)))) == {"accepted": 100}
            await one.close()

        run(body)
        assert small.counts()["requests"] == 100, "streams above the limit were opened"


@pytest.mark.parametrize("credentials", ["{}", "no JSON", '{"project_id": "p", "private_key": "x"}', "[]"])
def test_invalid_credentials_are_refused_before_sending(credentials: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        FcmProvider(credentials, now=lambda: NOW)
    assert refused.value.code == "INVALID_FCM_CREDENTIALS"


OFFICIAL = """
import asyncio, json, sys, warnings
warnings.simplefilter("ignore")
import firebase_admin
from firebase_admin import credentials, exceptions, messaging

url, account = sys.argv[1], json.loads(sys.stdin.read())
messaging._MessagingService.FCM_URL = url + "/v1/projects/{0}/messages:send"
firebase_admin.initialize_app(credentials.Certificate(account))
batch = [messaging.Message(token=f"official-{n:03d}", data={"n": str(n)}) for n in range(10)]
batch.append(messaging.Message(token="dead-token-1", notification=messaging.Notification(title="t")))
sync = messaging.send_each(batch)
two = asyncio.run(messaging.send_each_async(batch, dry_run=False))
for answers in (sync, two):
    print(answers.success_count, type(answers.responses[-1].exception).__name__)
"""


def test_the_official_client_works_against_the_emulator(fcm: FakeFcm) -> None:
    fcm.rules({"do": "UNREGISTERED", "match": "^dead"})
    finished = subprocess.run(
        [sys.executable, "-c", OFFICIAL, fcm.url], input=fcm.credentials, capture_output=True, text=True, timeout=60,
        env={"REQUESTS_CA_BUNDLE": fcm.ca, "SSL_CERT_FILE": fcm.ca},
    )  # fmt: skip
    assert finished.stdout.split("\n")[:2] == ["10 UnregisteredError", "10 UnregisteredError"], finished.stderr
    assert {token: len(ids) for token, ids in fcm.received().items()} == {f"official-{n:03d}": 2 for n in range(10)}
