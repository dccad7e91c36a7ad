"""`/events`: stream of the events of a tenant (text/event-stream).

Events are read from the database in the order (time, id). Transactions may commit out of order, so each poll rereads a
short overlap before the current position and skips events that were already sent. The event id encodes the position and
the number of events sent from the overlap. A client that reconnects with it gets the events it missed; if the overlap
has grown in the meantime, all of it is sent again, so no event is lost.

Arrival events are different: they announce starting jobs, are delivered at most once, have no id and are not replayed.
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
from timebell.api.executions import render_execution
from timebell.api.route import ApiRoute, Context, RequestContext, read_route
from timebell.api.schemas import format_utc
from timebell.api.streams import EventStream
from timebell.client.job_fields import metadata_json
from timebell.client.validation import parse_uuid
from timebell.errors import InvalidInput, StoreError
from timebell.ids import new_id
from timebell.model.routes import check_pattern
from timebell.store.audit import events as rows
from timebell.store.audit.events import Event, EventFilter, EventPosition
from timebell.store.types import from_micros, to_micros
from timebell.targets.arrived import SCHEDULE_ARRIVED, Arrived, arrived_event_name

log = logging.getLogger("timebell.api")

MAX_QUEUED_ARRIVALS = 1000  # buffer for slow clients; the oldest arrivals are dropped
REREAD_OVERLAP = timedelta(seconds=5)
POLL_INTERVAL = timedelta(seconds=1)
KEEP_ALIVE_INTERVAL = timedelta(seconds=15)
PAGE_SIZE = 500
MAX_STREAMS_PER_TENANT = 100  # on one node
FIRST_ID = "00000000-0000-0000-0000-000000000000"
_TOPIC_ARRIVED = re.compile(r"schedule\.[A-Za-z0-9_.-]+\.arrived", re.ASCII)
_EVENT_ID = re.compile(r"(\d{1,16})\.([0-9a-f-]{36})\.(\d{1,9})\.(\d{1,9})", re.ASCII)
EVENT_TYPES = (
    "job.completed", "job.failed", "job.cancelled", "job.skipped", "job.*", "schedule.*",
    "target.*",
    f"{SCHEDULE_ARRIVED} and {arrived_event_name('<topic>')} (first start of a job; only if requested)",
)  # fmt: skip


routes = APIRouter(route_class=ApiRoute, tags=["events"])
Text = Annotated[str | None, Query(max_length=200)]


@routes.get(
    "/events", response_class=EventStream, status_code=200,
    responses={200: {"description": "Stream of events that ends on disconnect or shutdown.", "content": {
        "text/event-stream": {"schema": {"type": "string"}}}}},
    **read_route(waits=True),
)  # fmt: skip
async def stream_events(
    ctx: Context, topic: Annotated[Text, Query(description="Topic, or prefix such as billing.*")] = None,
    type: Annotated[
        list[Annotated[str, Query(max_length=60)]] | None, Query(max_length=20, description=", ".join(EVENT_TYPES))
    ] = None,
    schedule_id: Annotated[Text, Query(alias="scheduleId")] = None,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=100)] = None,
) -> Response:  # fmt: skip
    """Stream finished jobs, changes of schedules and targets and, if requested, job starts as server-sent events.

    The stream starts now, or after Last-Event-ID.
    """
    if _arrival_types(type):
        check_pattern(topic or "*")
        ctx.app.require_arrivals()
    schedule = schedule_id and (parse_uuid(schedule_id) or new_id(ctx.now))  # an invalid id matches nothing
    stream = Stream.from_last_event_id(last_event_id, ctx.now, EventFilter(ctx.tenant_id, topic, type, schedule))
    return EventStream(_event_bytes(ctx, stream), ctx.authenticator, ctx.tenant_id, MAX_STREAMS_PER_TENANT)


@dataclass(slots=True)
class Stream:
    """Position of a client in the event stream, and the events of the overlap before it that were already sent."""

    event_filter: EventFilter
    position: EventPosition
    lower_bound: datetime
    sent_ids: set[str] = field(default_factory=set)
    sent_positions: list[EventPosition] = field(default_factory=list)
    resumed_count: int | None = None
    """Number of overlap events the client had received before it reconnected."""

    @classmethod
    def from_last_event_id(cls, last_event_id: str | None, now: datetime, event_filter: EventFilter) -> Stream:
        """Start a stream now, or resume it after the last event the client received. Raises InvalidInput."""
        if last_event_id is None:
            return cls(event_filter, (now, FIRST_ID), now)
        match = _EVENT_ID.fullmatch(last_event_id)
        try:
            at, id_ = from_micros(int(match[1])), str(UUID(match[2]))  # type: ignore[index]
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(
                f"Last-Event-ID is {last_event_id!r:.60}, which is not a valid event id.", code="INVALID_LAST_EVENT_ID",
                fix="Send the id of the last event unchanged, or omit the header.",
            ) from error  # fmt: skip
        assert match is not None
        return cls(event_filter, (at, id_), at - timedelta(milliseconds=int(match[4])), resumed_count=int(match[3]))

    @property
    def read_from(self) -> datetime:
        """Start of the next poll, including the overlap."""
        return max(self.lower_bound, self.position[0] - REREAD_OVERLAP)

    def assign_id(self, event: Event) -> str | None:
        """Advance past an event and return its id; None if it was already sent."""
        if event.id in self.sent_ids or event.at < self.lower_bound:
            return None
        self._mark_sent(event)
        self.position = max(self.position, (event.at, event.id))
        start = self.read_from
        while self.sent_positions[0][0] < start:
            self.sent_ids.discard(heappop(self.sent_positions)[1])
        window = (self.position[0] - start) // timedelta(milliseconds=1)
        return f"{to_micros(self.position[0])}.{self.position[1]}.{len(self.sent_ids)}.{window}"

    def restore_overlap(self, overlap: list[Event]) -> None:
        """After a reconnect, mark the overlap as sent, unless it now contains more events than were sent."""
        candidates = [event for event in overlap if (event.at, event.id) <= self.position]
        if self.resumed_count is not None and len(candidates) <= self.resumed_count:
            for event in candidates:
                self._mark_sent(event)
        self.resumed_count = None

    def _mark_sent(self, event: Event) -> None:
        self.sent_ids.add(event.id)
        heappush(self.sent_positions, (event.at, event.id))


def _arrival_types(types: Collection[str] | None) -> list[str]:
    """Return the requested event types that are arrivals."""
    return [name for name in types or () if name == SCHEDULE_ARRIVED or _TOPIC_ARRIVED.fullmatch(name)]


async def _event_bytes(ctx: RequestContext, stream: Stream) -> AsyncGenerator[bytes, None]:
    """Yield the encoded stream until the server stops or the key becomes invalid.

    Polls every POLL_INTERVAL and sends a comment after KEEP_ALIVE_INTERVAL without events. Holds no database connection
    between polls.
    """
    clock, alarm = ctx.app.clock, Alarm(ctx.app.clock)
    arrivals: deque[bytes] = deque(maxlen=MAX_QUEUED_ARRIVALS)
    collector: asyncio.Task[None] | None = None
    try:
        if names := _arrival_types(stream.event_filter.types):
            # Subscribe before the first bytes are sent, so that a connected client misses no arrival.
            subscribed = asyncio.Event()
            collector = asyncio.create_task(
                _collect_arrivals(ctx, stream.event_filter, names, arrivals, alarm, subscribed)
            )
            subscription = asyncio.create_task(subscribed.wait())
            await asyncio.wait([collector, subscription], return_when=asyncio.FIRST_COMPLETED)
            subscription.cancel()
        yield b": connected\nretry: 2000\n\n"
        last_sent_at = clock.now()
        with ctx.authenticator.wake_on_stop(alarm):
            while not ctx.authenticator.stopping and await ctx.authenticator.is_valid(ctx.caller):
                while arrivals:
                    yield arrivals.popleft()
                    last_sent_at = clock.now()
                if collector is not None and collector.done():
                    return  # the subscription to arrivals failed; the client will reconnect
                try:
                    async for event in _poll_events(ctx, stream):
                        yield event
                        last_sent_at = clock.now()
                except StoreError:
                    pass  # continue at the same position when the database answers again
                if clock.now() - last_sent_at >= KEEP_ALIVE_INTERVAL:
                    yield b": keep-alive\n\n"
                    last_sent_at = clock.now()
                await alarm.wait(clock.now() + POLL_INTERVAL)
    finally:
        if collector is not None:
            collector.cancel()
            await asyncio.wait([collector])
        alarm.close()


async def _collect_arrivals(
    ctx: RequestContext,
    event_filter: EventFilter,
    types: list[str],
    arrivals: deque[bytes],
    alarm: Alarm,
    subscribed: asyncio.Event,
) -> None:
    """Append each arrival to `arrivals`, once per requested event type."""
    try:
        async with ctx.app.arrivals(event_filter.topic or "*", tenant_id=event_filter.tenant_id) as events:
            subscribed.set()
            async for event in events:
                if event_filter.schedule_id not in (None, event.schedule_id):
                    continue
                for name in types:
                    if name in (SCHEDULE_ARRIVED, arrived_event_name(event.topic)):
                        data = orjson.dumps(
                            {"type": name, "at": format_utc(event.fired_at), "job": render_arrival(event)}
                        )
                        arrivals.append(format_sse_event(data_str=data.decode(), event=name))
                alarm.wake()
    except StoreError as error:
        log.warning("arrival subscription failed: %s", error)
    alarm.wake()


def render_arrival(event: Arrived) -> dict[str, Any]:
    """Render a starting job as JSON."""
    return {
        "id": event.job_id, "topic": event.topic, "payload": event.payload, "metadata": metadata_json(event.metadata),
        "timezone": event.timezone, "scheduledAt": format_utc(event.scheduled_at),
        "firedAt": format_utc(event.fired_at),
        "lateBy": event.late_by.total_seconds(), "scheduleId": event.schedule_id, "occurrenceKey": event.occurrence_key,
    }  # fmt: skip


async def _poll_events(ctx: RequestContext, stream: Stream) -> AsyncIterator[bytes]:
    if stream.resumed_count is not None:
        overlap = []
        async for event in _read_events(ctx, stream):
            if (event.at, event.id) > stream.position:
                break
            overlap.append(event)
        stream.restore_overlap(overlap)
    async for event in _read_events(ctx, stream):
        id_ = stream.assign_id(event)
        if id_ is not None:
            yield format_sse_event(data_str=orjson.dumps(render_event(event)).decode(), event=event.type, id=id_)


async def _read_events(ctx: RequestContext, stream: Stream) -> AsyncIterator[Event]:
    position: EventPosition = (stream.read_from, FIRST_ID)
    while True:
        page: list[Event] = await ctx.app.store.run(rows.list_events_after, stream.event_filter, position, PAGE_SIZE)
        for event in page:
            yield event
        if len(page) < PAGE_SIZE:
            return
        position = (page[-1].at, page[-1].id)


def render_event(event: Event) -> dict[str, Any]:
    """Render an event as JSON."""
    body: dict[str, Any] = {"type": event.type, "at": format_utc(event.at)}
    if event.job is not None:
        job = event.job
        return body | {"job": {"topic": job.topic, "ownerId": job.owner_id, "key": job.key, **render_execution(job)}}
    if event.type.startswith("target."):
        return body | {"target": {"name": event.subject}, "actor": event.actor}
    return body | {"schedule": {"id": event.subject}, "actor": event.actor}
