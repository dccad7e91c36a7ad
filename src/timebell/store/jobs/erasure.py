"""Erasure of one person's data: their jobs do not run, and what they carried is gone; that they were stays."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import orjson
from sqlalchemy import delete, select, update

from timebell.store.campaigns.tables import devices
from timebell.store.jobs import repository
from timebell.store.schema import finished, jobs, revisions, schedules
from timebell.store.transaction import Transaction
from timebell.store.triggers.erasure import forget

ERASED = "erased"


@dataclass(frozen=True, slots=True)
class Erased:
    """What was found of a person: jobs that will not run, that run just now, finished ones, schedules, and rows of
    sources."""

    prevented: int
    in_flight: int
    finished: int
    schedules: int
    items: int = 0


def erase(tx: Transaction, tenant_id: str, owner_id: str, now: datetime) -> Erased:
    """Stop and empty everything that a tenant keeps under this owner, in one transaction.

    Payload, metadata, key, result and errors go, and the owner's id with them; ids, topics and times stay, so
    that the history still adds up. What runs is asked not to be tried again; its row keeps the owner until it
    has finished, so that erasing once more completes the work. Devices registered for a user of this id go, and
    the person from the rows of sources whose recipients they are among.
    """
    prevented = in_flight = 0
    after: str | None = None
    while True:
        swept, after = repository.sweep(tx, {"tenant_id": tenant_id, "owner_id": owner_id}, now, after, 1000)
        prevented += swept.prevented
        in_flight += swept.in_flight
        if after is None:
            break
    nothing = {"payload": "null", "metadata": None, "key": None, "errors": None, "conditions": None}
    running = (jobs.c.tenant_id == tenant_id) & (jobs.c.owner_id == owner_id)
    tx.execute(update(jobs).where(running).values(**nothing))
    mine = (finished.c.tenant_id == tenant_id) & (finished.c.owner_id == owner_id)
    theirs = (devices.c.tenant_id == tenant_id) & (devices.c.user_id == owner_id)
    tx.execute(delete(devices).where(theirs))
    rows = tx.execute(update(finished).where(mine).values(owner_id=None, result=None, error=None, **nothing)).rowcount
    items = forget(tx, tenant_id, owner_id, now)
    return Erased(prevented, in_flight, rows, _schedules(tx, tenant_id, owner_id, now), items)


def _schedules(tx: Transaction, tenant_id: str, owner_id: str, now: datetime) -> int:
    """Switch off and empty the person's schedules, in every revision; how many."""
    owned = f'"owner_id":{orjson.dumps(owner_id).decode()}'  # as `schedules` writes it
    versions = (revisions.c.tenant_id == tenant_id) & revisions.c.action.contains(owned, autoescape=True)
    found = tx.execute(select(revisions).where(versions)).all()
    for version in found:
        which = (revisions.c.schedule_id == version.schedule_id) & (revisions.c.revision == version.revision)
        tx.execute(update(revisions).where(which).values(action=_emptied(version.action)))
    ids = {version.schedule_id for version in found}
    for row in tx.execute(select(schedules).where(schedules.c.id.in_(ids)).with_for_update()):
        values = {"action": _emptied(row.action), "enabled": False, "code_hash": None, "updated_at": now}
        tx.execute(update(schedules).where(schedules.c.id == row.id).values(**values))
    return len(ids)


def _emptied(action: str) -> str:
    emptied = orjson.loads(action) | {"payload": None, "metadata": {}, "owner_id": None}
    for asked in ("condition", "unless"):
        emptied.pop(asked, None)
    return orjson.dumps(emptied, option=orjson.OPT_SORT_KEYS).decode()
