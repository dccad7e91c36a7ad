from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, TypeVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from timebell import clock as module
from timebell.clock import Clock, ClockStep, SystemClock, Timer, VirtualClock
from timebell.sim.loop import run_virtual

START = datetime(2026, 11, 21, 9, tzinfo=UTC)
HOUR = 3600.0
T = TypeVar("T")


class ManualClock(VirtualClock):
    """A virtual clock whose monotonic time is set by the test."""

    at = 0.0

    def monotonic(self) -> float:
        return self.at


def database(seconds: float) -> datetime:
    """A reading of a database's clock, as seconds after START."""
    return START + timedelta(seconds=seconds)


# --- Instants and deadlines ---


def test_the_virtual_clock_is_its_start_plus_the_time_of_the_loop() -> None:
    async def main() -> tuple[datetime, datetime]:
        clock: Clock = VirtualClock(START)
        before = clock.now()
        await asyncio.sleep(HOUR)
        return before, clock.now()

    assert run_virtual(main()) == (START, START + timedelta(hours=1))


def test_a_virtual_clock_starts_at_an_aware_instant_of_any_zone() -> None:
    clock = ManualClock(datetime(2026, 11, 21, 10, tzinfo=timezone(timedelta(hours=1))))
    assert clock.now() == START
    assert clock.now().tzinfo is UTC
    with pytest.raises(ValueError, match="aware"):
        VirtualClock(datetime(2026, 11, 21))


def test_a_naive_instant_has_no_deadline() -> None:
    with pytest.raises(TypeError):
        ManualClock(START).deadline(datetime(2026, 11, 21))


@given(
    st.datetimes(datetime(1, 1, 1), datetime(9998, 1, 1), timezones=st.just(UTC)),
    st.floats(-1e9, 1e9),
)
@example(datetime(2163, 1, 1, 0, 0, 0, 1, UTC), 1.464949131011963)
@example(datetime(9997, 12, 31, 23, 59, 59, 999999, UTC), 0.1)
def test_clock_has_reached_an_instant_at_its_deadline(instant: datetime, offset: float) -> None:
    clock = ManualClock(START)
    clock.step(offset)
    clock.at = clock.deadline(instant)
    assert clock.now() >= instant
    if abs(clock.at) < 200 * 365 * 24 * HOUR:
        assert clock.now() == instant


def test_the_wall_clock_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    before = clock.now()
    monkeypatch.setattr(module, "datetime", None)  # a second read would fail
    assert timedelta(0) <= clock.now() - before < timedelta(minutes=1)
    assert abs(clock.deadline(before) - clock.monotonic()) < 60


# --- Discipline ---


@pytest.mark.parametrize(
    ("reading", "sent", "received", "offset"),
    [
        pytest.param(100.0, 100.0, 100.0, 0.0, id="agrees"),
        pytest.param(3700.0, 100.0, 100.0, 3600.0, id="an hour ahead: a wrong node, not a step"),
        pytest.param(-3500.0, 100.0, 100.0, -3600.0, id="an hour behind"),
        pytest.param(100.5, 100.0, 101.0, 0.0, id="read half way"),
        pytest.param(100.0, 100.0, 101.0, -0.5, id="all of the delay on the way back"),
        pytest.param(101.0, 100.0, 101.0, 0.5, id="all of the delay on the way there"),
    ],
)
def test_the_first_measurement_sets_the_offset(reading: float, sent: float, received: float, offset: float) -> None:
    clock = ManualClock(START)
    assert clock.offset == 0.0
    assert clock.discipline(database(reading), sent, received) is None
    assert clock.offset == pytest.approx(offset)
    assert clock.now() == database(offset)
    assert clock.deadline(database(offset)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("sent", "received", "moved", "taken", "step"),
    [
        pytest.param(1.0, 1.002, 0.0005, True, False, id="tighter wins"),
        pytest.param(1.0, 1.020, 0.0050, False, False, id="looser loses while both can be right"),
        pytest.param(1000.0, 1000.020, 0.0050, True, False, id="looser wins once the other is old"),
        pytest.param(1.0, 1.020, 0.0300, True, False, id="looser wins when both cannot be right"),
        pytest.param(1.0, 1.020, -1.0, True, False, id="a leap second is no step"),
        pytest.param(1.0, 1.002, 1.999, True, False, id="just no step"),
        pytest.param(1.0, 1.002, 2.1, True, True, id="a step forward"),
        pytest.param(1.0, 1.002, -5.0, True, True, id="a step back"),
        pytest.param(1.0, 1.002, 3600.0, True, True, id="an hour forward"),
        pytest.param(1.0, 5.0, 3.9, True, False, id="no step: a reading that took 4 s may be 2 s wrong"),
        pytest.param(1.0, 5.0, 4.1, True, True, id="a step beyond what a slow reading explains"),
    ],
)
def test_later_measurement_replaces_the_offset_if_it_is_better_or_contradicts(
    sent: float, received: float, moved: float, taken: bool, step: bool
) -> None:
    clock = ManualClock(START)
    clock.discipline(database(0.0), -0.005, 0.005)
    found = clock.discipline(database((sent + received) / 2 + moved), sent, received)
    assert clock.offset == pytest.approx(moved if taken else 0.0, abs=2e-6)
    assert (found is not None) == step
    if found is not None:
        assert found.seconds == pytest.approx(moved, abs=2e-6)
        assert type(found) is ClockStep


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("step", [-4.0, 3.0])
def test_slow_reading_moves_the_clock_no_further_than_its_certain_part(step: float, share: float) -> None:
    clock = ManualClock(START)
    clock.discipline(database(0.0), 0.0, 0.0)
    clock.discipline(database(1.0 + 31.0 * share + step), 1.0, 32.0)
    assert abs(clock.offset - step) <= abs(step) + 1e-5, "the reading made the offset worse"
    clock.discipline(database(33.0 + step), 33.0, 33.002)
    assert clock.offset == pytest.approx(step, abs=0.002)


