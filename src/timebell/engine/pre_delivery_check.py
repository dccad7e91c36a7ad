"""Checks just before delivery: decisions of features, conditions and monthly quotas.

Concurrent checks share a transaction, so a thousand simultaneously due jobs need only a few.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from timebell.engine.node import Node
from timebell.errors import InvalidInput, NotFound, StoreError, TimebellError
from timebell.model import decide
from timebell.model.job import Attempt, Completion, JobState, Kind
from timebell.model.payload import decode, encode
from timebell.model.preconditions import Preconditions
from timebell.store.jobs import pre_delivery_check
from timebell.store.jobs.pre_delivery_check import Decision, DeliveryCheck, QueryResult
from timebell.store.jobs.query_sources import no_such_source

log = logging.getLogger("timebell.preconditions")

MAX_CHECKS_PER_TRANSACTION = 500


class DeliveryReader(Protocol):
    """Reads external data for pre-delivery checks; provided by a feature."""

    async def read(self, checks: Sequence[DeliveryCheck]) -> tuple[dict[str, QueryResult], dict[str, TimebellError]]:
        """Return the results of the `unless` queries, and the errors of jobs that must wait, by job id."""

    async def close(self) -> None:
        """Close all connections."""


class PreDeliveryCheck:
    """The pre-delivery checks of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._readers: list[DeliveryReader] | None = None
        self._pending: dict[str, tuple[DeliveryCheck, asyncio.Future[Decision | TimebellError]]] = {}
        self._checking: asyncio.Task[None] | None = None

    def applies_to(self, attempt: Attempt) -> bool:
        """True if the attempt needs a check."""
        has_conditions = attempt.conditions is not None or attempt.kind == Kind.TRIGGER
        return has_conditions or attempt.tenant_id in self.node.metered_tenants

    async def check(self, attempt: Attempt) -> Completion | None:
        """Return None if the attempt may be delivered, otherwise the completion that replaces the delivery."""
        preconditions = None
        if attempt.conditions is not None and not attempt.manual_retries:
            try:
                preconditions = Preconditions.for_job(attempt.conditions, attempt.payload, attempt.metadata)
            except InvalidInput as error:  # written by a newer release, whose nodes can decode it
                return self._completion_for(attempt, error)
        delivery_check = DeliveryCheck(
            attempt.id, attempt.tenant_id, attempt.kind, attempt.manual_retries > 0, preconditions
        )
        decision: asyncio.Future[Decision | TimebellError] = asyncio.get_running_loop().create_future()
        self._pending[attempt.id] = delivery_check, decision
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check_pending())
        return self._completion_for(attempt, await asyncio.shield(decision))

    async def close(self) -> None:
        """Close the readers."""
        for reader in self._readers or ():
            await reader.close()

    async def _read(
        self, checks: Sequence[DeliveryCheck]
    ) -> tuple[dict[str, QueryResult], dict[str, TimebellError]]:  # fmt: skip
        """Return the query results and the errors of these jobs. A query that no feature can run is an error."""
        if self._readers is None:  # created on first use, because they load drivers
            readers = (feature.create_delivery_reader(self.node) for feature in self.node.features)
            self._readers = [reader for reader in readers if reader is not None]
        results, errors = dict[str, QueryResult](), dict[str, TimebellError]()
        for reader in self._readers:
            found, failed = await reader.read(checks)
            results |= found
            errors |= failed
        for check in checks:
            if check.unless is not None and check.id not in results and check.id not in errors:
                errors[check.id] = no_such_source(check.unless.source)
        return results, errors

    async def _check_pending(self) -> None:
        while self._pending:
            batch = dict(list(self._pending.items())[:MAX_CHECKS_PER_TRANSACTION])
            for id_ in batch:
                del self._pending[id_]
            decisions: dict[str, Decision | TimebellError] = {}
            error: TimebellError = StoreError("The pre-delivery check could not be run.")
            try:
                checks = [check for check, _ in batch.values()]
                queries: dict[str, QueryResult] = {}
                if reads := [check for check in checks if check.checks_trigger or check.unless]:
                    queries, errors = await self._read(reads)
                    decisions |= errors
                    checks = [check for check in checks if check.id not in errors]
                decisions |= await self.node.store.run(
                    pre_delivery_check.decide, checks, self.node.clock.now(), queries, self.node.features
                )
            except StoreError as exc:
                error = exc
            except Exception:  # resolve the futures, whatever happened
                log.exception("the pre-delivery check failed")
            for id_, (_, future) in batch.items():
                if not future.done():
                    future.set_result(decisions.get(id_, error))

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
