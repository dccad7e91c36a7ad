"""Progress of delivering the audit log to external destinations."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import func, insert, literal, null, select, update

from timebell.store.audit.audit_log import AuditRecord, load_records
from timebell.store.schema import audit_exports, audit_log
from timebell.store.transaction import Transaction
from timebell.store.types import Instant


def get_position(tx: Transaction, destination: str) -> str | None:
    """Return the id of a record up to which everything was delivered; None at the beginning."""
    position: str | None = tx.execute(
        select(audit_exports.c.position).where(audit_exports.c.destination == destination)
    ).scalar()
    return position


def save_progress(
    tx: Transaction, destination: str, position: str | None, now: datetime, error: str | None = None
) -> bool:
    """Save the position, and the time of the delivery or the error of an attempt. Returns true."""
    values = {"position": position, "error": error} | ({} if error else {"delivered_at": now})
    since = func.coalesce(audit_exports.c.failing_since, literal(now, Instant)) if error else null()
    matches = audit_exports.c.destination == destination
    if not tx.execute(update(audit_exports).where(matches).values(**values, failing_since=since)).rowcount:
        first = values | {"failing_since": now if error else None}
        tx.execute(insert(audit_exports).values(destination=destination, **first))
    return True


def clear_failures(tx: Transaction, destinations: Collection[str]) -> bool:
    """Clear the recorded failures of destinations that are not configured anymore; return true.

    `destinations` are the configured ones.
    """
    other = audit_exports.c.destination.not_in(destinations)
    tx.execute(update(audit_exports).where(other).values(failing_since=None, error=None))
    return True


def list_undelivered(
    tx: Transaction, position: str | None, delivered: Collection[str], limit: int
) -> list[AuditRecord]:
    """Return the first records after a position that are not among the delivered ids, in order."""
    query = select(audit_log.c.id).order_by(audit_log.c.id).limit(len(delivered) + limit)
    if position is not None:
        query = query.where(audit_log.c.id > position)
    missing = [id_ for id_ in tx.execute(query).scalars() if id_ not in delivered]
    return load_records(tx, missing[:limit])
