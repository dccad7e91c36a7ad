"""Time: the only module that reads a clock.

A node's time is its monotonic clock plus a measured offset to the database's clock. The node's wall clock is
read once, as a first guess; after that a step of it changes nothing. Instants are aware UTC datetimes, to the
microsecond; deadlines are seconds of `Clock.monotonic()`.
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

STEP = 2.0
"""Seconds, beyond what uncertainty explains, from which a jump of the database's time counts as a step."""

DRIFT = 50e-6
"""Seconds by which a measured offset is trusted less for each second of its age: two ordinary quartz
clocks."""

RESOLUTION = 1e-6
"""Seconds below which two readings agree: the microsecond of a datetime."""


@dataclass(frozen=True, slots=True)
class ClockStep:
    """The database's time jumped against this node's monotonic clock.

    `seconds` is positive when it jumped forward. A node that was suspended sees the sleep as a step, too.
    """

    seconds: float


class Timer(Protocol):
    """One callback at one monotonic deadline at a time. Belongs to the event loop that was running when it
    was made."""

    def arm(self, at: float) -> None:
        """Call back once, as soon as `Clock.monotonic()` is `at` or more and never before. Replaces an
        earlier arming."""

    def disarm(self) -> None:
        """Don't call back. The timer can be armed again."""

    def close(self) -> None:
        """Disarm for good and give back what the system lent. May be called again."""


class Clock(Protocol):
    """The time by the database's clock, as best known, and timers. Its methods are for the event loop's
    thread; `now`, `monotonic` and `deadline` may be called from any."""

    def now(self) -> datetime:
        """The present instant, aware UTC. A correction of less than `STEP` may take it back: nothing may rely
        on it rising, and nothing does, as a claim is checked by the database's own clock."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back, never corrected."""

    def deadline(self, instant: datetime) -> float:
        """The monotonic time of an aware `instant`, by the present offset; see `watch` for when that changes.
        A naive one is a TypeError."""

    def timer(self, callback: Callable[[], None]) -> Timer:
        """A new timer on the running event loop (RuntimeError without one). Close it."""

    @property
    def offset(self) -> float:
        """Seconds the database's clock is ahead of this node's as it was at the start; 0.0 until measured."""

    def discipline(self, reading: datetime, sent: float, received: float) -> ClockStep | None:
        """Learn from one measurement: the database read `reading` (aware) between the monotonic instants
        `sent` and `received`. Returns the step if its time has jumped, for an alert; otherwise None."""

    def watch(self, moved: Callable[[], None]) -> Callable[[], None]:
        """Call `moved` whenever the offset changes, so that deadlines must be computed anew. Returns how to
        stop."""


class _Disciplined(ABC):
    """What both clocks share: an instant for the monotonic zero, and an offset that measurements correct."""

    def __init__(self, zero: datetime) -> None:
        self._anchor = self._zero = zero
        self._error = math.inf
        self._measured = 0.0
        self._watchers: list[Callable[[], None]] = []

    @abstractmethod
    def monotonic(self) -> float: ...

    def now(self) -> datetime:
        return self._zero + timedelta(seconds=self.monotonic())

    def deadline(self, instant: datetime) -> float:
        after = instant - self._zero
        at = after.total_seconds()
        # A float has room for the microseconds of 270 years; beyond, it must not fall short of the instant.
        return at if timedelta(seconds=at) >= after else math.nextafter(at, math.inf)

    @property
    def offset(self) -> float:
        return (self._zero - self._anchor).total_seconds()

    def watch(self, moved: Callable[[], None]) -> Callable[[], None]:
        self._watchers.append(moved)
        return lambda: self._watchers.remove(moved)

    def discipline(self, reading: datetime, sent: float, received: float) -> ClockStep | None:
        # The server read its clock somewhere between sent and received, so half the way is the most the
        # middle can be wrong by, however unequal the two directions were.
        moved = (reading - self._zero).total_seconds() - (sent + received) / 2
        error = (received - sent) / 2
        known_error = self._error + DRIFT * max(0.0, received - self._measured)
        # The tighter of the two wins; but when they exclude each other, the older one is what is out of date.
        if error > known_error and abs(moved) <= error + known_error:
            return None
        stepped = abs(moved) > STEP + error + known_error
        if error > STEP and abs(moved) > error:
            # A reading that was under way for so long says that it moved, and not how far: no more than is sure.
            moved, error = moved - math.copysign(error, moved), 2 * error
        self._error, self._measured = error, received
        if abs(moved) > RESOLUTION:
            self._move(moved)
        return ClockStep(moved) if stepped else None

    def _move(self, seconds: float) -> None:
        self._zero += timedelta(seconds=seconds)
        for moved in tuple(self._watchers):
            moved()


