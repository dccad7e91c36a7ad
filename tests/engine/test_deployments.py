"""Two releases of a program on one PostgreSQL, starting, stopping and dying in every order."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest

from timebell import Arrived, Timebell
from timebell.model.schedule import Schedule

from .test_service_many_nodes import eventually

OPTIONS = {"heartbeat": 0.1, "lease": 5.0, "poll": 0.1}  # a busy machine may delay a heartbeat by a second
Definitions = dict[str, str]
V1: Definitions = {"report": "0 9 * * *", "old": "0 1 * * *"}
V2: Definitions = {"report": "0 10 * * *", "new": "0 2 * * *"}
ACTIVE = {
    1: {"report": "At 09:00, UTC", "old": "At 01:00, UTC"},
    2: {"report": "At 10:00, UTC", "new": "At 02:00, UTC"},
}


def release(url: str, definitions: Definitions, **options: Any) -> Timebell:
    app = Timebell(url, timezone="UTC", **options)
    for name, cron in definitions.items():

        @app.schedule(name, cron=cron)
        async def handle(event: Arrived) -> None: ...

    return app


@asynccontextmanager
async def running(url: str, definitions: Definitions, **options: Any) -> AsyncIterator[Timebell]:
    app = release(url, definitions, **options)
    try:
        async with app.running(**OPTIONS):
            yield app
    finally:
        await app.close()


async def read_schedules(app: Timebell) -> dict[str, Schedule]:
    return {schedule.name: schedule for schedule in await app.schedules.list()}


async def read_active(app: Timebell) -> dict[str, str]:
    stored = await read_schedules(app)
    return {name: each.recurrence.describe() for name, each in stored.items() if each.enabled}


async def wait_for(app: Timebell, active: dict[str, str]) -> None:
    async def is_active() -> bool:
        return await read_active(app) == active

    await eventually(is_active, app)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def test_an_older_replica_that_restarts_changes_nothing(nodes_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with running(nodes_url, V1) as old:
            assert await read_active(old) == ACTIVE[1]
            async with running(nodes_url, V2) as new:
                assert await read_active(new) == ACTIVE[2]
                revisions = {name: each.revision for name, each in (await read_schedules(new)).items()}
                for _ in range(2):
                    async with running(nodes_url, V1):
                        assert await read_active(new) == ACTIVE[2]
                assert {name: each.revision for name, each in (await read_schedules(new)).items()} == revisions
                assert (await read_schedules(new))["old"].pause_reason == "removed from code"
        assert "a newer one defines the schedules" in caplog.text

    run(test())


def test_the_older_definitions_apply_again_when_the_newest_has_stopped(nodes_url: str) -> None:
    async def test() -> None:
        async with running(nodes_url, V1) as old:
            async with running(nodes_url, V2):
                await wait_for(old, ACTIVE[2])
            await wait_for(old, ACTIVE[1])
            async with running(nodes_url, V2):
                assert await read_active(old) == ACTIVE[2]
        async with running(nodes_url, V1) as old:  # a rollback after all nodes have stopped
            assert await read_active(old) == ACTIVE[1]

    run(test())


PROCESS = """
import asyncio, sys
from tests.engine import test_deployments as t

