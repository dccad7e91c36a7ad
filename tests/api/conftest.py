"""Fixtures of the HTTP API tests: an app behind its API, on each store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from tests.coroutines import pytest_pyfunc_call as pytest_pyfunc_call
from timebell import Timebell
from timebell.api import health, server, v1
from timebell.clock import VirtualClock

from .web import SECRET, Web


@pytest.fixture
def make(store_url: str) -> Callable[..., Any]:
    """Return a context manager: `async with make() as web:` serves an app of this store.

    With `open_here`, clients on this machine need no key. Other options are passed to Timebell.
    """

    @asynccontextmanager
    async def served(
        *, open_here: bool = True, clock: VirtualClock | None = None, **options: Any
    ) -> AsyncIterator[Web]:
        app = Timebell(store_url, clock=clock, **options)
        app.settings = replace(app.settings, secret_key=SECRET)
        site = server.HttpApp(app, [health.router(app), v1.build_routes(app.features)], allow_local=open_here)
        transport = httpx2.ASGITransport(app=site, client=("127.0.0.1", 50_000))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700/api/v1") as client:
            try:
                yield Web(app, client, site)
            finally:
                await app.close()

    return served
