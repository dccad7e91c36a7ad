"""/metrics, /livez and /readyz: their contents for local and remote clients, and when a process is not ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any

import httpx2
import pytest

from tests.servers import free_port
from tests.unit.cli.conftest import Start, start
from tests.unit.cli.test_serve import get
from timebell import Timebell
from timebell.api import health, metrics, server
from timebell.clock import system_now
from timebell.engine.heartbeat import Heartbeat
from timebell.engine.planner import Planner
from timebell.engine.worker import Worker
from timebell.store import open as opening
from timebell.store import version as schema
from timebell.store.cluster import gauges

__all__ = ["start"]

LOCAL, REMOTE = ("127.0.0.1", 1), ("203.0.113.9", 1)
Request = Callable[..., Coroutine[Any, Any, httpx2.Response]]


def served(url: str, test: Callable[[Timebell, Request], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a test with a running engine and a function that requests its endpoints from a local or remote address."""

    async def body() -> None:
        app = Timebell(url, timezone="UTC")
        web = server.HttpApp(app, [health.router(app), metrics.router(app)])

        async def request(path: str, client: tuple[str, int] = LOCAL, **headers: str) -> httpx2.Response:
            transport = httpx2.ASGITransport(app=web, client=client)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
                return await http.get(path, headers=headers)

        async with app.running(**{"heartbeat": 0.2, "lease": 5.0, "drain": 0.0, **options}):
            await test(app, request)
        await app.close()

    asyncio.run(body())


async def code_is(request: Request, code: str | None, component: str = "") -> None:
    """Poll until the code of /readyz is expected: a machine that stalls briefly reports another code meanwhile."""
    async with asyncio.timeout(40):
        while (answer := (await request("/readyz")).json()).get("code") != code or component not in str(answer):
            await asyncio.sleep(0.05)


def test_remote_clients_get_no_versions(sqlite_url: str) -> None:
    async def test(app: Timebell, request: Request) -> None:
        await code_is(request, None)
        details = (await request("/readyz?verbose")).json()
        assert {"version", "schema", "tzdata", "node"} <= set(details)
        assert app.service is not None
        assert details["nodeId"] == app.service.node.id
        for answer in (
            await request("/readyz?verbose", REMOTE),
            await request("/readyz?verbose", LOCAL, **{"X-Forwarded-For": "203.0.113.9"}),
            await request("/readyz?verbose", ("::ffff:203.0.113.9", 1)),
        ):
            assert (answer.status_code, answer.json()) == (200, {"status": "ready"})

    served(sqlite_url, test)


