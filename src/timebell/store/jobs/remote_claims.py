"""Claims of remote workers, and their heartbeats.

A remote worker runs the same attempts as a node: the claim is the one of a node, and its transaction dispatches the
attempts to the worker. Their `heartbeat` is the end of the lease, which the worker extends; then every node reclaims
them. The attempt number stays the fence of all reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import bindparam, select, update

from timebell.model.job import Attempt, Completion, JobState
from timebell.model.progress import Progress, encode_progress
from timebell.store.cluster import workers
from timebell.store.jobs import complete
from timebell.store.jobs.claim import attempt_from_job
from timebell.store.schema import jobs
from timebell.store.tenancy.tenant_limits import AdmittedClaim
from timebell.store.transaction import Transaction
from timebell.store.types import to_micros


class RemoteClaim(NamedTuple):
    """The attempts that a remote worker got; `is_repeated` if an earlier request with the same claim id got them."""

    attempts: list[Attempt]
    is_repeated: bool = False
    returned: int = 0
    """Claimed jobs that the limits of their tenants did not allow."""


def claim_for_worker(
    tx: Transaction,
    worker_id: str,
    claim_id: str | None,
    lease_end: Callable[[Attempt], datetime],
    claim: Callable[..., list[Attempt] | AdmittedClaim],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> RemoteClaim:
    """Call `claim` with these arguments, and dispatch the attempts to a remote worker until their `lease_end`.

    The row of the worker is locked first, so a repeated claim returns what the first one got. A worker that drains,
    or whose row was removed, gets nothing.
    """
    announced = workers.find_claim(tx, worker_id, claim_id, lock=True)
    if announced is not None and announced.repeated is not None:
        return RemoteClaim(announced.repeated, is_repeated=True)
    if announced is None or announced.draining:
        return RemoteClaim([])
    attempts, returned = AdmittedClaim.of(claim(tx, *args, **kwargs))
    if attempts:
        dispatched = [
            Completion(each.id, each.number, JobState.DISPATCHED, each.started_at, run_at=lease_end(each))
            for each in attempts
        ]
        complete.dispatch(tx, dispatched)
        for attempt in attempts:
            attempt.state = JobState.DISPATCHED
        workers.record_claim(tx, worker_id, claim_id, attempts)
    return RemoteClaim(attempts, returned=returned)


@dataclass(frozen=True, slots=True)
class Renewal:
    """The heartbeat of one attempt, with the progress that the worker reports, if any."""

    job_id: str
    number: int
    progress: Progress | None = None


class Renewed(NamedTuple):
    """The lease of an attempt after its heartbeat."""

    until: datetime
    cancel_requested: bool


def renew(
    tx: Transaction,
    tenant_id: str | None,
    renewals: Sequence[Renewal],
    lease_end: Callable[[Attempt], datetime],
) -> Mapping[str, Renewed]:
    """Extend the leases of dispatched attempts, and store their progress; return those whose fence held, by job id."""
    numbers = {each.job_id: each.number for each in renewals}
    query = select(jobs).where(jobs.c.id.in_(numbers), jobs.c.state == JobState.DISPATCHED.value)
    if tenant_id is not None:
        query = query.where(jobs.c.tenant_id == tenant_id)
    rows = {row.id: row for row in tx.execute(query.order_by(jobs.c.id).with_for_update())}
    renewed: dict[str, Renewed] = {}
    leases, reports = [], []
    for each in renewals:
        row = rows.get(each.job_id)
        if row is None or row.attempt != each.number:
            continue
        until = lease_end(attempt_from_job(row))
        renewed[row.id] = Renewed(until, bool(row.cancel_requested) or row.hold is not None)
        leases.append({"job": row.id, "until": to_micros(until)})
        if each.progress is not None:
            reports.append({"job": row.id, "value": encode_progress(each.progress, each.number)})
    same = jobs.c.id == bindparam("job")
    if leases:
        tx.execute(update(jobs).where(same).values(heartbeat=bindparam("until")), leases)
    if reports:
        tx.execute(update(jobs).where(same).values(progress=bindparam("value")), reports)
    return renewed
