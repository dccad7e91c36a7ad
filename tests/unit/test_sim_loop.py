from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from timebell.sim.loop import VirtualLoop, run_virtual

DAY = 86_400


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_of_seconds_passes_in_seconds() -> None:
    async def main() -> float:
        for _ in range(DAY):
            await asyncio.sleep(1)
        return loop_time()

    began = time.monotonic()
    assert run_virtual(main()) == DAY
    assert time.monotonic() - began < 60


def test_result_and_exception_of_main_are_returned() -> None:
    async def fails() -> None:
        raise KeyError("why")

    async def succeeds() -> str:
        return "fine"

    assert run_virtual(succeeds()) == "fine"
    with pytest.raises(KeyError, match="why"):
        run_virtual(fails())


@pytest.mark.parametrize("start_time", [0.0, 0.1, 1e9 + 0.1, 4e9])
def test_timers_are_called_at_exactly_their_time(start_time: float) -> None:
    async def main() -> None:
        loop, chance = asyncio.get_running_loop(), Random(7)
        assert loop.time() == start_time
        whens = [start_time + chance.uniform(0, 100) for _ in range(500)]
        whens += [start_time + 50 + n * 1e-10 for n in range(50)]
        called: list[tuple[float, float]] = []

        def call(when: float) -> None:
            called.append((when, loop.time()))

        for when in whens:
            loop.call_at(when, call, when)
        await asyncio.sleep(101)
        assert [at for _, at in called] == sorted(whens)
        assert all(when == at for when, at in called)

    run_virtual(main(), start_time)


def test_distant_timer_is_reached_in_one_step() -> None:
    async def main() -> float:
        await asyncio.sleep(1000 * 365 * DAY)
        return loop_time()

    assert run_virtual(main()) == 1000 * 365 * DAY


def test_timeouts_wait_for_and_task_groups_use_virtual_time() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3600)
        assert loop_time() == 3600.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.sleep(61)
        assert loop_time() == 3660.0
        async with asyncio.TaskGroup() as group:
            for seconds in range(10):
                group.create_task(asyncio.sleep(seconds))
        assert loop_time() == 3669.0

    run_virtual(main())


def test_cancelled_timer_does_not_advance_time() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(1, lambda: None).cancel()
        asyncio.get_running_loop().call_later(500, lambda: None).cancel()
        await asyncio.sleep(2)
        return loop_time()

    assert run_virtual(main()) == 2


# --- Threads ---


def test_time_stands_still_while_a_thread_works() -> None:
    async def main() -> None:
        ticks: list[float] = []

        async def ticker() -> None:
            while True:
                await asyncio.sleep(1)
                ticks.append(loop_time())

        def work() -> str:
            sum(range(1_000_000))
            return threading.current_thread().name

        task = asyncio.create_task(ticker())
        with ThreadPoolExecutor(1, thread_name_prefix="own") as executor:
            assert await asyncio.get_running_loop().run_in_executor(executor, work) == "own_0"
            assert await asyncio.to_thread(lambda: threading.current_thread().name) == "virtual_0"
        assert ticks == []
        await asyncio.sleep(2.5)
        assert ticks == [1.0, 2.0]
        task.cancel()

    run_virtual(main())


def test_timeout_does_not_expire_while_a_thread_works() -> None:
    async def main() -> int:
        async with asyncio.timeout(0.001):
            return await asyncio.to_thread(sum, range(100_000))

    assert run_virtual(main()) == sum(range(100_000))


def test_exception_of_a_thread_is_raised() -> None:
    async def main() -> None:
        def fails() -> None:
            raise KeyError("why")

        with pytest.raises(KeyError, match="why"):
            await asyncio.to_thread(fails)

    run_virtual(main())


def test_thread_results_arrive_in_call_order_after_all_ready_callbacks() -> None:
    async def main() -> list[object]:
        seen: list[object] = []
        second_done = threading.Event()

        async def call(name: str, func: Callable[[], object]) -> None:
            await asyncio.to_thread(func)
            seen.append(name)

        async def steps() -> None:
            for step in range(50):
                seen.append(step)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(call("first", second_done.wait))  # ends last
            group.create_task(call("second", second_done.set))
            group.create_task(steps())
        return seen

    assert run_virtual(main()) == [*range(50), "first", "second"]


def test_thread_may_wait_for_a_coroutine_that_uses_another_thread() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()

        async def inner() -> int:
            return await asyncio.to_thread(lambda: 42)

        def outer() -> int:
            return asyncio.run_coroutine_threadsafe(inner(), loop).result()

        return await asyncio.to_thread(outer)

    assert run_virtual(main()) == 42


