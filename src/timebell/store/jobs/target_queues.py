"""Queues of named http targets with limits: their jobs wait in a queue of their own, whose limits are the target's.

A job is assigned when it is inserted, so schedules follow their target, and only jobs that specify no queue are.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from sqlalchemy import or_, select, update

from timebell.model.job import JobState, NewJob
from timebell.model.limits import Limits
from timebell.model.payload import decode, encode
from timebell.model.routes import named_target, named_target_route
from timebell.store.jobs import queues as queue_rows
from timebell.store.schema import jobs, queues
from timebell.store.transaction import JOBS, Transaction

KIND = "http"
ROUTE = named_target_route(KIND)
DEFAULT_QUEUE = "default"
PREFIX = "target:"
MAX_NAME_CHARACTERS = 100


def target_queue(tenant_id: str, name: str) -> str:
    """Return the name of a target's queue; a digest if it would be too long."""
    readable = f"{PREFIX}{tenant_id}/{name}"
    if len(readable) <= MAX_NAME_CHARACTERS:
        return readable
    return f"{PREFIX}{sha256(readable.encode()).hexdigest()}"


def is_visible(queue: str, tenant_id: str) -> bool:
    """Return whether a tenant may see a queue: queues of targets contain names of their tenant."""
    return not queue.startswith(PREFIX) or queue.rpartition("/")[0] == f"{PREFIX}{tenant_id}"


def assign_queues(tx: Transaction, new_jobs: Sequence[NewJob]) -> None:
    """Assign new jobs that specify no queue, and whose target has limits, to the queue of their target."""
    candidates = [job for job in new_jobs if job.route == ROUTE and job.queue == DEFAULT_QUEUE]
    if not candidates:
        return
    names = {job.id: target_queue(job.tenant_id, decode(job.target)["name"]) for job in candidates}
    is_limited = or_(queues.c.concurrency.is_not(None), queues.c.rate.is_not(None))
    limited = set(
        tx.execute(select(queues.c.name).where(queues.c.name.in_(sorted(set(names.values()))), is_limited)).scalars()
    )
    for job in candidates:
        if names[job.id] in limited:
            job.queue = names[job.id]


def set_target_limits(tx: Transaction, tenant_id: str, name: str, limits: Limits | None) -> None:
    """Set or remove the limits of a target, also for its pending jobs."""
    queue = target_queue(tenant_id, name)
    if limits is None:
        if tx.execute(select(queues.c.name).where(queues.c.name == queue)).first() is not None:
            queue_rows.set_limits(tx, queue, Limits())
        return
    queue_rows.set_limits(tx, queue, limits)
    # Reads the pending jobs of the tenant, like the deletion of a target. A claimed job keeps its queue.
    of_target = (jobs.c.tenant_id == tenant_id) & (jobs.c.target == encode(named_target(KIND, name), "target"))
    is_waiting = (jobs.c.state == JobState.PENDING.value) & (jobs.c.queue == DEFAULT_QUEUE)
    tx.execute(update(jobs).where(of_target, is_waiting).values(queue=queue))
    tx.notify(JOBS)
