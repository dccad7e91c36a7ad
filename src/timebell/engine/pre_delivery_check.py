"""The gate: what is asked just before a job of a trigger, one with a condition, or of a tenant with a limited month, is
delivered.

All who ask meanwhile are looked at in one transaction, so a thousand that are due at once are a few of them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from timebell.engine.node import Node
from timebell.errors import InvalidInput, NotFound, StoreError, TimebellError
from timebell.model import decide
from timebell.model.job import Attempt, Ending, JobState, Kind
from timebell.model.payload import decode, encode
from timebell.model.preconditions import Gated
from timebell.store.jobs import pre_delivery_check
from timebell.store.jobs.pre_delivery_check import Asked, Found, Ruling

if TYPE_CHECKING:
    from timebell.engine.triggers.source_reads import Reading

log = logging.getLogger("timebell.gate")

AT_ONCE = 500  # attempts a transaction


class Gate:
    """The gate of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._reading: Reading | None = None
        self._asked: dict[str, tuple[Asked, asyncio.Future[Ruling | TimebellError]]] = {}
        self._ruling: asyncio.Task[None] | None = None

    def asks(self, attempt: Attempt) -> bool:
        """Whether there is anything to ask of an attempt."""
        gated = attempt.conditions is not None or attempt.kind == Kind.TRIGGER
        return gated or attempt.tenant_id in self.node.metered

    async def of(self, attempt: Attempt) -> Ending | None:
        """What becomes of an attempt that asks, instead of its delivery; None: let it be delivered."""
        own = None
        if attempt.conditions is not None and not attempt.replays:
            try:
                own = Gated.of(attempt.conditions, attempt.payload, attempt.metadata)
            except InvalidInput as unfit:  # of a newer release, whose nodes can
                return self._ending(attempt, unfit)
        asked = Asked(attempt.id, attempt.tenant_id, attempt.kind, attempt.replays > 0, own)
        waiting: asyncio.Future[Ruling | TimebellError] = asyncio.get_running_loop().create_future()
        self._asked[attempt.id] = asked, waiting
        if self._ruling is None or self._ruling.done():
            self._ruling = asyncio.create_task(self._rule())
        return self._ending(attempt, await asyncio.shield(waiting))

    async def close(self) -> None:
        """Let go of the sources."""
        if self._reading is not None:
            await self._reading.close()

    async def _rule(self) -> None:
        while self._asked:
            batch = dict(list(self._asked.items())[:AT_ONCE])
            for id_ in batch:
                del self._asked[id_]
            found: dict[str, Ruling | TimebellError] = {}
            wrong: TimebellError = StoreError("Whether it may run could not be looked up.")
            try:
                asked = [one for one, _ in batch.values()]
                queries: dict[str, Found] = {}
                if reads := [one for one in asked if one.of_trigger or one.unless]:
                    from timebell.engine.triggers.source_reads import Reading  # only where there are sources

                    self._reading = self._reading or Reading(self.node)
                    queries, failed_ones = await self._reading.of(reads)
                    found |= failed_ones
                    asked = [one for one in asked if one.id not in failed_ones]
                found |= await self.node.store.run(pre_delivery_check.rule, asked, self.node.clock.now(), queries)
            except StoreError as failed:
                wrong = failed
            except Exception:  # whoever waits must not wait for ever
                log.exception("the gate failed")
            for id_, (_, waiting) in batch.items():
                if not waiting.done():
                    waiting.set_result(found.get(id_, wrong))
            self.node.working.poke()  # what was moved may be due soon

    def _ending(self, attempt: Attempt, ruling: Ruling | TimebellError) -> Ending | None:
        now, verdicts = self.node.clock.now(), self.node.counters.verdicts
        if isinstance(ruling, TimebellError):
            verdicts.add("waits")
            retry = self.node.retry_of(attempt, decode(attempt.retry))
            return decide.after_failure(
                attempt.id, attempt.number, attempt.tries, retry, now, ruling.code, str(ruling), counts=False,
                retryable=not isinstance(ruling, NotFound),
            )  # fmt: skip
        if ruling.state is None:
            verdicts.add("passed")
            attempt.verdict = ruling.verdict
            return None
        verdicts.add(ruling.reason or "withdrawn")
        state = ruling.state
        if state is JobState.SKIPPED and attempt.tries:  # something was delivered, so it is no skip
            state = JobState.CANCELLED
        result = None if ruling.verdict is None else encode({"condition": ruling.verdict}, "result")
        return Ending(
            attempt.id, attempt.number, state, now, reason=ruling.reason, code=ruling.code, error=ruling.error,
            result=result, counts=False,
        )  # fmt: skip
