"""/metrics, /livez and /readyz: who is told what, and when a process is not ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx2
import pytest

from tests.servers import free_port
from tests.unit.cli.conftest import Start, start
from tests.unit.cli.test_serve import get
from timebell import Timebell
from timebell.api import health, metrics, server
from timebell.clock import wall
from timebell.engine.planner import Planner
from timebell.engine.worker import Worker
from timebell.store import open as opening
from timebell.store.cluster import gauges

__all__ = ["start"]

NEAR, FAR = ("127.0.0.1", 1), ("203.0.113.9", 1)
Ask = Callable[..., Coroutine[Any, Any, httpx2.Response]]


def served(url: str, test: Callable[[Timebell, Ask], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a test beside a running engine whose endpoints it can ask, from near or from far."""

    async def body() -> None:
        app = Timebell(url, timezone="UTC")
        web = server.Site(app, [health.router(app), metrics.router(app)])

        async def ask(path: str, client: tuple[str, int] = NEAR, **headers: str) -> httpx2.Response:
            transport = httpx2.ASGITransport(app=web, client=client)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
                return await http.get(path, headers=headers)

        async with app.running(**{"heartbeat": 0.2, "lease": 5.0, "drain": 0.0, **options}):
            await test(app, ask)
        await app.close()

    asyncio.run(body())


def test_anonymous_strangers_learn_no_versions(sqlite_url: str) -> None:
    async def test(app: Timebell, ask: Ask) -> None:
        told = (await ask("/readyz?verbose")).json()
        assert {"version", "schema", "tzdata", "node"} <= set(told)
        for answer in (
            await ask("/readyz?verbose", FAR),
            await ask("/readyz?verbose", NEAR, **{"X-Forwarded-For": "203.0.113.9"}),
            await ask("/readyz?verbose", ("::ffff:203.0.113.9", 1)),
        ):
            assert (answer.status_code, answer.json()) == (200, {"status": "ready"})

    served(sqlite_url, test)


def test_strangers_learn_no_reasons_and_addresses(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(app: Timebell, ask: Ask) -> None:
        for module in (health, opening):
            monkeypatch.setattr(module, "HEAD", "9999")
        near, far = await ask("/readyz"), await ask("/readyz", FAR)
        assert (near.status_code, far.status_code) == (503, 503)
        assert near.json()["code"] == far.json()["code"] == "DATABASE_NOT_UPGRADED"
        assert "needs" in near.json()["detail"]
        assert "000" not in far.json()["detail"] + far.json()["title"]

    served(sqlite_url, test)


@pytest.mark.parametrize("service", [Planner, Worker])
def test_a_process_whose_loop_is_stuck_is_not_ready(
    service: type[Any], sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = service.step

    async def step(self: Any) -> Any:
        if stuck:
            await asyncio.sleep(60)
        return await turn(self)

    stuck: list[bool] = []
    monkeypatch.setattr(service, "step", step)
    monkeypatch.setattr(health, "PATIENCE", 0.5)

    async def test(app: Timebell, ask: Ask) -> None:
        async def says(code: str | None, who: str = "") -> None:
            """A machine that stands still for half a second says something else meanwhile."""
            async with asyncio.timeout(40):
                while (answer := (await ask("/readyz")).json()).get("code") != code or who not in str(answer):
                    await asyncio.sleep(0.05)

        await says(None)
        stuck.append(True)
        await says("ENGINE_STUCK", f"The {service.__name__.lower()} ")

    served(sqlite_url, test)


def test_a_node_whose_clock_is_far_off_is_not_ready(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    async def test(app: Timebell, ask: Ask) -> None:
        assert (await ask("/readyz")).status_code == 200
        monkeypatch.setattr(health, "wall", lambda: wall() + timedelta(seconds=6))
        assert (await ask("/readyz")).json()["code"] == "CLOCK_SKEWED"
        monkeypatch.setattr(health, "wall", lambda: wall() - timedelta(seconds=4))
        assert (await ask("/readyz")).status_code == 200

    served(sqlite_url, test)


def test_scraping_reads_the_database_once_in_a_while(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = gauges.read

    def counting(*args: Any, **options: Any) -> gauges.Gauges:
        if "labelled" in options:  # else it is the leader that looks
            reads.append(1)
        return read(*args, **options)

    async def test(app: Timebell, ask: Ask) -> None:
        monkeypatch.setattr(gauges, "read", counting)
        monkeypatch.setattr(metrics, "FRESH", 60.0)
        answers = await asyncio.gather(*(ask("/metrics") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert "timebell_database_up 1.0" in answers[-1].text
        assert len(reads) == 1

    served(store_url, test)


def test_a_scrape_outlives_the_database(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        from timebell.errors import StoreUnreachable

        raise StoreUnreachable("gone")

    async def test(app: Timebell, ask: Ask) -> None:
        monkeypatch.setattr(gauges, "read", broken)
        answer = await ask("/metrics")
        assert answer.status_code == 200
        assert "timebell_database_up 0.0" in answer.text
        assert "timebell_fire_lag_seconds_count" in answer.text
        assert "timebell_queue_depth" not in answer.text

    served(store_url, test)


def test_openmetrics_is_told_to_who_asks_for_it(sqlite_url: str) -> None:
    async def test(app: Timebell, ask: Ask) -> None:
        answer = await ask("/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert answer.text.endswith("# EOF\n")

    served(sqlite_url, test)


def test_metrics_are_on_the_common_port_only_of_a_loopback_address(start: Start) -> None:
    port = free_port()
    process = start("run", "--port", port)
    process.wait_for("Ready in", err=True)
    status, text = get(port, "/metrics")
    assert (status, "timebell_build_info{" in text) == (200, True)
    assert process.end() == 0


def test_metrics_of_a_public_process_are_on_a_listener_of_their_own(start: Start) -> None:
    """S84."""
    port, apart = free_port(), free_port()
    process = start("run", "--host", "0.0.0.0", "--port", port, TIMEBELL_METRICS_PORT=str(apart))
    process.wait_for("Ready in", err=True)
    assert get(port, "/metrics")[0] == 404
    assert get(port, "/livez")[0] == 200
    status, text = get(apart, "/metrics")
    assert (status, "timebell_leader" in text) == (200, True)
    assert get(apart, "/livez")[0] == 404
    assert process.end() == 0
