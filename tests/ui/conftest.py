"""Fixtures that serve the dashboard of an app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from tests.api.web import SECRET
from tests.coroutines import pytest_pyfunc_call as pytest_pyfunc_call
from timebell import Timebell
from timebell.api import health, server, v1
from timebell.clock import VirtualClock
from timebell.dashboard import site, views
from timebell.tenancy import passwords
from timebell_fcm_emulator import FakeFcm

from . import hostile_data
from .browser import Browser


@pytest.fixture
def serve(store_url: str) -> Callable[..., Any]:
    """`async with serve() as browser:` serves an app on this store; `allow_local` as in `timebell dev`."""
    return _server(store_url)


@pytest.fixture
def serve_sqlite(sqlite_url: str) -> Callable[..., Any]:
    """Like `serve`, on SQLite only, for tests that do not depend on the store."""
    return _server(sqlite_url)


def _server(url: str) -> Callable[..., Any]:
    @asynccontextmanager
    async def served(
        *, allow_local: bool = False, clock: VirtualClock | None = None, app: Timebell | None = None
    ) -> AsyncIterator[Browser]:
        app = app or Timebell(url, clock=clock)
        app.settings = replace(app.settings, secret_key=SECRET)
        web = server.HttpApp(
            app,
            [health.router(app), v1.build_routes(app.features), site.build_routes(app.features)],
            allow_local=allow_local,
        )
        transport = httpx2.ASGITransport(app=web, client=("127.0.0.1", 50_000))
        async with httpx2.AsyncClient(transport=transport, base_url="https://127.0.0.1:8700") as client:
            try:
                yield Browser(app, client, web)
            finally:
                await app.close()

    return served


@pytest.fixture(scope="module")
def phones() -> Iterator[FakeFcm]:
    """Fake FCM to which campaigns are sent."""
    with FakeFcm() as fcm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostile_data, "FCM", {"fcm_credentials": fcm.credentials, "fcm_url": fcm.url})
        patch.setenv("SSL_CERT_FILE", fcm.ca)
        yield fcm


@pytest.fixture(autouse=True)
def _fast_passwords_and_long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash passwords with a low cost, and tolerate slow pages on a busy machine."""
    monkeypatch.setattr(passwords, "SCRYPT_N", 16)
    monkeypatch.setattr(views, "PAGE_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(health, "STORE_TIMEOUT_SECONDS", 60.0)
