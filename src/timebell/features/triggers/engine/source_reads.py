"""Reads of polled sources just before delivery: re-read the item, and run the `unless` queries.

If a source does not answer in time, its last known values apply. But a job with a query waits until the query can be
run, and a job of an unauthorized source waits until the source is reauthorized.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from timebell.engine.node import Node
from timebell.errors import SourceFailed, SourceGone, StoreError, TimebellError
from timebell.features.triggers.engine.source_adapters import AdapterCache
from timebell.features.triggers.model.trigger import SOURCE_UNAUTHORIZED, ItemChange, Source, epoch_micros
from timebell.features.triggers.sources import POLLED_KINDS
from timebell.features.triggers.store import planned_firings, pre_delivery_check, sources
from timebell.features.triggers.store.pre_delivery_check import PlannedFiring
from timebell.store.jobs.pre_delivery_check import DeliveryCheck, QueryResult
from timebell.store.jobs.query_sources import no_such_source

log = logging.getLogger("timebell.sources")

SOURCE_TIMEOUT_SECONDS = 5.0
MAX_CONCURRENT_QUERIES = 8


class SourceQuery(NamedTuple):
    """A query to a source on behalf of a job."""

    job_id: str
    source: Source
    query: str
    parameters: dict[str, Any]


class SourceReader:
    """Reads sources for the pre-delivery check of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._adapters = AdapterCache(node)

    async def read(self, checks: Sequence[DeliveryCheck]) -> tuple[dict[str, QueryResult], dict[str, TimebellError]]:
        """Re-read the items of these jobs and run their queries, or those of their triggers.

        Returns the query results and the errors, by job id. A job with an error must wait.
        """
        run = self.node.store.run
        ids = [check.id for check in checks if check.checks_trigger]
        by_source: dict[str, list[PlannedFiring]] = defaultdict(list)
        for firing in await run(pre_delivery_check.load_planned_firings, ids) if ids else ():
            if firing.source.kind in POLLED_KINDS:
                by_source[firing.source.id].append(firing)
        results, errors = dict[str, QueryResult](), dict[str, TimebellError]()
        for firings in by_source.values():
            error = await self._reread(firings)
            if error is not None:
                errors |= {firing.job_id: error for firing in firings}
        queries = [
            SourceQuery(firing.job_id, firing.source, firing.trigger.rule.unless, firing.parameters)
            for firing in (await run(pre_delivery_check.load_planned_firings, ids) if by_source else ())
            if firing.trigger.rule.unless is not None
            and firing.source.kind in POLLED_KINDS
            and firing.job_id not in errors
        ]
        own_queries = {check.id: (check.tenant_id, check.unless) for check in checks if check.unless is not None}
        sources_by_name = (
            await run(
                sources.find_sources_by_name, {(tenant_id, unless.source) for tenant_id, unless in own_queries.values()}
            )
            if own_queries
            else {}
        )
        for id_, (tenant_id, unless) in own_queries.items():
            if (source := sources_by_name.get((tenant_id, unless.source))) is None:
                errors[id_] = no_such_source(unless.source)
            else:
                queries.append(SourceQuery(id_, source, unless.query, unless.parameters))
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)

        async def run_query(query: SourceQuery) -> None:
            try:
                async with semaphore, asyncio.timeout(SOURCE_TIMEOUT_SECONDS):
                    found_rows = await (await self._adapters.get(query.source)).matches(query.query, query.parameters)
                results[query.job_id] = QueryResult(found_rows, query.parameters)
            except StoreError:
                raise
            except TimebellError as error:
                errors[query.job_id] = error
            except TimeoutError:
                errors[query.job_id] = SourceFailed("The source did not answer in time.")
            except Exception as exc:  # must not fail the jobs of other sources
                log.exception("could not query source %s", query.source.name)
                errors[query.job_id] = SourceFailed(f"The source could not be queried: {type(exc).__name__}.")

        await asyncio.gather(*map(run_query, queries))
        return results, errors

    async def _reread(self, planned: Sequence[PlannedFiring]) -> SourceFailed | None:
        """Re-read the items of one source. Returns the error if it must be reauthorized first, otherwise None."""
        source, keys = planned[0].source, sorted({firing.item for firing in planned})
        at = epoch_micros(self.node.clock.now())
        try:
            async with asyncio.timeout(SOURCE_TIMEOUT_SECONDS):
                rows = await (await self._adapters.get(source)).read_rows(keys)
            if source.orphaned_at is not None:  # access came back
                await self.node.store.run(sources.set_orphaned, source.id, None, self.node.clock.now())
            changes = [ItemChange(key, at, rows.get(key)) for key in keys]
            await self.node.store.run(planned_firings.apply_poll_result, source, changes, None, self.node.clock.now())
        except StoreError:
            raise
        except SourceGone as gone:
            await self.node.store.run(sources.set_orphaned, source.id, gone.message, self.node.clock.now())
        except (TimebellError, TimeoutError) as error:
            if isinstance(error, SourceFailed) and error.code == SOURCE_UNAUTHORIZED:
                log.warning("source %s: %s", source.name, error)
                await self.node.store.run(sources.record_failure, source.id, str(error), error.code)
                return error
            log.warning("source %s: %s Using its last known values.", source.name, str(error) or "no answer.")
        except Exception:  # must not fail the jobs of other sources
            log.exception("could not read source %s. Using its last known values.", source.name)
        return None

    async def close(self) -> None:
        """Close all adapters."""
        await self._adapters.close()
