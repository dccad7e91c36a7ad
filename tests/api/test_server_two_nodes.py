"""Two `timebell run` nodes on one PostgreSQL database, each with its own port."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.servers import free_port
from tests.unit.cli.process import Process, until
from timebell import Timebell
from timebell.store.cluster import nodes
from timebell.store.tenancy import api_keys as key_rows
from timebell.tenancy import keys
from timebell.tenancy.keys import Key
from timebell.tenancy.roles import Role

from .web import NIGHTLY, SECRET, is_problem

APP = """
from timebell import Timebell
app = Timebell()

@app.on("tick.*")
async def tick(event):
    return event.payload
"""


class Cluster:
    """Two nodes, their database, and a client of each node."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.ports = [free_port(), free_port()]
        self.nodes = [self._start(port) for port in self.ports]
        for node in self.nodes:
            node.wait_for("Ready in", err=True)
        self.key = self.run_with_app(_make_key, "admin")
        self.clients = [
            httpx2.Client(
                base_url=f"http://127.0.0.1:{port}/api/v1", headers={"Authorization": f"Bearer {self.key}"}, timeout=30
            )
            for port in self.ports
        ]

    def _start(self, port: int) -> Process:
        (self.folder / "app.py").write_text(APP)
        return Process(
            self.folder, ["run", "app.py", "--port", str(port)],
            {"TIMEBELL_DATABASE_URL": self.url, "TIMEBELL_SECRET_KEY": SECRET, "TIMEBELL_NODE_NAME": f"n{port}",
             "TIMEBELL_SCHEDULER_LEASE": "3s", "TIMEBELL_SCHEDULER_HEARTBEAT": "1s", "TIMEBELL_LOG_LEVEL": "info"},
        )  # fmt: skip

    def run_with_app(self, operation: Any, *args: Any) -> Any:
        """Run a coroutine with an app on the database of the cluster."""

        async def ask() -> Any:
            app = Timebell(self.url)
            try:
                await app.open()
                return await operation(app, *args)
            finally:
                await app.close()

        return asyncio.run(ask())

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for node in self.nodes:
            node.kill()


async def _make_key(app: Timebell, role: str) -> str:
    id_, text = keys.generate_key()
    created = Key(id=id_, tenant_id="default", name=role, role=Role(role), created_at=app.clock.now())
    await app.store.run(key_rows.create_key, created, keys.digest(SECRET, text))
    return text


async def _revoke(app: Timebell, text: str) -> None:
    await app.store.run(key_rows.revoke_key, None, text.split("_")[2], app.clock.now())


async def _leader(app: Timebell) -> str | None:
    lease = await app.store.run(nodes.get_lease)
    names = {one.id: one.name for one in await app.store.run(nodes.list_nodes)}
    return names.get(lease.holder or "")


async def _heartbeats(app: Timebell, name: str) -> int:
    return next(one.heartbeat for one in await app.store.run(nodes.list_nodes) if one.name == name)


@pytest.fixture
def cluster(postgres_url: str, tmp_path: Path) -> Iterator[Cluster]:
    created = Cluster(tmp_path, postgres_url)
    yield created
    created.close()


def test_either_node_serves_every_request_and_survives_the_other(cluster: Cluster) -> None:
    one, other = cluster.clients
    beat = {"name": "beat", "interval": {"everyMs": 1000}, "timezone": "UTC", "topic": "tick.tock", "payload": 7}
    created = one.post("/schedules", json=beat).json()
    assert other.get(f"/schedules/{created['id']}").json()["name"] == "beat"
    stale = other.patch(f"/schedules/{created['id']}", json={"priority": 1}, headers={"If-Match": '"7"'})
    is_problem(stale, 412, "REVISION_STALE")
    with ThreadPoolExecutor(8) as threads:
        requests = [
            threads.submit(client.post, "/schedules", json=NIGHTLY, headers={"Idempotency-Key": "same"})
            for client in (one, other) * 4
        ]
        answers = [each.result() for each in requests]
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1

    def completed(client: httpx2.Client) -> set[str]:
        runs = client.get(f"/schedules/{created['id']}/executions", params={"limit": 500, "status": "completed"}).json()
        return {run["scheduledAt"] for run in runs["items"]}

    until(lambda: len(completed(one)) >= 3 or None, lambda: "three runs")
    leader = until(lambda: cluster.run_with_app(_leader), lambda: "a leader")
    dead = 0 if leader == f"n{cluster.ports[0]}" else 1
    cluster.nodes[dead].end(signal.SIGKILL)
    left = cluster.clients[1 - dead]
    survivor = f"n{cluster.ports[1 - dead]}"
    before, began = completed(left), cluster.run_with_app(_heartbeats, survivor)

    def in_time(found: Callable[[], bool]) -> bool | None:
        """Measure time in heartbeats of the survivor: one per second, or fewer on a busy machine."""
        passed = cluster.run_with_app(_heartbeats, survivor) - began
        if found():
            return True
        assert passed < 20
        return None

    until(lambda: in_time(lambda: len(completed(left) - before) >= 5), lambda: "more runs")
    until(lambda: in_time(lambda: cluster.run_with_app(_leader) == survivor), lambda: "the other leads")
    rows = left.get(f"/schedules/{created['id']}/executions", params={"limit": 500}).json()["items"]
    instants = [row["scheduledAt"] for row in rows]
    assert len(instants) == len(set(instants)), "no occurrence has two rows"


def test_a_key_revoked_on_one_node_is_refused_by_all_within_5_s(cluster: Cluster) -> None:
    for client in cluster.clients:
        assert client.get("/schedules").status_code == 200
    cluster.run_with_app(_revoke, cluster.key)
    revoked = time.monotonic()
    for client in cluster.clients:
        requested_at = revoked
        while client.get("/schedules").status_code == 200:
            assert requested_at - revoked < 5
            time.sleep(0.05)
            requested_at = time.monotonic()
        is_problem(client.get("/schedules"), 401, "UNAUTHORIZED")
