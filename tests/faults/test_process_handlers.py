"""Handlers with `executor="process"`: results, exceptions, timeouts, stops, crashes and the end of the node."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.world import QUIET, World, virtual
from tests.faults import process_handlers
from timebell import Arrived, Retry, Timebell
from timebell.errors import InvalidInput, JobFailed
from timebell.model.job import LIVE, Job, JobState

TIMEOUT_SECONDS = 60


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """The file in which `spin` writes the ids of its processes."""
    return tmp_path / "pids"


@asynccontextmanager
async def running(url: str, function: Callable[[Arrived], Any], **options: Any) -> AsyncIterator[Timebell]:
    """Run a node that handles the topic `work` in processes."""
    app = Timebell(url, timezone="UTC")
    app.on("work", executor="process", **options)(function)
    async with asyncio.timeout(TIMEOUT_SECONDS), app.running(heartbeat=0.2):
        yield app
    await app.close()


async def run_one(url: str, function: Callable[[Arrived], Any], payload: Any = None, **options: Any) -> Job:
    """Return the job after the node has nothing to do."""
    async with running(url, function, **options) as app:
        job = await app.schedule_at("work", payload=payload)
        assert app.service is not None
        await app.service.wait_until_idle()
        return await app.get(job.id)


async def read_pids(pids: Path) -> list[int]:
    """Wait until `spin` runs; return the ids of its two processes."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not pids.exists():
            await asyncio.sleep(0.01)
    return list(map(int, pids.read_text().split()))


