"""Clocks and timers. No other module reads a system clock.

A node's time is its monotonic clock plus a measured offset to the database's clock. The node's wall clock is read once,
as a first estimate; later steps of it have no effect. Instants are aware UTC datetimes with microsecond resolution;
deadlines are seconds of `Clock.monotonic()`.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import ctypes

STEP_THRESHOLD_SECONDS = 2.0
"""A jump of the database's time larger than this, plus the measurement uncertainty, counts as a step."""

DRIFT_PER_SECOND = 50e-6
"""Growth of the uncertainty of a measured offset per second of its age: the drift between two quartz clocks."""

RESOLUTION_SECONDS = 1e-6
"""Two readings that differ by at most this are equal: the resolution of a datetime."""


@dataclass(frozen=True, slots=True)
class ClockStep:
    """A jump of the database's time relative to this node's monotonic clock.

    `seconds` is positive for a jump forward. A suspended node sees the suspension as a step as well.
    """

    seconds: float


class Timer(Protocol):
    """Calls one callback at one monotonic deadline. Bound to the event loop that was running at its creation."""

    def arm(self, at: float) -> None:
        """Call back once, as soon as `Clock.monotonic()` is at least `at`, never earlier. Replaces the last arming."""

    def disarm(self) -> None:
        """Cancel the callback. The timer can be armed again."""

    def close(self) -> None:
        """Disarm permanently and release system resources. Idempotent."""


class Clock(Protocol):
    """The estimated time of the database's clock, and timers.

    Methods must be called from the event loop's thread, except `now`, `monotonic` and `deadline`.
    """

    def now(self) -> datetime:
        """Return the current instant, aware UTC.

        It may go back by a correction, so nothing may rely on it being monotonic. Correctness does not depend on it: a
        claim is checked by the database's own clock.
        """

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never goes back, never corrected."""

    def deadline(self, instant: datetime) -> float:
        """Return the monotonic time of an aware `instant` by the current offset; `watch` reports when that changes.

        Raises TypeError for a naive instant.
        """

    def timer(self, callback: Callable[[], None]) -> Timer:
        """Return a new timer on the running event loop, which must be closed. Raises RuntimeError without a loop."""

    @property
    def offset(self) -> float:
        """Seconds by which the database's clock is ahead of the node's initial estimate; 0.0 until measured."""

    def discipline(self, reading: datetime, sent: float, received: float) -> ClockStep | None:
        """Correct the offset by one measurement.

        The database's clock showed `reading` (aware) between the monotonic times `sent` and `received`. Returns the
        step if the database's time has jumped; otherwise None.
        """

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` whenever the offset changes, after which deadlines must be recomputed.

        Returns a function that unsubscribes.
        """


class _DisciplinedClock(ABC):
    """Base of both clocks: the instant of monotonic zero, corrected by measurements."""

    def __init__(self, zero: datetime) -> None:
        self._anchor = self._zero = zero
        self._uncertainty = math.inf
        self._measured_at = 0.0
        self._watchers: list[Callable[[], None]] = []

    @abstractmethod
    def monotonic(self) -> float: ...

    def now(self) -> datetime:
        return self._zero + timedelta(seconds=self.monotonic())

    def deadline(self, instant: datetime) -> float:
        elapsed = instant - self._zero
        at = elapsed.total_seconds()
        # A float represents the microseconds of 270 years exactly; beyond, round up, so that it is never early.
        return at if timedelta(seconds=at) >= elapsed else math.nextafter(at, math.inf)

    @property
    def offset(self) -> float:
        return (self._zero - self._anchor).total_seconds()

    def watch(self, on_change: Callable[[], None]) -> Callable[[], None]:
        self._watchers.append(on_change)
        return lambda: self._watchers.remove(on_change)

    def discipline(self, reading: datetime, sent: float, received: float) -> ClockStep | None:
        # The server read its clock between sent and received. Their midpoint is wrong by at most half the round trip,
        # however asymmetric the two directions were.
        moved = (reading - self._zero).total_seconds() - (sent + received) / 2
        error = (received - sent) / 2
        known_error = self._uncertainty + DRIFT_PER_SECOND * max(0.0, received - self._measured_at)
        # The more precise measurement wins; if the two contradict each other, the older one is outdated.
        if error > known_error and abs(moved) <= error + known_error:
            return None
        stepped = abs(moved) > STEP_THRESHOLD_SECONDS + error + known_error
        if error > STEP_THRESHOLD_SECONDS and abs(moved) > error:
            # A slow round trip proves that the time moved, but not how far: apply only the certain part.
            moved, error = moved - math.copysign(error, moved), 2 * error
        self._uncertainty, self._measured_at = error, received
        if abs(moved) > RESOLUTION_SECONDS:
            self._shift(moved)
        return ClockStep(moved) if stepped else None

    def _shift(self, seconds: float) -> None:
        self._zero += timedelta(seconds=seconds)
        for on_change in tuple(self._watchers):
            on_change()