def test_after_a_step_the_next_measurement_agrees() -> None:
    clock = ManualClock(START)
    clock.discipline(database(0.0), 0.0, 0.0)
    assert clock.discipline(database(HOUR + 1), 1.0, 1.0) is not None
    assert clock.discipline(database(HOUR + 2), 2.0, 2.0) is None
    assert clock.offset == pytest.approx(HOUR)


@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(0.0, 0.5)), min_size=1, max_size=20))
def test_offset_error_is_at_most_half_of_the_best_round_trip(
    delays: list[tuple[float, float]],
) -> None:
    clock, true = ManualClock(START), 7.0
    for second, (there, back) in enumerate(delays):
        assert clock.discipline(database(second + there + true), second, second + there + back) is None
        clock.at = second + there + back
    best = min((there + back) / 2 for there, back in delays)
    assert abs(clock.offset - true) <= best + module.DRIFT_PER_SECOND * (len(delays) + 1) + 2e-6


def test_a_drift_of_500_ppm_is_followed_within_the_error_of_a_reading() -> None:
    clock = ManualClock(START)
    for second in range(0, 36_000, 10):
        true = second * 500e-6
        assert clock.discipline(database(second + 0.005 + true), second, second + 0.010) is None
        assert abs(clock.offset - true) < 0.025


def test_watchers_are_called_only_when_the_offset_changes() -> None:
    clock, offsets = ManualClock(START), list[float]()
    unwatch = clock.watch(lambda: offsets.append(clock.offset))
    clock.discipline(database(0.0), 0.0, 0.0)
    clock.discipline(database(1.0000004), 1.0, 1.0)  # the same to the microsecond
    assert offsets == []
    clock.step(5.0)
    clock.discipline(database(6.5), 2.0, 2.0)
    assert offsets == [5.0, pytest.approx(4.5)]
    unwatch()
    clock.step(1.0)
    assert len(offsets) == 2


def test_one_clock_follows_another_that_steps() -> None:
    async def main() -> None:
        server, node = VirtualClock(START), VirtualClock(START - timedelta(hours=1))
        await asyncio.sleep(10)
        assert node.discipline(server.now(), node.monotonic(), node.monotonic()) is None
        assert node.now() == server.now()
        server.step(-60.0)
        found = node.discipline(server.now(), node.monotonic(), node.monotonic())
        assert found is not None
        assert found.seconds == pytest.approx(-60.0)
        assert node.now() == server.now()

    run_virtual(main())


# --- Timers ---

Maker = Callable[[Callable[[], None]], Timer]
TIMERS: list[Maker] = [SystemClock().timer, module._YieldingTimer]


def loops() -> list[Callable[[], asyncio.AbstractEventLoop]]:
    try:
        import uvloop
    except ImportError:
        return [asyncio.new_event_loop]
    return [asyncio.new_event_loop, uvloop.new_event_loop]


