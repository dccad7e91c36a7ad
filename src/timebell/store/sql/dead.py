"""Dead letters: jobs that failed for good. They stay in `finished` until they are replayed or forgotten."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, func, insert, select

from timebell.errors import Conflict
from timebell.model.job import Hold, JobState
from timebell.model.payload import decode
from timebell.model.routes import route
from timebell.store.schema import finished, jobs, schedules
from timebell.store.sql import ledger
from timebell.store.transaction import Transaction

_LIVE = [column.name for column in jobs.columns if column.name in finished.columns]


def replay(tx: Transaction, tenant_id: str | None, job_id: str, now: datetime) -> bool | None:
    """Make a failed job pending again, under its id and with a fresh budget of tries; None for an unknown id.

    False when it has not failed. One of a schedule waits for its turn. Raises Conflict (KEY_IN_USE).
    """
    mine = (
        finished.c.id == job_id
        if tenant_id is None
        else (finished.c.id == job_id) & (finished.c.tenant_id == tenant_id)
    )
    row = tx.execute(select(finished).where(mine).with_for_update()).first()
    if row is None:
        return None if ledger.find(tx, tenant_id, job_id) is None else False
    if row.state != JobState.FAILED:
        return False
    same = (jobs.c.tenant_id == row.tenant_id) & (jobs.c.key == row.key)
    if row.key is not None and (holder := tx.execute(select(jobs.c.id).where(same)).scalar()):
        raise Conflict(
            f"The key {row.key!r} belongs to job {holder} by now.", code="KEY_IN_USE", existing=holder,
            fix="Wait for that job to finish, or cancel it.",
        )  # fmt: skip
    hold = None
    if row.serial:
        tx.execute(select(schedules.c.id).where(schedules.c.id == row.schedule_id).with_for_update())
        others = select(func.count()).select_from(jobs).where(jobs.c.schedule_id == row.schedule_id)
        hold = Hold.OVERLAP.value if tx.execute(others).scalar_one() else None
    values = {name: getattr(row, name) for name in _LIVE} | {
        "state": JobState.PENDING.value, "run_at": now, "tries": 0, "node_id": None, "started_at": None,
        "expires_at": None, "hold": hold, "route": route(row.topic, decode(row.target)),
    }  # fmt: skip
    tx.execute(delete(finished).where(mine))
    tx.execute(insert(jobs).values(**values))
    tx.notify()
    return True
