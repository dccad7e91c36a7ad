"""A Timebell behind its HTTP API, on each store in turn: `web` is open to this machine, `locked` wants keys."""

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
    """`async with make() as web:` serves an app of this store; options go to the server."""

    @asynccontextmanager
    async def served(
        *, open_here: bool = True, clock: VirtualClock | None = None, **options: Any
    ) -> AsyncIterator[Web]:
        app = Timebell(store_url, clock=clock, **options)
        app.settings = replace(app.settings, secret_key=SECRET)
        site = server.Site(app, [health.router(app), v1.routes], open_here=open_here)
        transport = httpx2.ASGITransport(app=site, client=("127.0.0.1", 50_000))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700/api/v1") as client:
            try:
                yield Web(app, client, site)
            finally:
                await app.close()

    return served
