"""The audit log: who changed what, written in the transaction of the change."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select

from timebell.model.page import Page
from timebell.store.schema import audit_log
from timebell.store.statement import Statement
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


_WRITTEN = "id, tenant_id, at, actor, key_id, address, action, subject, before, after, request_id"
WRITE = Statement(
    f"WITH $rows INSERT INTO timebell_audit_log ({_WRITTEN}) SELECT {_WRITTEN} FROM d",  # noqa: S608 - our own names
    **dict.fromkeys(_WRITTEN.split(", "), "text") | {"id": "id", "at": "instant", "request_id": "id"},
)


def write(tx: Transaction, record: AuditRecord) -> None:
    """Add a record."""
    tx.fetch(WRITE, [{
        "id": record.id, "tenant_id": record.tenant_id, "at": tx.dialect.to_db(record.at), "actor": record.actor,
        "key_id": record.key_id, "address": record.address, "action": record.action, "subject": record.subject,
        "before": record.before, "after": record.after, "request_id": record.request_id,
    }])  # fmt: skip


def page(
    tx: Transaction, tenant_id: str, limit: int, before: str | None, *,
    subject: str | None = None, action: str | None = None, actor: str | None = None,
    start: datetime | None = None, end: datetime | None = None,
) -> Page[AuditRecord]:  # fmt: skip
    """Records of a tenant, newest first; `start` is inclusive, `end` exclusive."""
    query = select(audit_log).where(audit_log.c.tenant_id == tenant_id).order_by(audit_log.c.id.desc())
    equal = {audit_log.c.subject: subject, audit_log.c.action: action, audit_log.c.actor: actor}
    query = query.where(*(column == value for column, value in equal.items() if value is not None))
    if start is not None:
        query = query.where(audit_log.c.at >= start)
    if end is not None:
        query = query.where(audit_log.c.at < end)
    if before is not None:
        query = query.where(audit_log.c.id < before)
    found = [AuditRecord(**row._mapping) for row in tx.execute(query.limit(limit + 1))]
    return Page(found[:limit], found[limit - 1].id if len(found) > limit else None)