def test_cancelled_thread_call_still_runs_and_time_waits_for_it() -> None:
    async def main() -> list[str]:
        loop, done, gate = asyncio.get_running_loop(), list[str](), threading.Event()

        def work(name: str) -> None:
            gate.wait()
            done.append(name)

        with ThreadPoolExecutor(1) as executor:
            calls = [loop.run_in_executor(executor, work, name) for name in ("started", "queued")]
            for call in calls:
                call.cancel()
            gate.set()
            await asyncio.sleep(1)
            return done[:]

    assert run_virtual(main()) == ["started", "queued"]


def test_call_dropped_by_its_executor_is_cancelled() -> None:
    async def main() -> None:
        loop, started, gate = asyncio.get_running_loop(), threading.Event(), threading.Event()
        executor = ThreadPoolExecutor(1)

        def work() -> None:
            started.set()
            gate.wait()

        loop.run_in_executor(executor, work)
        queued = loop.run_in_executor(executor, len, "")
        started.wait()
        executor.shutdown(wait=False, cancel_futures=True)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await queued

    run_virtual(main())


def test_call_that_outlives_the_loop_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # warnings about objects of earlier tests are emitted now
    caplog.clear()
    gate = threading.Event()
    with ThreadPoolExecutor(1) as executor:

        async def main() -> None:
            asyncio.get_running_loop().run_in_executor(executor, gate.wait)

        run_virtual(main())
        gate.set()
    assert caplog.records == []


def test_calls_from_foreign_threads_are_run() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        event = asyncio.Event()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(event.set,))
        thread.start()
        with loop.hold_time():
            async with asyncio.timeout(1):
                await event.wait()
        thread.join()
        assert loop.time() == 0.0

    run_virtual(main())


def test_loop_waits_for_a_busy_executor_at_the_end() -> None:
    done: list[int] = []

    async def main() -> None:
        asyncio.get_running_loop().run_in_executor(None, lambda: done.append(sum(range(1_000_000))))

    run_virtual(main())
    assert len(done) == 1


def test_sockets_are_real_and_hold_time_waits_for_them() -> None:
    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            answer = threading.Thread(target=lambda: sum(range(1_000_000)) and theirs.send(b"pong"))
            answer.start()
            with loop.hold_time():
                async with asyncio.timeout(1):
                    received = await loop.sock_recv(ours, 4)
            answer.join()
        assert loop.time() == 0.0
        return received

    assert run_virtual(main()) == b"pong"


# --- Deadlocks ---


def test_deadlock_is_an_error_that_names_the_waiting_tasks() -> None:
    cleaned: list[str] = []

    async def main() -> None:
        asyncio.current_task().set_name("lonely")  # type: ignore[union-attr]
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(cleaned.append, "yes")
            await asyncio.sleep(5)
            cleaned.append("later")

    with pytest.raises(RuntimeError, match=r"no timer is set \(tasks: lonely\)"):
        run_virtual(main())
    assert cleaned == ["yes", "later"]


def test_thread_that_waits_for_virtual_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualLoop, "thread_timeout_seconds", 0.05)
    gate = threading.Event()

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, gate.set)
        try:
            await asyncio.to_thread(gate.wait)
        finally:
            gate.set()

    with pytest.raises(RuntimeError, match="has been busy"):
        run_virtual(main())


# --- Reproducibility ---


def test_run_with_threads_has_a_reproducible_trace() -> None:
    def run() -> list[tuple[float, str]]:
        trace: list[tuple[float, str]] = []

        async def node(name: str, executor: ThreadPoolExecutor, chance: Random) -> None:
            for turn in range(40):
                await asyncio.sleep(chance.choice([0, 0.5, 1]))
                await asyncio.get_running_loop().run_in_executor(executor, sum, range(chance.randrange(20_000)))
                trace.append((loop_time(), f"{name}{turn}"))

        async def main() -> None:
            with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
                async with asyncio.TaskGroup() as group:
                    for number, name in enumerate("abcdef"):
                        group.create_task(node(name, (one, two)[number % 2], Random(number)))

        run_virtual(main())
        return trace

    first = run()
    assert len(first) == 240
    assert all(run() == first for _ in range(5))


def test_loop_leaks_no_descriptor() -> None:
    async def main() -> None:
        await asyncio.to_thread(len, "")

    def used() -> int:
        run_virtual(main())
        return len(os.listdir("/dev/fd"))

    gc.collect()  # closes descriptors that earlier tests left open
    before = used()
    assert used() <= before
