"""Answers kept under an Idempotency-Key, so that a repeated request gets the first one again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import orjson
from sqlalchemy import delete, select

from timebell.store.schema import answers
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

KEPT = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered to the request with this digest."""

    request: str
    status: int
    headers: dict[str, str]
    body: str


# Waits for a transaction that takes the same key just now, and then sees what it has kept.
TAKE = Statement(
    "WITH $rows INSERT INTO timebell_answers (tenant_id, key, request, created_at)"
    " SELECT tenant_id, key, request, created_at FROM d WHERE true ON CONFLICT DO NOTHING RETURNING key",
    tenant_id="text",
    key="text",
    request="text",
    created_at="instant",
)


def take(tx: Transaction, tenant_id: str, key: str, request: str, now: datetime) -> Answer | None:
    """Take a key for a request; or the answer that the key was given before."""
    row = {"tenant_id": tenant_id, "key": key, "request": request, "created_at": tx.dialect.to_db(now)}
    if tx.fetch(TAKE, [row]):
        return None
    mine = (answers.c.tenant_id == tenant_id) & (answers.c.key == key)
    too_old = tx.execute(delete(answers).where(mine, answers.c.created_at <= now - KEPT)).rowcount
    if too_old and tx.fetch(TAKE, [row]):
        return None
    found = tx.execute(select(answers).where(mine)).one()
    return Answer(found.request, found.status or 0, orjson.loads(found.headers or "{}"), found.body or "")


KEEP = Statement(
    "UPDATE timebell_answers SET status = :status, headers = :headers, body = :body"
    " WHERE tenant_id = :tenant_id AND key = :key"
)


def keep(tx: Transaction, tenant_id: str, key: str, answer: Answer) -> None:
    """Keep the answer to the request that took the key."""
    headers = orjson.dumps(answer.headers).decode()
    tx.fetch(KEEP, status=answer.status, headers=headers, body=answer.body, tenant_id=tenant_id, key=key)


def prune(tx: Transaction, now: datetime) -> int:
    """Forget what is older than a day; how many."""
    return tx.execute(delete(answers).where(answers.c.created_at <= now - KEPT)).rowcount
