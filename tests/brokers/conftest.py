"""A Redis server per test process, empty for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import redis as client

from tests.coroutines import pytest_pyfunc_call as pytest_pyfunc_call
from tests.servers import Redis
from timebell.engine.leader import broker_reconciler
from timebell.model import decide


@pytest.fixture(scope="session")
def one_redis() -> Iterator[Redis]:
    server = Redis(os.environ.get("TIMEBELL_TEST_REDIS_URL"))
    yield server
    server.close()


@pytest.fixture
def redis(one_redis: Redis) -> Redis:
    """Return an empty Redis."""
    flush(one_redis)
    return one_redis


@pytest.fixture
def frail_redis() -> Iterator[Redis]:
    """Return a Redis with a password that a test may stop."""
    server = Redis(password="open-sesame")
    yield server
    server.close()


def flush(server: Redis) -> None:
    """FLUSHALL."""
    with client.Redis.from_url(server.url) as connection:
        connection.flushall()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the reconcile interval and the outage pause."""
    monkeypatch.setattr(broker_reconciler, "RECONCILE_INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(decide, "MAX_OUTAGE_PAUSE_SECONDS", 0.2)