async def main() -> None:
    async with t.running(sys.argv[1], getattr(t, sys.argv[2])):
        print("started", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


async def start(url: str, release: int) -> asyncio.subprocess.Process:
    """Start a process of a release; it stops when it reads a line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, url, f"V{release}", env=environment, **pipes
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"started\n"
    return process


async def end(process: asyncio.subprocess.Process, *, kill: bool) -> None:
    if kill:
        process.send_signal(signal.SIGKILL)
    await process.communicate(None if kill else b"\n")


def orders(events: int) -> Iterator[tuple[str, ...]]:
    """Yield every order in which the processes of two releases start, stop and are killed: `start 1`, `kill 1`, ..."""
    for order in product(*[[f"{word} {release}" for word in ("start", "stop", "kill") for release in (1, 2)]] * events):
        running_releases: set[str] = set()
        for word, release in map(str.split, order):
            if (word == "start") == (release in running_releases):
                break
            running_releases ^= {release}
        else:
            yield order


ALWAYS_TESTED = {
    "start 1, start 2, kill 2, start 2",
    "start 1, kill 1, start 2, start 1",
    "start 2, start 1, stop 1, kill 2",
}


@pytest.mark.parametrize("order", [  # in many, a lease must expire
    pytest.param(order, id=", ".join(order), marks=() if ", ".join(order) in ALWAYS_TESTED else pytest.mark.soak)
    for order in orders(4)
])  # fmt: skip
def test_the_newest_live_release_defines_the_schedules(order: tuple[str, ...], nodes_url: str) -> None:
    async def test() -> None:
        observer = Timebell(nodes_url, timezone="UTC")
        seen: list[int] = []
        processes: dict[int, asyncio.subprocess.Process] = {}
        active: dict[str, str] = {}
        try:
            for word, release in ((word, int(release)) for word, release in map(str.split, order)):
                if word == "start":
                    seen += [] if release in seen else [release]
                    processes[release] = await start(nodes_url, release)
                else:
                    await end(processes.pop(release), kill=word == "kill")
                if processes:
                    active = ACTIVE[max(processes, key=seen.index)]
                await wait_for(observer, active)
        finally:
            for process in processes.values():
                await end(process, kill=True)
            await observer.close()

    run(test())


def test_a_manual_pause_survives_deployments(nodes_url: str) -> None:
    async def test() -> None:
        async with running(nodes_url, V1) as old:
            await old.schedules.pause((await read_schedules(old))["report"].id, "holidays")
            await old.schedules.pause((await read_schedules(old))["old"].id, "obsolete")
            async with running(nodes_url, V2) as new:
                stored = await read_schedules(new)
                assert {name: each.pause_reason for name, each in stored.items()} == {
                    "report": "holidays", "old": "obsolete", "new": None,
                }  # fmt: skip
            await wait_for(old, {})

    run(test())


def test_prune_deletes_what_was_removed_from_code(nodes_url: str) -> None:
    async def test() -> None:
        async with running(nodes_url, V1):
            pass
        async with running(nodes_url, V2, prune=True) as new:
            assert set(await read_schedules(new)) == {"report", "new"}

    run(test())


def test_a_process_without_schedules_retires_none_of_its_program(nodes_url: str) -> None:
    def handlers_only(url: str) -> Timebell:
        app = Timebell(url, timezone="UTC")
        app.on("work")(handle_work)
        return app

    async def test() -> None:
        worker = handlers_only(nodes_url)
        async with running(nodes_url, V1) as scheduler, worker.running(**OPTIONS):
            assert await read_active(scheduler) == ACTIVE[1]
        await worker.close()

    run(test())


@pytest.mark.parametrize("same_deployment", [True, False])
def test_an_explicit_deployment_joins_processes_with_different_schedules(
    nodes_url: str, monkeypatch: pytest.MonkeyPatch, *, same_deployment: bool
) -> None:
    async def test() -> None:
        monkeypatch.setenv("TIMEBELL_DEPLOYMENT", "build-41")
        async with running(nodes_url, {"one": "0 1 * * *"}) as first:
            if not same_deployment:
                monkeypatch.setenv("TIMEBELL_DEPLOYMENT", "build-42")
            async with running(nodes_url, {"two": "0 2 * * *"}):
                assert set(await read_active(first)) == ({"one", "two"} if same_deployment else {"two"})

    run(test())


def test_programs_are_independent(nodes_url: str) -> None:
    async def test() -> None:
        other = Timebell(nodes_url, timezone="UTC")
        names: dict[str, Any] = {"app": other, "__name__": "other_program.jobs"}
        exec("@app.schedule('theirs', cron='0 3 * * *')\ndef theirs(event): ...", names)
        async with other.running(**OPTIONS), running(nodes_url, V1) as ours:
            assert set(await read_active(ours)) == {"theirs", "report", "old"}
        await other.close()

    run(test())


async def handle_work(event: Arrived) -> None: ...
