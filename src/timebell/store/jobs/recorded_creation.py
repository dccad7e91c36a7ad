"""Create a job together with the audit record of its request."""

from __future__ import annotations

from timebell.model.job import NewJob
from timebell.store.audit.audit_log import AuditRecord
from timebell.store.jobs.claim import notify_of
from timebell.store.recent_writes import CREATIONS, JOBS
from timebell.store.tenancy import usage
from timebell.store.transaction import Transaction, whole_transaction


def needs_lookup(job: NewJob) -> bool:
    """Return whether `repository.create` has to look something up for a job: its key, target or condition."""
    return job.key is not None or job.target_name is not None or job.conditions is not None


@whole_transaction
def create_recorded(tx: Transaction, job: NewJob, record: AuditRecord, day: str, payload_bytes: int) -> bool:
    """Create a job that needs no lookup, write the audit record, and count the size of the request.

    Returns False, and changes nothing, if the request id was used before or the tenant does not exist: then use
    `repository.create`.
    """
    if not tx.dialect.insert_recorded(tx, job, *usage.change_rows(tx, record, day, payload_bytes)):
        return False
    notify_of(tx, [job])
    tx.record(JOBS, {job.id: None})
    tx.record(CREATIONS, {job.id: job})
    return True
