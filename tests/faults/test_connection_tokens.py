"""A node that is killed while it renews the token of a connection: another node renews it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.monday_stand_in import board
from timebell import Timebell
from timebell.features.triggers.engine.connection_tokens import ConnectionToken
from timebell.observe.counters import Counters

SECRET = "a secret key of the tests, long enough"
NODE = f"""
import asyncio, sys
from datetime import timedelta
from types import SimpleNamespace
from timebell import Timebell
from timebell.features.triggers.engine import connection_tokens
from timebell.observe.counters import Counters

connection_tokens.RENEWAL_LEASE = timedelta(seconds=3)

async def main():
    app = Timebell(sys.argv[1])
    await app.open()
    counters = Counters.for_features(app.features)
    node = SimpleNamespace(store=app.store, clock=app.clock, secret_key={SECRET!r}, counters=counters)
    await connection_tokens.ConnectionToken(node, "default", "monday")()

asyncio.run(main())
"""


def test_a_killed_token_renewal_is_done_by_another_node(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ours.db"
    asked, hung = threading.Event(), threading.Event()

    def first_hangs(sent: dict[str, str]) -> tuple[int, Any]:
        if not asked.is_set():
            asked.set()
            hung.wait(180)
        return 200, {"access_token": "fresh", "refresh_token": "next", "expires_in": 3600}

    async def begin(app: Timebell, token_url: str) -> None:
        app.settings = replace(app.settings, secret_key=SECRET)
        await app.connections.put("monday", "stale", "once", expires_in=0, token_url=token_url)

    async def survive(app: Timebell) -> None:
        node: Any = SimpleNamespace(
            store=app.store, clock=app.clock, secret_key=SECRET, counters=Counters.for_features(app.features)
        )
        before = await app.connections.get("monday")
        assert (before.state, before.version) == ("ready", 1)
        assert before.renewing_until is not None
        async with asyncio.timeout(120):
            assert await ConnectionToken(node, "default", "monday")() == "fresh"
        assert app.clock.now() >= before.renewing_until  # not before the lease of the killed node expired
        after = await app.connections.get("monday")
        assert (after.state, after.version, after.renewing_until) == ("ready", 2, None)

    async def run(step: Any, *args: Any) -> None:
        app = Timebell(url)
        try:
            await step(app, *args)
        finally:
            await app.close()

    with board() as monday:
        monday.renews = first_hangs
        asyncio.run(run(begin, f"{monday.url}/token"))
        node = subprocess.Popen([sys.executable, "-c", NODE, url], cwd=tmp_path)
        try:
            assert asked.wait(120)
        finally:
            node.send_signal(signal.SIGKILL)
            node.wait(60)
        asyncio.run(run(survive))
        hung.set()
        assert [one["refresh_token"] for one in monday.renewals] == ["once", "once"]
