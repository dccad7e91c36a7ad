"""A Timebell behind its dashboard."""

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
from timebell.testing.fcm import FakeFcm

from . import stock
from .browsing import Browser


@pytest.fixture
def make(store_url: str) -> Callable[..., Any]:
    """`async with make() as browser:` serves an app of this store; `open_here` as in `dev`."""
    return _maker(store_url)


@pytest.fixture
def make_light(sqlite_url: str) -> Callable[..., Any]:
    """The same on SQLite alone, for what no store decides."""
    return _maker(sqlite_url)


def _maker(url: str) -> Callable[..., Any]:
    @asynccontextmanager
    async def served(
        *, open_here: bool = False, clock: VirtualClock | None = None, app: Timebell | None = None
    ) -> AsyncIterator[Browser]:
        app = app or Timebell(url, clock=clock)
        app.settings = replace(app.settings, secret_key=SECRET)
        web = server.Site(app, [health.router(app), v1.routes, site.routes], open_here=open_here)
        transport = httpx2.ASGITransport(app=web, client=("127.0.0.1", 50_000))
        async with httpx2.AsyncClient(transport=transport, base_url="https://127.0.0.1:8700") as client:
            try:
                yield Browser(app, client, web)
            finally:
                await app.close()

    return served


@pytest.fixture(scope="module")
def phones() -> Iterator[FakeFcm]:
    """A fake FCM that campaigns go to."""
    with FakeFcm() as fcm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock, "FCM", {"fcm_credentials": fcm.credentials, "fcm_url": fcm.url})
        patch.setenv("SSL_CERT_FILE", fcm.ca)
        yield fcm


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for a password is for those who guess; and a busy machine may take its time for a page."""
    monkeypatch.setattr(passwords, "N", 16)
    for asked in (views, health):
        monkeypatch.setattr(asked, "PATIENCE", 60.0)
