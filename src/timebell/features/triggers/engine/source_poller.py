"""Poll sources on the leader: a full scan first, then changes, and a full scan again from time to time.

The poller subscribes to changes before a full scan, so that no change is missed in between. Rows read are stored with
the time at which the read began, so a slow read never overwrites a later one. Each page is applied in one transaction
with its cursor, and the next leader continues from there. Items that a complete full scan did not find are marked gone;
an interrupted scan marks none.
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
from timebell.errors import SourceFailed, SourceGone, StoreError, TimebellError
from timebell.features.triggers import metrics
from timebell.features.triggers.engine.source_adapters import AdapterCache
from timebell.features.triggers.model.trigger import (
    SOURCE_ROWS_REJECTED,
    SOURCE_UNAUTHORIZED,
    ChangeSummary,
    ItemChange,
    Source,
    epoch_micros,
)
from timebell.features.triggers.sources import POLLED_KINDS
from timebell.features.triggers.sources.base import RowPage, SourceAdapter
from timebell.features.triggers.store import planned_firings, sources, webhook_changes

log = logging.getLogger("timebell.sources")

PAGE_SIZE = 500
RETRY_DELAY_SECONDS = 5.0  # after a failed poll
ORPHANED_RETRY_DELAY_SECONDS = 30.0  # after the source object was found to be gone
MAX_KEYS_PER_READ = 500
MAX_ROWS_IN_MESSAGE = 3  # rejected rows listed in an error message


@dataclass(slots=True)
class SourceWatch:
    """The state of a source between polls. Times are monotonic seconds."""

    alarm: Alarm
    last_full_scan_at: float | None = None
    last_poll_at: float | None = None
    source_updated_at: datetime | None = None
    changed_keys: set[str] = field(default_factory=set)
    paused_until: float = 0.0
    """The end of the pause after a failure; it respects the source's Retry-After."""

    def notify(self, key: str | None) -> None:
        """Record that a row has changed, or, with None, that the subscription has ended."""
        if key is not None:
            self.changed_keys.add(key)
        self.alarm.wake()


