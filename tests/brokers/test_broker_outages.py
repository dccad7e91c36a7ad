"""An unavailable, full or unauthorized broker delays jobs and loses none; invalid configurations are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from redis.asyncio import Redis as Client

from tests.brokers.node import until
from tests.brokers.scene import Scene, scene
from tests.servers import Redis
from timebell import Timebell
from timebell.errors import InvalidInput, Refused
from timebell.targets import brokers

TARGETS = {
    "bullmq": {"kind": "bullmq", "queue": "mail"},
    "celery": {"kind": "celery"},
    "redis-stream": {"kind": "redis-stream", "stream": "due"},
}
kinds = pytest.mark.parametrize("kind", TARGETS)
ONE_TRY = {"attempts": 1}


def urls(url: str | None) -> dict[str, Any]:
    return {f"broker_{kind.replace('-', '_')}_url": url for kind in TARGETS}


async def delayed(here: Scene, kind: str, code: str) -> str:
    """Create a job with one attempt; return its id after repeated failures with this code used no attempt."""
    id_ = await here.due("mail.digest", TARGETS[kind], retry=ONE_TRY)

    async def twice() -> bool:
        seen = await here.app.get(id_)
        assert seen.state in ("pending", "running"), seen
        assert seen.attempts_used == 0
        return [line["code"] for line in seen.attempts].count(code) > 1

    await until(twice, about=lambda: code)
    return id_


@kinds
async def test_an_unavailable_queue_delays_jobs_and_loses_none(kind: str, sqlite_url: str, frail_redis: Redis) -> None:
    async with scene(sqlite_url, **urls(frail_redis.url)) as here:
        await here.job(await here.due("mail.digest", TARGETS[kind]), "completed")  # establishes the connection
        frail_redis.stop()
        late = await delayed(here, kind, "BROKER_UNREACHABLE")
        frail_redis.start()
        done = await here.job(late, "completed")
        assert done.result["messageId"] == late
        errors = [line["error"] for line in done.attempts if line["error"] is not None]  # instants contain digits, too
        assert errors
        assert str(frail_redis.port) not in str(errors)


@kinds
async def test_wrong_credentials_delay_jobs_and_the_error_hides_the_password(
    kind: str, sqlite_url: str, frail_redis: Redis
) -> None:
    async with scene(sqlite_url, **urls(frail_redis.url.replace("open-sesame", "hunter2"))) as here:
        late = await delayed(here, kind, "BROKER_REFUSED")
        assert "hunter2" not in str((await here.app.get(late)).attempts)


@kinds
async def test_a_full_redis_delays_jobs(kind: str, sqlite_url: str, redis: Redis) -> None:
    async with scene(sqlite_url, **urls(redis.url)) as here, Client.from_url(redis.url) as client:
        await client.set("ballast", b"x" * 4_000_000)
        await client.config_set("maxmemory", "1mb")
        try:
            late = await delayed(here, kind, "BROKER_UNREACHABLE")
        finally:
            await client.config_set("maxmemory", "0")
        await here.job(late, "completed")


@kinds
async def test_an_invalid_url_delays_jobs_and_is_reported(kind: str, sqlite_url: str) -> None:
    async with scene(sqlite_url, **urls("gopher://127.0.0.1:1/0")) as here:
        await delayed(here, kind, "BROKER_REFUSED")


@kinds
async def test_without_its_extra_a_kind_is_refused_and_not_offered(
    kind: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = brokers.find_spec
    package = brokers.KINDS[kind].package
    monkeypatch.setattr(brokers, "find_spec", lambda name: None if name == package else found(name))
    with caplog.at_level(logging.WARNING, "timebell.wiring"):
        async with scene(sqlite_url, **urls("redis://127.0.0.1:1/0")) as here:
            assert kind not in here.app._targets_by_kind
            with pytest.raises(Refused, match=rf'pip install "timebell\[{brokers.KINDS[kind].extra}\]"') as refused:
                await here.due("mail.digest", TARGETS[kind])
            assert refused.value.code == "EXTRA_MISSING"
            assert not (await here.app.list()).items
    assert f"target {kind} is configured" in caplog.text


@kinds
async def test_a_kind_without_a_connection_is_refused(kind: str, sqlite_url: str) -> None:
    app = Timebell(sqlite_url)
    with pytest.raises(Refused, match=f"TIMEBELL_BROKER_{kind.upper().replace('-', '_')}_URL") as refused:
        await app.schedule_at("a", timezone="UTC", target=TARGETS[kind])
    assert refused.value.code == "BROKER_NOT_CONFIGURED"
    await app.close()


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("bullmq", {"queue": None}), ("bullmq", {"queue": "a:b"}), ("bullmq", {"queue": ""}),
        ("bullmq", {"queue": "x" * 201}), ("bullmq", {"jobName": 7}), ("bullmq", {"prefix": " a"}),
        ("bullmq", {"connection": "redis://10.0.0.1"}), ("bullmq", {"url": "redis://10.0.0.1"}),
        ("bullmq", {"ack": "maybe"}), ("bullmq", {"ack": ["reported"]}), ("bullmq", {"body": "xml"}),
        ("bullmq", {"body": {}}), ("celery", {"task": "a\nb"}), ("celery", {"body": "cloudevents"}),
        ("redis-stream", {"stream": 1}), ("redis-stream", {"maxLength": 0}), ("redis-stream", {"maxLength": True}),
        ("redis-stream", {"maxLength": "10"}), ("redis-stream", {"maxLength": 10**12}),
    ],
)  # fmt: skip
async def test_invalid_options_are_refused_before_anything_is_written(
    kind: str, bad: dict[str, Any], sqlite_url: str
) -> None:
    async with scene(sqlite_url, **urls("redis://127.0.0.1:1/0")) as here:
        with pytest.raises(InvalidInput) as refused:
            await here.due("mail.digest", TARGETS[kind] | bad)
        assert refused.value.code == "INVALID_TARGET_OPTIONS"
        assert not (await here.app.list()).items


async def test_reports_require_a_secret_key(sqlite_url: str) -> None:
    async with scene(sqlite_url, **urls("redis://127.0.0.1:1/0")) as here:
        other = Timebell(sqlite_url)
        other.settings = here.app.settings.__class__(**urls("redis://127.0.0.1:1/0"), database_url=sqlite_url)
        with pytest.raises(Refused) as refused:
            await other.schedule_at("a", timezone="UTC", target=TARGETS["bullmq"] | {"ack": "reported"})
        assert refused.value.code == "SECRET_KEY_MISSING"
        await other.close()


async def test_named_targets_can_use_another_server(sqlite_url: str, redis: Redis, frail_redis: Redis) -> None:
    servers = {"here": redis.url, "there": frail_redis.url}
    options = {"queue": "mail", "ack": "reported"}
    async with scene(sqlite_url, broker_bullmq_url=f"{redis.url} shop={frail_redis.url}") as here:
        await here.app.targets.put("here", "bullmq", options)
        await here.app.targets.put("there", "bullmq", options | {"connection": "shop"})
        ids = {name: await here.due("mail.digest", {"name": name}) for name in servers}

        async def queued(name: str) -> bool:
            async with Client.from_url(servers[name], decode_responses=True) as client:
                return bool(await client.lrange("bull:mail:wait", 0, -1) == [ids[name]])

        for name, id_ in ids.items():
            await here.job(id_, "dispatched")
            assert await queued(name)
        async with Client.from_url(frail_redis.url) as client:
            await client.flushall()
        await until(
            lambda: here.service.repair_report.repairs.get("message") == 1, about=lambda: here.service.repair_report
        )
        assert await queued("there")
        here.app._named_targets_by_kind["bullmq"]._urls.pop("shop")  # type: ignore[attr-defined] # as on a node without this setting
        late = await here.due("mail.digest", {"name": "there"}, retry=ONE_TRY)

        async def put_off() -> bool:
            seen = await here.app.get(late)
            assert (seen.state in ("pending", "running"), seen.attempts_used) == (True, 0), seen
            return "BROKER_NOT_CONFIGURED" in [line["code"] for line in seen.attempts]

        await until(put_off)
