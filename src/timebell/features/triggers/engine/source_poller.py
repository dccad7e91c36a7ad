"""Poll sources on the leader: a full scan first, then changes, and a full scan again from time to time.

The position of the changes is taken before a full scan begins, so no change is missed in between. A scan is read in
pages; between two pages, notified rows and changes are read, so a long scan delays nothing. Rows read are stored with
the time at which the read began, so a slow read never overwrites a later one. The position is stored with each page,
and the next leader continues from there. Items that a scan did not find are read again by key; those that do not exist
are gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from timebell.alarm import Alarm
from timebell.engine.node import Node
from timebell.errors import SourceFailed, SourceGone, StoreError, TimebellError
from timebell.features.triggers import metrics
from timebell.features.triggers.engine.source_access import ReadLimits
from timebell.features.triggers.engine.source_adapters import AdapterCache
from timebell.features.triggers.engine.webhook_subscriptions import WebhookSubscriptions
from timebell.features.triggers.model.trigger import (
    SOURCE_BUDGET_SPENT,
    SOURCE_ROWS_REJECTED,
    SOURCE_UNAUTHORIZED,
    ChangeSummary,
    ItemChange,
    Source,
    epoch_micros,
)
from timebell.features.triggers.sources import POLLED_KINDS
from timebell.features.triggers.sources.base import RowPage, SourceAdapter
from timebell.features.triggers.sources.call_plan import CallPlan, account_id
from timebell.features.triggers.store import item_changes, sources, webhook_changes

log = logging.getLogger("timebell.sources")

RETRY_DELAY_SECONDS, MAX_RETRY_DELAY_SECONDS = 5.0, 60.0  # after a failed poll, doubled after each further one
MAX_LIMITED_RETRY_DELAY_SECONDS = 300.0  # of a source whose calls are limited per day, failed ones included
SCAN_SLICE_SECONDS = (
    0.5  # of a scan, after which polls and webhooks have their turn; notified rows have it after a page
)
SAVE_INTERVAL_SECONDS = 5.0  # of the position of a scan that finds no differences
ORPHANED_RETRY_DELAY_SECONDS = 30.0  # after the source object was found to be gone
MAX_KEYS_PER_READ = 500
KNOWN_KEYS_PAGE_SIZE = 5000
MAX_ROWS_IN_MESSAGE = 3  # rejected rows listed in an error message


@dataclass(slots=True)
class Scan:
    """A full scan in progress: where it began and continues, and the rows, keys and rejected rows found so far.

    After its last page, the known items that it did not find are checked, from the key `checked` on.
    """

    started: int
    after: str | None
    rows: int = 0
    is_read: bool = False
    checked: str | None = None
    seen: set[str] = field(default_factory=set)
    rejected: list[str] = field(default_factory=list)
    saved_at: float | None = None
    pages: int = 0


@dataclass(slots=True)
class SourceWatch:
    """The state of a source between polls. Times are monotonic seconds."""

    alarm: Alarm
    last_full_scan_at: float | None = None
    last_poll_at: float | None = None
    source_updated_at: datetime | None = None
    changed_keys: set[str] = field(default_factory=set)
    scan: Scan | None = None
    pages: int = 1
    """Pages of the last full scan."""
    failures: int = 0
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
        self._limits = ReadLimits()
        self._scans = node.counters.of_features[metrics.SCANS]
        self._run_as_leader = run_as_leader
        self._subscriptions = WebhookSubscriptions(node, AdapterCache(node), run_as_leader)
        self._accounts: Counter[str] = Counter()
        """Number of sources by account."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watches: dict[str, SourceWatch] = {}

    async def step(self) -> datetime | None:
        """Keep one task per polled source while this node leads. Runs at each heartbeat."""
        sources_by_id: dict[str, Source] = {
            source.id: source for source in await self._run_as_leader(sources.list_sources_of_kinds, POLLED_KINDS) or []
        }
        self._accounts = Counter(account_id(each.tenant_id, each.options) for each in sources_by_id.values())
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
        self._subscriptions.start_removal()
        return None

    async def close(self) -> None:
        """Stop all tasks and close the adapters."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        await self._subscriptions.close()
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
        """Read notified rows, changes, and a page of a full scan, as far as due; return the seconds until the next."""
        if watch.source_updated_at != source.updated_at:
            watch.last_full_scan_at, watch.source_updated_at, watch.paused_until = None, source.updated_at, 0.0
            watch.scan, watch.failures = None, 0
            if (age := self._seconds_since_scan(source)) is not None:
                watch.last_full_scan_at = self.node.clock.monotonic() - age
        if (remaining := watch.paused_until - self.node.clock.monotonic()) > 0:
            return remaining
        try:
            adapter = await self.adapters.get(source)
            async with self._limits.slot(source.tenant_id):
                await self._subscriptions.update(source)
                await self._read_due(source, adapter, watch)
        except StoreError:
            return RETRY_DELAY_SECONDS
        except SourceGone as error:
            self._scans.add("orphaned")
            if source.orphaned_reason != error.message:
                log.warning("source %s: %s", source.name, error)
                await self._run_as_leader(sources.set_orphaned, source.id, error.message, self.node.clock.now())
            return ORPHANED_RETRY_DELAY_SECONDS
        except TimebellError as error:
            return await self._pause_after(source, watch, str(error), error.code, getattr(error, "retry_after", None))
        except Exception as exc:  # must not stop the other sources
            log.exception("could not read source %s", source.name)
            reason = f"{type(exc).__name__}; see the log of the leader."
            return await self._pause_after(source, watch, reason, "SOURCE_FAILED", None)
        watch.failures = 0
        return self._next_delay(source, adapter, watch)

    def _seconds_since_scan(self, source: Source) -> float | None:
        """Return the age of the last full scan, possibly by another leader; None if a scan is due or in progress."""
        if source.synced_at is None or source.synced_at <= source.updated_at or "after" in _stored_position(source):
            return None
        return (self.node.clock.now() - source.synced_at).total_seconds()

    async def _pause_after(
        self, source: Source, watch: SourceWatch, reason: str, code: str, retry_after: float | None
    ) -> float:
        """Record a failure; return the seconds until the next try, during which the source is not read."""
        await self._record_failure(source, reason, code)
        longest = MAX_LIMITED_RETRY_DELAY_SECONDS if source.kind == "monday" else MAX_RETRY_DELAY_SECONDS
        pause: float = min(RETRY_DELAY_SECONDS * 2**watch.failures, longest)
        watch.failures = min(watch.failures + 1, 10)
        if retry_after is not None:
            pause = retry_after if code == SOURCE_BUDGET_SPENT else max(pause, retry_after)
        watch.paused_until = self.node.clock.monotonic() + pause
        return pause

    async def _read_due(self, source: Source, adapter: SourceAdapter, watch: SourceWatch) -> None:
        if await adapter.listen(watch.notify):
            watch.last_poll_at = None  # changes while there was no subscription
        watch.changed_keys.update(
            await self._run_as_leader(webhook_changes.list_unconfirmed_items, source.id, MAX_KEYS_PER_READ) or ()
        )
        now = self.node.clock.monotonic()
        if watch.changed_keys:
            await self._read_changed(source, adapter, watch)
        if self._is_poll_due(adapter, watch, now):
            watch.last_poll_at = now
            if (position := _stored_position(source).get("changes")) is not None:
                if await self._poll_changes(source, adapter, position):
                    watch.last_poll_at = None
                return  # the position has changed: a scan continues with the source as stored now
        if watch.scan is None and not self._is_full_scan_due(source, adapter, watch, now):
            return
        await self._continue_scan(source, adapter, watch, now + SCAN_SLICE_SECONDS)

    def _is_full_scan_due(self, source: Source, adapter: SourceAdapter, watch: SourceWatch, now: float) -> bool:
        return watch.last_full_scan_at is None or (
            now - watch.last_full_scan_at >= self._full_scan_interval(source, adapter, watch)
        )

    def _full_scan_interval(self, source: Source, adapter: SourceAdapter, watch: SourceWatch) -> float:
        """Return the seconds between full scans: more for large sources, and for several, of one limited account."""
        if adapter.daily_calls is None:
            return adapter.full_scan_interval
        pages = watch.pages * self._accounts[account_id(source.tenant_id, source.options)]
        return CallPlan(adapter.daily_calls, adapter.full_scan_interval).interval_of(pages)

    def _is_poll_due(self, adapter: SourceAdapter, watch: SourceWatch, now: float) -> bool:
        return adapter.poll_interval > 0 and (
            watch.last_poll_at is None or now - watch.last_poll_at >= adapter.poll_interval
        )

    def _next_delay(self, source: Source, adapter: SourceAdapter, watch: SourceWatch) -> float:
        """Return the seconds until the next read."""
        if watch.changed_keys or watch.scan is not None or watch.last_full_scan_at is None:
            return 0.0
        now = self.node.clock.monotonic()
        delays = [self._full_scan_interval(source, adapter, watch) - (now - watch.last_full_scan_at)]
        if adapter.poll_interval:
            delays.append(0.0 if watch.last_poll_at is None else adapter.poll_interval - (now - watch.last_poll_at))
        return max(0.01, min(delays))

    async def _record_failure(self, source: Source, reason: str, code: str) -> None:
        self._scans.add("unauthorized" if code == SOURCE_UNAUTHORIZED else "failed")
        if source.error != reason:
            log.warning("source %s: %s", source.name, reason)
        try:
            await self._run_as_leader(sources.record_failure, source.id, reason, code)
        except StoreError:
            return

    async def _continue_scan(
        self, source: Source, adapter: SourceAdapter, watch: SourceWatch, until: float
    ) -> None:  # fmt: skip
        """Begin or continue a full scan, until a monotonic time or a notified row; finish it after the last page."""
        position = _stored_position(source)
        if (scan := watch.scan) is None:
            started = epoch_micros(self.node.clock.now())
            scan = watch.scan = Scan(position.get("began", started), position.get("after"), position.get("rows", 0))
        if "changes" not in position and (page := await adapter.read_changes(None, adapter.page_size)) is not None:
            position["changes"] = page.cursor
        while True:
            if scan.is_read:
                if not await self._check_missing(source, adapter, scan):
                    await self._finish_scan(source, adapter, watch, scan, position.get("changes"))
                    return
            else:
                try:
                    await self._scan_page(source, adapter, scan, position)
                except SourceFailed as error:
                    if error.code != "SOURCE_CURSOR_LOST" or scan.after is None:
                        raise
                    scan.after, scan.rows = None, 0  # restart; the items already found stay marked as seen
                    continue
                scan.is_read = scan.after is None
            if watch.changed_keys or self.node.clock.monotonic() >= until:
                return

    async def _scan_page(
        self, source: Source, adapter: SourceAdapter, scan: Scan, position: dict[str, Any]
    ) -> None:  # fmt: skip
        """Read and apply the next page of a scan. The position is stored with differences, and from time to time."""
        read_at, now = epoch_micros(self.node.clock.now()), self.node.clock.monotonic()
        page = await adapter.read_page(scan.after, adapter.page_size)
        scan.seen.update(page.rows, page.problems)
        scan.rows += len(page.rows) + len(page.problems)
        position |= {"began": scan.started, "after": page.cursor, "rows": scan.rows}
        is_save_due = scan.saved_at is None or now - scan.saved_at >= SAVE_INTERVAL_SECONDS
        scan.rejected += await self._apply_page(source, page, read_at, json.dumps(position), save_cursor=is_save_due)
        scan.saved_at = now if is_save_due else scan.saved_at
        scan.after = page.cursor
        scan.pages += 1

    async def _finish_scan(
        self, source: Source, adapter: SourceAdapter, watch: SourceWatch, scan: Scan, changes_cursor: str | None
    ) -> None:
        watch.pages = max(scan.pages, 1)
        message = (
            self._describe_row_errors(source, scan.rejected)
            or self._subscriptions.error(source.id)
            or await self._describe_short_grace(source, adapter, watch)
        )
        final_cursor = json.dumps({} if changes_cursor is None else {"changes": changes_cursor})
        await self._run_as_leader(sources.record_full_scan, source.id, final_cursor, self.node.clock.now(), message)
        watch.scan, watch.last_full_scan_at = None, self.node.clock.monotonic()
        self._scans.add("ok")

    async def _describe_short_grace(self, source: Source, adapter: SourceAdapter, watch: SourceWatch) -> str | None:
        """Return the error for a board that has become too large for the grace of a trigger, given its daily calls."""
        interval = self._full_scan_interval(source, adapter, watch)
        if interval <= adapter.full_scan_interval:
            return None  # the triggers were checked for this interval
        triggers = await self._run_as_leader(sources.list_triggers_of_source, source) or ()
        short = min(triggers, key=lambda trigger: trigger.rule.grace, default=None)
        if short is None or short.rule.grace > interval:
            return None
        return str(sources.grace_too_short(short.name, short.rule.grace, interval))

    async def _check_missing(self, source: Source, adapter: SourceAdapter, scan: Scan) -> bool:
        """Read the next known items that a scan did not find again, by key; return whether there may be more.

        Those that do not exist are gone. If a former leader began the scan, the items on its pages are not known here
        as found, and are read again, too.
        """
        keys = await self._run_as_leader(item_changes.list_known_keys, source.id, scan.checked, KNOWN_KEYS_PAGE_SIZE)
        missing = [key for key in keys or () if key not in scan.seen]
        for start in range(0, len(missing), MAX_KEYS_PER_READ):
            await self._read_keys(source, adapter, missing[start : start + MAX_KEYS_PER_READ])
        scan.checked = keys[-1] if keys else None
        return bool(keys)

    async def _poll_changes(self, source: Source, adapter: SourceAdapter, since: str) -> bool:
        """Read a page of changes; return whether there may be more."""
        read_at = epoch_micros(self.node.clock.now())
        page = await adapter.read_changes(since, adapter.page_size)
        assert page is not None, "an adapter with a position lists changes"
        cursor = json.dumps(_stored_position(source) | {"changes": page.cursor})
        if page.rows or page.problems or page.deleted or page.cursor != since:
            await self._record_row_errors(source, await self._apply_page(source, page, read_at, cursor))
        elif source.error is not None and source.error_code != SOURCE_ROWS_REJECTED:
            await self._apply_page(source, page, read_at, cursor)  # clears the error
        return page.has_more

    async def _read_changed(self, source: Source, adapter: SourceAdapter, watch: SourceWatch) -> None:
        keys = sorted(watch.changed_keys)[:MAX_KEYS_PER_READ]
        started_at = self.node.clock.now()
        watch.changed_keys.difference_update(keys)
        try:
            rejected = await self._read_keys(source, adapter, keys)
        except BaseException:
            watch.changed_keys.update(keys)
            raise
        await self._record_row_errors(source, rejected)
        await self._run_as_leader(webhook_changes.mark_confirmed, source.id, keys, started_at)

    async def _read_keys(self, source: Source, adapter: SourceAdapter, keys: list[str]) -> list[str]:
        """Read rows by key and apply them; return the rejected ones."""
        read_at = epoch_micros(self.node.clock.now())
        changes = (await adapter.read_rows(keys)).to_changes(keys, read_at)
        return await self._apply(source, changes)

    async def _apply_page(
        self, source: Source, page: RowPage, at: int, cursor: str, *, save_cursor: bool = True
    ) -> list[str]:  # fmt: skip
        """Apply a page; return the rejected rows. Stores the cursor if a row differs or `save_cursor` is set."""
        changes = page.to_changes([key for key in (*page.rows, *page.deleted, *page.problems) if key], at)
        rejected = await self._apply(source, changes, cursor, save_cursor=save_cursor)
        return [*rejected, *([page.problems[""]] if "" in page.problems else [])]

    async def _apply(
        self, source: Source, changes: list[ItemChange], cursor: str | None = None, *, save_cursor: bool = False
    ) -> list[str]:
        """Apply changes; return the rejected rows, each with the reason."""
        now = self.node.clock.now()
        summary: ChangeSummary | None = await self._run_as_leader(
            item_changes.apply_read, source, changes, now, cursor, save_cursor
        )
        if summary is None:
            raise StoreError("This node does not lead anymore.")
        metrics.record_changes(self.node.counters, summary)
        return summary.rejected

    async def _record_row_errors(self, source: Source, row_errors: list[str]) -> None:
        if (message := self._describe_row_errors(source, row_errors)) is not None:
            await self._run_as_leader(sources.record_failure, source.id, message, SOURCE_ROWS_REJECTED)

    def _describe_row_errors(self, source: Source, row_errors: list[str]) -> str | None:
        """Return the error message for rejected rows, or None if there are none. A new message is also logged."""
        if not row_errors:
            return None
        rows = f"{len(row_errors):,} rows are" if len(row_errors) > 1 else "A row is"
        examples = " ".join(row_errors[:MAX_ROWS_IN_MESSAGE])
        message = f"{rows} rejected; their last known values apply. {examples}"
        if source.error != message:
            log.warning("source %s: %s", source.name, message)
        return message


def _stored_position(source: Source) -> dict[str, Any]:
    """Return the stored position: of the changes, and of a scan in progress."""
    position: dict[str, Any] = json.loads(source.cursor) if source.cursor else {}
    return position
