"""What the gate reads of sources that Timebell reads itself: the value once more, and what queries find.

A source that does not answer in time is taken for what was last known of it; but where a query decides, the job waits
until it can be asked, and where tokens are not taken any more, until somebody gives new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from timebell.engine.node import Node
from timebell.engine.triggers.source_adapters import Adapters
from timebell.errors import SourceFailed, SourceGone, StoreError, TimebellError
from timebell.model.trigger import UNAUTHORISED, Change, Source, micros
from timebell.store.jobs import pre_delivery_check
from timebell.store.jobs.pre_delivery_check import Asked, Found, Planned
from timebell.store.triggers import planned_firings, sources
from timebell.store.triggers.query_sources import no_such_source
from timebell.triggers import KINDS

log = logging.getLogger("timebell.sources")

WITHIN = 5.0  # seconds
AT_ONCE = 8  # queries


class Question(NamedTuple):
    """What a source is asked for a job."""

    job_id: str
    source: Source
    query: str
    parameters: dict[str, Any]


class Reading:
    """The sources, as this node's gate reads them."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._adapters = Adapters(node)

    async def of(self, asked: Sequence[Asked]) -> tuple[dict[str, Found], dict[str, TimebellError]]:
        """Bring what is known of these jobs' items up to date; what their queries, or those of their triggers, found,
        and the jobs of which that could not be asked."""
        run = self.node.store.run
        ids = [one.id for one in asked if one.of_trigger]
        by_source: dict[str, list[Planned]] = defaultdict(list)
        for one in await run(pre_delivery_check.planned, ids) if ids else ():
            if one.source.kind in KINDS:
                by_source[one.source.id].append(one)
        found, failed = dict[str, Found](), dict[str, TimebellError]()
        for some in by_source.values():
            refused = await self._again(some)
            if refused is not None:
                failed |= {one.job_id: refused for one in some}
        wanted = [
            Question(one.job_id, one.source, one.trigger.rule.unless, one.parameters)
            for one in (await run(pre_delivery_check.planned, ids) if by_source else ())
            if one.trigger.rule.unless is not None and one.source.kind in KINDS and one.job_id not in failed
        ]
        asking = {one.id: (one.tenant_id, one.unless) for one in asked if one.unless is not None}
        homes = await run(sources.by_names, {(tenant, own.source) for tenant, own in asking.values()}) if asking else {}
        for id_, (tenant, own) in asking.items():
            if (home := homes.get((tenant, own.source))) is None:
                failed[id_] = no_such_source(own.source)
            else:
                wanted.append(Question(id_, home, own.query, own.parameters))
        gate = asyncio.Semaphore(AT_ONCE)

        async def ask(one: Question) -> None:
            try:
                async with gate, asyncio.timeout(WITHIN):
                    anything = await (await self._adapters.of(one.source)).any(one.query, one.parameters)
                found[one.job_id] = Found(anything, one.parameters)
            except StoreError:
                raise
            except TimebellError as wrong:
                failed[one.job_id] = wrong
            except TimeoutError:
                failed[one.job_id] = SourceFailed("The source does not answer in time.")
            except Exception as broken:  # of this source alone: the others' jobs go on
                log.exception("source %s cannot be asked", one.source.name)
                failed[one.job_id] = SourceFailed(f"The source cannot be asked: {type(broken).__name__}.")

        await asyncio.gather(*map(ask, wanted))
        return found, failed

    async def _again(self, some: Sequence[Planned]) -> SourceFailed | None:
        """Read the items of one source once more; why these jobs have to wait, if somebody has to give new tokens."""
        source, keys = some[0].source, sorted({one.item for one in some})
        at = micros(self.node.clock.now())
        try:
            async with asyncio.timeout(WITHIN):
                rows = await (await self._adapters.of(source)).read(keys)
            if source.orphaned_at is not None:  # access came back
                await self.node.store.run(sources.orphan, source.id, None, self.node.clock.now())
            changes = [Change(key, at, rows.get(key)) for key in keys]
            await self.node.store.run(planned_firings.take_in, source, changes, None, self.node.clock.now())
        except StoreError:
            raise
        except SourceGone as gone:
            await self.node.store.run(sources.orphan, source.id, gone.message, self.node.clock.now())
        except (TimebellError, TimeoutError) as failed:
            if isinstance(failed, SourceFailed) and failed.code == UNAUTHORISED:
                log.warning("source %s: %s", source.name, failed)
                await self.node.store.run(sources.failed, source.id, str(failed), failed.code)
                return failed
            log.warning("source %s: %s What was last known of it counts.", source.name, str(failed) or "no answer.")
        except Exception:  # of this source alone, as above
            log.exception("source %s cannot be read. What was last known of it counts.", source.name)
        return None

    async def close(self) -> None:
        """Let go of the sources."""
        await self._adapters.close()
