"""Due jobs whose topic no live node listens to: held until one does, or completed if they say so."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from timebell.model.job import Ending, JobState
from timebell.model.routes import ANYONE, COMPLETES_TEXT, Routes
from timebell.store.jobs import groups
from timebell.store.jobs.claim import CLAIMABLE, look
from timebell.store.jobs.serial import end_in_turn
from timebell.store.statement import Statement
from timebell.store.transaction import Transaction

NO_LISTENERS = '{"listeners":0}'

# Only the head of each lane is looked at: a job that nobody waits behind harms nobody.
_HEAD = (
    f"SELECT id, route FROM timebell_jobs j WHERE {CLAIMABLE} AND queue = :queue"  # noqa: S608 - constants only
    " AND priority = :priority AND run_at <= :now ORDER BY run_at LIMIT 1000"
)
# What was tried before is no firing that nobody heard.
_COMPLETES = "target = :completes AND attempt = 0"
HOLD = Statement(
    f"UPDATE timebell_jobs SET hold = 'unheard' WHERE id $pick SELECT id FROM ({_HEAD}) AS head"  # noqa: S608
    f" WHERE NOT $hears $picked AND {CLAIMABLE} AND (target IS NULL OR NOT ({_COMPLETES}))"
    " RETURNING id, route, queue, tenant_id, group_name"
)
COMPLETABLE = Statement(
    f"SELECT id, schedule_id, serial FROM timebell_jobs WHERE id $pick SELECT id FROM ({_HEAD}) AS head"  # noqa: S608
    f" WHERE NOT $hears $picked AND {CLAIMABLE} AND {_COMPLETES}"
)
HEAR = Statement(
    "UPDATE timebell_jobs SET hold = NULL WHERE id $pick SELECT id FROM timebell_jobs j"
    " WHERE hold = 'unheard' AND state = 'pending' AND $hears LIMIT 10000 $picked RETURNING id"
)


class Settled(NamedTuple):
    """How many jobs were held, were let go as a node listens again, and were completed without listeners."""

    held: int = 0
    freed: int = 0
    completed: int = 0
    routes: frozenset[str] = frozenset()
    """Of those that were held: their topics, or `@http` and the like."""


def settle(tx: Transaction, heard: Routes, now: datetime) -> Settled:
    """Set aside or complete due jobs that no live node takes, and let go those that one takes again."""
    freed = hear(tx, heard)
    held = completed = 0
    routes: set[str] = set()
    for row in look(tx, ANYONE, now):
        at = {"queue": row["queue"], "priority": row["priority"], "now": tx.dialect.to_db(now)}
        asked = {**at, **heard.params(), "completes": COMPLETES_TEXT}
        aside = tx.fetch(HOLD, **asked)
        groups.let_go(tx, aside)
        held, routes = held + len(aside), routes | {job["route"] for job in aside}
        over = tx.fetch(COMPLETABLE, **asked)
        endings = [
            Ending(str(job["id"]), 0, JobState.COMPLETED, now, was=JobState.PENDING, counts=False, result=NO_LISTENERS)
            for job in over
        ]
        if endings:
            completed += len(end_in_turn(tx, endings, [str(job["schedule_id"]) for job in over if job["serial"]]).ids)
    return Settled(held, freed, completed, frozenset(routes))


def hear(tx: Transaction, routes: Routes) -> int:
    """Let go the unheard jobs that these routes take; how many."""
    freed = len(tx.fetch(HEAR, **routes.params()))
    if freed:
        tx.notify()
    return freed