def test_concurrent_probes_share_one_check(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(app: Timebell, request: Request) -> None:
        await code_is(request, None)
        read_clock, reads = app.store.read_clock, 0

        async def count_reads() -> datetime:
            nonlocal reads
            reads += 1
            return await read_clock()

        monkeypatch.setattr(app.store, "read_clock", count_reads)
        answers = await asyncio.gather(*(request("/readyz", REMOTE) for _ in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        assert reads < 10  # some of them by the heartbeat

    served(sqlite_url, test)


def test_remote_clients_get_no_reasons_or_addresses(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(app: Timebell, request: Request) -> None:
        for module in (health, opening, schema):
            monkeypatch.setattr(module, "HEAD", "9999")
        local, remote = await request("/readyz"), await request("/readyz", REMOTE)
        assert (local.status_code, remote.status_code) == (503, 503)
        assert local.json()["code"] == remote.json()["code"] == "DATABASE_NOT_UPGRADED"
        assert "needs" in local.json()["detail"]
        assert "000" not in remote.json()["detail"] + remote.json()["title"]

    served(sqlite_url, test)


@pytest.mark.parametrize("service", [Heartbeat, Planner, Worker])
def test_a_process_whose_loop_is_stuck_is_not_ready(
    service: type[Any], sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_step = service.step

    async def step(self: Any) -> Any:
        if stuck:
            await asyncio.sleep(60)
        return await original_step(self)

    stuck: list[bool] = []
    monkeypatch.setattr(service, "step", step)
    monkeypatch.setattr(health, "STORE_TIMEOUT_SECONDS", 0.5)

    async def test(app: Timebell, request: Request) -> None:
        await code_is(request, None)
        stuck.append(True)
        await code_is(request, "ENGINE_STUCK", f"The {service.__name__.lower()} ")

    served(sqlite_url, test)


def test_a_node_with_a_skewed_clock_is_not_ready(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    async def test(app: Timebell, request: Request) -> None:
        await code_is(request, None)
        monkeypatch.setattr(health, "system_now", lambda: system_now() + timedelta(seconds=6))
        await code_is(request, "CLOCK_SKEWED")
        monkeypatch.setattr(health, "system_now", lambda: system_now() - timedelta(seconds=4))
        await code_is(request, None)

    served(sqlite_url, test)


def test_concurrent_scrapes_read_the_database_once(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = gauges.read_gauges

    def counting(*args: Any, **options: Any) -> gauges.Gauges:
        if "per_schedule" in options:  # the leader reads them without this option
            reads.append(1)
        return read(*args, **options)

    async def test(app: Timebell, request: Request) -> None:
        monkeypatch.setattr(gauges, "read_gauges", counting)
        monkeypatch.setattr(metrics, "CACHE_SECONDS", 60.0)
        answers = await asyncio.gather(*(request("/metrics") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert "timebell_database_up 1.0" in answers[-1].text
        assert len(reads) == 1

    served(store_url, test)


def test_a_scrape_succeeds_without_the_database(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        from timebell.errors import StoreUnreachable

        raise StoreUnreachable("gone")

    async def test(app: Timebell, request: Request) -> None:
        monkeypatch.setattr(gauges, "read_gauges", broken)
        answer = await request("/metrics")
        assert answer.status_code == 200
        assert "timebell_database_up 0.0" in answer.text
        assert "timebell_fire_lag_seconds_count" in answer.text
        assert "timebell_queue_depth" not in answer.text

    served(store_url, test)


@pytest.mark.parametrize(
    ("accepted", "returned"),
    [("*/*", "text/plain; version=0.0.4; charset=utf-8"),
     ("text/plain;version=1.0.0", "text/plain; version=0.0.4; charset=utf-8"),
     ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3",
      "application/openmetrics-text; version=1.0.0; charset=utf-8"),
     ("application/openmetrics-text; version=next", "application/openmetrics-text; version=1.0.0; charset=utf-8")],
)  # fmt: skip
def test_openmetrics_is_returned_when_accepted(sqlite_url: str, accepted: str, returned: str) -> None:
    async def test(app: Timebell, request: Request) -> None:
        answer = await request("/metrics", Accept=accepted)
        assert (answer.status_code, answer.headers["content-type"]) == (200, returned)
        assert answer.text.endswith("# EOF\n") == ("openmetrics" in returned)
        assert "timebell_database_up 1.0\n" in answer.text

    served(sqlite_url, test)


def test_metrics_share_the_port_of_a_loopback_address(start: Start) -> None:
    port = free_port()
    process = start("run", "--port", port)
    process.wait_for("Ready in", err=True)
    status, text = get(port, "/metrics")
    assert (status, "timebell_build_info{" in text) == (200, True)
    assert process.end() == 0


def test_metrics_of_a_public_process_have_a_separate_port(start: Start) -> None:
    port, metrics_port = free_port(), free_port()
    process = start("run", "--host", "0.0.0.0", "--port", port, TIMEBELL_METRICS_PORT=str(metrics_port))
    process.wait_for("Ready in", err=True)
    assert get(port, "/metrics")[0] == 404
    assert get(port, "/livez")[0] == 200
    status, text = get(metrics_port, "/metrics")
    assert (status, "timebell_leader" in text) == (200, True)
    assert get(metrics_port, "/livez")[0] == 404
    assert process.end() == 0
