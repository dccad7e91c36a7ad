"""Remote workers: processes in any language that claim jobs over HTTP.

The row of a worker announces the topics that it handles, and holds its last claim: a worker that has lost the answer of
a claim repeats it with the same claim id, and gets the same jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import NAMESPACE_URL, uuid5

import orjson
from sqlalchemy import Row, delete, func, select, update

from timebell.model.job import Attempt, JobState
from timebell.model.payload import decode
from timebell.model.routes import Routes
from timebell.store.jobs import claim
from timebell.store.schema import jobs, workers
from timebell.store.transaction import Transaction

_ALL_WORKERS = select(workers).order_by(workers.c.started_at, workers.c.id)


@dataclass(frozen=True, slots=True)
class RemoteWorker:
    """A remote worker, as announced by its last claim.

    `routes.tenant_id` is the tenant whose jobs it claims (None: all tenants), `queues` are the queues from which it
    claims (None: all queues).
    """

    id: str
    name: str
    routes: Routes
    queues: tuple[str, ...] | None
    slots: int
    """The number of jobs that it asked for."""
    started_at: datetime
    seen_at: datetime
    heartbeat: int = 0
    draining: bool = False
    """Requested to finish its running jobs and stop."""

    @property
    def tenant_id(self) -> str | None:
        """The tenant to which it belongs; None if it belongs to the platform."""
        return self.routes.tenant_id


class Announcement(NamedTuple):
    """The state of the row of a worker before it announced itself again.

    `repeated` has the attempts of the claim if this is a repeated one, else None. `is_changed`: it is new, or handles
    other topics than before.
    """

    draining: bool
    is_changed: bool
    repeated: list[Attempt] | None


def worker_id(tenant_id: str | None, name: str) -> str:
    """Return the id of the worker with this name. The same name in another tenant is another worker."""
    return str(uuid5(NAMESPACE_URL, f"timebell:worker:{tenant_id or ''}:{name}"))


def announce(tx: Transaction, worker: RemoteWorker, claim_id: str | None) -> Announcement:
    """Insert or update the row of a worker that is about to claim."""
    routes = _encode_routes(worker)
    query = select(workers.c.routes, workers.c.draining, workers.c.claim_id, workers.c.claimed)
    row = tx.execute(query.where(workers.c.id == worker.id)).first()
    replaced = ("name", "tenant_id", "routes", "slots", "seen_at")
    tx.execute(
        tx.dialect.upsert(workers, replace=replaced, add=("heartbeat",)),
        {
            "id": worker.id, "tenant_id": worker.tenant_id, "name": worker.name, "routes": routes,
            "slots": worker.slots, "heartbeat": 1, "started_at": worker.started_at, "seen_at": worker.seen_at,
        },
    )  # fmt: skip
    if row is None:
        return Announcement(draining=False, is_changed=True, repeated=None)
    return Announcement(bool(row.draining), row.routes != routes, _find_repeated(tx, worker.id, row, claim_id))


def find_claim(tx: Transaction, id_: str, claim_id: str | None, *, lock: bool = False) -> Announcement | None:
    """Return the state of the row of a worker; None without a row.

    With `lock`, the row stays locked until the transaction ends, so that a repeated claim waits for the first one.
    """
    query = select(workers.c.draining, workers.c.claim_id, workers.c.claimed).where(workers.c.id == id_)
    row = tx.execute(query.with_for_update() if lock else query).first()
    return None if row is None else Announcement(bool(row.draining), False, _find_repeated(tx, id_, row, claim_id))


def record_claim(tx: Transaction, id_: str, claim_id: str | None, claimed: Sequence[Attempt]) -> None:
    """Store the last claim of a worker."""
    values = {"claim_id": claim_id, "claimed": orjson.dumps([[each.id, each.number] for each in claimed]).decode()}
    tx.execute(update(workers).where(workers.c.id == id_).values(**values))


def _find_repeated(tx: Transaction, id_: str, row: Row[Any], claim_id: str | None) -> list[Attempt] | None:
    """Return the attempts of the last claim that have not ended, if `claim_id` repeats it."""
    if claim_id is None or row.claim_id != claim_id:
        return None
    numbers = dict(decode(row.claimed) or [])
    own = (jobs.c.node_id == id_) & (jobs.c.state == JobState.DISPATCHED.value)
    rows = tx.execute(select(jobs).where(jobs.c.id.in_(numbers), own).order_by(jobs.c.run_at)).all()
    return [claim.attempt_from_job(each) for each in rows if each.attempt == numbers[each.id]]


def touch(tx: Transaction, ids: Sequence[str], now: datetime) -> set[str]:
    """Record that these workers are alive; return the ids of those that were requested to drain."""
    same = workers.c.id.in_(ids)
    tx.execute(update(workers).where(same).values(heartbeat=workers.c.heartbeat + 1, seen_at=now))
    return set(tx.execute(select(workers.c.id).where(same, workers.c.draining)).scalars())


def list_workers(tx: Transaction, tenant_id: str | None = None) -> list[RemoteWorker]:
    """Return the workers that have a row, of one tenant or all, oldest first."""
    rows = tx.execute(_ALL_WORKERS if tenant_id is None else _ALL_WORKERS.where(workers.c.tenant_id == tenant_id))
    return [_worker_from_row(row) for row in rows]


def count_running(tx: Transaction) -> dict[str, int]:
    """Return the number of jobs that each remote worker runs, by worker id."""
    dispatched = jobs.c.state == JobState.DISPATCHED.value
    query = select(jobs.c.node_id, func.count().label("running")).where(dispatched).group_by(jobs.c.node_id)
    return {row.node_id: row.running for row in tx.execute(query)}


def request_drain(tx: Transaction, id_: str) -> bool:
    """Request a worker to finish its running jobs and stop; return False for an unknown worker."""
    return tx.execute(update(workers).where(workers.c.id == id_).values(draining=True)).rowcount == 1


def remove_workers(tx: Transaction, ids: Sequence[str]) -> None:
    """Remove workers that have stopped or died."""
    tx.execute(delete(workers).where(workers.c.id.in_(ids)))


def _encode_routes(worker: RemoteWorker) -> str:
    queues = None if worker.queues is None else sorted(worker.queues)
    return orjson.dumps({**worker.routes.to_json(), "queues": queues}).decode()


def _worker_from_row(row: Row[Any]) -> RemoteWorker:
    values = decode(row.routes)
    routes = Routes(
        frozenset(values["exact"]), frozenset(values["prefixes"]), values["allTopics"], tenant_id=row.tenant_id
    )
    queues = None if values["queues"] is None else tuple(values["queues"])
    return RemoteWorker(
        row.id, row.name, routes, queues, row.slots, row.started_at, row.seen_at, row.heartbeat, bool(row.draining)
    )
