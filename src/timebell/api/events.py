"""`/events`: what happens in a tenant, as it happens (text/event-stream).

What has happened is read from the tables, in order of (instant, id). A transaction may commit after a later one, so
each look begins a little before where the last one ended, and what was sent already is left out. An event's id says
where the stream stands and how much of that overlap was sent: who comes back with it gets what was missed, and if
something was committed late meanwhile, the overlap once more rather than not at all.

Arrivals are another thing: hints of jobs that start, which are told once at most, have no id and are not made up for.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import heappop, heappush
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Header, Query, Response
from fastapi.sse import format_sse_event

from timebell.alarm import Alarm
from timebell.api.executions import execution
from timebell.api.route import Asked, Guarded, Let, reads
from timebell.api.schemas import utc
from timebell.api.streams import EventStream
from timebell.client.job_fields import metadata_json
from timebell.client.validation import uuid_of
from timebell.errors import InvalidInput, StoreError
from timebell.ids import new_id
from timebell.store.audit import events as rows
from timebell.store.audit.events import Event, Place, Wanted
from timebell.store.types import from_micros, to_micros
from timebell.targets.handler import SCHEDULE_ARRIVED, Arrived, arrived_event_name, check_pattern

log = logging.getLogger("timebell.api")

MOST_HEARD = 1000  # arrivals that wait for a slow reader; the oldest are dropped
OVERLAP = timedelta(seconds=5)
EVERY = timedelta(seconds=1)
KEEP_ALIVE = timedelta(seconds=15)
PAGE = 500
MOST_STREAMS = 100  # of a tenant, on a node
FIRST = "00000000-0000-0000-0000-000000000000"
_OF_TOPIC = re.compile(r"schedule\.[A-Za-z0-9_.-]+\.arrived", re.ASCII)
_PLACE = re.compile(r"(\d{1,16})\.([0-9a-f-]{36})\.(\d{1,9})\.(\d{1,9})", re.ASCII)
TYPES = (
    "job.completed", "job.failed", "job.cancelled", "job.skipped", "job.*", "schedule.*",
    "target.*",
    f"{SCHEDULE_ARRIVED} and {arrived_event_name('<topic>')} (a job starts for the first time; only if asked for)",
)  # fmt: skip


routes = APIRouter(route_class=Guarded, tags=["events"])
Text = Annotated[str | None, Query(max_length=200)]


@routes.get(
    "/events", response_class=EventStream, status_code=200,
    responses={200: {"description": "One event after the other, until somebody ends it.", "content": {
        "text/event-stream": {"schema": {"type": "string"}}}}},
    **reads(),
)  # fmt: skip
async def stream_events(
    let: Let, topic: Annotated[Text, Query(description="A topic, or a prefix: billing.*")] = None,
    type: Annotated[
        list[Annotated[str, Query(max_length=60)]] | None, Query(max_length=20, description=", ".join(TYPES))
    ] = None,
    schedule_id: Annotated[Text, Query(alias="scheduleId")] = None,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=100)] = None,
) -> Response:  # fmt: skip
    """Ends of jobs, changes of schedules and targets and, if asked for, starts of jobs, as they happen (server-sent
    events): from now on, or from Last-Event-ID."""
    if _arrivals(type):
        check_pattern(topic or "*")
        let.app.reach_arrivals()
    schedule = schedule_id and (uuid_of(schedule_id) or new_id(let.now))  # what is no id fits nothing
    stream = Stream.of(last_event_id, let.now, Wanted(let.tenant_id, topic, type, schedule))
    return EventStream(_sent(let, stream), let.door, let.tenant_id, MOST_STREAMS)


@dataclass(slots=True)
class Stream:
    """How far a listener is: up to `mark`, and of what lies within the overlap before it, what was `sent`."""

    wanted: Wanted
    mark: Place
    began: datetime
    sent: set[str] = field(default_factory=set)
    order: list[Place] = field(default_factory=list)
    resumed: int | None = None
    """How many events of the overlap it had got when it left."""

    @classmethod
    def of(cls, last: str | None, now: datetime, wanted: Wanted) -> Stream:
        """A new listener, or one that comes back with the id of the last event it got. Raises InvalidInput."""
        if last is None:
            return cls(wanted, (now, FIRST), now)
        found = _PLACE.fullmatch(last)
        try:
            at, id_ = from_micros(int(found[1])), str(UUID(found[2]))  # type: ignore[index]
        except (TypeError, ValueError, OverflowError) as bad:
            raise InvalidInput(
                f"Last-Event-ID is {last!r:.60}, which is not one of ours.", code="INVALID_LAST_EVENT_ID",
                fix="Send the id of the last event as it came, or none.",
            ) from bad  # fmt: skip
        assert found is not None
        return cls(wanted, (at, id_), at - timedelta(milliseconds=int(found[4])), resumed=int(found[3]))

    @property
    def start(self) -> datetime:
        """Where to look from."""
        return max(self.began, self.mark[0] - OVERLAP)

    def take(self, event: Event) -> str | None:
        """The id to send an event under; None for one that was sent already."""
        if event.id in self.sent or event.at < self.began:
            return None
        self._add(event)
        self.mark = max(self.mark, (event.at, event.id))
        start = self.start
        while self.order[0][0] < start:
            self.sent.discard(heappop(self.order)[1])
        window = (self.mark[0] - start) // timedelta(milliseconds=1)
        return f"{to_micros(self.mark[0])}.{self.mark[1]}.{len(self.sent)}.{window}"

    def come_back(self, overlap: list[Event]) -> None:
        """Leave out the overlap, which was sent, unless more is in it now than was sent."""
        there = [event for event in overlap if (event.at, event.id) <= self.mark]
        if self.resumed is not None and len(there) <= self.resumed:
            for event in there:
                self._add(event)
        self.resumed = None

    def _add(self, event: Event) -> None:
        self.sent.add(event.id)
        heappush(self.order, (event.at, event.id))


def _arrivals(types: Collection[str] | None) -> list[str]:
    """Of the types asked for, those of arrivals."""
    return [one for one in types or () if one == SCHEDULE_ARRIVED or _OF_TOPIC.fullmatch(one)]


async def _sent(let: Asked, stream: Stream) -> AsyncGenerator[bytes, None]:
    """The stream as bytes: a look every second, a comment now and then, until the server stops or the key is no
    longer good. Between looks it holds nothing of the database's."""
    clock, alarm = let.app.clock, Alarm(let.app.clock)
    heard: deque[bytes] = deque(maxlen=MOST_HEARD)
    hearing: asyncio.Task[None] | None = None
    try:
        if names := _arrivals(stream.wanted.types):
            there = asyncio.Event()
            hearing = asyncio.create_task(_hear(let, stream.wanted, names, heard, alarm, there))
            waits = asyncio.create_task(there.wait())
            await asyncio.wait([hearing, waits], return_when=asyncio.FIRST_COMPLETED)
            waits.cancel()
        yield b": connected\nretry: 2000\n\n"
        said = clock.now()
        with let.door.told(alarm):
            while not let.door.stopping and await let.door.still(let.caller):
                while heard:
                    yield heard.popleft()
                    said = clock.now()
                if hearing is not None and hearing.done():
                    return  # what tells of arrivals cannot be reached: the listener comes back
                try:
                    async for event in _look(let, stream):
                        yield event
                        said = clock.now()
                except StoreError:
                    pass  # it goes on where it is as soon as the database answers
                if clock.now() - said >= KEEP_ALIVE:
                    yield b": keep-alive\n\n"
                    said = clock.now()
                await alarm.wait(clock.now() + EVERY)
    finally:
        if hearing is not None:
            hearing.cancel()
            await asyncio.wait([hearing])
        alarm.close()


