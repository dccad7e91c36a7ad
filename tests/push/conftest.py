"""An FCM emulator per test module, reset before each test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from timebell import Timebell
from timebell.features.campaigns.push.fcm import FcmProvider
from timebell_fcm_emulator import FakeFcm


@pytest.fixture(scope="module")
def server() -> Iterator[FakeFcm]:
    with FakeFcm() as fcm:
        yield fcm


@pytest.fixture
def fcm(server: FakeFcm) -> FakeFcm:
    server.reset()
    return server


@pytest.fixture(autouse=True)
def _short_cancel_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timebell.features.campaigns.push.fcm.CANCEL_GRACE_SECONDS", 0.2)


@pytest.fixture
def provider(fcm: FakeFcm) -> Callable[..., FcmProvider]:
    """Return a factory of providers that send to the emulator."""

    def make(**options: Any) -> FcmProvider:
        defaults = {"now": lambda: datetime.now(UTC), "url": fcm.url, "ca": fcm.ca, **options}
        return FcmProvider(defaults.pop("credentials", fcm.credentials), **defaults)

    return make


@pytest.fixture
def run_app() -> Callable[[str, Callable[[Timebell], Coroutine[Any, Any, None]]], None]:
    """Return a function that runs a coroutine with an app and its running engine, on the system clock."""

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
