"""The push target in the engine: which messages the next attempt sends again, for each way an attempt ends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.engine.world import QUIET, World, engine, jobs, virtual
from tests.push.deliveries import delivery
from timebell import Retry, Timebell
from timebell.errors import InvalidInput, Refused, TimebellError
from timebell.features.campaigns.push.message import Message
from timebell.features.campaigns.push.provider import OnResult, PushResult, SendOutcome
from timebell.features.campaigns.push.target import PushTarget
from timebell.model.job import Job
from timebell_fcm_emulator import FakeFcm

OK = PushResult(SendOutcome.ACCEPTED, id="0:1")
DEAD = PushResult(SendOutcome.REFUSED, code="UNREGISTERED", error="gone", token_is_dead=True)
LATER = PushResult(SendOutcome.RETRY, code="UNAVAILABLE", error="later", retry_after=20.0)
QUOTA = PushResult(SendOutcome.RETRY, code="QUOTA_EXCEEDED", error="slow down", retry_after=60.0, uncounted=True)
LOST = PushResult(SendOutcome.UNKNOWN, code="CONNECTION_LOST", error="connection lost")


class ScriptedProvider:
    """A provider with a list of results by token: the first is used up, the last one repeats, None hangs."""

    name = "scripted"

    def __init__(self, **answers: list[PushResult | None]) -> None:
        self.answers = answers
        self.sent: list[list[str]] = []
        self.seen: list[Message] = []

    async def ready(self) -> None: ...

    def divide_quota(self, nodes: int) -> None: ...

    async def send(self, messages: Sequence[Message], on_result: OnResult) -> None:
        self.sent.append([message.to for message in messages])
        self.seen += messages
        hangs = False
        for place, message in enumerate(messages):
            script = self.answers.get(message.to, [OK])
            answer = script.pop(0) if len(script) > 1 else script[0]
            if answer is None:
                hangs = True
            else:
                on_result(place, answer)
        if hangs:
            try:
                await asyncio.Event().wait()
            finally:
                for place, message in enumerate(messages):
                    if self.answers.get(message.to, [OK])[0] in (None, OK) and message.to.startswith("hang"):
                        on_result(place, LOST)

    async def close(self) -> None: ...


def app_with(world: World, provider: ScriptedProvider) -> Timebell:
    app = world.app()
    app._targets_by_kind["push"] = PushTarget(lambda: provider, app.clock.now)
    return app


async def push_and_wait(world: World, provider: ScriptedProvider, minutes: float = 10, **options: Any) -> Job:
    """Create a push job, advance the clock by `minutes`, and return the job."""
    app = app_with(world, provider)
    timeout = options.pop("timeout", None)
    payload = options.pop("payload", None)
    retry = options.pop("retry", Retry(attempts=4, delay=5, jitter=0))
    target = {"kind": "push", "title": "Hello", **options}
    async with engine(app, **QUIET):
        job = await app.schedule_at("push.hello", target=target, payload=payload, retry=retry, timeout=timeout)
        await world.advance(minutes=minutes)
        return await app.get(job.id)


@virtual
async def test_a_push_records_the_result_of_every_token(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "timebell.push")
    provider = ScriptedProvider(b=[DEAD])
    job = await push_and_wait(world, provider, tokens=["a", "b", "c"], notificationId="n-1")
    assert job.state == "completed"
    assert job.result["accepted"] == 2
    assert job.result["refused"] == 1
    assert job.result["targets"] == [
        {"outcome": "accepted", "id": "0:1"},
        {"outcome": "refused", "code": "UNREGISTERED", "remove": True},
        {"outcome": "accepted", "id": "0:1"},
    ]
    records = [record for record in caplog.records if getattr(record, "event", "") == "push.chunk"]
    assert [record.getMessage() for record in records] == [
        "push n-1: sent to 3 of 3 tokens, 2 accepted, 1 refused (UNREGISTERED)"
    ]


@virtual
async def test_the_next_attempt_skips_accepted_and_refused_tokens(world: World) -> None:
    provider = ScriptedProvider(b=[LATER, LATER, OK], c=[DEAD])
    job = await push_and_wait(world, provider, tokens=["a", "b", "c", "d"])
    assert provider.sent == [["a", "b", "c", "d"], ["b"], ["b"]]
    assert job.state == "completed"
    assert (job.result["accepted"], job.result["refused"]) == (3, 1)
    assert [line["code"] for line in job.attempts if line["code"]] == ["PUSH_INCOMPLETE"] * 2


@virtual
async def test_quota_errors_use_up_no_attempt(world: World) -> None:
    provider = ScriptedProvider(b=[*[QUOTA] * 9, OK])
    job = await push_and_wait(world, provider, tokens=["a", "b"], retry=Retry(attempts=1))
    assert job.state == "completed"
    assert provider.sent == [["a", "b"], *[["b"]] * 9]


@virtual
async def test_unknown_results_are_sent_again_under_the_same_tag(world: World) -> None:
    provider = ScriptedProvider(b=[LOST, OK])
    job = await push_and_wait(world, provider, tokens=["a", "b"])
    assert provider.sent == [["a", "b"], ["b"]]
    assert len({message.content.suffix for message in provider.seen}) == 1
    assert b'"tag":"' in provider.seen[0].content.suffix
    assert job.state == "completed"


@virtual
async def test_unknown_results_are_left_if_the_job_specifies_it(world: World) -> None:
    provider = ScriptedProvider(b=[LOST, OK])
    job = await push_and_wait(world, provider, tokens=["a", "b"], unknown="leave")
    assert provider.sent == [["a", "b"]]
    assert job.state == "completed"
    assert (job.result["accepted"], job.result["unknown"]) == (1, 1)


@virtual
async def test_only_unknown_results_are_not_a_delivery(world: World) -> None:
    job = await push_and_wait(world, ScriptedProvider(a=[LOST]), tokens=["a"], unknown="leave")
    assert (job.state, job.error_code) == ("failed", "PUSH_UNKNOWN")


@virtual
async def test_a_push_refused_for_every_token_fails_without_a_retry(world: World) -> None:
    provider = ScriptedProvider(a=[DEAD])
    job = await push_and_wait(world, provider, tokens=["a"])
    assert (job.state, job.error_code) == ("failed", "PUSH_REFUSED")
    assert "UNREGISTERED" in str(job.error)
    assert len(provider.sent) == 1


@virtual
async def test_a_timeout_keeps_accepted_results(world: World) -> None:
    provider = ScriptedProvider(**{"hang-b": [None, OK]})
    job = await push_and_wait(world, provider, tokens=["a", "hang-b"], timeout=5)
    assert provider.sent == [["a", "hang-b"], ["hang-b"]]
    assert job.state == "completed"
    assert job.attempts[0]["code"] == "TIMEOUT"
    assert "progress" not in job.attempts[0], "the result has the details"


@virtual
async def test_a_drain_keeps_accepted_results(world: World) -> None:
    provider = ScriptedProvider(**{"hang-b": [None, OK]})
    app = app_with(world, provider)
    async with engine(app, **QUIET, drain=1.0):
        job = await app.schedule_at("push.hello", target={"kind": "push", "title": "Hi", "tokens": ["a", "hang-b"]})
        await world.advance(seconds=2)
    other = app_with(world, provider)
    async with engine(other, **QUIET):
        await world.advance(minutes=1)
        assert (await other.get(job.id)).state == "completed"
    assert provider.sent == [["a", "hang-b"], ["hang-b"]]


@virtual
async def test_a_manual_retry_skips_accepted_tokens(world: World) -> None:
    provider = ScriptedProvider(b=[LATER, LATER, OK])
    app = app_with(world, provider)
    async with engine(app, **QUIET):
        target = {"kind": "push", "title": "Hi", "tokens": ["a", "b"]}
        job = await app.schedule_at("push.hello", target=target, retry=Retry(attempts=2, delay=1))
        await world.advance(minutes=5)
        assert (await app.get(job.id)).state == "failed"
        await app.retry(job.id)
        await world.advance(minutes=5)
        assert (await app.get(job.id)).state == "completed"
    assert provider.sent == [["a", "b"], ["b"], ["b"]]


@pytest.mark.parametrize(("unknown", "sent"), [("retry", [["b"]]), ("leave", [])])
def test_messages_in_flight_when_a_node_died_are_unknown(unknown: str, sent: list[list[str]]) -> None:
    """An earlier attempt recorded `a` as accepted; the dead node recorded no result of `b`."""

    async def body() -> None:
        provider = ScriptedProvider()
        target = PushTarget(lambda: provider, lambda: delivery().fired_at)
        known = [{"outcome": "accepted", "id": "1"}, None]
        earlier: list[dict[str, Any]] = [
            {"attempt": 1, "code": "PUSH_INCOMPLETE", "progress": {"targets": known}},
            {"attempt": 2, "code": "LEASE_LOST"},
        ]
        options = target.check({"tokens": ["a", "b"], "title": "Hi", "unknown": unknown})
        outcome = await target.deliver(delivery(previous_attempts=earlier), options)
        assert provider.sent == sent
        assert outcome.delivered
        assert outcome.result["unknown"] == (unknown == "leave")

    asyncio.run(body())


VERSE = {"division": "bible", "version": 0, "bible_code": 3, "chapter": 22, "section": 29, "landing_url": None}


@virtual
async def test_data_fields_are_renamed_and_nulls_left_out(world: World) -> None:
    """The stored bible_code becomes bibleCode; 0 is sent, null is left out, and all values are strings."""
    provider = ScriptedProvider()
    rename = {"bible_code": "bibleCode", "landing_url": "landingUrl"}
    await push_and_wait(world, provider, tokens=["a"], payload=VERSE, fields={"rename": rename})
    assert b'"data":{"division":"bible","version":"0","bibleCode":"3","chapter":"22","section":"29"}' in (
        provider.seen[0].content.suffix
    )


def test_the_preview_equals_the_request() -> None:
    target = PushTarget(ScriptedProvider, lambda: delivery().fired_at)
    options = target.check({"tokens": ["phone-0001", "phone-0002"], "title": "{{payload.title}}", "ttl": 60})
    preview = target.preview(delivery(payload={"title": "약 먹기"}), options)
    assert preview["requests"] == 2
    assert json.loads(preview["body"])["message"] == {
        "token": "phone-0001",
        "notification": {"title": "약 먹기"},
        "android": {"ttl": "60s", "notification": {"tag": "job"}},
        "apns": {"headers": {"apns-expiration": "1803902460", "apns-collapse-id": "job"}},
        "webpush": {"headers": {"TTL": "60"}},
    }


@virtual
async def test_templates_are_filled_from_the_payload(world: World) -> None:
    provider = ScriptedProvider()
    await push_and_wait(
        world, provider, tokens="{{payload.devices}}", title="Shift at {{payload.at}}",
        data={"shift": "{{payload.shift|string}}", "room": "{{payload.room?|string}}"},
        notificationId="shift-{{payload.shift}}", payload={"devices": ["x", "y"], "at": "09:00", "shift": 0},
    )  # fmt: skip
    assert provider.sent == [["x", "y"]]
    rest = provider.seen[0].content.suffix
    assert b'"title":"Shift at 09:00"' in rest
    assert b'"data":{"shift":"0","notificationId":"shift-0"}' in rest
    assert b'"tag":"shift-0"' in rest


@virtual
async def test_a_missing_payload_field_is_refused_at_creation(world: World) -> None:
    provider = ScriptedProvider()
    with pytest.raises(InvalidInput) as refused:
        await push_and_wait(world, provider, tokens=["a"], data={"x": "{{payload.x}}"}, payload={})
    assert refused.value.code == "INVALID_BODY"
    assert provider.sent == []


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"title": "t"}, "INVALID_TARGET_OPTIONS"),
        ({"tokens": ["a"], "topic": "b", "title": "t"}, "INVALID_TARGET_OPTIONS"),
        ({"tokens": [], "title": "t"}, "INVALID_TARGET_OPTIONS"),
        ({"tokens": [f"t{n}" for n in range(501)], "title": "t"}, "INVALID_TARGET_OPTIONS"),
        ({"tokens": ["a b"], "title": "t"}, "INVALID_PUSH_MESSAGE"),
        ({"tokens": ["a"]}, "INVALID_PUSH_MESSAGE"),
        ({"tokens": ["a"], "title": 3}, "INVALID_TARGET_OPTIONS"),
        ({"tokens": ["a"], "title": "t", "ttl": "1h"}, "INVALID_TARGET_OPTIONS"),
        ({"tokens": ["a"], "title": "t", "ttl": -1}, "INVALID_PUSH_MESSAGE"),
        ({"tokens": ["a"], "title": "t", "data": {"n": 1}}, "INVALID_PUSH_MESSAGE"),
        ({"tokens": ["a"], "title": "t", "data": {"from": "1"}}, "INVALID_PUSH_MESSAGE"),
        ({"tokens": ["a"], "body": "x" * 4097}, "PUSH_MESSAGE_TOO_LARGE"),
        ({"topic": "t", "body": "x" * 2049}, "PUSH_MESSAGE_TOO_LARGE"),
        ({"topic": "a b", "title": "t"}, "INVALID_PUSH_MESSAGE"),
        ({"condition": "news", "title": "t"}, "INVALID_PUSH_MESSAGE"),
        ({"tokens": ["a"], "title": "{{payload"}, "INVALID_TEMPLATE"),
        ({"tokens": ["a"], "title": "t", "unknown": "guess"}, "INVALID_TARGET_OPTIONS"),
        ({"tokens": ["a"], "title": "t", "fields": {"strings": True}}, "INVALID_TARGET_OPTIONS"),
        ({"tokens": ["a"], "title": "t", "colour": "red"}, "INVALID_TARGET_OPTIONS"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        PushTarget(ScriptedProvider, lambda: delivery().fired_at).check(options)
    assert refused.value.code == code


@virtual
async def test_an_invalid_job_is_refused_before_anything_is_written(world: World) -> None:
    app = app_with(world, ScriptedProvider())
    with pytest.raises(InvalidInput):
        await app.schedule_at("push.hello", target={"kind": "push", "topic": "a b", "title": "t"})
    assert await jobs(app) == []


@virtual
async def test_missing_credentials_name_the_setting(world: World) -> None:
    with pytest.raises(Refused, match="TIMEBELL_FCM_CREDENTIALS_FILE") as refused:
        await world.app().schedule_at("push.hello", target={"kind": "push", "tokens": ["a"], "title": "t"})
    assert refused.value.code == "FCM_CREDENTIALS_MISSING"


def test_a_missing_extra_names_the_package(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    from timebell.features.campaigns.push import google

    monkeypatch.setattr(google, "find_spec", lambda name: None)
    monkeypatch.setenv("TIMEBELL_FCM_CREDENTIALS", "{}")

    async def body() -> None:
        app = Timebell(sqlite_url, timezone="UTC")
        try:
            with pytest.raises(TimebellError, match=r"timebell\[push\]"):
                await app.schedule_at("push.x", target={"kind": "push", "topic": "t", "title": "t"})
        finally:
            await app.close()

    asyncio.run(body())


def test_a_push_is_delivered_end_to_end(
    store_url: str, fcm: FakeFcm, monkeypatch: pytest.MonkeyPatch, run_app: Callable[..., None]
) -> None:
    """Over HTTP/2, on both stores: one accepted, one dead token, one accepted by the second attempt."""
    fcm.rules({"do": "UNREGISTERED", "match": "^dead"}, {"do": "UNAVAILABLE", "match": "^busy", "times": 1,
                                                         "retry_after": "0"})  # fmt: skip
    monkeypatch.setenv("TIMEBELL_FCM_CREDENTIALS", fcm.credentials)
    monkeypatch.setenv("TIMEBELL_FCM_URL", fcm.url)
    monkeypatch.setenv("SSL_CERT_FILE", fcm.ca)

    async def body(app: Timebell) -> None:
        target = {"kind": "push", "tokens": ["phone-0001", "dead-00001", "busy-00001"], "title": "Hi", "ttl": 3600,
                  "notificationId": "n-7"}  # fmt: skip
        retry = Retry(attempts=3, delay=0.1)
        job = await app.schedule_at("push.hello", target=target, retry=retry)
        while (found := await app.get(job.id)).state not in ("completed", "failed"):
            await asyncio.sleep(0.02)
        assert found.state == "completed", found
        assert (found.result["accepted"], found.result["refused"]) == (2, 1)

    run_app(store_url, body)
    assert {to: len(ids) for to, ids in fcm.received().items()} == {"phone-0001": 1, "busy-00001": 1}
    (sent,) = fcm.bodies()["phone-0001"]
    assert sent["message"]["notification"] == {"title": "Hi"}
    assert sent["message"]["data"] == {"notificationId": "n-7"}
    assert sent["message"]["android"] == {"ttl": "3600s", "notification": {"tag": "n-7"}}
