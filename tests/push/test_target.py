"""Target push in the engine: what is sent again and what never is, whatever ended the attempt."""

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
from timebell.model.job import Job
from timebell.targets.push.message import Message
from timebell.targets.push.provider import Answer, Fate, Told
from timebell.targets.push.target import PushTarget
from timebell.testing.fcm import FakeFcm

OK = Answer(Fate.ACCEPTED, id="0:1")
DEAD = Answer(Fate.REFUSED, code="UNREGISTERED", error="gone", remove=True)
LATER = Answer(Fate.AGAIN, code="UNAVAILABLE", error="later", after=20.0)
QUOTA = Answer(Fate.AGAIN, code="QUOTA_EXCEEDED", error="slow down", after=60.0, costs_nothing=True)
LOST = Answer(Fate.UNKNOWN, code="CONNECTION_LOST", error="nobody knows")


class Scripted:
    """A provider whose answers are lists by token, used up from the left; the last one stays. None hangs."""

    name = "scripted"

    def __init__(self, **answers: list[Answer | None]) -> None:
        self.answers = answers
        self.sent: list[list[str]] = []
        self.seen: list[Message] = []

    async def ready(self) -> None: ...

    async def send(self, messages: Sequence[Message], told: Told) -> None:
        self.sent.append([message.to for message in messages])
        self.seen += messages
        hangs = False
        for place, message in enumerate(messages):
            script = self.answers.get(message.to, [OK])
            answer = script.pop(0) if len(script) > 1 else script[0]
            if answer is None:
                hangs = True
            else:
                told(place, answer)
        if hangs:
            try:
                await asyncio.Event().wait()
            finally:
                for place, message in enumerate(messages):
                    if self.answers.get(message.to, [OK])[0] in (None, OK) and message.to.startswith("hang"):
                        told(place, LOST)

    async def close(self) -> None: ...


def app_with(world: World, provider: Scripted) -> Timebell:
    app = world.app()
    app.kinds["push"] = PushTarget(lambda: provider, app.clock.now)
    return app


async def pushed(world: World, provider: Scripted, minutes: float = 10, **options: Any) -> Job:
    """One push job, when it is over or `minutes` have passed."""
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
async def test_all_accepted(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "timebell.push")
    provider = Scripted(b=[DEAD])
    job = await pushed(world, provider, tokens=["a", "b", "c"], notificationId="n-1")
    assert job.state == "completed"
    assert job.result["accepted"] == 2
    assert job.result["refused"] == 1
    assert job.result["targets"] == [
        {"fate": "accepted", "id": "0:1"},
        {"fate": "refused", "code": "UNREGISTERED", "remove": True},
        {"fate": "accepted", "id": "0:1"},
    ]
    said = [record for record in caplog.records if getattr(record, "event", "") == "push.chunk"]
    assert [record.getMessage() for record in said] == [
        "push n-1: 3 of 3 tokens sent to, 2 accepted, 1 refused (UNREGISTERED)"
    ]


@virtual
async def test_the_next_attempt_goes_only_to_those_that_do_not_have_it(world: World) -> None:
    provider = Scripted(b=[LATER, LATER, OK], c=[DEAD])
    job = await pushed(world, provider, tokens=["a", "b", "c", "d"])
    assert provider.sent == [["a", "b", "c", "d"], ["b"], ["b"]]
    assert job.state == "completed"
    assert (job.result["accepted"], job.result["refused"]) == (3, 1)
    assert [line["code"] for line in job.attempts if line["code"]] == ["PUSH_INCOMPLETE"] * 2


@virtual
async def test_quota_uses_up_no_try(world: World) -> None:
    provider = Scripted(b=[*[QUOTA] * 9, OK])
    job = await pushed(world, provider, tokens=["a", "b"], retry=Retry(attempts=1))
    assert job.state == "completed"
    assert provider.sent == [["a", "b"], *[["b"]] * 9]


@virtual
async def test_unknown_is_sent_again_under_the_same_tag(world: World) -> None:
    provider = Scripted(b=[LOST, OK])
    job = await pushed(world, provider, tokens=["a", "b"])
    assert provider.sent == [["a", "b"], ["b"]]
    assert len({message.content.rest for message in provider.seen}) == 1
    assert b'"tag":"' in provider.seen[0].content.rest
    assert job.state == "completed"


@virtual
async def test_unknown_is_left_where_the_job_says_so(world: World) -> None:
    provider = Scripted(b=[LOST, OK])
    job = await pushed(world, provider, tokens=["a", "b"], unknown="leave")
    assert provider.sent == [["a", "b"]]
    assert job.state == "completed"
    assert (job.result["accepted"], job.result["unknown"]) == (1, 1)


