"""`timebell watch` with real nodes: alarms within 30 s if nodes or the database are killed, frozen or stuck."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text

from tests.faults.harness import NodeProcess, ask, starts, wait_until
from tests.servers import MariaDB, Postgres
from tests.unit.cli.conftest import Start, start
from tests.unit.cli.process import Process
from timebell import Every, Timebell
from timebell.features import FEATURES
from timebell.store.open import upgrade
from timebell.store.transaction import Transaction

__all__ = ["start"]

Nodes = Callable[..., NodeProcess]
LIMIT = 30.0
FAST_HEARTBEAT = {"TIMEBELL_SCHEDULER_LEASE": "3s", "TIMEBELL_SCHEDULER_HEARTBEAT": "1s"}  # for tests without nodes


class Inbox:
    """Receives the messages that Apprise sends to json:// URLs."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                inbox.messages.append(json.loads(body) | {"path": self.path})
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def titles(self) -> list[str]:
        return [message["title"] for message in self.messages]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


def ticking(url: str) -> None:
    ask(url, lambda app: app.schedule_repeat("work", Every("PT2S"), name="ticks", overlap="allow"))


def watching(start: Start, url: str, **environment: str) -> Process:
    process = start("watch", "-o", "json", TIMEBELL_DATABASE_URL=url, **environment)
    process.wait_for("Watching", err=True)
    return process


def read_lines(process: Process) -> list[dict[str, Any]]:
    """Return all lines so far."""
    return [json.loads(line) for line in process.out.read_text().splitlines() if line.endswith("}")]


def alarms(process: Process) -> list[tuple[str, str]]:
    """Return (raised or resolved, code) of all lines so far."""
    return [(line["alarm"], line["code"]) for line in read_lines(process)]


def alarmed(process: Process, code: str, since: float) -> float:
    """Return the seconds from an instant to this alarm, at most LIMIT, without those in which the machine stalled."""
    still = 0.0
    while ("raised", code) not in alarms(process):
        assert time.monotonic() - since - still < LIMIT, f"no alarm {code}: {process.err.read_text()}"
        before = time.monotonic()
        time.sleep(0.1)
        still += max(0.0, time.monotonic() - before - 0.5)
    took = time.monotonic() - since
    print(f"{code}: alarm after {took:.1f} s")
    return took


def test_killed_nodes_raise_an_alarm(store_url: str, start: Start, node: Nodes, effects: Path, inbox: Inbox) -> None:
    ticking(store_url)
    nodes = [node(store_url) for _ in range(1 if store_url.startswith("sqlite") else 2)]
    watch = watching(start, store_url, TIMEBELL_ALERT_URLS=inbox.url)
    wait_until(lambda: len(starts(effects)) > 3, "it fires")
    for one in nodes[1:]:
        one.signal(signal.SIGKILL)
    assert alarms(watch) == []  # one live node is enough
    nodes[0].signal(signal.SIGKILL)
    struck = time.monotonic()
    alarmed(watch, "SCHEDULE_NOT_FIRED", struck)
    alarmed(watch, "NO_LIVE_NODE", struck)
    wait_until(lambda: "Timebell: NO_LIVE_NODE" in inbox.titles(), "it is sent")
    node(store_url)
    wait_until(lambda: ("resolved", "NO_LIVE_NODE") in alarms(watch), "the alarm is resolved")
    wait_until(lambda: ("resolved", "SCHEDULE_NOT_FIRED") in alarms(watch), "the alarm is resolved")
    both = {f"Timebell: {code}{end}" for code in ("NO_LIVE_NODE", "SCHEDULE_NOT_FIRED") for end in ("", " resolved")}
    wait_until(lambda: set(inbox.titles()) == both, "both ends are sent")
    assert len(inbox.titles()) == len(both)
    assert watch.end() == 0


@pytest.mark.soak
def test_frozen_nodes_raise_an_alarm(nodes_url: str, start: Start, node: Nodes, effects: Path) -> None:
    ticking(nodes_url)
    nodes = [node(nodes_url) for _ in range(2)]
    watch = watching(start, nodes_url)
    wait_until(lambda: len(starts(effects)) > 3, "it fires")
    for one in nodes:
        one.freeze()
    alarmed(watch, "NO_LIVE_NODE", time.monotonic())
    for one in nodes:
        one.signal(signal.SIGCONT)
    wait_until(lambda: ("resolved", "NO_LIVE_NODE") in alarms(watch), "the alarm is resolved")