class SourcePoller:
    """The poller service. `run_as_leader` runs a store operation, or returns None if this node does not lead."""

    def __init__(self, node: Node, run_as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self.alarm = node.wakeups.add_alarm(sources.SOURCES)
        self.adapters = AdapterCache(node)
        self._scans = node.counters.of_features[metrics.SCANS]
        self._run_as_leader = run_as_leader
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watches: dict[str, SourceWatch] = {}

    async def step(self) -> datetime | None:
        """Keep one task per polled source while this node leads. Runs at each heartbeat."""
        sources_by_id: dict[str, Source] = {
            source.id: source for source in await self._run_as_leader(sources.list_sources_of_kinds, POLLED_KINDS) or []
        }
        for id_ in [id_ for id_, task in self._tasks.items() if id_ not in sources_by_id or task.done()]:
            task = self._tasks.pop(id_)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.adapters.discard(id_)
        for id_ in sources_by_id.keys() - self._tasks.keys():
            self._watches[id_] = SourceWatch(Alarm(self.node.clock))
            self._tasks[id_] = asyncio.create_task(self._run_source(id_), name=f"timebell-source-{id_}")
        unconfirmed = (
            await self._run_as_leader(webhook_changes.list_sources_with_unconfirmed_items) if sources_by_id else None
        )
        for id_, source in sources_by_id.items():
            if self._watches[id_].source_updated_at != source.updated_at or id_ in (unconfirmed or ()):
                self._watches[id_].alarm.wake()
        return None

    async def close(self) -> None:
        """Stop all tasks and close the adapters."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        await self.adapters.close()

    async def _run_source(self, source_id: str) -> None:
        watch = self._watches[source_id]
        try:
            while True:
                source = await self._load_source(source_id)
                pause = RETRY_DELAY_SECONDS if source is None else await self._poll(source, watch)
                await watch.alarm.wait(self.node.clock.now() + timedelta(seconds=pause))
        finally:
            watch.alarm.close()

    async def _load_source(self, source_id: str) -> Source | None:
        try:
            source: Source | None = await self._run_as_leader(sources.find_source_by_id, source_id)
        except StoreError:
            return None  # the services log store failures
        return source

    async def _poll(self, source: Source, watch: SourceWatch) -> float:
        """Read a source once; return the seconds until the next read."""
        if watch.source_updated_at != source.updated_at:
            watch.last_full_scan_at, watch.source_updated_at, watch.paused_until = None, source.updated_at, 0.0
        if (remaining := watch.paused_until - self.node.clock.monotonic()) > 0:
            return remaining
        try:
            adapter = await self.adapters.get(source)
            if await adapter.listen(watch.notify):
                watch.last_full_scan_at = None
            watch.changed_keys.update(
                await self._run_as_leader(webhook_changes.list_unconfirmed_items, source.id, MAX_KEYS_PER_READ) or ()
            )
            now = self.node.clock.monotonic()
            if watch.last_full_scan_at is None or now - watch.last_full_scan_at >= adapter.full_scan_interval:
                await self._full_scan(source, adapter)
                watch.last_full_scan_at = watch.last_poll_at = now
                self._scans.add("ok")
            elif watch.changed_keys:
                await self._read_changed(source, adapter, watch)
            elif adapter.poll_interval and (
                watch.last_poll_at is None or now - watch.last_poll_at >= adapter.poll_interval
            ):
                await self._poll_changes(source, adapter)
                watch.last_poll_at = now
        except StoreError:
            return RETRY_DELAY_SECONDS
        except SourceGone as error:
            self._scans.add("orphaned")
            if source.orphaned_reason != error.message:
                log.warning("source %s: %s", source.name, error)
                await self._run_as_leader(sources.set_orphaned, source.id, error.message, self.node.clock.now())
            return ORPHANED_RETRY_DELAY_SECONDS
        except TimebellError as error:
            await self._record_failure(source, str(error), error.code)
            pause = max(RETRY_DELAY_SECONDS, getattr(error, "retry_after", None) or 0.0)
            watch.paused_until = self.node.clock.monotonic() + pause
            return pause
        except Exception as exc:  # must not stop the other sources
            log.exception("could not read source %s", source.name)
            await self._record_failure(source, f"{type(exc).__name__}; see the log of the leader.", "SOURCE_FAILED")
            return RETRY_DELAY_SECONDS
        return self._next_delay(adapter, watch)

    def _next_delay(self, adapter: SourceAdapter, watch: SourceWatch) -> float:
        """Return the seconds until the next read."""
        if watch.changed_keys or watch.last_full_scan_at is None:
            return 0.0
        now = self.node.clock.monotonic()
        delays = [adapter.full_scan_interval - (now - watch.last_full_scan_at)]
        if adapter.poll_interval:
            delays.append(adapter.poll_interval - (now - (watch.last_poll_at or watch.last_full_scan_at)))
        return max(0.01, min(delays))

    async def _record_failure(self, source: Source, reason: str, code: str) -> None:
        self._scans.add("unauthorized" if code == SOURCE_UNAUTHORIZED else "failed")
        if source.error != reason:
            log.warning("source %s: %s", source.name, reason)
        try:
            await self._run_as_leader(sources.record_failure, source.id, reason, code)
        except StoreError:
            return

    async def _full_scan(self, source: Source, adapter: SourceAdapter) -> None:
        """Read all rows, continuing at the stored cursor, and mark unseen items as gone."""
        cursor_state = json.loads(source.cursor) if source.cursor else {}
        started_micros = cursor_state.get("began", epoch_micros(self.node.clock.now()))
        after: str | None = cursor_state.get("after")
        changes_cursor = cursor_state.get("changes")
        rejected_count, examples = 0, list[str]()
        while True:
            read_at = epoch_micros(self.node.clock.now())
            try:
                page = await adapter.read_page(after, PAGE_SIZE)
            except SourceFailed as error:
                if error.code != "SOURCE_CURSOR_LOST" or after is None:
                    raise
                after = None  # restart; the items already found stay marked as seen
                continue
            after = page.cursor
            cursor = json.dumps({"began": started_micros, "after": after, "changes": changes_cursor})
            rejected = await self._apply_page(source, page, read_at, None if after is None else cursor)
            rejected_count, examples = rejected_count + len(rejected), [*examples, *rejected][:MAX_ROWS_IN_MESSAGE]
            if after is None:
                break
        while await self._run_as_leader(
            planned_firings.mark_unseen_gone, source, started_micros, PAGE_SIZE, self.node.clock.now()
        ):
            pass
        message = self._describe_row_errors(source, rejected_count, examples)
        final_cursor = json.dumps({"changes": changes_cursor})
        await self._run_as_leader(sources.record_full_scan, source.id, final_cursor, self.node.clock.now(), message)

    async def _poll_changes(self, source: Source, adapter: SourceAdapter) -> None:
        """Read the changed rows; run a full scan if the source cannot list changes."""
        cursor_state = json.loads(source.cursor) if source.cursor else {}
        changes_cursor: str | None = cursor_state.get("changes")
        while True:
            read_at = epoch_micros(self.node.clock.now())
            page = await adapter.read_changes(changes_cursor, PAGE_SIZE)
            if page is None:
                await self._full_scan(source, adapter)
                self._scans.add("ok")
                return
            changes_cursor = page.cursor
            await self._record_row_errors(
                source, await self._apply_page(source, page, read_at, json.dumps({"changes": changes_cursor}))
            )
            if len(page.rows) < PAGE_SIZE:
                return

    async def _read_changed(self, source: Source, adapter: SourceAdapter, watch: SourceWatch) -> None:
        keys = sorted(watch.changed_keys)[:MAX_KEYS_PER_READ]
        started_at = self.node.clock.now()
        read_at = epoch_micros(started_at)
        watch.changed_keys.difference_update(keys)
        try:
            rows = await adapter.read_rows(keys)
        except BaseException:
            watch.changed_keys.update(keys)
            raise
        gone = [ItemChange(key, read_at, None) for key in keys if key not in rows]
        updated = [ItemChange(key, read_at, fields) for key, fields in rows.items()]
        await self._record_row_errors(source, await self._apply_changes(source, [*gone, *updated], source.cursor))
        await self._run_as_leader(webhook_changes.mark_confirmed, source.id, keys, started_at)

    async def _apply_page(self, source: Source, page: RowPage, at: int, cursor: str | None) -> list[str]:
        changes = [ItemChange(key, at, fields) for key, fields in page.rows.items()]
        return await self._apply_changes(source, changes, cursor)

    async def _apply_changes(self, source: Source, changes: list[ItemChange], cursor: str | None) -> list[str]:
        """Store changes and the cursor; return the rejected rows, each with the reason."""
        summary: ChangeSummary | None = await self._run_as_leader(
            planned_firings.apply_poll_result, source, changes, cursor, self.node.clock.now()
        )
        if summary is None:
            raise StoreError("This node does not lead anymore.")
        metrics.record_changes(self.node.counters, summary)
        return summary.rejected

    async def _record_row_errors(self, source: Source, row_errors: list[str]) -> None:
        if (
            message := self._describe_row_errors(source, len(row_errors), row_errors[:MAX_ROWS_IN_MESSAGE])
        ) is not None:
            await self._run_as_leader(sources.record_failure, source.id, message, SOURCE_ROWS_REJECTED)

    def _describe_row_errors(self, source: Source, count: int, examples: list[str]) -> str | None:
        """Return the error message for rejected rows, or None if there are none. A new message is also logged."""
        if not count:
            return None
        rows = f"{count:,} rows are" if count > 1 else "A row is"
        message = f"{rows} rejected; their last known values apply. {' '.join(examples)}"
        if source.error != message:
            log.warning("source %s: %s", source.name, message)
        return message
