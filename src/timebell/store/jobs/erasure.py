"""Erase the data of one owner: their jobs do not run, and personal data is removed from the history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import orjson
from sqlalchemy import select, update

from timebell.feature import Feature
from timebell.store.jobs import repository
from timebell.store.schema import finished, jobs, revisions, schedules
from timebell.store.transaction import Transaction


@dataclass(frozen=True, slots=True)
class ErasureResult:
    """Counts of the affected objects: jobs prevented from starting, jobs in flight, finished jobs, schedules, items."""

    prevented: int
    in_flight: int
    finished: int
    schedules: int
    items: int = 0


def erase(
    tx: Transaction, tenant_id: str, owner_id: str, now: datetime, features: Sequence[Feature]
) -> ErasureResult:  # fmt: skip
    """Stop and empty everything that a tenant stores for this owner, in one transaction.

    Removes payload, metadata, key, result, errors and the owner id. Ids, topics and times remain, so that the history
    stays consistent. Pending jobs are cancelled. Running jobs are emptied and not retried, but keep the owner id until
    they finish: erase once more afterwards to complete the erasure. `features` erase their own data.
    """
    prevented = in_flight = 0
    after: str | None = None
    while True:
        swept, after = repository.cancel_matching(tx, {"tenant_id": tenant_id, "owner_id": owner_id}, now, after, 1000)
        prevented += swept.prevented
        in_flight += swept.in_flight
        if after is None:
            break
    emptied = {"payload": "null", "metadata": None, "key": None, "errors": None, "conditions": None}
    live = (jobs.c.tenant_id == tenant_id) & (jobs.c.owner_id == owner_id)
    tx.execute(update(jobs).where(live).values(progress=None, **emptied))
    of_owner = (finished.c.tenant_id == tenant_id) & (finished.c.owner_id == owner_id)
    rows = tx.execute(
        update(finished).where(of_owner).values(owner_id=None, result=None, error=None, **emptied)
    ).rowcount
    items = sum(feature.erase(tx, tenant_id, owner_id, now) for feature in features)
    return ErasureResult(prevented, in_flight, rows, _erase_schedules(tx, tenant_id, owner_id, now), items)


def _erase_schedules(tx: Transaction, tenant_id: str, owner_id: str, now: datetime) -> int:
    """Disable the schedules of an owner and empty all their revisions; return the number of schedules."""
    owned = f'"owner_id":{orjson.dumps(owner_id).decode()}'  # in the format that `store.schedules` writes
    of_owner = (revisions.c.tenant_id == tenant_id) & revisions.c.action.contains(owned, autoescape=True)
    owned_revisions = tx.execute(select(revisions).where(of_owner)).all()
    for revision in owned_revisions:
        same = (revisions.c.schedule_id == revision.schedule_id) & (revisions.c.revision == revision.revision)
        tx.execute(update(revisions).where(same).values(action=_without_personal_data(revision.action)))
    ids = {revision.schedule_id for revision in owned_revisions}
    for row in tx.execute(select(schedules).where(schedules.c.id.in_(ids)).with_for_update()):
        values = {"action": _without_personal_data(row.action), "enabled": False, "code_hash": None, "updated_at": now}
        tx.execute(update(schedules).where(schedules.c.id == row.id).values(**values))
    return len(ids)


def _without_personal_data(action: str) -> str:
    emptied = orjson.loads(action) | {"payload": None, "metadata": {}, "owner_id": None}
    for name in ("condition", "unless"):
        emptied.pop(name, None)
    return orjson.dumps(emptied, option=orjson.OPT_SORT_KEYS).decode()
