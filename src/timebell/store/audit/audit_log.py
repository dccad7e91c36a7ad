"""Audit log: changes with their actor, written in the transaction of the change, and refused requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import Row, Select, insert, or_, select

from timebell.model.audit_values import list_changes
from timebell.model.page import Page
from timebell.recurrence.instants import format_instant
from timebell.store.schema import audit_log
from timebell.store.transaction import Transaction, read_only

DONE, REFUSED = "done", "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One change, or one refused request. `at` is aware UTC.

    actor_kind: `user`, `key`, `source`, `local`, `cli` or `engine`.
    subject: id or name of the object; `subject_name` is its name at that time.
    before, after: recorded state of the subject (`model/audit_values.py`).
    code: error code of a refused request; `suppressed` counts refusals like it that have no record of their own.
    """

    id: str
    tenant_id: str
    at: datetime
    actor: str
    actor_kind: str
    action: str
    subject: str | None = None
    subject_name: str | None = None
    outcome: str = DONE
    code: str | None = None
    suppressed: int = 0
    key_id: str | None = None
    address: str | None = None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Filter of records; the fields are combined with AND.

    `subject` is an id or a name. An `action` that ends with `*` is a prefix. `start` is inclusive, `end` exclusive.
    """

    subject: str | None = None
    action: str | None = None
    actor: str | None = None
    outcome: str | None = None
    start: datetime | None = None
    end: datetime | None = None


NO_FILTER = AuditFilter()
INSERT_RECORD = insert(audit_log)


def write_record(tx: Transaction, record: AuditRecord) -> None:
    """Insert a record."""
    tx.execute(INSERT_RECORD, record_values(record))


def record_values(record: AuditRecord) -> dict[str, Any]:
    """Return the values of a record's row by column."""
    return {
        "id": record.id, "tenant_id": record.tenant_id, "at": record.at, "actor": record.actor,
        "actor_kind": record.actor_kind, "action": record.action, "subject": record.subject,
        "subject_name": record.subject_name, "outcome": record.outcome, "code": record.code,
        "suppressed": record.suppressed, "key_id": record.key_id, "address": record.address,
        "before": _to_json(record.before), "after": _to_json(record.after), "request_id": record.request_id,
    }  # fmt: skip


@read_only
def list_records(
    tx: Transaction, tenant_id: str, limit: int, before: str | None, wanted: AuditFilter = NO_FILTER
) -> Page[AuditRecord]:
    """Return a page of a tenant's records, newest first."""
    return _page(tx, _filtered(tenant_id, wanted), limit, before)


def list_records_after(
    tx: Transaction, after: str | None, limit: int, tenant_id: str | None = None, wanted: AuditFilter = NO_FILTER
) -> list[AuditRecord]:
    """Return the first records, oldest first, or those after an id: of a tenant, or of all."""
    query = _filtered(tenant_id, wanted)
    if after is not None:
        query = query.where(audit_log.c.id > after)
    return [_record_from_row(row) for row in tx.execute(query.order_by(audit_log.c.id).limit(limit))]


@read_only
def list_history(
    tx: Transaction, tenant_id: str, kind: str, subject: str, limit: int, before: str | None
) -> Page[AuditRecord]:
    """Return a page of the changes of one object, newest first. `kind` is the first part of their actions."""
    changes = _filtered(tenant_id, AuditFilter(action=f"{kind}.*", outcome=DONE))
    return _page(tx, changes.where(audit_log.c.subject == subject), limit, before)


def load_records(tx: Transaction, ids: Sequence[str]) -> list[AuditRecord]:
    """Return the records with these ids, oldest first."""
    if not ids:
        return []
    rows = tx.execute(select(audit_log).where(audit_log.c.id.in_(ids)).order_by(audit_log.c.id))
    return [_record_from_row(row) for row in rows]


def render_record(record: AuditRecord) -> dict[str, Any]:
    """Render a record as JSON, as the API and the export show it."""
    return {
        "id": record.id, "tenantId": record.tenant_id, "at": format_instant(record.at), "actor": record.actor,
        "actorKind": record.actor_kind, "keyId": record.key_id, "address": record.address, "action": record.action,
        "subject": record.subject, "subjectName": record.subject_name, "outcome": record.outcome, "code": record.code,
        "suppressed": record.suppressed, "changes": render_changes(record), "requestId": record.request_id,
    }  # fmt: skip


def render_changes(record: AuditRecord) -> list[dict[str, Any]]:
    """Render the changed fields of a record as JSON."""
    return [
        {"field": change.field, "before": change.before, "after": change.after}
        for change in list_changes(record.before, record.after)
    ]


def _page(tx: Transaction, query: Select[Any], limit: int, before: str | None) -> Page[AuditRecord]:
    if before is not None:
        query = query.where(audit_log.c.id < before)
    rows = tx.execute(query.order_by(audit_log.c.id.desc()).limit(limit + 1))
    page = [_record_from_row(row) for row in rows]
    return Page(page[:limit], page[limit - 1].id if len(page) > limit else None)


def _filtered(tenant_id: str | None, wanted: AuditFilter) -> Select[Any]:
    columns, conditions = audit_log.c, []
    if tenant_id is not None:
        conditions.append(columns.tenant_id == tenant_id)
    if wanted.subject is not None:
        conditions.append(or_(columns.subject == wanted.subject, columns.subject_name == wanted.subject))
    if wanted.action is not None and wanted.action.endswith("*"):
        conditions.append(columns.action.startswith(wanted.action[:-1], autoescape=True))
    elif wanted.action is not None:
        conditions.append(columns.action == wanted.action)
    equal = {columns.actor: wanted.actor, columns.outcome: wanted.outcome}
    conditions += [column == value for column, value in equal.items() if value is not None]
    if wanted.start is not None:
        conditions.append(columns.at >= wanted.start)
    if wanted.end is not None:
        conditions.append(columns.at < wanted.end)
    return select(audit_log).where(*conditions)


def _record_from_row(row: Row[Any]) -> AuditRecord:
    states = {name: None if value is None else orjson.loads(value)
              for name, value in (("before", row.before), ("after", row.after))}  # fmt: skip
    return AuditRecord(**{**row._mapping, **states})


def _to_json(state: dict[str, Any] | None) -> str | None:
    return None if state is None else orjson.dumps(state, default=str).decode()
