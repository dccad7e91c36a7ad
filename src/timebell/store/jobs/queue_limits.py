"""Claims that are more than the next jobs due: within the limits of a queue, and shared between tenants.

The plain claim, of one statement, is in `jobs`; what a queue allows is decided in `model/limits.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from timebell.model.job import Attempt
from timebell.model.limits import Group, admitted, allowed, in_turns, started
from timebell.model.payload import decode, encode
from timebell.model.routes import Routes
from timebell.store.jobs import claim, groups
from timebell.store.jobs.claim import DUE, SHARED, START, TAKEN, Lane
from timebell.store.statement import Statement
from timebell.store.transaction import Row, Transaction
from timebell.store.types import to_micros

VISITED = 200  # tenants that one claim looks at
SEEN = 500  # due jobs that one look at groups takes
LOOKS = 20  # looks of one claim: so many jobs of full groups may be set aside meanwhile

_LANE = f"FROM timebell_jobs WHERE {SHARED} AND queue = :queue AND priority = :priority"
# Round and round by name, each once (so UNION ends it): a few look-ups a tenant, whatever the number of jobs.
TENANTS = Statement(
    f"""
    WITH RECURSIVE circle(id) AS (
        SELECT COALESCE((SELECT tenant_id {_LANE} AND tenant_id > :after ORDER BY tenant_id LIMIT 1),
                        (SELECT tenant_id {_LANE} ORDER BY tenant_id LIMIT 1))
        UNION
        SELECT COALESCE((SELECT tenant_id {_LANE} AND tenant_id > circle.id ORDER BY tenant_id LIMIT 1),
                        (SELECT tenant_id {_LANE} ORDER BY tenant_id LIMIT 1))
        FROM circle WHERE circle.id IS NOT NULL
    )
    SELECT id, (SELECT 1 {_LANE} AND tenant_id = seen.id AND $due ORDER BY run_at LIMIT 1) AS due
    FROM (SELECT id FROM circle WHERE id IS NOT NULL LIMIT {VISITED}) AS seen
    """  # noqa: S608 - constants only
)


class Turns(NamedTuple):
    """Tenants that have due jobs in a lane, in turn, and the one after which to go on."""

    tenants: list[str]
    after: str


def turns_of(tx: Transaction, lane: Lane, after: str, most: int, now: datetime) -> Turns:
    """Up to `most` of the tenants whose turn is next in a lane; none when nobody shares it."""
    seen = tx.fetch(TENANTS, queue=lane.queue, priority=lane.priority, after=after, now=tx.dialect.to_db(now))
    due = [row["id"] for row in seen if row["due"]]
    if len(due) > most:
        return Turns(due[:most], due[most - 1])
    return Turns(due if len(due) > 1 else [], seen[-1]["id"] if seen else "")


# So many of each tenant.
_SHARES = (
    f"FROM d $each WHERE {SHARED} AND tenant_id = d.tenant AND queue = :queue AND priority = :priority"
    " AND $due AND $hears ORDER BY run_at LIMIT :most $skip_locked $each_end"
)
CLAIM_SHARES = Statement(
    f"WITH $rows {START} WHERE id $pick SELECT s.id {_SHARES} $picked RETURNING {TAKEN}",
    tenant="text",
)


def claim_shares(
    tx: Transaction, lane: Lane, routes: Routes, node: str, most: int, now: datetime, tenants: Sequence[str]
) -> list[Attempt]:
    """As `jobs.claim`, an equal share of each of these tenants first (of one at least, if `most` is less)."""
    share, rows = max(1, most // max(1, len(tenants))), [{"tenant": tenant} for tenant in tenants[:most]]
    asked = claim.of(lane, routes)
    claimed = claim.begun(tx, CLAIM_SHARES, now, rows, node=node, most=share, **asked) if rows else []
    if len(claimed) < most:
        claimed += claim.claim(tx, lane, routes, node, most - len(claimed), now)
    return claimed


LOCK_QUEUE = Statement("SELECT * FROM timebell_queues WHERE name = :queue $for_update")
BUSY = Statement(f"SELECT {claim.BUSY.format(':queue')} AS busy")
NOTE_STARTS = Statement("UPDATE timebell_queues SET starts = :starts WHERE name = :queue")


def claim_limited(
    tx: Transaction, lane: Lane, routes: Routes, node: str, most: int, now: datetime, tenants: Sequence[str] = ()
) -> list[Attempt]:
    """As `claim_shares`, within the limits of the queue over all nodes: its row is locked meanwhile."""
    found = tx.fetch(LOCK_QUEUE, queue=lane.queue)
    if not found:
        return claim_shares(tx, lane, routes, node, most, now, tenants)
    queue = found[0]
    if queue["paused"]:
        return []
    if queue["concurrency"] is not None:
        most = min(most, queue["concurrency"] - tx.fetch(BUSY, queue=lane.queue)[0]["busy"])
    starts, rate, at = decode(queue["starts"]) or [], queue["rate"], to_micros(now)
    per = round((queue["per"] or 0) * 1e6)
    if rate is not None:
        most = min(most, allowed(starts, rate, per, at))
    if most < 1:
        return []
    if queue["concurrency_per_group"] is None:
        claimed = claim_shares(tx, lane, routes, node, most, now, tenants)
    else:
        claimed = _claim_in_groups(tx, lane, routes, node, most, now, tenants, queue["concurrency_per_group"])
    if rate is not None:
        # What has expired is put away and never starts; if it counted, a late queue would do nothing else.
        begin = sum(one.expires_at is None or one.expires_at > now for one in claimed)
        if begin:
            tx.fetch(NOTE_STARTS, queue=lane.queue, starts=encode(started(starts, rate, per, at, begin)))
    return claimed


RUNNING_GROUPS = Statement(
    f"SELECT tenant_id, group_name, count(*) AS running FROM ({groups.BUSY}) AS busy GROUP BY tenant_id, group_name"  # noqa: S608
)
SEE = Statement(
    f"SELECT id, tenant_id, group_name FROM timebell_jobs WHERE {DUE} ORDER BY run_at LIMIT :most $skip_locked"  # noqa: S608
)
SEE_SHARES = Statement(f"WITH $rows SELECT s.id, s.tenant_id, s.group_name {_SHARES}", tenant="text")
START_THESE = Statement(
    f"WITH $rows {START} WHERE id $pick SELECT id FROM d $picked RETURNING {TAKEN}",  # noqa: S608
    id="id",
)
HOLD_THESE = Statement(
    "WITH $rows UPDATE timebell_jobs SET hold = 'group' WHERE id $pick SELECT id FROM d $picked", id="id"
)


def _claim_in_groups(
    tx: Transaction, lane: Lane, routes: Routes, node: str, most: int, now: datetime, tenants: Sequence[str],
    per_group: int,
) -> list[Attempt]:  # fmt: skip
    """Start what its group has room for; what it has not leaves the claim index until one of the group ends."""
    counted = tx.fetch(RUNNING_GROUPS, queue=lane.queue)
    running: Counter[Group] = Counter({(row["tenant_id"], row["group_name"]): row["running"] for row in counted})
    claimed: list[Attempt] = []
    rows = [{"tenant": tenant} for tenant in tenants[:most]]
    asked = {**claim.of(lane, routes), "now": tx.dialect.to_db(now)}
    for look in range(LOOKS):
        if rows and look == 0:
            seen = tx.fetch(SEE_SHARES, rows, most=max(1, SEEN // len(rows)), **asked)
            seen = [seen[at] for at in in_turns([row["tenant_id"] for row in seen])]
        else:
            seen = tx.fetch(SEE, most=SEEN, **asked)
        start, wait = admitted(map(_group, seen), running, per_group, most - len(claimed))
        if wait:
            tx.fetch(HOLD_THESE, [{"id": str(seen[at]["id"])} for at in wait])
        if start:
            ids = [{"id": str(seen[at]["id"])} for at in start]
            claimed += claim.begun(tx, START_THESE, now, ids, node=node)
        if len(claimed) == most or (len(seen) < SEEN and not (rows and look == 0)):
            break
    return claimed


def _group(row: Row) -> Group | None:
    return None if row["group_name"] is None else (row["tenant_id"], row["group_name"])
