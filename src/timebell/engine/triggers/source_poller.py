"""The leader reads the sources that Timebell reads itself: all of a source first, then what changes, and all of it
again from time to time, for whatever was missed.

It subscribes before it looks at everything, so nothing falls between. What a look says is as of the instant it began,
so that one which took long never overwrites a later one. Each page and its place are one transaction: whoever leads
next goes on from there. What a whole look did not find is gone; one that broke off removes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from timebell.alarm import Alarm
from timebell.engine.node import Node
from timebell.engine.triggers.source_adapters import Adapters
from timebell.errors import SourceFailed, SourceGone, StoreError, TimebellError
from timebell.model.trigger import SET_ASIDE, UNAUTHORISED, Change, Observed, Source, micros
from timebell.store.triggers import planned_firings, sources, webhook_changes
from timebell.triggers import KINDS
from timebell.triggers.base import Adapter, Read

log = logging.getLogger("timebell.sources")

PAGE = 500
AGAIN = 5.0  # seconds after one that failed
LATER = 30.0  # seconds after one that found nothing to read any more
HEARD = 500  # keys a look
NAMED = 3  # of the rows that are set aside


@dataclass(slots=True)
class Watch:
    """What is remembered of a source between looks. Instants are of the monotonic clock."""

    alarm: Alarm
    swept: float | None = None
    looked: float | None = None
    edited: datetime | None = None
    heard: set[str] = field(default_factory=set)
    rests: float = 0.0
    """Until when the source asked to be left alone."""

    def hear(self, key: str | None) -> None:
        """A row has changed; or, with None, nothing will be heard any more."""
        if key is not None:
            self.heard.add(key)
        self.alarm.poke()


class Watching:
    """The service; `as_leader` runs an operation if this node leads, and answers None if it does not."""

    def __init__(self, node: Node, as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self.alarm = Alarm(node.clock)
        self.adapters = Adapters(node)
        self._as_leader = as_leader
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watches: dict[str, Watch] = {}

    async def step(self) -> datetime | None:
        """Have a task for each source that there is, while this node leads. Poked at each heartbeat."""
        there: dict[str, Source] = {one.id: one for one in await self._as_leader(sources.of_kinds, KINDS) or []}
        for id_ in [id_ for id_, task in self._tasks.items() if id_ not in there or task.done()]:
            task = self._tasks.pop(id_)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.adapters.forget(id_)
        for id_ in there.keys() - self._tasks.keys():
            self._watches[id_] = Watch(Alarm(self.node.clock))
            self._tasks[id_] = asyncio.create_task(self._watch(id_), name=f"timebell-source-{id_}")
        told = await self._as_leader(webhook_changes.sources_waiting) if there else None
        for id_, source in there.items():
            if self._watches[id_].edited != source.updated_at or id_ in (told or ()):
                self._watches[id_].alarm.poke()
        return None

    async def close(self) -> None:
        """End all of it."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        await self.adapters.close()
        self.alarm.close()

    async def _watch(self, source_id: str) -> None:
        watch = self._watches[source_id]
        try:
            while True:
                source = await self._source(source_id)
                pause = AGAIN if source is None else await self._look(source, watch)
                await watch.alarm.wait(self.node.clock.now() + timedelta(seconds=pause))
        finally:
            watch.alarm.close()

    async def _source(self, source_id: str) -> Source | None:
        try:
            found: Source | None = await self._as_leader(sources.by_id, source_id)
        except StoreError:
            return None  # whoever keeps the services says so
        return found

    async def _look(self, source: Source, watch: Watch) -> float:
        """One look; seconds until the next."""
        if watch.edited != source.updated_at:
            watch.swept, watch.edited, watch.rests = None, source.updated_at, 0.0
        if (left := watch.rests - self.node.clock.monotonic()) > 0:
            return left
        try:
            adapter = await self.adapters.of(source)
            if await adapter.listen(watch.hear):
                watch.swept = None
            watch.heard.update(await self._as_leader(webhook_changes.waiting, source.id, HEARD) or ())
            now = self.node.clock.monotonic()
            if watch.swept is None or now - watch.swept >= adapter.sweep:
                await self._sweep(source, adapter)
                watch.swept = watch.looked = now
                self.node.counters.scans.add("ok")
            elif watch.heard:
                await self._hear(source, adapter, watch)
            elif adapter.every and (watch.looked is None or now - watch.looked >= adapter.every):
                await self._changes(source, adapter)
                watch.looked = now
        except StoreError:
            return AGAIN
        except SourceGone as gone:
            self.node.counters.scans.add("orphaned")
            if source.orphaned_reason != gone.message:
                log.warning("source %s: %s", source.name, gone)
                await self._as_leader(sources.orphan, source.id, gone.message, self.node.clock.now())
            return LATER
        except TimebellError as failed:
            await self._failed(source, str(failed), failed.code)
            pause = max(AGAIN, getattr(failed, "retry_after", None) or 0.0)
            watch.rests = self.node.clock.monotonic() + pause
            return pause
        except Exception as broken:  # the other sources go on
            log.exception("source %s cannot be read", source.name)
            await self._failed(source, f"{type(broken).__name__}; the log of the leader says more.", "SOURCE_FAILED")
            return AGAIN
        return self._pause(adapter, watch)

    def _pause(self, adapter: Adapter, watch: Watch) -> float:
        """Seconds until the next look."""
        if watch.heard or watch.swept is None:
            return 0.0
        now = self.node.clock.monotonic()
        left = [adapter.sweep - (now - watch.swept)]
        if adapter.every:
            left.append(adapter.every - (now - (watch.looked or watch.swept)))
        return max(0.01, min(left))

    async def _failed(self, source: Source, why: str, code: str) -> None:
        self.node.counters.scans.add("unauthorised" if code == UNAUTHORISED else "failed")
        if source.fault != why:
            log.warning("source %s: %s", source.name, why)
        try:
            await self._as_leader(sources.failed, source.id, why, code)
        except StoreError:
            return

    async def _sweep(self, source: Source, adapter: Adapter) -> None:
        """Look at everything, from where the last leader was."""
        place = json.loads(source.cursor) if source.cursor else {}
        began = place.get("began", micros(self.node.clock.now()))
        after: str | None = place.get("after")
        since = place.get("changes")
        aside, first = 0, list[str]()
        while True:
            at = micros(self.node.clock.now())
            try:
                read = await adapter.page(after, PAGE)
            except SourceFailed as lost:
                if lost.code != "SOURCE_CURSOR_LOST" or after is None:
                    raise
                after = None  # from the top; what was found before stays found
                continue
            after = read.cursor
            going = json.dumps({"began": began, "after": after, "changes": since})
            unfit = await self._take_in(source, read, at, None if after is None else going)
            aside, first = aside + len(unfit), [*first, *unfit][:NAMED]
            if after is None:
                break
        while await self._as_leader(planned_firings.drop_unseen, source, began, PAGE, self.node.clock.now()):
            self.node.working.poke()
        why = self._told(source, aside, first)
        end = json.dumps({"changes": since})
        await self._as_leader(sources.synced, source.id, end, self.node.clock.now(), why)

    async def _changes(self, source: Source, adapter: Adapter) -> None:
        """Look at what has changed; where the source cannot tell, at everything."""
        place = json.loads(source.cursor) if source.cursor else {}
        since: str | None = place.get("changes")
        while True:
            at = micros(self.node.clock.now())
            read = await adapter.changed(since, PAGE)
            if read is None:
                await self._sweep(source, adapter)
                self.node.counters.scans.add("ok")
                return
            since = read.cursor
            await self._set_aside(source, await self._take_in(source, read, at, json.dumps({"changes": since})))
            if len(read.rows) < PAGE:
                return

    async def _hear(self, source: Source, adapter: Adapter, watch: Watch) -> None:
        keys = sorted(watch.heard)[:HEARD]
        began = self.node.clock.now()
        at = micros(began)
        watch.heard.difference_update(keys)
        try:
            rows = await adapter.read(keys)
        except BaseException:
            watch.heard.update(keys)
            raise
        gone = [Change(key, at, None) for key in keys if key not in rows]
        there = [Change(key, at, fields) for key, fields in rows.items()]
        await self._set_aside(source, await self._observe(source, [*gone, *there], source.cursor))
        await self._as_leader(webhook_changes.read, source.id, keys, began)

    async def _take_in(self, source: Source, read: Read, at: int, cursor: str | None) -> list[str]:
        changes = [Change(key, at, fields) for key, fields in read.rows.items()]
        return await self._observe(source, changes, cursor)

    async def _observe(self, source: Source, changes: list[Change], cursor: str | None) -> list[str]:
        """The rows that were set aside, each with the reason."""
        done: Observed | None = await self._as_leader(
            planned_firings.take_in, source, changes, cursor, self.node.clock.now()
        )
        if done is None:
            raise StoreError("This node does not lead any more.")
        self.node.counters.observed(done)
        if done.made:
            self.node.working.poke()
        return done.unfit

    async def _set_aside(self, source: Source, unfit: list[str]) -> None:
        if (why := self._told(source, len(unfit), unfit[:NAMED])) is not None:
            await self._as_leader(sources.failed, source.id, why, SET_ASIDE)

    def _told(self, source: Source, count: int, first: list[str]) -> str | None:
        """What is said of rows that were set aside, if there are any; in the log, too, if it is new."""
        if not count:
            return None
        rows = f"{count:,} rows are" if count > 1 else "A row is"
        why = f"{rows} set aside, and what was last known counts. {' '.join(first)}"
        if source.fault != why:
            log.warning("source %s: %s", source.name, why)
        return why
