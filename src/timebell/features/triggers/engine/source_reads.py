"""Reads of polled sources just before delivery: re-read the item, and run the `unless` queries.

Sources are read concurrently, each within its own limits (`source_access.py`), so a slow source delays only its own
jobs. The items of one source that are due together are read in one request. If a source does not answer in time, its
last known values apply. But a job with a query waits until the query can be run, and a job of an unauthorized source
waits until the source is reauthorized.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from timebell.engine.batcher import Batcher
from timebell.engine.node import Node
from timebell.errors import SourceFailed, SourceGone, StoreError, TimebellError
from timebell.features.triggers.engine.source_access import ReadLimits, SourceAccess
from timebell.features.triggers.engine.source_adapters import AdapterCache
from timebell.features.triggers.model.trigger import SOURCE_UNAUTHORIZED, Source, epoch_micros
from timebell.features.triggers.sources import POLLED_KINDS
from timebell.features.triggers.sources.base import RowPage
from timebell.features.triggers.store import item_changes, pre_delivery_check, sources
from timebell.features.triggers.store.pre_delivery_check import PlannedFiring
from timebell.store.jobs.pre_delivery_check import DeliveryCheck, DeliveryRead, QueryResult
from timebell.store.jobs.query_sources import no_such_source

log = logging.getLogger("timebell.sources")

MAX_ITEMS_PER_READ = 500
SLOW_READ_SECONDS = 1.0
"""A delivery that waited longer for its source says so in the attempt log of its job."""


class SourceReader:
    """Reads sources for the pre-delivery check of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._adapters = AdapterCache(node)
        self._firings = Batcher(self._load_firings, MAX_ITEMS_PER_READ)
        self._sources = Batcher(self._load_sources, MAX_ITEMS_PER_READ)
        self._limits = ReadLimits()
        self._readers: dict[str, ItemReader] = {}

    async def read(self, check: DeliveryCheck) -> DeliveryRead | None:
        """Re-read the item of a job and run its query, or that of its trigger. Raises the error if it must wait."""
        if check.unless is not None:
            source = await self._sources.run(check.id, (check.tenant_id, check.unless.source))
            if source is None or source.kind not in POLLED_KINDS:
                raise no_such_source(check.unless.source)
            return await self._query(source, check.unless.query, check.unless.parameters, None)
        firing = await self._firings.run(check.id, check.id) if check.checks_trigger else None
        if firing is None or firing.source.kind not in POLLED_KINDS:
            return None
        problem = await self._reader(firing.source).read(firing)
        if firing.trigger.rule.unless is None:
            return DeliveryRead(problem=problem)
        current = await self._firings.run(check.id, check.id)  # its item may have changed
        if current is None:
            return DeliveryRead(problem=problem)
        return await self._query(current.source, firing.trigger.rule.unless, current.parameters, problem)

    async def close(self) -> None:
        """Close all adapters."""
        await self._adapters.close()

    def _reader(self, source: Source) -> ItemReader:
        reader = self._readers.get(source.id)
        if reader is None or reader.access.source.updated_at != source.updated_at:  # new, or edited
            reader = self._readers[source.id] = ItemReader(
                self.node, self._adapters, SourceAccess(source, self.node.clock, self._limits)
            )
        reader.access.source = source
        return reader

    async def _query(
        self, source: Source, query: str, parameters: dict[str, Any], problem: dict[str, Any] | None
    ) -> DeliveryRead:
        async def run_query() -> bool:
            return await (await self._adapters.get(source)).matches(query, parameters)

        began = self.node.clock.monotonic()
        try:
            found_rows = await self._reader(source).access.call(run_query)
        except TimebellError:
            raise
        except Exception as exc:  # a value that the driver cannot send, for example
            log.exception("could not query source %s", source.name)
            raise SourceFailed(f"The source could not be queried: {type(exc).__name__}.") from exc
        seconds = self.node.clock.monotonic() - began
        return DeliveryRead(QueryResult(found_rows, parameters), problem or _describe_delay(source, seconds, None))

    async def _load_firings(self, ids: Mapping[str, str]) -> Mapping[str, PlannedFiring | None]:
        firings = await self.node.store.run(pre_delivery_check.load_planned_firings, list(ids))
        return {**dict.fromkeys(ids), **{firing.job_id: firing for firing in firings}}

    async def _load_sources(self, names: Mapping[str, tuple[str, str]]) -> Mapping[str, Source | None]:
        found = await self.node.store.run(sources.find_sources_by_name, set(names.values()))
        return {id_: found.get(name) for id_, name in names.items()}


class ItemReader:
    """Re-reads the items of one source, those of one batch in one request."""

    def __init__(self, node: Node, adapters: AdapterCache, access: SourceAccess) -> None:
        self.node = node
        self.access = access
        self._adapters = adapters
        self._items = Batcher(self._read_batch, MAX_ITEMS_PER_READ)

    async def read(self, firing: PlannedFiring) -> dict[str, Any] | None:
        """Re-read the item of a firing; describe a slow or failed read. Raises SourceFailed (SOURCE_UNAUTHORIZED)."""
        began = self.node.clock.monotonic()
        problem = await self._items.run(firing.job_id, firing.item)
        return _describe_delay(self.access.source, self.node.clock.monotonic() - began, problem)

    async def _read_batch(self, items: Mapping[str, str]) -> Mapping[str, str | None]:
        """Read items by job id; return the problems of the read. Raises SourceFailed (SOURCE_UNAUTHORIZED)."""
        problems = await self._read_items(sorted(set(items.values())))
        return {job_id: problems.get(key) for job_id, key in items.items()}

    async def _read_items(self, keys: list[str]) -> Mapping[str, str]:
        """Read items and store them; return the problems of those that could not be read."""
        source, run = self.access.source, self.node.store.run
        read_at = epoch_micros(self.node.clock.now())

        async def read_rows() -> RowPage:
            return await (await self._adapters.get(source)).read_rows(keys)

        try:
            page = await self.access.call(read_rows)
            if source.orphaned_at is not None:  # access came back
                await run(sources.set_orphaned, source.id, None, self.node.clock.now())
            changes = page.to_changes(keys, read_at)
            await run(item_changes.apply_read, source, changes, self.node.clock.now())
        except StoreError:
            raise
        except SourceGone as gone:
            await run(sources.set_orphaned, source.id, gone.message, self.node.clock.now())
        except TimebellError as error:
            log.warning("source %s: %s", source.name, error)
            if error.code == SOURCE_UNAUTHORIZED:
                await run(sources.record_failure, source.id, str(error), error.code)
                raise
            return dict.fromkeys(keys, error.message)
        except Exception as exc:  # must not fail the jobs of the source
            log.exception("could not read source %s", source.name)
            return dict.fromkeys(keys, f"{type(exc).__name__}; see the log of the node.")
        else:
            return page.problems
        return {}


def _describe_delay(source: Source, seconds: float, problem: str | None) -> dict[str, Any] | None:
    if problem is None and seconds < SLOW_READ_SECONDS:
        return None
    values = "current" if problem is None else "last known"
    return {"name": source.name, "seconds": round(seconds, 3), "problem": problem, "values": values}
