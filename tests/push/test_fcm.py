"""FCM over the wire: quotas, credentials, HTTP/2 as servers end connections, and the official client beside it."""

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
from timebell.targets.push.fcm import FcmProvider
from timebell.targets.push.message import Content, Encoded, Message
from timebell.targets.push.provider import Answer, Fate
from timebell.testing.fcm import FakeFcm
from timebell.testing.push_providers import NOW, messages, run, send, tokens

Make = Callable[..., FcmProvider]

CODES = {
    "UNSPECIFIED_ERROR": (Fate.UNKNOWN, False),
    "INVALID_ARGUMENT": (Fate.REFUSED, False),
    "UNREGISTERED": (Fate.REFUSED, True),
    "SENDER_ID_MISMATCH": (Fate.REFUSED, False),
    "QUOTA_EXCEEDED": (Fate.AGAIN, False),
    "UNAVAILABLE": (Fate.AGAIN, False),
    "INTERNAL": (Fate.UNKNOWN, False),
    "THIRD_PARTY_AUTH_ERROR": (Fate.REFUSED, False),
}


def fates(answers: list[Answer]) -> Counter[str]:
    return Counter(answer.fate.value for answer in answers)


@pytest.mark.parametrize("code", CODES)
def test_every_code_of_fcm(fcm: FakeFcm, provider: Make, code: str) -> None:
    fcm.rules({"do": code})

    async def body() -> None:
        one = provider()
        (answer,) = await send(one, messages(tokens(1)))
        await one.close()
        assert (answer.fate, answer.remove) == CODES[code]
        assert answer.code == code

    run(body)


def test_a_bare_503_is_unknown_and_the_page_of_a_proxy_too(fcm: FakeFcm, provider: Make) -> None:
    fcm.rules({"do": "UNAVAILABLE", "details": False, "match": "^bare"}, {"do": "HTML", "match": "^page"})

    async def body() -> None:
        one = provider()
        answers = await send(one, messages(["bare-token", "page-token"]))
        await one.close()
        assert {(answer.fate, answer.code) for answer in answers} == {(Fate.UNKNOWN, "UNEXPLAINED_5XX")}

    run(body)


