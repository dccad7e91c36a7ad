"""Audit log: one record per change with its actor, written in the transaction of the change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

from sqlalchemy import insert, select

from timebell.model.page import Page
from timebell.store.schema import audit_log
from timebell.store.transaction import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One change. `before` and `after` are SHA-256 digests of the subject; `at` is aware UTC."""

    id: str
    tenant_id: str
    at: datetime
    actor: str
    action: str
    subject: str | None = None
    key_id: str | None = None
    address: str | None = None
    before: str | None = None
    after: str | None = None
    request_id: str | None = None


INSERT_RECORD = insert(audit_log)


def write_record(tx: Transaction, record: AuditRecord) -> None:
    """Insert a record."""
    tx.execute(INSERT_RECORD, asdict(record))


def list_records(
    tx: Transaction, tenant_id: str, limit: int, before: str | None, *,
    subject: str | None = None, action: str | None = None, actor: str | None = None,
    start: datetime | None = None, end: datetime | None = None,
) -> Page[AuditRecord]:  # fmt: skip
    """Return a page of a tenant's records, newest first; `start` is inclusive, `end` exclusive."""
    query = select(audit_log).where(audit_log.c.tenant_id == tenant_id).order_by(audit_log.c.id.desc())
    filters = {audit_log.c.subject: subject, audit_log.c.action: action, audit_log.c.actor: actor}
    query = query.where(*(column == value for column, value in filters.items() if value is not None))
    if start is not None:
        query = query.where(audit_log.c.at >= start)
    if end is not None:
        query = query.where(audit_log.c.at < end)
    if before is not None:
        query = query.where(audit_log.c.id < before)
    page = [AuditRecord(**row._mapping) for row in tx.execute(query.limit(limit + 1))]
    return Page(page[:limit], page[limit - 1].id if len(page) > limit else None)
