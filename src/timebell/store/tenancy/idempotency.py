"""Responses stored per Idempotency-Key, so that a repeated request gets the first response again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Row, delete, select, update

from timebell.store.schema import answers
from timebell.store.transaction import Transaction

KEY_RETENTION = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Response to the request with this digest."""

    request_digest: str
    status: int
    headers: dict[str, str]
    body: str


def claim_key(tx: Transaction, tenant_id: str, key: str, request_digest: str, now: datetime) -> StoredResponse | None:
    """Claim a key for a request: None if it is now claimed, otherwise the response already stored for the key."""
    stored = _insert_or_read(tx, tenant_id, key, request_digest, now)
    if stored.created_at <= now - KEY_RETENTION:
        tx.execute(delete(answers).where(_by_key(tenant_id, key), answers.c.created_at <= now - KEY_RETENTION))
        stored = _insert_or_read(tx, tenant_id, key, request_digest, now)
    if stored.status is None:  # inserted by this transaction: those of others are visible only with their response
        return None
    return StoredResponse(stored.request, stored.status, orjson.loads(stored.headers or "{}"), stored.body or "")


def _insert_or_read(tx: Transaction, tenant_id: str, key: str, request_digest: str, now: datetime) -> Row[Any]:
    # The insert waits for a concurrent transaction with the same key, whose response is then visible.
    tx.execute(tx.dialect.insert_ignoring_duplicates(answers).values(
        tenant_id=tenant_id, key=key, request=request_digest, created_at=now
    ))  # fmt: skip
    return tx.execute(select(answers).where(_by_key(tenant_id, key))).one()


def store_response(tx: Transaction, tenant_id: str, key: str, response: StoredResponse) -> None:
    """Store the response to the request that claimed the key."""
    headers = orjson.dumps(response.headers).decode()
    values = {"status": response.status, "headers": headers, "body": response.body}
    tx.execute(update(answers).where(_by_key(tenant_id, key)).values(**values))


def prune(tx: Transaction, now: datetime) -> int:
    """Delete keys older than 24 hours; return the number of deleted rows."""
    return tx.execute(delete(answers).where(answers.c.created_at <= now - KEY_RETENTION)).rowcount


def _by_key(tenant_id: str, key: str) -> ColumnElement[bool]:
    return (answers.c.tenant_id == tenant_id) & (answers.c.key == key)
