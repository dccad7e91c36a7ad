"""Responses stored per Idempotency-Key, so that a repeated request gets the first response again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import orjson
from sqlalchemy import bindparam, delete, select, update

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


_BY_KEY = (answers.c.tenant_id == bindparam("of_tenant")) & (answers.c.key == bindparam("of_key"))
SELECT_BY_KEY = select(answers).where(_BY_KEY)
DELETE_EXPIRED = delete(answers).where(_BY_KEY, answers.c.created_at <= bindparam("expired"))
UPDATE_RESPONSE = update(answers).where(_BY_KEY)


def claim_key(tx: Transaction, tenant_id: str, key: str, request_digest: str, now: datetime) -> StoredResponse | None:
    """Claim a key for a request: None if it is now claimed, otherwise the response already stored for the key."""
    row = {"tenant_id": tenant_id, "key": key, "request": request_digest, "created_at": now}
    of_key = {"of_tenant": tenant_id, "of_key": key}
    # The insert waits for a concurrent transaction with the same key, whose response is then visible.
    tx.execute(tx.dialect.insert_ignoring_duplicates(answers), row)
    stored = tx.execute(SELECT_BY_KEY, of_key).one()
    if stored.created_at <= now - KEY_RETENTION:
        tx.execute(DELETE_EXPIRED, {**of_key, "expired": now - KEY_RETENTION})
        tx.execute(tx.dialect.insert_ignoring_duplicates(answers), row)
        stored = tx.execute(SELECT_BY_KEY, of_key).one()
    if stored.status is None:  # inserted by this transaction: those of others are visible only with their response
        return None
    return StoredResponse(stored.request, stored.status, orjson.loads(stored.headers or "{}"), stored.body or "")


def store_response(tx: Transaction, tenant_id: str, key: str, response: StoredResponse) -> None:
    """Store the response to the request that claimed the key."""
    headers = orjson.dumps(response.headers).decode()
    values = {"status": response.status, "headers": headers, "body": response.body}
    tx.execute(UPDATE_RESPONSE, {"of_tenant": tenant_id, "of_key": key, **values})


def prune(tx: Transaction, now: datetime) -> int:
    """Delete keys older than 24 hours; return the number of deleted rows."""
    return tx.execute(delete(answers).where(answers.c.created_at <= now - KEY_RETENTION)).rowcount
