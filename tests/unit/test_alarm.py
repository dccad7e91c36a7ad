from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from timebell.alarm import Alarm
from timebell.clock import Clock, SystemClock, VirtualClock
from timebell.sim.loop import run_virtual

START = datetime(2026, 11, 21, 9, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@asynccontextmanager
async def waiting(alarm: Alarm, until: datetime | None) -> AsyncIterator[asyncio.Task[bool]]:
    """A task that waits on the alarm."""
    task = asyncio.create_task(alarm.wait(until))
    await asyncio.sleep(0)
    yield task
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


def test_wait_ends_exactly_at_the_instant() -> None:
    async def main() -> None:
        clock = VirtualClock(START)
        alarm = Alarm(clock)
        for seconds in (0.1, 3600.000001, 86_400 * 400, 86_400 * 400):
            assert await alarm.wait(after(seconds)) is False
            assert clock.now() == after(seconds)

    run_virtual(main())


def test_wake_ends_one_wait_before_its_instant() -> None:
    async def main() -> None:
        clock = VirtualClock(START)
        alarm = Alarm(clock)
        asyncio.get_running_loop().call_later(5, alarm.wake)
        assert await alarm.wait(after(10)) is True
        assert clock.now() == after(5)
        assert await alarm.wait(after(10)) is False
        assert clock.now() == after(10)

    run_virtual(main())


def test_wakes_without_a_waiter_count_once() -> None:
    async def main() -> None:
        alarm = Alarm(VirtualClock(START))
        alarm.wake()
        alarm.wake()
        assert await alarm.wait(START) is True  # a wake takes precedence over an instant
        assert await alarm.wait(START) is False

    run_virtual(main())


def test_wait_without_an_instant_ends_only_with_wake() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        alarm = Alarm(VirtualClock(START))
        loop.call_later(86_400 * 30, alarm.wake)
        assert await alarm.wait(None) is True
        return loop.time()

    assert run_virtual(main()) == 86_400 * 30


def test_wake_at_the_instant_is_not_lost() -> None:
    async def main() -> None:
        clock = VirtualClock(START)
        alarm = Alarm(clock)
        async with waiting(alarm, after(10)) as task:
            # Called right after the alarm's own timer, before the task runs.
            asyncio.get_running_loop().call_at(10.0, alarm.wake)
            assert await task is False
        assert await alarm.wait(after(20)) is True
        assert clock.now() == after(10)

    run_virtual(main())


def test_instant_at_a_wake_is_not_lost() -> None:
    async def main() -> None:
        alarm = Alarm(VirtualClock(START))
        asyncio.get_running_loop().call_at(10.0, alarm.wake)  # called right before the alarm's own timer
        assert await alarm.wait(after(10)) is True
        assert await alarm.wait(after(10)) is False

    run_virtual(main())


@pytest.mark.parametrize("seconds", [-3600.0, -0.5, 0.5, 3600.0])
def test_clock_step_while_waiting_moves_the_end(seconds: float) -> None:
    async def main() -> None:
        clock = VirtualClock(START)
        alarm = Alarm(clock)
        async with waiting(alarm, after(10)) as task:
            clock.step(seconds)
            assert await task is False
        assert clock.now() == max(after(10), after(seconds))
        assert clock.monotonic() == pytest.approx(max(10 - seconds, 0.0))

    run_virtual(main())


def test_small_correction_while_waiting_moves_the_end() -> None:
    async def main() -> None:
        server, clock = VirtualClock(START), VirtualClock(START)
        alarm = Alarm(clock)
        server.step(-0.25)
        async with waiting(alarm, after(10)) as task:
            clock.discipline(server.now(), clock.monotonic(), clock.monotonic())
            assert await task is False
        assert server.now() == after(10)

    run_virtual(main())


def test_clock_step_after_a_wake_changes_nothing() -> None:
    async def main() -> None:
        clock = VirtualClock(START)
        alarm = Alarm(clock)
        async with waiting(alarm, after(10)) as task:
            alarm.wake()
            clock.step(100)
            assert await task is True
        assert await alarm.wait(after(10)) is False

    run_virtual(main())


def test_cancelled_wait_leaves_no_timer_and_can_be_repeated() -> None:
    async def main() -> None:
        clock = VirtualClock(START)
        alarm = Alarm(clock)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await alarm.wait(after(10))
        assert clock._watchers == []
        assert await alarm.wait(after(20)) is False
        assert clock.now() == after(20)

    run_virtual(main())


def test_wake_at_a_cancellation_ends_the_next_wait() -> None:
    async def main() -> None:
        alarm = Alarm(VirtualClock(START))
        async with waiting(alarm, None) as task:
            alarm.wake()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await alarm.wait(None) is True

    run_virtual(main())


def test_instant_at_a_cancellation_is_not_a_wake() -> None:
    async def main() -> None:
        alarm = Alarm(VirtualClock(START))
        async with waiting(alarm, after(10)) as task:
            asyncio.get_running_loop().call_at(10.0, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await alarm.wait(after(10)) is False

    run_virtual(main())


def test_second_waiter_is_refused() -> None:
    async def main() -> None:
        alarm = Alarm(VirtualClock(START))
        async with waiting(alarm, None) as task:
            with pytest.raises(RuntimeError, match="already"):
                await alarm.wait(None)
            alarm.wake()
            assert await task is True

    run_virtual(main())


def test_close_wakes_only_the_current_waiter() -> None:
    async def main() -> None:
        alarm = Alarm(VirtualClock(START))
        async with waiting(alarm, after(10)) as task:
            alarm.close()
            alarm.close()
            assert await task is True
        assert await alarm.wait(after(10)) is False
        alarm.close()
        assert await alarm.wait(after(20)) is False

    run_virtual(main())


@pytest.mark.parametrize("closing", [True, False])
def test_alarm_works_on_consecutive_loops(closing: bool) -> None:
    alarm = Alarm(clock := SystemClock())

    async def main() -> None:
        assert await alarm.wait(clock.now() + timedelta(milliseconds=2)) is False
        if closing:
            alarm.close()

    asyncio.run(main())
    asyncio.run(main())
    alarm.close()


@pytest.mark.parametrize("wake", [Alarm.wake, Alarm.wake_threadsafe])
def test_alarm_can_be_created_and_woken_before_a_loop_exists(wake: Callable[[Alarm], None]) -> None:
    alarm = Alarm(VirtualClock(START))
    wake(alarm)

    async def main() -> None:
        assert await alarm.wait(after(10)) is True
        assert await alarm.wait(after(10)) is False

    run_virtual(main())


@pytest.mark.parametrize("make", [SystemClock, lambda: VirtualClock(START)], ids=["system", "virtual"])
def test_wake_from_another_thread(make: type[Clock]) -> None:
    async def main() -> Alarm:
        alarm = Alarm(make())
        thread = threading.Thread(target=alarm.wake_threadsafe)
        async with waiting(alarm, alarm._clock.now() + timedelta(hours=1)) as task:
            thread.start()
            thread.join()
            assert await task is True
        alarm.close()
        return alarm

    alarm = run_virtual(main()) if make is not SystemClock else asyncio.run(main())
    alarm.wake_threadsafe()  # its loop is already closed


def test_system_clock_wait_is_never_early() -> None:
    async def main() -> None:
        clock = SystemClock()
        alarm = Alarm(clock)
        for _ in range(50):
            until = clock.now() + timedelta(milliseconds=1)
            assert await alarm.wait(until) is False
            assert clock.now() >= until
        alarm.close()

    asyncio.run(main())


def test_cancelled_waits_on_the_system_clock_leak_no_descriptor() -> None:
    async def main() -> tuple[int, int]:
        clock = SystemClock()

        async def cancelled() -> int:
            alarm = Alarm(clock)
            async with waiting(alarm, clock.now() + timedelta(hours=1)):
                pass
            alarm.close()
            return len(os.listdir("/dev/fd"))

        first = await cancelled()
        for _ in range(20):
            last = await cancelled()
        return first, last

    gc.collect()  # closes descriptors that earlier tests left open
    first, last = asyncio.run(main())
    assert last <= first
