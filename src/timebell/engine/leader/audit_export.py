"""Deliver the audit log to its external destinations, each record at least once and in order.

Ids are in the order of creation, but transactions may commit in another order. So the stored position stays
OVERLAP_SECONDS behind, and the leader remembers which records after it were delivered: a record that becomes visible
late is still found. A new leader delivers the records after the position again; receivers remove duplicates by `id`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from timebell.store.audit import exports
from timebell.store.audit.audit_log import AuditRecord

if TYPE_CHECKING:
    from timebell.engine.node import Node

log = logging.getLogger("timebell.audit_export")

POLL_SECONDS = 2.0
BATCH_SIZE = 100  # records per delivery
OVERLAP_SECONDS = 60.0  # far longer than the time between writing a record and the commit of its transaction
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 2.0, 300.0


class DeliveryFailed(Exception):
    """The destination did not accept the records. The text contains no secret."""


class AuditDestination(Protocol):
    """A destination of audit records."""

    async def send(self, records: Sequence[AuditRecord]) -> None:
        """Send records in order. Raises DeliveryFailed."""


@dataclass(slots=True)
class _Progress:
    """Progress of one destination while this node leads; `delivered` has times of records after the position."""

    position: str | None
    saved_position: str | None
    delivered: dict[str, datetime] = field(default_factory=dict)
    retry_seconds: float = 0.0
    retry_at: datetime | None = None


class AuditExport:
    """The service. `run_as_leader` runs a store operation, or returns None if this node does not lead."""

    def __init__(self, node: Node, run_as_leader: Callable[..., Awaitable[Any]]) -> None:
        self.node = node
        self._run_as_leader = run_as_leader
        self._progress: dict[str, _Progress] = {}
        self._has_cleared_failures = False

    def reset(self) -> None:
        """Reload the positions, because this node became leader."""
        self._progress.clear()
        self._has_cleared_failures = False

    async def step(self) -> datetime | None:
        """Deliver new records; return when to check again, or None without destinations."""
        destinations = self.node.audit_destinations
        if not self._has_cleared_failures:
            self._has_cleared_failures = bool(await self._run_as_leader(exports.clear_failures, list(destinations)))
        if not destinations:
            return None
        await asyncio.gather(*(self._deliver(name, destination) for name, destination in destinations.items()))
        return self.node.clock.now() + timedelta(seconds=POLL_SECONDS)

    async def _deliver(self, name: str, destination: AuditDestination) -> None:
        progress = await self._load_progress(name)
        while progress.retry_at is None or progress.retry_at <= self.node.clock.now():
            records: list[AuditRecord] | None = await self._run_as_leader(
                exports.list_undelivered, progress.position, progress.delivered, BATCH_SIZE
            )
            if records is None:  # another node leads
                return
            if records:
                try:
                    await destination.send(records)
                except DeliveryFailed as error:
                    await self._record_failure(name, progress, str(error))
                    return
                progress.retry_seconds, progress.retry_at = 0.0, None
                progress.delivered |= {record.id: record.at for record in records}
            await self._advance(name, progress, was_delivered=bool(records))
            if len(records) < BATCH_SIZE:
                return

    async def _load_progress(self, name: str) -> _Progress:
        if name not in self._progress:
            position = await self.node.store.run(exports.get_position, name)
            self._progress[name] = _Progress(position, position)
        return self._progress[name]

    async def _advance(self, name: str, progress: _Progress, *, was_delivered: bool) -> None:
        """Move the position up to the newest delivered record that is older than the overlap, and save it."""
        now = self.node.clock.now()
        settled_at = now - timedelta(seconds=OVERLAP_SECONDS)
        settled = [id_ for id_, at in progress.delivered.items() if at <= settled_at]
        if settled:
            progress.position = max(settled)
            progress.delivered = {id_: at for id_, at in progress.delivered.items() if id_ > progress.position}
        if (was_delivered or progress.position != progress.saved_position) and await self._run_as_leader(
            exports.save_progress, name, progress.position, now
        ):
            progress.saved_position = progress.position

    async def _record_failure(self, name: str, progress: _Progress, error: str) -> None:
        if not progress.retry_seconds:
            log.error("could not deliver audit log destination=%s error=%s; retrying", name, error)
        progress.retry_seconds = min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, 2 * progress.retry_seconds))
        progress.retry_at = self.node.clock.now() + timedelta(seconds=progress.retry_seconds)
        await self._run_as_leader(
            exports.save_progress, name, progress.saved_position, self.node.clock.now(), error[:500]
        )
