"""Conformance of the Redis targets."""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis as client

from tests.servers import Redis, free_port
from timebell.targets.brokers import create_broker
from timebell.testing.targets import Received, Scene, TargetConformance

PASSWORD = "open-sesame"
UNREACHABLE_URL = f"redis://:{PASSWORD}@127.0.0.1:%d/0"


class OverRedis(TargetConformance, ABC):
    """A target kind, its options, and a reader of its queue."""

    kind: str
    options: dict[str, Any]
    bad: tuple[dict[str, Any], ...] = ()

    @abstractmethod
    def read(self, connection: Any) -> list[Received]:
        """Return the messages in the queue, in order."""

    @pytest.fixture(autouse=True)
    def _empty(self, redis: Redis) -> None:
        self.redis = redis

    @asynccontextmanager
    async def scene(self) -> AsyncIterator[Scene]:
        def made(url: str) -> Any:
            return create_broker(self.kind, url, server="http://127.0.0.1:1", secret_key="k" * 40)

        with client.Redis.from_url(self.redis.url, decode_responses=True) as connection:
            yield Scene(
                made(self.redis.url), self.options, lambda: self.read(connection), invalid_options=self.bad,
                unreachable=(made(UNREACHABLE_URL % free_port()), self.options), secrets=[PASSWORD],
            )  # fmt: skip


class TestRedisStream(OverRedis):
    kind = "redis-stream"
    options = {"stream": "due"}
    bad = ({}, {"stream": ""}, {"stream": "due", "maxLength": 0}, {"stream": "due", "ack": "maybe"})

    def read(self, connection: Any) -> list[Received]:
        return [Received(json.loads(one["body"])["payload"], one["id"]) for _, one in connection.xrange("due")]


class TestRedisStreamReported(TestRedisStream):
    """A stream with a template and a reporting worker."""

    options = {
        "stream": "due", "ack": "reported", "template": {"payload": "{{payload}}", "to": "{{report.token}}"},
    }  # fmt: skip


class TestBullmq(OverRedis):
    kind = "bullmq"
    options = {"queue": "due"}
    bad = ({}, {"queue": "a:b"}, {"queue": "due", "template": "{{nothing}}"})

    def read(self, connection: Any) -> list[Received]:
        ids = reversed(connection.lrange("bull:due:wait", 0, -1))
        return [Received(json.loads(connection.hget(f"bull:due:{id_}", "data"))["payload"], id_) for id_ in ids]


class TestCelery(OverRedis):
    kind = "celery"
    options = {"task": "due"}
    bad = ({"task": "a\nb"}, {"template": {}}, {"body": "cloudevents"})

    def read(self, connection: Any) -> list[Received]:
        messages = [json.loads(one) for one in reversed(connection.lrange("celery", 0, -1))]
        return [Received(json.loads(base64.b64decode(one["body"]))[1], one["headers"]["id"]) for one in messages]