@virtual
async def test_with_nothing_but_unknown_it_does_not_call_itself_delivered(world: World) -> None:
    job = await pushed(world, Scripted(a=[LOST]), tokens=["a"], unknown="leave")
    assert (job.state, job.error_code) == ("failed", "PUSH_UNKNOWN")


@virtual
async def test_refused_by_all_it_is_dead_at_once(world: World) -> None:
    provider = Scripted(a=[DEAD])
    job = await pushed(world, provider, tokens=["a"])
    assert (job.state, job.error_code) == ("failed", "PUSH_REFUSED")
    assert "UNREGISTERED" in str(job.error)
    assert len(provider.sent) == 1


@virtual
async def test_a_timeout_keeps_what_was_accepted(world: World) -> None:
    provider = Scripted(**{"hang-b": [None, OK]})
    job = await pushed(world, provider, tokens=["a", "hang-b"], timeout=5)
    assert provider.sent == [["a", "hang-b"], ["hang-b"]]
    assert job.state == "completed"
    assert job.attempts[0]["code"] == "TIMEOUT"
    assert "progress" not in job.attempts[0], "the result says more"


@virtual
async def test_a_drain_keeps_what_was_accepted(world: World) -> None:
    provider = Scripted(**{"hang-b": [None, OK]})
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
async def test_a_replayed_one_goes_to_nobody_who_has_it(world: World) -> None:
    provider = Scripted(b=[LATER, LATER, OK])
    app = app_with(world, provider)
    async with engine(app, **QUIET):
        target = {"kind": "push", "title": "Hi", "tokens": ["a", "b"]}
        job = await app.schedule_at("push.hello", target=target, retry=Retry(attempts=2, delay=1))
        await world.advance(minutes=5)
        assert (await app.get(job.id)).state == "failed"
        await app.replay(job.id)
        await world.advance(minutes=5)
        assert (await app.get(job.id)).state == "completed"
    assert provider.sent == [["a", "b"], ["b"], ["b"]]


@pytest.mark.parametrize(("unknown", "sent"), [("retry", [["b"]]), ("leave", [])])
def test_after_a_node_that_died_what_it_was_sending_is_unknown(unknown: str, sent: list[list[str]]) -> None:
    """`a` is known to have it from an attempt before; of `b` the dead node said nothing."""

    async def body() -> None:
        provider = Scripted()
        target = PushTarget(lambda: provider, lambda: delivery().fired_at)
        known = [{"fate": "accepted", "id": "1"}, None]
        earlier: list[dict[str, Any]] = [
            {"attempt": 1, "code": "PUSH_INCOMPLETE", "progress": {"targets": known}},
            {"attempt": 2, "code": "LEASE_LOST"},
        ]
        options = target.check({"tokens": ["a", "b"], "title": "Hi", "unknown": unknown})
        outcome = await target.deliver(delivery(earlier=earlier), options)
        assert provider.sent == sent
        assert outcome.delivered
        assert outcome.result["unknown"] == (unknown == "leave")

    asyncio.run(body())


BIBLE = {"division": "bible", "version": 0, "bible_code": 3, "chapter": 22, "section": 29, "landing_url": None}


@virtual
async def test_the_bible_app_reads_the_names_it_knows(world: World) -> None:
    """Stored as bible_code, read as bibleCode; 0 is a value, null is left out, and all are strings."""
    provider = Scripted()
    rename = {"bible_code": "bibleCode", "landing_url": "landingUrl"}
    await pushed(world, provider, tokens=["a"], payload=BIBLE, fields={"rename": rename})
    assert b'"data":{"division":"bible","version":"0","bibleCode":"3","chapter":"22","section":"29"}' in (
        provider.seen[0].content.rest
    )


def test_the_preview_is_the_request_to_the_letter() -> None:
    target = PushTarget(Scripted, lambda: delivery().fired_at)
    options = target.check({"tokens": ["phone-0001", "phone-0002"], "title": "{{payload.title}}", "ttl": 60})
    shown = target.preview(delivery(payload={"title": "약 먹기"}), options)
    assert shown["requests"] == 2
    assert json.loads(shown["body"])["message"] == {
        "token": "phone-0001",
        "notification": {"title": "약 먹기"},
        "android": {"ttl": "60s", "notification": {"tag": "job"}},
        "apns": {"headers": {"apns-expiration": "1803902460", "apns-collapse-id": "job"}},
        "webpush": {"headers": {"TTL": "60"}},
    }


