"""Who wants to know that a job is due now, in this process or in others: `Timebell.arrivals`.

A node says of each job that starts for the first time its id, topic, tenant and the instant; a listener reads the job
itself from the store. These are hints: each reaches a listener once at most, and none that was not there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import NamedTuple

from timebell.alarm import Alarm
from timebell.clock import Clock
from timebell.model.job import Attempt, Job
from timebell.store.dialects.base import Store
from timebell.store.jobs import repository
from timebell.store.notifications import ASK_EVERY, ASKED_FOR, Bridge, packed, unpacked
from timebell.store.types import from_micros, to_micros
from timebell.targets.handler import Arrived, Handler

log = logging.getLogger("timebell.arrivals")

GATHER = 0.05  # seconds in which hints are gathered before they are sent
MOST_WAITING = 10_000  # hints that wait to be sent, or for a listener; the oldest are dropped
PAUSE = 1.0  # seconds until a lost bridge is tried again


class Hint(NamedTuple):
    """A job that is due now."""

    id: str
    topic: str
    tenant_id: str
    at: str
    """When it started, in microseconds since 1970."""


class Listener:
    """One who wants to know of some topics, of one tenant or of all."""

    def __init__(self, pattern: str, tenant_id: str | None, clock: Clock) -> None:
        self._wants = Handler(pattern, lambda event: None)
        self._tenant_id = tenant_id
        self._hints: deque[Hint] = deque(maxlen=MOST_WAITING)
        self._dropped = 0
        self.alarm = Alarm(clock)

    def take(self, hint: Hint) -> None:
        """Remember it, if it is for this one."""
        if self._tenant_id in (None, hint.tenant_id) and self._wants.hears(hint.topic):
            if len(self._hints) == MOST_WAITING:
                self._dropped += 1
                if self._dropped % MOST_WAITING == 1:
                    log.warning("a listener to arrivals is too slow: %d were dropped", self._dropped)
            self._hints.append(hint)
            self.alarm.poke()

    async def next(self) -> Hint:
        """The oldest that waits, or the next to come."""
        while not self._hints:
            await self.alarm.wait(None)
        return self._hints.popleft()


class Heard:
    """The events of a listener, for `async for`; a wait for one that is given up takes nothing from the next."""

    def __init__(self, listener: Listener, store: Store) -> None:
        self._listener, self._store = listener, store

    def __aiter__(self) -> Heard:
        return self

    async def __anext__(self) -> Arrived:
        while True:
            hint = await self._listener.next()
            job = await self._store.run(repository.find, hint.tenant_id, hint.id)
            if job is not None:
                return _arrived(job, hint)


class Arrivals:
    """What a process knows of arrivals: of its own node, or by the bridge of all of them."""

    def __init__(self, bridge: Bridge | None, clock: Clock) -> None:
        self.bridge = bridge
        self._clock = clock
        self._listeners: set[Listener] = set()
        self._asked_until = 0.0
        self._waiting: deque[Hint] = deque(maxlen=MOST_WAITING)
        self._sending: asyncio.Task[None] | None = None
        self._hearing: asyncio.Task[None] | None = None

    def asked(self) -> None:
        """Somebody elsewhere listens: send hints for a while."""
        self._asked_until = self._clock.monotonic() + ASKED_FOR

    @property
    def wanted(self) -> bool:
        """Whether anybody wants to know."""
        if self.bridge is None:
            return bool(self._listeners)
        return not self.bridge.on_request or self._clock.monotonic() < self._asked_until

    def told(self, attempt: Attempt, at: datetime) -> None:
        """An attempt starts: on the way of every job, so it does nothing where nobody wants to know."""
        if not self.wanted:
            return
        if self.bridge is None:
            self._take(_hint(attempt, at))
        else:
            self._waiting.append(_hint(attempt, at))
            if self._sending is None or self._sending.done():
                self._sending = asyncio.create_task(self._send_soon(), name="timebell-arrivals")

    def _take(self, hint: Hint) -> None:
        for listener in self._listeners:
            listener.take(hint)

    async def _send_soon(self) -> None:
        alarm = Alarm(self._clock)
        try:
            while self._waiting:
                await alarm.wait(self._clock.now() + timedelta(seconds=GATHER))
                await self.flush()
        finally:
            alarm.close()

    async def flush(self) -> None:
        """Send what waits. What cannot be sent is lost: it was a hint."""
        hints = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not hints or self.bridge is None:
            return
        try:
            await self.bridge.tell(packed(list(hints)))
        except Exception as failed:
            log.warning("%d arrivals could not be told: %s", len(hints), type(failed).__name__)

    @asynccontextmanager
    async def listening(self, pattern: str, tenant_id: str | None) -> AsyncIterator[Listener]:
        """A listener, which hears while the block runs. Raises StoreUnreachable when it cannot begin."""
        if self.bridge is not None and self._hearing is None:
            look_after = await self.bridge.connect(self._heard)
            self._hearing = asyncio.create_task(self._hear(self.bridge, look_after), name="timebell-listening")
        listener = Listener(pattern, tenant_id, self._clock)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            listener.alarm.close()
            if not self._listeners:
                await self._hush()

    async def _hear(self, bridge: Bridge, look_after: Callable[[], object]) -> None:
        """Keep the bridge, and connect anew when it is lost."""
        alarm, lost = Alarm(self._clock), False
        try:
            while True:
                try:
                    if lost:
                        await bridge.close()
                        look_after = await bridge.connect(self._heard)
                        log.warning("arrivals are heard again; those in between are lost")
                        lost = False
                    await look_after()  # type: ignore[misc]
                    pause = ASK_EVERY if bridge.on_request else 0.0
                except Exception as failed:
                    if not lost:
                        log.warning("arrivals are not heard for now: %s", type(failed).__name__)
                    lost, pause = True, PAUSE
                if pause:
                    await alarm.wait(self._clock.now() + timedelta(seconds=pause))
        finally:
            alarm.close()

    def _heard(self, text: str) -> None:
        for one in unpacked(text):
            with suppress(TypeError, ValueError):
                hint = Hint(*one)
                int(hint.at)
                self._take(hint)

    async def _hush(self) -> None:
        hearing, self._hearing = self._hearing, None
        if hearing is not None and self.bridge is not None:
            hearing.cancel()
            await asyncio.wait([hearing])
            await self.bridge.close()

    async def close(self) -> None:
        """Send what waits and let go of the bridge."""
        await self.flush()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
            self._sending = None
        await self._hush()
        if self.bridge is not None:
            await self.bridge.close()


def _hint(attempt: Attempt, at: datetime) -> Hint:
    return Hint(attempt.id, attempt.topic, attempt.tenant_id, str(to_micros(at)))


def _arrived(job: Job, hint: Hint) -> Arrived:
    """The event of a job that a hint was about."""
    at = from_micros(int(hint.at))
    tenant = {} if job.tenant_id == "default" else {"tenant_id": job.tenant_id}
    return Arrived(
        topic=job.topic, payload=job.payload, metadata={**job.metadata, **tenant}, timezone=job.timezone,
        scheduled_at=job.scheduled_at, fired_at=at, late_by=at - job.scheduled_at, job_id=job.id,
        schedule_id=job.schedule_id, occurrence_key=job.occurrence_key, attempt=1,
    )  # fmt: skip