async def end_of(processes: list[int]) -> None:
    """Wait until processes have ended."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while any(map(is_running, processes)):
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_jobs_run_in_another_process_which_the_next_one_reuses(sqlite_url: str) -> None:
    async with running(sqlite_url, process_handlers.tell_pid) as app:
        jobs = [await app.wait((await app.schedule_at("work")).id) for _ in range(3)]
    assert len({job.result for job in jobs}) == 1
    assert jobs[0].result != os.getpid()
    await end_of([jobs[0].result])


async def test_payload_result_progress_and_log_cross_the_processes(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shop")
    async with running(sqlite_url, process_handlers.double) as app:
        job = await app.wait((await app.schedule_at("work", payload={"number": 21})).id)
    assert job.result == {"number": 42}
    assert job.progress is not None
    assert (job.progress.fraction, job.progress.text) == (0.5, "half")
    assert "doubled order 21" in [record.message for record in caplog.records if record.name == "shop.orders"]


async def test_an_exception_has_its_own_code_and_traceback(sqlite_url: str) -> None:
    job = await run_one(sqlite_url, process_handlers.take_from_empty, retry=Retry(attempts=1))
    attempt = job.attempts[0]
    assert (attempt["code"], job.error_code) == ("KeyError", "KeyError")
    assert "KeyError: 'price' (process_handlers.py:" in attempt["error"]
    assert 'raise KeyError("price")' in attempt["traceback"]
    assert "process_worker" not in attempt["traceback"]


@pytest.mark.parametrize(
    ("retry", "attempts"),
    [
        (Retry(attempts=2, delay=0, fail_on=(process_handlers.Declined,)), 1),
        (Retry(attempts=2, delay=0, retry_on=(process_handlers.Declined,)), 2),
        (Retry(attempts=2, delay=0, retry_on=(TimeoutError,)), 1),
    ],
)
async def test_the_class_of_an_exception_decides_about_retries(sqlite_url: str, retry: Retry, attempts: int) -> None:
    job = await run_one(sqlite_url, process_handlers.decline, retry=retry)
    assert (job.state, job.error_code, job.attempts_used) == (JobState.FAILED, "Declined", attempts)
    assert "Declined: declined: no money" in (job.error or "")


@pytest.mark.parametrize(
    ("payload", "state", "code", "reason"),
    [
        ("snooze", JobState.PENDING, None, None),
        ("cancel", JobState.CANCELLED, None, "gone"),
        ("fail", JobState.FAILED, "Fail", None),
        ("stop", JobState.FAILED, "RuntimeError", None),
        ("exit", JobState.FAILED, "SystemExit", None),
        ("awaitable", JobState.FAILED, "TypeError", None),
        ("unstorable", JobState.COMPLETED, None, "RESULT_NOT_STORED: result is not JSON: it contains a lock object."),
    ],
)
async def test_every_other_end_of_a_handler_has_its_usual_effect(
    sqlite_url: str, payload: str, state: JobState, code: str | None, reason: str | None
) -> None:
    job = await run_one(sqlite_url, process_handlers.end_early, payload, retry=Retry(attempts=1))
    assert (job.state, job.error_code) == (state, code)
    assert reason is None or job.reason == reason


@pytest.mark.parametrize(
    ("function", "ending"),
    [(process_handlers.die_first, "was killed by SIGKILL"), (process_handlers.leave_first, "ended with exit status 3")],
)
async def test_an_attempt_whose_process_dies_is_retried_in_another_one(
    sqlite_url: str, function: Callable[[Arrived], int], ending: str
) -> None:
    policy = Retry(attempts=2, delay=0, retry_on=(TimeoutError,))
    job = await run_one(sqlite_url, function, retry=policy)
    assert (job.state, job.result) == (JobState.COMPLETED, 2)
    assert (job.attempts[0]["code"], job.attempts[0]["error"]) == ("PROCESS_DIED", f"The worker process {ending}.")


async def test_a_timeout_kills_the_process_and_what_it_started(sqlite_url: str, pids: Path) -> None:
    async with running(sqlite_url, process_handlers.spin, retry=Retry(attempts=1)) as app:
        first = await app.schedule_at("work", payload=str(pids))  # the next one finds a process
        await read_pids(pids)
        pids.unlink()
        await app.wait(first.id)
        job = await app.schedule_at("work", payload=str(pids), timeout=5)  # enough to write its pids
        processes = await read_pids(pids)
        with pytest.raises(JobFailed):
            await app.wait(job.id)
        assert (await app.get(job.id)).error_code == "TIMEOUT"
        await end_of(processes)


async def test_a_job_that_is_stopped_ends_as_cancelled_and_the_next_one_runs(sqlite_url: str, pids: Path) -> None:
    async with running(sqlite_url, process_handlers.spin) as app:
        for _ in range(2):
            job = await app.schedule_at("work", payload=str(pids))
            processes = await read_pids(pids)
            assert (await app.cancel(job.id, stop=True)).outcome == "in_flight"
            while (job := await app.get(job.id)).state in LIVE:
                await asyncio.sleep(0.01)
            assert job.state is JobState.CANCELLED
            await end_of(processes)
            pids.unlink()


async def test_a_node_that_stops_waits_for_its_processes(sqlite_url: str, pids: Path) -> None:
    async with running(sqlite_url, process_handlers.spin) as app:
        job = await app.schedule_at("work", payload=str(pids))
        processes = await read_pids(pids)
        os.kill(processes[0], signal.SIGTERM)  # a service manager signals all processes of the node
        asyncio.get_running_loop().call_later(0.3, pids.unlink)
    app = Timebell(sqlite_url, timezone="UTC")
    assert (await app.get(job.id)).state is JobState.COMPLETED
    await app.close()
    await end_of(processes)


async def test_a_node_that_waited_long_enough_kills_its_processes(sqlite_url: str, pids: Path) -> None:
    app = Timebell(sqlite_url, timezone="UTC")
    app.on("work", executor="process")(process_handlers.spin)
    async with asyncio.timeout(TIMEOUT_SECONDS), app.running(drain=0.1):
        job = await app.schedule_at("work", payload=str(pids))
        processes = await read_pids(pids)
    await end_of(processes)
    job = await app.get(job.id)
    assert (job.state, job.attempts_used) == (JobState.PENDING, 0)
    await app.close()


async def test_nothing_is_left_of_a_node_that_was_killed(sqlite_url: str, pids: Path) -> None:
    program = "from tests.faults.process_handlers import main; main()"
    node = subprocess.Popen([sys.executable, "-c", program, sqlite_url, str(pids)])
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            processes = await read_pids(pids)
            assert all(map(is_running, processes))
    finally:
        node.kill()
        node.wait()
    await end_of(processes)


async def test_a_process_that_starts_slowly_runs_only_the_attempt_that_has_not_timed_out(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_IMPORT_SECONDS", "2")
    policy = Retry(attempts=100, backoff="fixed", delay=0.2, jitter=0)
    record = tmp_path / "record"
    async with running(sqlite_url, process_handlers.record_attempt, timeout=0.5, retry=policy) as app:
        job = await app.wait((await app.schedule_at("work", payload=str(record))).id)
    assert job.attempts[0]["code"] == "TIMEOUT"
    lines = record.read_text().splitlines()
    started = {int(number): at for number, at in map(str.split, lines)}
    assert len(started) == len(lines)
    assert started.keys() & {1, job.attempt} == {job.attempt}
    for attempt in job.attempts:  # one that the process could still start may time out as it ends
        assert started.get(attempt["attempt"], "") < attempt["endedAt"]


@virtual
async def test_jobs_run_in_processes_on_virtual_time(world: World) -> None:
    app = world.app()
    app.on("work", executor="process")(process_handlers.die_first)
    async with app.running(**QUIET):
        job = await app.schedule_in("work", 60)
        await world.advance(minutes=2)
        job = await app.get(job.id)
    assert (job.state, job.result) == (JobState.COMPLETED, 2)


async def test_a_transaction_is_refused(sqlite_url: str) -> None:
    job = await run_one(sqlite_url, process_handlers.write_in_transaction, retry=Retry(attempts=1))
    assert (job.state, job.error_code) == (JobState.FAILED, "TimebellError")
    assert "event.transaction() does not work in a worker process" in (job.error or "")


class CallableObject:
    def __call__(self, event: Arrived) -> None: ...


async def coroutine(event: Arrived) -> None: ...


def plain(event: Arrived) -> None: ...


def local() -> Callable[[Arrived], None]:
    def inner(event: Arrived) -> None: ...

    return inner


def of_main() -> Callable[[Arrived], None]:
    def inner(event: Arrived) -> None: ...

    inner.__module__, inner.__qualname__ = "__main__", "inner"
    return inner


@pytest.mark.parametrize(
    ("function", "executor", "message"),
    [
        (coroutine, "process", "not a plain function"),
        (CallableObject(), "process", "not a plain function"),
        (functools.partial(plain), "process", "not a plain function"),
        (lambda event: None, "process", "a lambda or defined inside a function"),
        (local(), "process", "a lambda or defined inside a function"),
        (of_main(), "process", "main program"),
        (plain, "threads", "no executor 'threads'"),
    ],
)
def test_functions_that_no_process_can_import_are_refused(
    function: Callable[[Arrived], Any], executor: Any, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as error:
        Timebell(timezone="UTC").on("work", executor=executor)(function)
    assert error.value.code == "INVALID_EXECUTOR"


async def test_a_node_whose_function_was_replaced_by_another_does_not_start(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Timebell(sqlite_url, timezone="UTC")
    app.on("work", executor="process")(process_handlers.tell_pid)
    monkeypatch.setattr(process_handlers, "tell_pid", process_handlers.spin)
    with pytest.raises(InvalidInput, match="cannot find tell_pid in the module tests") as error:
        async with app.running():
            raise AssertionError
    assert error.value.code == "INVALID_EXECUTOR"
    await app.close()