class Run:
    """Runs a coroutine on a fresh event loop of one implementation."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._new_loop = new_loop

    def __call__(self, main: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=self._new_loop) as runner:
            return runner.run(main)


@pytest.fixture(params=loops(), ids=lambda new: new.__module__.split(".")[0])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param)


every_timer = pytest.mark.parametrize("make", TIMERS, ids=lambda make: make.__name__)


@every_timer
def test_timer_is_never_early_and_its_median_lateness_is_below_500_ms(
    make: Maker, run: Run, record_property: Callable[[str, object], None]
) -> None:
    async def main() -> list[float]:
        late, chance = list[float](), random.Random(7)
        woken = asyncio.Event()

        def wake() -> None:
            late.append(time.monotonic() - at)
            woken.set()

        timer = make(wake)
        for _ in range(100):
            at = time.monotonic() + chance.uniform(0.0, 0.01)
            timer.arm(at)
            await woken.wait()
            woken.clear()
        timer.close()
        return late

    late = sorted(run(main()))
    figures = f"p50 {late[50] * 1e3:.3f} ms, p99 {late[98] * 1e3:.3f} ms, max {late[99] * 1e3:.3f} ms"
    print(figures)
    record_property("lateness", figures)
    assert late[0] >= 0.0
    assert statistics.median(late) < 0.5


@every_timer
def test_past_deadline_calls_back_immediately_and_once(make: Maker, run: Run) -> None:
    async def main() -> int:
        calls, seconds = list[str](), asyncio.Event()
        first = make(lambda: calls.append("first"))
        second = make(seconds.set)
        for at in (-1.0, 0.0, time.monotonic() - 5):
            first.arm(at)
        second.arm(time.monotonic() + 0.02)
        await seconds.wait()
        first.close()
        second.close()
        return len(calls)

    assert run(main()) == 1


@every_timer
def test_disarmed_rearmed_or_closed_timer_does_not_call_back(make: Maker, run: Run) -> None:
    async def main() -> list[str]:
        calls, done = list[str](), asyncio.Event()
        end = make(done.set)
        disarmed = make(lambda: calls.append("disarmed"))
        closed = make(lambda: calls.append("closed"))
        moved = make(lambda: calls.append("moved"))
        now = time.monotonic()
        for timer in (disarmed, closed, moved):
            timer.arm(now)
        # The expiry is already queued; the following calls must override it.
        disarmed.disarm()
        closed.close()
        moved.arm(now + HOUR)
        end.arm(now + 0.02)
        await done.wait()
        for timer in (end, disarmed, closed, moved):
            timer.close()
            timer.close()
        return calls

    assert run(main()) == []


@every_timer
def test_pending_expiry_is_ignored_after_rearming(make: Maker, run: Run) -> None:
    async def main() -> list[str]:
        calls, done = list[str](), asyncio.Event()

        def first(name: str) -> None:
            calls.append(name)
            a.arm(time.monotonic() + HOUR)
            b.disarm()
            end.arm(time.monotonic() + 0.02)

        a, b, end = make(lambda: first("a")), make(lambda: first("b")), make(done.set)
        a.arm(time.monotonic())
        b.arm(time.monotonic())
        await done.wait()
        for timer in (a, b, end):
            timer.close()
        return calls

    assert len(run(main())) == 1


@every_timer
def test_a_callback_may_arm_and_close_its_own_timer(make: Maker, run: Run) -> None:
    async def main() -> int:
        left, done = [3], asyncio.Event()

        def again() -> None:
            left[0] -= 1
            if left[0]:
                timer.arm(time.monotonic())
            else:
                timer.close()
                done.set()

        timer = make(again)
        timer.arm(time.monotonic())
        await done.wait()
        return left[0]

    assert run(main()) == 0


@every_timer
def test_timers_leak_no_descriptor_even_when_closed_after_their_loop(make: Maker, run: Run) -> None:
    left: list[Timer] = []

    async def main() -> None:
        for _ in range(20):
            timer = make(lambda: None)
            timer.arm(time.monotonic() + HOUR)
            timer.close()
        left.append(make(lambda: None))

    def used() -> int:
        run(main())
        left.pop().close()
        return len(os.listdir("/dev/fd"))

    gc.collect()  # closes descriptors that earlier tests left open
    before = used()
    assert used() <= before


def test_timer_accepts_the_latest_datetime(run: Run) -> None:
    async def main() -> None:
        clock = SystemClock()
        timer = clock.timer(lambda: None)
        timer.arm(clock.deadline(datetime.max.replace(tzinfo=UTC)))
        await asyncio.sleep(0)
        timer.close()

    run(main())


def test_a_timer_needs_a_running_loop() -> None:
    for clock in (SystemClock(), VirtualClock(START)):
        with pytest.raises(RuntimeError, match="no running event loop"):
            clock.timer(lambda: None)


def test_busy_thread_does_not_make_a_timer_early(run: Run) -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    async def main() -> float:
        woken = asyncio.Event()
        timer = SystemClock().timer(woken.set)
        at = time.monotonic() + 0.02
        timer.arm(at)
        await woken.wait()
        timer.close()
        return time.monotonic() - at

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        assert run(main()) >= 0.0
    finally:
        stop.set()
        thread.join()