@pytest.mark.parametrize(  # one watch process for all
    "store",
    [
        pytest.param("postgres", marks=pytest.mark.slow),
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("sqlite", "mariadb")),
    ],
)
def test_a_stuck_planner_of_live_nodes_raises_an_alarm(
    store: str, request: pytest.FixtureRequest, start: Start, node: Nodes, effects: Path, tmp_path: Path
) -> None:
    store_url = request.getfixturevalue(f"{store}_url")
    ticking(store_url)
    stuck = tmp_path / "stuck"
    node(store_url, STUCK=str(stuck))
    watch = watching(start, store_url)
    wait_until(lambda: len(starts(effects)) > 2, "it fires")
    assert alarms(watch) == []
    stuck.touch()
    alarmed(watch, "SCHEDULE_NOT_FIRED", time.monotonic())
    assert ("raised", "NO_LIVE_NODE") not in alarms(watch)
    (line,) = read_lines(watch)
    assert "ticks (since " in line["message"]
    stuck.unlink()
    wait_until(lambda: ("resolved", "SCHEDULE_NOT_FIRED") in alarms(watch), "the alarm is resolved")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", pytest.param("frozen", marks=pytest.mark.soak)])
def test_an_unresponsive_database_raises_an_alarm(
    how: str, own_server: Postgres | MariaDB, start: Start, node: Nodes
) -> None:
    url = own_server.create_database()
    asyncio.run(upgrade(url, FEATURES))
    node(url)
    watch = watching(start, url)
    wait_until(lambda: _beating(url), "the node beats")
    if how == "stopped":
        own_server.stop("immediate")
        alarmed(watch, "DATABASE_UNREACHABLE", time.monotonic())
        own_server.start()
    else:
        frozen = _processes(own_server)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            alarmed(watch, "DATABASE_UNREACHABLE", time.monotonic())
        finally:
            for pid in frozen:
                with suppress(ProcessLookupError):  # the process was ending
                    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: ("resolved", "DATABASE_UNREACHABLE") in alarms(watch), "the alarm is resolved")
    assert ("raised", "NO_LIVE_NODE") not in alarms(watch)


def _beating(url: str) -> bool:
    def look(tx: Transaction) -> bool:
        return (tx.execute(text("SELECT max(heartbeat) FROM timebell_nodes")).scalar() or 0) > 1

    async def asked(app: Timebell) -> bool:
        await app.open()
        return await app.store.run(look)

    return ask(url, asked)


def _processes(server: Postgres | MariaDB) -> list[int]:
    """Return the process ids of the server and its children."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return [server.pid, *map(int, children)]


def test_a_missing_sqlite_file_raises_an_alarm(sqlite_url: str, start: Start, node: Nodes) -> None:
    watch = watching(start, sqlite_url, **FAST_HEARTBEAT)
    Path(sqlite_url.removeprefix("sqlite:///")).unlink()
    alarmed(watch, "DATABASE_UNREACHABLE", time.monotonic())
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()


def test_fail_exits_with_1_at_the_first_alarm(sqlite_url: str, start: Start) -> None:
    process = start("watch", "--fail", TIMEBELL_DATABASE_URL=sqlite_url, **FAST_HEARTBEAT)
    assert process.wait() == 1
    process.wait_for("ALARM  NO_LIVE_NODE: ", err=True)


def test_a_read_only_role_can_watch(postgres: Postgres, postgres_url: str, start: Start, node: Nodes) -> None:
    name = f"watcher_{os.getpid()}"

    async def grant() -> None:
        connection = await asyncpg.connect(postgres_url)
        await connection.execute(f"CREATE ROLE {name} LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
        await connection.close()

    async def revoke() -> None:
        connection = await asyncpg.connect(postgres_url)
        await connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")
        await connection.close()

    asyncio.run(grant())
    try:
        ticking(postgres_url)
        watch = watching(start, postgres_url.replace("timebell@", f"{name}@"), **FAST_HEARTBEAT)
        wait_until(lambda: alarms(watch), "an alarm")
        assert {code for _, code in alarms(watch)} <= {"SCHEDULE_NOT_FIRED", "NO_LIVE_NODE"}
        watch.end()
    finally:
        asyncio.run(revoke())
