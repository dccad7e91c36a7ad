"""Live stream of started jobs, within a process or across processes: `Timebell.arrivals`.

When a job starts its first attempt, the node publishes its id, topic, tenant and start time; a listener reads the job
from the store. These messages are hints: delivery is at most once, and only to listeners subscribed at that moment.
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
from timebell.store.notifications import (
    REQUEST_INTERVAL_SECONDS,
    REQUEST_VALIDITY_SECONDS,
    NotificationChannel,
    pack_hints,
    unpack_hints,
)
from timebell.store.types import from_micros, to_micros
from timebell.targets.arrived import Arrived
from timebell.targets.handler import Handler

log = logging.getLogger("timebell.arrivals")

HINT_BATCH_SECONDS = 0.05  # how long hints are collected before they are sent
MAX_QUEUED_HINTS = 10_000  # per listener and for sending; then the oldest are dropped
RECONNECT_DELAY_SECONDS = 1.0  # pause before a lost channel is connected again


class Hint(NamedTuple):
    """The notification that a job has started."""

    id: str
    topic: str
    tenant_id: str
    started_at_micros: str
    """Start time in microseconds since 1970, as text."""


class Listener:
    """A subscriber to the topics of a pattern, for one tenant or for all (None)."""

    def __init__(self, pattern: str, tenant_id: str | None, clock: Clock) -> None:
        self._pattern = Handler(pattern, lambda event: None)
        self._tenant_id = tenant_id
        self._hints: deque[Hint] = deque(maxlen=MAX_QUEUED_HINTS)
        self._dropped_count = 0
        self.alarm = Alarm(clock)

    def offer(self, hint: Hint) -> None:
        """Queue a hint if it matches the subscription."""
        if self._tenant_id in (None, hint.tenant_id) and self._pattern.matches(hint.topic):
            if len(self._hints) == MAX_QUEUED_HINTS:
                self._dropped_count += 1
                if self._dropped_count % MAX_QUEUED_HINTS == 1:
                    log.warning("a listener to arrivals is too slow: %d arrivals were dropped", self._dropped_count)
            self._hints.append(hint)
            self.alarm.wake()

    async def next(self) -> Hint:
        """Return the oldest queued hint; wait for one if the queue is empty."""
        while not self._hints:
            await self.alarm.wait(None)
        return self._hints.popleft()


class ArrivalStream:
    """The events of a listener, for `async for`. A cancelled wait loses no event."""

    def __init__(self, listener: Listener, store: Store) -> None:
        self._listener, self._store = listener, store

    def __aiter__(self) -> ArrivalStream:
        return self

    async def __anext__(self) -> Arrived:
        while True:
            hint = await self._listener.next()
            job = await self._store.run(repository.find_job, hint.tenant_id, hint.id)
            if job is not None:
                return _build_event(job, hint)


class ArrivalHub:
    """Publishes and receives the hints of a process: its own only, or through a channel those of all nodes."""

    def __init__(self, channel: NotificationChannel | None, clock: Clock) -> None:
        self.channel = channel
        self._clock = clock
        self._listeners: set[Listener] = set()
        self._requested_until = 0.0
        self._outgoing: deque[Hint] = deque(maxlen=MAX_QUEUED_HINTS)
        self._sender: asyncio.Task[None] | None = None
        self._receiver: asyncio.Task[None] | None = None

    def mark_requested(self) -> None:
        """Record that another process listens, so that hints are sent for `REQUEST_VALIDITY_SECONDS`."""
        self._requested_until = self._clock.monotonic() + REQUEST_VALIDITY_SECONDS

    @property
    def has_listeners(self) -> bool:
        """True if published hints may have a listener."""
        if self.channel is None:
            return bool(self._listeners)
        return not self.channel.on_request or self._clock.monotonic() < self._requested_until

    def publish(self, attempt: Attempt, at: datetime) -> None:
        """Publish the start of an attempt. Does nothing without listeners, as it is called for every job."""
        if not self.has_listeners:
            return
        if self.channel is None:
            self._dispatch(_build_hint(attempt, at))
        else:
            self._outgoing.append(_build_hint(attempt, at))
            if self._sender is None or self._sender.done():
                self._sender = asyncio.create_task(self._flush_soon(), name="timebell-arrivals")

    def _dispatch(self, hint: Hint) -> None:
        for listener in self._listeners:
            listener.offer(hint)

    async def _flush_soon(self) -> None:
        alarm = Alarm(self._clock)
        try:
            while self._outgoing:
                await alarm.wait(self._clock.now() + timedelta(seconds=HINT_BATCH_SECONDS))
                await self.flush()
        finally:
            alarm.close()

    async def flush(self) -> None:
        """Send the queued hints. Hints that cannot be sent are dropped."""
        hints = [self._outgoing.popleft() for _ in range(len(self._outgoing))]
        if not hints or self.channel is None:
            return
        try:
            await self.channel.publish(pack_hints(list(hints)))
        except Exception as error:
            log.warning("could not publish %d arrivals: %s", len(hints), type(error).__name__)

    @asynccontextmanager
    async def subscribe(self, pattern: str, tenant_id: str | None) -> AsyncIterator[Listener]:
        """Yield a listener that receives hints while the block runs. Raises StoreUnreachable if it cannot connect."""
        if self.channel is not None and self._receiver is None:
            keep_alive = await self.channel.connect(self._on_message)
            self._receiver = asyncio.create_task(self._receive(self.channel, keep_alive), name="timebell-listening")
        listener = Listener(pattern, tenant_id, self._clock)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            listener.alarm.close()
            if not self._listeners:
                await self._stop_receiving()

    async def _receive(self, channel: NotificationChannel, keep_alive: Callable[[], object]) -> None:
        """Keep the channel connected; reconnect after a failure."""
        alarm, lost = Alarm(self._clock), False
        try:
            while True:
                try:
                    if lost:
                        await channel.close()
                        keep_alive = await channel.connect(self._on_message)
                        log.warning("receiving arrivals again; those in between are lost")
                        lost = False
                    await keep_alive()  # type: ignore[misc]
                    pause = REQUEST_INTERVAL_SECONDS if channel.on_request else 0.0
                except Exception as error:
                    if not lost:
                        log.warning("arrivals cannot be received, reconnecting: %s", type(error).__name__)
                    lost, pause = True, RECONNECT_DELAY_SECONDS
                if pause:
                    await alarm.wait(self._clock.now() + timedelta(seconds=pause))
        finally:
            alarm.close()

    def _on_message(self, text: str) -> None:
        for fields in unpack_hints(text):
            with suppress(TypeError, ValueError):
                hint = Hint(*fields)
                int(hint.started_at_micros)
                self._dispatch(hint)

    async def _stop_receiving(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None and self.channel is not None:
            receiver.cancel()
            await asyncio.wait([receiver])
            await self.channel.close()

    async def close(self) -> None:
        """Send the queued hints and close the channel."""
        await self.flush()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
            self._sender = None
        await self._stop_receiving()
        if self.channel is not None:
            await self.channel.close()


def _build_hint(attempt: Attempt, at: datetime) -> Hint:
    return Hint(attempt.id, attempt.topic, attempt.tenant_id, str(to_micros(at)))


def _build_event(job: Job, hint: Hint) -> Arrived:
    """Build the event of a started job."""
    at = from_micros(int(hint.started_at_micros))
    tenant = {} if job.tenant_id == "default" else {"tenant_id": job.tenant_id}
    return Arrived(
        topic=job.topic, payload=job.payload, metadata={**job.metadata, **tenant}, timezone=job.timezone,
        scheduled_at=job.scheduled_at, fired_at=at, late_by=at - job.scheduled_at, job_id=job.id,
        schedule_id=job.schedule_id, occurrence_key=job.occurrence_key, attempt=1,
    )  # fmt: skip
