"""Budgets of calls to the APIs of accounts, shared by all nodes and all sources of an account."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import delete, or_, select, update

from timebell.features.triggers.store.tables import call_budgets
from timebell.store.transaction import Transaction

RETENTION = timedelta(days=7)


def take_call(tx: Transaction, account: str, tenant_id: str, limit: int, now: datetime) -> datetime | None:
    """Count a call of an account if it is permitted; otherwise return when the next one is.

    No call is permitted before the time that the API asked for, or after `limit` calls on one day (UTC).
    """
    values = {"account": account, "tenant_id": tenant_id, "calls": 0, "resets_at": next_midnight(now)}
    tx.execute(tx.dialect.insert_ignoring_duplicates(call_budgets), [values])
    matches = call_budgets.c.account == account
    row = tx.execute(select(call_budgets).where(matches).with_for_update()).one()
    if row.retry_at is not None and row.retry_at > now:
        retry_at: datetime = row.retry_at
        return retry_at
    calls, resets_at = (0, next_midnight(now)) if row.resets_at <= now else (row.calls, row.resets_at)
    if calls >= limit:
        return resets_at
    tx.execute(update(call_budgets).where(matches).values(calls=calls + 1, resets_at=resets_at, retry_at=None))
    return None


def postpone_calls(tx: Transaction, account: str, until: datetime) -> None:
    """Keep all nodes from calling the API of an account before an instant; an earlier instant has no effect."""
    is_earlier = or_(call_budgets.c.retry_at.is_(None), call_budgets.c.retry_at < until)
    tx.execute(update(call_budgets).where(call_budgets.c.account == account, is_earlier).values(retry_at=until))


def prune_budgets(tx: Transaction, now: datetime) -> None:
    """Delete budgets of accounts that were not called for some time."""
    tx.execute(delete(call_budgets).where(call_budgets.c.resets_at < now - RETENTION))


def next_midnight(now: datetime) -> datetime:
    """Return the next midnight UTC, at which the daily limits of APIs are reset."""
    return now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