class SystemClock(_DisciplinedClock):
    """The clock of a running node."""

    def __init__(self) -> None:
        super().__init__(datetime.now(UTC) - timedelta(seconds=time.monotonic()))

    monotonic = staticmethod(time.monotonic)

    def timer(self, callback: Callable[[], None]) -> Timer:
        return _FdTimer(callback) if sys.platform == "linux" else _YieldingTimer(callback)


class VirtualClock(_DisciplinedClock):
    """A clock for tests and simulation: `start` plus the event loop's time, which jumps on `sim.loop.VirtualLoop`.

    Bound to the loop that is running on first use. One instance can serve as the clock of both node and database. To
    simulate a database clock that steps, or a node with a wrong clock, create two; `step` one and `discipline` the
    other.
    """

    def __init__(self, start: datetime) -> None:
        """Start at `start`, the instant at which the loop's time is 0. Raises ValueError for a naive one."""
        if start.tzinfo is None:
            raise ValueError("A clock must start at an aware instant; this one has no time zone.")
        super().__init__(start.astimezone(UTC))
        self._loop: asyncio.AbstractEventLoop | None = None

    def monotonic(self) -> float:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    def timer(self, callback: Callable[[], None]) -> Timer:
        return _LoopTimer(callback)

    def step(self, seconds: float) -> None:
        """Shift `now()` by `seconds` immediately, like setting a wall clock. Waiting alarms are updated."""
        self._shift(seconds)


class _LoopTimer:
    """A timer of the event loop; exact if the loop's time is virtual."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._handle: asyncio.Handle | None = None

    def arm(self, at: float) -> None:
        if self._handle is not None:
            self.disarm()
        self._handle = self._loop.call_at(at, self._fire)

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        self.disarm()

    def _fire(self) -> None:
        self._handle = None
        self._callback()


class _YieldingTimer(_LoopTimer):
    """A timer for systems without timerfd.

    Event loops wake up to 2 ms late, so this timer wakes that much earlier and then yields to the loop until the
    deadline, so that other tasks can run.
    """

    _EARLY_SECONDS = 0.002

    def arm(self, at: float) -> None:
        self.disarm()
        self._handle = self._loop.call_later(max(0.0, at - time.monotonic() - self._EARLY_SECONDS), self._check, at)

    def _check(self, at: float) -> None:
        if time.monotonic() < at:
            self._handle = self._loop.call_soon(self._check, at)
        else:
            self._handle = None
            self._callback()


class _FdTimer:
    """A kernel timer (Linux timerfd) that the event loop watches like a socket: only microseconds late."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._deadline = math.inf
        self._fd = _check_errno(_libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop.add_reader(self._fd, self._ready)

    def arm(self, at: float) -> None:
        self._deadline = at
        self._set(max(1, math.ceil(at * 1e9)))  # 0 would disarm

    def disarm(self) -> None:
        if self._deadline < math.inf:
            self._deadline = math.inf
            self._set(0)

    def close(self) -> None:
        if self._fd >= 0:
            self._deadline = math.inf
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ready(self) -> None:
        # A readiness event may be older than the last arm() or disarm(), so the clock decides. Until the deadline the
        # descriptor stays readable or armed, and this is called again.
        if time.monotonic() >= self._deadline:
            self.disarm()  # also clears the expiry of the descriptor, without a read
            self._callback()

    def _set(self, nanoseconds: int) -> None:
        import ctypes

        absolute = 1
        spec = (ctypes.c_long * 4)(0, 0, *divmod(nanoseconds, 1_000_000_000))
        _check_errno(_libc().timerfd_settime(self._fd, absolute, spec, None))


@cache
def _libc() -> ctypes.PyDLL:
    """Return the C library, because os.timerfd_create requires Python 3.13.

    PyDLL keeps the GIL: releasing it for a call of a microsecond can cost milliseconds when other threads are busy.
    """
    import ctypes

    return ctypes.PyDLL(None, use_errno=True)


def _check_errno(result: int) -> int:
    if result < 0:
        import ctypes

        raise OSError(ctypes.get_errno(), f"Could not create or set a timer: {os.strerror(ctypes.get_errno())}.")
    return result


def system_now() -> datetime:
    """Return the time of this machine's wall clock, which serves as the database's clock for SQLite."""
    return datetime.now(UTC)