@virtual
async def test_texts_are_filled_in_from_the_payload(world: World) -> None:
    provider = Scripted()
    await pushed(
        world, provider, tokens="{{payload.devices}}", title="Shift at {{payload.at}}",
        data={"shift": "{{payload.shift|string}}", "room": "{{payload.room?|string}}"},
        notificationId="shift-{{payload.shift}}", payload={"devices": ["x", "y"], "at": "09:00", "shift": 0},
    )  # fmt: skip
    assert provider.sent == [["x", "y"]]
    rest = provider.seen[0].content.rest
    assert b'"title":"Shift at 09:00"' in rest
    assert b'"data":{"shift":"0","notificationId":"shift-0"}' in rest
    assert b'"tag":"shift-0"' in rest


@virtual
async def test_what_the_payload_lacks_is_told_when_the_job_is_made(world: World) -> None:
    provider = Scripted()
    with pytest.raises(InvalidInput) as refused:
        await pushed(world, provider, tokens=["a"], data={"x": "{{payload.x}}"}, payload={})
    assert refused.value.code == "BODY_UNFIT"
    assert provider.sent == []


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"title": "t"}, "TARGET_OPTIONS_INVALID"),
        ({"tokens": ["a"], "topic": "b", "title": "t"}, "TARGET_OPTIONS_INVALID"),
        ({"tokens": [], "title": "t"}, "TARGET_OPTIONS_INVALID"),
        ({"tokens": [f"t{n}" for n in range(501)], "title": "t"}, "TARGET_OPTIONS_INVALID"),
        ({"tokens": ["a b"], "title": "t"}, "PUSH_MESSAGE_INVALID"),
        ({"tokens": ["a"]}, "PUSH_MESSAGE_INVALID"),
        ({"tokens": ["a"], "title": 3}, "TARGET_OPTIONS_INVALID"),
        ({"tokens": ["a"], "title": "t", "ttl": "1h"}, "TARGET_OPTIONS_INVALID"),
        ({"tokens": ["a"], "title": "t", "ttl": -1}, "PUSH_MESSAGE_INVALID"),
        ({"tokens": ["a"], "title": "t", "data": {"n": 1}}, "PUSH_MESSAGE_INVALID"),
        ({"tokens": ["a"], "title": "t", "data": {"from": "1"}}, "PUSH_MESSAGE_INVALID"),
        ({"tokens": ["a"], "body": "x" * 4097}, "PUSH_MESSAGE_TOO_LARGE"),
        ({"topic": "t", "body": "x" * 2049}, "PUSH_MESSAGE_TOO_LARGE"),
        ({"topic": "a b", "title": "t"}, "PUSH_MESSAGE_INVALID"),
        ({"condition": "news", "title": "t"}, "PUSH_MESSAGE_INVALID"),
        ({"tokens": ["a"], "title": "{{payload"}, "TEMPLATE_INVALID"),
        ({"tokens": ["a"], "title": "t", "unknown": "guess"}, "TARGET_OPTIONS_INVALID"),
        ({"tokens": ["a"], "title": "t", "fields": {"strings": True}}, "TARGET_OPTIONS_INVALID"),
        ({"tokens": ["a"], "title": "t", "colour": "red"}, "TARGET_OPTIONS_INVALID"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        PushTarget(Scripted, lambda: delivery().fired_at).check(options)
    assert refused.value.code == code


@virtual
async def test_a_bad_job_is_refused_before_anything_is_written(world: World) -> None:
    app = app_with(world, Scripted())
    with pytest.raises(InvalidInput):
        await app.schedule_at("push.hello", target={"kind": "push", "topic": "a b", "title": "t"})
    assert await jobs(app) == []


@virtual
async def test_without_credentials_it_says_what_to_set(world: World) -> None:
    with pytest.raises(Refused, match="TIMEBELL_FCM_CREDENTIALS_FILE") as refused:
        await world.app().schedule_at("push.hello", target={"kind": "push", "tokens": ["a"], "title": "t"})
    assert refused.value.code == "FCM_CREDENTIALS_MISSING"


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> None:
    from timebell.targets.push import google

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


def test_from_the_settings_to_the_phone(
    store_url: str, fcm: FakeFcm, monkeypatch: pytest.MonkeyPatch, run_app: Callable[..., None]
) -> None:
    """All of it, over the wire, on both stores: some accepted, one dead, one that FCM takes at the second try."""
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
