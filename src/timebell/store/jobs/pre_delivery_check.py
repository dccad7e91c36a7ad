"""Pre-delivery checks of started jobs: its feature still wants it, conditions hold, monthly quota not exhausted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from timebell.feature import Feature
from timebell.model.condition import Comparison, evaluate
from timebell.model.job import JobState, Kind, Reason
from timebell.model.preconditions import Preconditions, UnlessQuery
from timebell.store.tenancy import monthly_quota
from timebell.store.transaction import Transaction

MAX_VERDICT_BYTES = 8192  # of a stored verdict, as JSON


@dataclass(frozen=True, slots=True)
class DeliveryCheck:
    """An attempt to check before its delivery."""

    id: str
    tenant_id: str
    kind: str
    is_manual_retry: bool
    preconditions: Preconditions | None = None
    """The preconditions of the job itself."""

    @property
    def checks_trigger(self) -> bool:
        """Return whether its trigger is checked, too."""
        return self.kind == Kind.TRIGGER and not self.is_manual_retry

    @property
    def unless(self) -> UnlessQuery | None:
        """The query of its own preconditions."""
        return None if self.preconditions is None else self.preconditions.unless


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of an `unless` query: whether it found rows, and the parameters it was run with."""

    found_rows: bool
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeliveryRead:
    """The external data read for a check. `problem` describes a slow or failed read, for the attempt log."""

    query: QueryResult | None = None
    problem: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about an attempt: it may be delivered if `state` is None, else `state` is final for the job.

    `verdict` is the JSON verdict of its condition, if it has one.
    """

    state: JobState | None = None
    reason: str | None = None
    code: str | None = None
    error: str | None = None
    verdict: dict[str, Any] | None = None


ALLOWED = Decision()


def decide(
    tx: Transaction, checks: Sequence[DeliveryCheck], now: datetime, query_results: Mapping[str, QueryResult],
    features: Sequence[Feature],
) -> dict[str, Decision]:  # fmt: skip
    """Decide whether attempts may be delivered; return the decisions by job id.

    Allowed jobs are charged to the monthly quota of their tenants. `query_results` are the results of the `unless`
    queries of the jobs, by job id. `features` decide first about the jobs that they created.
    """
    decisions = dict.fromkeys((check.id for check in checks), ALLOWED)
    for feature in features:
        decisions |= feature.decide_deliveries(tx, checks, now, query_results)
    for check in checks:
        if check.preconditions is not None and decisions[check.id].state is None:
            decisions[check.id] = decide_condition(
                check.preconditions.condition, check.preconditions.fields, query_results.get(check.id)
            )
    allowed: dict[str, list[str]] = defaultdict(list)
    for check in checks:
        if decisions[check.id].state is None:
            allowed[check.tenant_id].append(check.id)
    for id_, error in monthly_quota.charge_jobs(tx, allowed, now).items():
        decisions[id_] = Decision(
            JobState.SKIPPED,
            Reason.QUOTA,
            code="MONTHLY_LIMIT_REACHED",
            error=str(error),
            verdict=decisions[id_].verdict,
        )
    return decisions


def decide_condition(
    condition: Sequence[Comparison], fields: dict[str, Any], query_result: QueryResult | None
) -> Decision:
    """Evaluate comparisons and the result of a query."""
    if not condition and query_result is None:
        return ALLOWED
    verdict = evaluate(condition, fields)
    result = verdict.to_json()
    if query_result is not None:
        result["unless"] = {"found": query_result.found_rows, "parameters": query_result.parameters}
    result["holds"] = verdict.holds and not (query_result is not None and query_result.found_rows)
    if len(orjson.dumps(result)) > MAX_VERDICT_BYTES:
        result = {
            "holds": result["holds"],
            "failed": result["failed"],
            "inputs": "The inputs are too long to be stored.",
        }
    return Decision(verdict=result) if result["holds"] else Decision(JobState.SKIPPED, Reason.CONDITION, verdict=result)
