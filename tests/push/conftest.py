"""One fake FCM for a file of tests, as new for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from timebell import Timebell
from timebell.targets.push.fcm import FcmProvider
from timebell.testing.fcm import FakeFcm


@pytest.fixture(scope="module")
def server() -> Iterator[FakeFcm]:
    with FakeFcm() as fcm:
        yield fcm


@pytest.fixture
def fcm(server: FakeFcm) -> FakeFcm:
    server.reset()
    return server


@pytest.fixture(autouse=True)
def _soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timebell.targets.push.fcm.LAST_WORDS", 0.2)


@pytest.fixture
def provider(fcm: FakeFcm) -> Callable[..., FcmProvider]:
    """Makes a provider that speaks to it."""

    def make(**options: Any) -> FcmProvider:
        given = {"now": lambda: datetime.now(UTC), "url": fcm.url, "ca": fcm.ca, **options}
        return FcmProvider(given.pop("credentials", fcm.credentials), **given)

    return make


@pytest.fixture
def run_app() -> Callable[[str, Callable[[Timebell], Coroutine[Any, Any, None]]], None]:
    """Runs a body with an app whose engine is running, on the machine's own clock."""

    def run(url: str, body: Callable[[Timebell], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            app = Timebell(url, timezone="UTC")
            try:
                async with app.running():
                    await asyncio.wait_for(body(app), 60)
            finally:
                await app.close()

        asyncio.run(main())

    return run
