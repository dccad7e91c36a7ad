"""An FCM emulator, and an app on each store that sends campaigns to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from timebell import Timebell
from timebell_fcm_emulator import FakeFcm

Body = Callable[[Timebell, Any], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeFcm]:
    with FakeFcm() as fcm:
        yield fcm


@pytest.fixture
def fcm(server: FakeFcm, monkeypatch: pytest.MonkeyPatch) -> FakeFcm:
    server.reset()
    monkeypatch.setenv("TIMEBELL_FCM_CREDENTIALS", server.credentials)
    monkeypatch.setenv("TIMEBELL_FCM_URL", server.url)
    monkeypatch.setenv("SSL_CERT_FILE", server.ca)
    return server


@pytest.fixture
def run(store_url: str, fcm: FakeFcm) -> Callable[[Body], None]:
    """Return a function that runs a coroutine with an app and its running service."""

    def run(body: Body) -> None:
        async def main() -> None:
            app = Timebell(store_url, timezone="UTC")
            try:
                async with app.running() as service:
                    await asyncio.wait_for(body(app, service), 60)
            finally:
                await app.close()

        asyncio.run(main())

    return run
