"""Responses stored per Idempotency-Key, so that a repeated request gets the first response again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import orjson
from sqlalchemy import delete, select

from timebell.store.schema import answers
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

KEY_RETENTION = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Response to the request with this digest."""

    request_digest: str
    status: int
    headers: dict[str, str]
    body: str


# The unique index makes this wait for a concurrent transaction with the same key, whose response is then visible.
INSERT_KEY = Statement(
    "WITH $rows INSERT INTO timebell_idempotency_keys (tenant_id, key, request, created_at)"
    " SELECT tenant_id, key, request, created_at FROM d WHERE true ON CONFLICT DO NOTHING RETURNING key",
    tenant_id="text",
    key="text",
    request="text",
    created_at="instant",
)


def claim_key(tx: Transaction, tenant_id: str, key: str, request_digest: str, now: datetime) -> StoredResponse | None:
    """Claim a key for a request: None if it is now claimed, otherwise the response already stored for the key."""
    row = {"tenant_id": tenant_id, "key": key, "request": request_digest, "created_at": tx.dialect.to_db(now)}
    if tx.fetch(INSERT_KEY, [row]):
        return None
    matches = (answers.c.tenant_id == tenant_id) & (answers.c.key == key)
    expired = tx.execute(delete(answers).where(matches, answers.c.created_at <= now - KEY_RETENTION)).rowcount
    if expired and tx.fetch(INSERT_KEY, [row]):
        return None
    stored = tx.execute(select(answers).where(matches)).one()
    return StoredResponse(stored.request, stored.status or 0, orjson.loads(stored.headers or "{}"), stored.body or "")


UPDATE_RESPONSE = Statement(
    "UPDATE timebell_idempotency_keys SET status = :status, headers = :headers, body = :body"
    " WHERE tenant_id = :tenant_id AND key = :key"
)


def store_response(tx: Transaction, tenant_id: str, key: str, response: StoredResponse) -> None:
    """Store the response to the request that claimed the key."""
    headers = orjson.dumps(response.headers).decode()
    tx.fetch(UPDATE_RESPONSE, status=response.status, headers=headers, body=response.body, tenant_id=tenant_id, key=key)


def prune(tx: Transaction, now: datetime) -> int:
    """Delete keys older than 24 hours; return the number of deleted rows."""
    return tx.execute(delete(answers).where(answers.c.created_at <= now - KEY_RETENTION)).rowcount