def test_a_bad_token_is_removed_and_a_bad_message_costs_nobody_a_token(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        one = provider()
        bad = Encoded(Content("t", data={"google.x": "1"}), NOW)  # as check() would have refused
        batch = [*messages(["odd/token!!"]), Message("token", "good-token", bad)]
        token, message = await send(one, batch)
        await one.close()
        assert (token.code, token.remove) == ("INVALID_ARGUMENT", True)
        assert (message.code, message.remove) == ("INVALID_ARGUMENT", False)

    run(body)


def test_topics_and_conditions(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        one = provider()
        content = Encoded(Content("t"), NOW)
        condition = "'news' in topics && !('sports' in topics)"
        answers = await send(one, [Message("topic", "news", content), Message("condition", condition, content)])
        await one.close()
        assert fates(answers) == {"accepted": 2}
        assert set(fcm.received()) == {"news", condition}

    run(body)


def test_over_the_quota_nothing_is_sent_until_fcm_said_so(fcm: FakeFcm, provider: Make) -> None:
    fcm.quota(30)

    async def body() -> None:
        one = provider()
        first = fates(await send(one, messages(tokens(100, "first"))))
        later = await send(one, messages(tokens(100, "later")))
        await one.close()
        assert first == {"accepted": 30, "again": 70}
        assert {(answer.fate, answer.costs_nothing) for answer in later} == {(Fate.AGAIN, True)}
        assert 50 < min(answer.after or 0 for answer in later) <= 60
        assert fcm.counts()["requests"] <= 100, "it went on asking while it was told to wait"

    run(body)


def test_the_pace_keeps_within_the_quota(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        one = provider(per_minute=6_000)  # 96 at once, then 96 a second
        began = asyncio.get_running_loop().time()
        assert fates(await send(one, messages(tokens(192)))) == {"accepted": 192}
        assert asyncio.get_running_loop().time() - began > 0.9
        await one.close()

    run(body)


def test_a_token_that_fcm_no_longer_takes_is_replaced_and_the_message_sent(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        one = provider()
        assert fates(await send(one, messages(tokens(3, "before")))) == {"accepted": 3}
        fcm.expire_tokens()
        assert fates(await send(one, messages(tokens(150, "after")))) == {"accepted": 150}
        await one.close()
        assert fcm.counts()["twice"] == 0
        assert fcm.counts()["answered"]["UNAUTHENTICATED"] > 0

    run(body)


def test_a_token_near_its_end_is_replaced_while_it_is_used(fcm: FakeFcm, provider: Make) -> None:
    fcm.expire_tokens(200)  # less than is left when it is replaced

    async def body() -> None:
        one = provider()
        before = fcm.counts()["exchanges"]
        for _ in range(3):
            assert fates(await send(one, messages(tokens(2)))) == {"accepted": 2}
        await one.close()
        assert fcm.counts()["exchanges"] - before >= 2
        assert "UNAUTHENTICATED" not in fcm.counts()["answered"]

    run(body)
    fcm.expire_tokens()


def test_an_account_that_google_refuses_sends_nothing(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        account = json.loads(fcm.credentials) | {"client_email": "other@timebell-test.iam.gserviceaccount.com"}
        one = provider(credentials=json.dumps(account))
        answers = await send(one, messages(tokens(3)))
        await one.close()
        assert {(answer.fate, answer.code, answer.after) for answer in answers} == {
            (Fate.AGAIN, "FCM_TOKEN_UNAVAILABLE", None)
        }
        assert fcm.counts()["requests"] == 0

    run(body)


class Odd:
    """An answer of the token endpoint."""

    status, headers = 200, dict[str, str]()

    def __init__(self, says: bytes | Exception) -> None:
        self.says = says

    def __enter__(self) -> Odd:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read(self) -> bytes:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@pytest.mark.parametrize("says", [IncompleteRead(b"{"), b"[]", b'{"expires_in": null}'])
def test_an_odd_answer_of_the_token_endpoint_sends_nothing(
    says: bytes | Exception, fcm: FakeFcm, provider: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Odd(says))

    async def body() -> None:
        one = provider()
        await one.ready()
        answers = await send(one, messages(tokens(3)))
        await one.close()
        assert {(answer.fate, answer.code) for answer in answers} == {(Fate.AGAIN, "FCM_TOKEN_UNAVAILABLE")}
        assert fcm.counts()["requests"] == 0

    run(body)


def test_with_nobody_there_nothing_was_sent(provider: Make) -> None:
    async def body() -> None:
        one = provider(url="https://localhost:1")
        answers = await send(one, messages(tokens(300)))
        await one.close()
        assert {(answer.fate, answer.code) for answer in answers} == {(Fate.AGAIN, "CONNECT_FAILED")}

    run(body)


def test_a_server_that_hangs_up_at_once_is_not_stormed(fcm: FakeFcm, provider: Make) -> None:
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
        assert {(answer.fate, answer.code) for answer in answers} == {(Fate.AGAIN, "CONNECT_FAILED")}
        assert hung_up <= 6

    run(body)


def test_a_certificate_that_is_not_trusted_gets_nothing(fcm: FakeFcm, provider: Make) -> None:
    async def body() -> None:
        one = provider()
        await send(one, messages(tokens(1)))  # the token is had
        for line in one._lines:
            line.close()
        one._tls = one._ca = None  # the system's authorities
        (answer,) = await send(one, messages(["token-unsafe"]))
        await one.close()
        assert (answer.fate, answer.code) == (Fate.AGAIN, "CONNECT_FAILED")
        assert "certificate" in str(answer.error)

    run(body)


def test_streams_the_server_refuses_are_sent_again_and_once(fcm: FakeFcm, provider: Make) -> None:
    fcm.rules({"do": "REFUSE", "times": 40})

    async def body() -> None:
        one = provider()
        assert fates(await send(one, messages(tokens(200)))) == {"accepted": 200}
        await one.close()
        assert (fcm.counts()["targets"], fcm.counts()["twice"]) == (200, 0)

    run(body)


def test_streams_that_are_refused_for_ever_are_given_back(fcm: FakeFcm, provider: Make) -> None:
    fcm.rules({"do": "REFUSE"})

    async def body() -> None:
        one = provider()
        answers = await send(one, messages(tokens(3)))
        await one.close()
        assert {(answer.fate, answer.code) for answer in answers} == {(Fate.AGAIN, "STREAM_REFUSED")}

    run(body)


def test_what_a_goaway_leaves_out_goes_over_another_connection(fcm: FakeFcm, provider: Make) -> None:
    fcm.rules({"do": "GOAWAY", "times": 3, "match": "7$"})

    async def body() -> None:
        one = provider()
        answers = await send(one, messages(tokens(400)))
        await one.close()
        assert fates(answers) == {"accepted": 400}
        assert (fcm.counts()["targets"], fcm.counts()["twice"]) == (400, 0)

    run(body)


def test_what_was_sent_before_a_goaway_is_still_answered(fcm: FakeFcm, provider: Make) -> None:
    fcm.rules({"do": "ACCEPT", "delay": 2, "match": "^slow"})

    async def body() -> None:
        one = provider(connections=1)
        slow = asyncio.create_task(send(one, messages(tokens(20, "slow"))))
        while fcm.counts()["requests"] < 20:
            await asyncio.wait([slow], timeout=0.01)
        fcm.goaway()
        quick = await send(one, messages(tokens(20, "quick")))
        assert not slow.done()
        assert fates(quick) == fates(await slow) == {"accepted": 20}
        await one.close()
        assert fcm.counts()["twice"] == 0

    run(body)


def test_a_server_with_room_for_little_gets_little_at_once() -> None:
    with FakeFcm(streams=3) as small:

        async def body() -> None:
            now: Any = lambda: NOW  # noqa: E731
            one = FcmProvider(small.credentials, now=now, url=small.url, ca=small.ca, connections=2)
            assert fates(await send(one, messages(tokens(100)))) == {"accepted": 100}
            await one.close()

        run(body)
        assert small.counts()["requests"] == 100, "streams above the limit were opened"


@pytest.mark.parametrize("credentials", ["{}", "no JSON", '{"project_id": "p", "private_key": "x"}', "[]"])
def test_bad_credentials_are_told_before_anything_is_sent(credentials: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        FcmProvider(credentials, now=lambda: NOW)
    assert refused.value.code == "FCM_CREDENTIALS_INVALID"


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


def test_the_official_client_takes_the_fake_for_fcm(fcm: FakeFcm) -> None:
    fcm.rules({"do": "UNREGISTERED", "match": "^dead"})
    said = subprocess.run(
        [sys.executable, "-c", OFFICIAL, fcm.url], input=fcm.credentials, capture_output=True, text=True, timeout=60,
        env={"REQUESTS_CA_BUNDLE": fcm.ca, "SSL_CERT_FILE": fcm.ca},
    )  # fmt: skip
    assert said.stdout.split("\n")[:2] == ["10 UnregisteredError", "10 UnregisteredError"], said.stderr
    assert {token: len(ids) for token, ids in fcm.received().items()} == {f"official-{n:03d}": 2 for n in range(10)}