class SystemClock(_Disciplined):
    """The clock of a running node."""

    def __init__(self) -> None:
        super().__init__(datetime.now(UTC) - timedelta(seconds=time.monotonic()))

    monotonic = staticmethod(time.monotonic)

    def timer(self, callback: Callable[[], None]) -> Timer:
        return _FdTimer(callback) if sys.platform == "linux" else _YieldingTimer(callback)


class VirtualClock(_Disciplined):
    """A clock for tests and simulation: `start` plus the event loop's own time, which on
    `sim.loop.VirtualLoop` jumps.

    It belongs to the loop that is running when it is first used. One instance can be node and database at
    once. To play a database clock that steps, or a node whose clock is wrong, give each its own, `step` one
    and `discipline` the other.
    """

    def __init__(self, start: datetime) -> None:
        """`start` is the instant at which the loop's time is 0; naive is a ValueError."""
        if start.tzinfo is None:
            raise ValueError("A clock starts at an aware instant; this one has no time zone.")
        super().__init__(start.astimezone(UTC))
        self._loop: asyncio.AbstractEventLoop | None = None

    def monotonic(self) -> float:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    def timer(self, callback: Callable[[], None]) -> Timer:
        return _LoopTimer(callback)

    def step(self, seconds: float) -> None:
        """Shift `now()` by `seconds` at once, as when somebody sets a clock. Waiting alarms notice."""
        self._move(seconds)


class _LoopTimer:
    """A timer of the event loop: exact when its time is virtual."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._handle: asyncio.Handle | None = None

    def arm(self, at: float) -> None:
        if self._handle is not None:
            self.disarm()
        self._handle = self._loop.call_at(at, self._ring)

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        self.disarm()

    def _ring(self) -> None:
        self._handle = None
        self._callback()


class _YieldingTimer(_LoopTimer):
    """For systems without timerfd. Event loops wake up to 2 ms late, so this wakes that much before and
    yields until the instant, which leaves the loop free for others."""

    _SHORT = 0.002

    def arm(self, at: float) -> None:
        self.disarm()
        self._handle = self._loop.call_later(max(0.0, at - time.monotonic() - self._SHORT), self._look, at)

    def _look(self, at: float) -> None:
        if time.monotonic() < at:
            self._handle = self._loop.call_soon(self._look, at)
        else:
            self._handle = None
            self._callback()


class _FdTimer:
    """A kernel timer (Linux timerfd) the event loop watches like a socket: late by microseconds, at no cost
    in between."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._at = math.inf
        self._fd = _checked(_libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop.add_reader(self._fd, self._ready)

    def arm(self, at: float) -> None:
        self._at = at
        self._set(max(1, math.ceil(at * 1e9)))  # 0 would disarm

    def disarm(self) -> None:
        if self._at < math.inf:
            self._at = math.inf
            self._set(0)

    def close(self) -> None:
        if self._fd >= 0:
            self._at = math.inf
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ready(self) -> None:
        # A report may be older than the last arm() or disarm(): the clock decides. Until it agrees the
        # descriptor stays readable or armed, and this is called again.
        if time.monotonic() >= self._at:
            self.disarm()  # which also takes the expiry off the descriptor, without a read
            self._callback()

    def _set(self, nanoseconds: int) -> None:
        import ctypes

        absolute = 1
        spec = (ctypes.c_long * 4)(0, 0, *divmod(nanoseconds, 1_000_000_000))
        _checked(_libc().timerfd_settime(self._fd, absolute, spec, None))


@cache
def _libc() -> ctypes.PyDLL:
    """The C library; os.timerfd_create comes with Python 3.13. PyDLL keeps the interpreter's lock, as giving
    it up for a call of a microsecond can cost milliseconds when other threads are busy."""
    import ctypes

    return ctypes.PyDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        import ctypes

        raise OSError(ctypes.get_errno(), f"The system gave no timer: {os.strerror(ctypes.get_errno())}.")
    return result


def wall() -> datetime:
    """This machine's own clock, steps and all: the database's clock of a SQLite file."""
    return datetime.now(UTC)