async def _hear(
    let: Asked, wanted: Wanted, names: list[str], heard: deque[bytes], alarm: Alarm, there: asyncio.Event
) -> None:
    """Put what arrives into `heard`, under each name that was asked for."""
    try:
        async with let.app.arrivals(wanted.topic or "*", tenant_id=wanted.tenant_id) as events:
            there.set()
            async for event in events:
                if wanted.schedule_id not in (None, event.schedule_id):
                    continue
                for name in names:
                    if name in (SCHEDULE_ARRIVED, arrived_event_name(event.topic)):
                        data = orjson.dumps({"type": name, "at": utc(event.fired_at), "job": shown_arrival(event)})
                        heard.append(format_sse_event(data_str=data.decode(), event=name))
                alarm.poke()
    except StoreError as failed:
        log.warning("a listener to arrivals was sent away: %s", failed)
    alarm.poke()


def shown_arrival(event: Arrived) -> dict[str, Any]:
    """A job that starts, as it is sent."""
    return {
        "id": event.job_id, "topic": event.topic, "payload": event.payload, "metadata": metadata_json(event.metadata),
        "timezone": event.timezone, "scheduledAt": utc(event.scheduled_at), "firedAt": utc(event.fired_at),
        "lateBy": event.late_by.total_seconds(), "scheduleId": event.schedule_id, "occurrenceKey": event.occurrence_key,
    }  # fmt: skip


async def _look(let: Asked, stream: Stream) -> AsyncIterator[bytes]:
    if stream.resumed is not None:
        overlap = []
        async for event in _read(let, stream):
            if (event.at, event.id) > stream.mark:
                break
            overlap.append(event)
        stream.come_back(overlap)
    async for event in _read(let, stream):
        id_ = stream.take(event)
        if id_ is not None:
            yield format_sse_event(data_str=orjson.dumps(shown(event)).decode(), event=event.type, id=id_)


async def _read(let: Asked, stream: Stream) -> AsyncIterator[Event]:
    place: Place = (stream.start, FIRST)
    while True:
        found: list[Event] = await let.app.store.run(rows.since, stream.wanted, place, PAGE)
        for event in found:
            yield event
        if len(found) < PAGE:
            return
        place = (found[-1].at, found[-1].id)


def shown(event: Event) -> dict[str, Any]:
    """An event as it is sent."""
    body: dict[str, Any] = {"type": event.type, "at": utc(event.at)}
    if event.job is not None:
        job = event.job
        return body | {"job": {"topic": job.topic, "ownerId": job.owner_id, "key": job.key, **execution(job)}}
    if event.type.startswith("target."):
        return body | {"target": {"name": event.subject}, "actor": event.actor}
    return body | {"schedule": {"id": event.subject}, "actor": event.actor}
