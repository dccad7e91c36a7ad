"""Checks just before delivery: decisions of features, conditions and monthly quotas.

Each job first waits for the external data of its own check only. The decisions about all jobs that are ready then share
a transaction, so a thousand simultaneously due jobs need only a few transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from timebell.engine.batcher import Batcher
from timebell.engine.node import Node
from timebell.errors import NotFound, TimebellError
from timebell.model import decide
from timebell.model.job import Attempt, Completion, JobState, Kind
from timebell.model.payload import decode, encode
from timebell.model.preconditions import Preconditions
from timebell.store.jobs import pre_delivery_check
from timebell.store.jobs.pre_delivery_check import Decision, DeliveryCheck, DeliveryRead, QueryResult
from timebell.store.jobs.query_sources import no_such_source

MAX_CHECKS_PER_TRANSACTION = 500
WaitContext = Callable[[], AbstractAsyncContextManager[None]]
"""Creates the context in which an attempt waits for external data."""


class DeliveryReader(Protocol):
    """Reads external data for pre-delivery checks; provided by a feature."""

    async def read(self, check: DeliveryCheck) -> DeliveryRead | None:
        """Read the data for a check; None if the feature has none. Raises TimebellError if the job must wait."""

    async def close(self) -> None:
        """Close all connections."""


class PreDeliveryCheck:
    """The pre-delivery checks of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._readers: list[DeliveryReader] | None = None
        self._decisions = Batcher(self._decide, MAX_CHECKS_PER_TRANSACTION)

    def applies_to(self, attempt: Attempt) -> bool:
        """True if the attempt needs a check."""
        has_conditions = attempt.conditions is not None or attempt.kind == Kind.TRIGGER
        return has_conditions or attempt.tenant_id in self.node.metered_tenants

    async def check(self, attempt: Attempt, waiting: WaitContext = nullcontext) -> Completion | None:
        """Return None if the attempt may be delivered, otherwise the completion that replaces the delivery."""
        try:
            preconditions = None
            if attempt.conditions is not None and not attempt.manual_retries:
                preconditions = Preconditions.for_job(attempt.conditions, attempt.payload, attempt.metadata)
            delivery_check = DeliveryCheck(
                attempt.id, attempt.tenant_id, attempt.kind, attempt.manual_retries > 0, preconditions
            )
            query = await self._read(delivery_check, attempt, waiting)
            return self._completion_for(attempt, await self._decisions.run(attempt.id, (delivery_check, query)))
        except TimebellError as error:  # also InvalidInput: written by a newer release, whose nodes can decode it
            return self._completion_for(attempt, error)

    async def close(self) -> None:
        """Close the readers."""
        for reader in self._readers or ():
            await reader.close()

    async def _read(self, check: DeliveryCheck, attempt: Attempt, waiting: WaitContext) -> QueryResult | None:
        """Return the query result of a job. Raises NotFound (SOURCE_NOT_FOUND) for a query that no feature can run."""
        if not check.checks_trigger and check.unless is None:
            return None
        if self._readers is None:  # created on first use, because they load drivers
            readers = (feature.create_delivery_reader(self.node) for feature in self.node.features)
            self._readers = [reader for reader in readers if reader is not None]
        query: QueryResult | None = None
        async with waiting():
            for reader in self._readers:
                if (read := await reader.read(check)) is not None:
                    query, attempt.source_read = read.query, read.problem
        if check.unless is not None and query is None:
            raise no_such_source(check.unless.source)
        return query

    async def _decide(self, checks: Mapping[str, tuple[DeliveryCheck, QueryResult | None]]) -> Mapping[str, Decision]:
        queries = {id_: query for id_, (_, query) in checks.items() if query is not None}
        return await self.node.store.run(
            pre_delivery_check.decide, [check for check, _ in checks.values()], self.node.clock.now(), queries,
            self.node.features,
        )  # fmt: skip

    def _completion_for(self, attempt: Attempt, decision: Decision | TimebellError) -> Completion | None:
        now, verdicts = self.node.clock.now(), self.node.counters.delivery_check_verdicts
        if isinstance(decision, TimebellError):
            verdicts.add("waits")
            retry = self.node.retry_policy_for(attempt, decode(attempt.retry))
            return decide.complete_after_failure(
                attempt.id, attempt.number, attempt.attempts_used, retry, now, decision.code, str(decision),
                uses_attempt=False, retryable=not isinstance(decision, NotFound),
            )  # fmt: skip
        if decision.state is None:
            verdicts.add("passed")
            attempt.verdict = decision.verdict
            return None
        verdicts.add(decision.reason or "withdrawn")
        state = decision.state
        if state is JobState.SKIPPED and attempt.attempts_used:  # an earlier attempt was delivered, so it is not a skip
            state = JobState.CANCELLED
        result = None if decision.verdict is None else encode({"condition": decision.verdict}, "result")
        return Completion(
            attempt.id, attempt.number, state, now, reason=decision.reason, code=decision.code, error=decision.error,
            result=result, uses_attempt=False,
        )  # fmt: skip
