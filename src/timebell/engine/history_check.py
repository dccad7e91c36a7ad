"""Compare the recent commits of this process with the database after its server has changed."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timedelta

from timebell.clock import Clock
from timebell.ids import new_id
from timebell.model.planned_job import build_job
from timebell.store.cluster import rewinds
from timebell.store.cluster.rewinds import MAX_EXAMPLES, Rewind
from timebell.store.dialects.base import Store
from timebell.store.recent_writes import KINDS, Batch
from timebell.store.transaction import Transaction

log = logging.getLogger("timebell.history")


async def check_history(store: Store, clock: Clock, node_name: str) -> Rewind | None:
    """Look for lost commits, if the server has changed since the last check. Raises StoreError.

    Lost writes are reapplied as far as possible. Returns the loss, after recording it; None if nothing was lost.
    """
    recent = store.recent_writes
    if not recent.is_unverified:
        return None
    recent.is_unverified = False
    batches = recent.snapshot()
    try:
        lost = await store.run(rewinds.find_lost, batches)
        rewind = _describe_loss(lost, batches, clock, node_name, recent.monotonic())
        if rewind is not None:
            rewind = await store.run(_reapply_and_record, rewind, batches, lost, recent.reapplied_jobs)
    except BaseException:
        recent.is_unverified = True
        raise
    if rewind is not None:
        recent.discard(batches)
        log.error("%s", rewind.describe(), extra={"event": "database.rewound"})
    return rewind


def _reapply_and_record(
    tx: Transaction, rewind: Rewind, batches: list[Batch], lost: dict[str, set[str]], reapplied_jobs: str
) -> Rewind:
    counts = rewinds.reapply(tx, batches, lost, reapplied_jobs, build_job, rewind.detected_at)
    rewind = replace(rewind, reapplied=counts)
    rewinds.record_rewind(tx, rewind)
    return rewind


def _describe_loss(
    lost: dict[str, set[str]], batches: list[Batch], clock: Clock, node_name: str, monotonic: float
) -> Rewind | None:
    # Of a row that was written several times, the last write decides: the earlier ones may have survived.
    last_written = {
        (batch.kind, id_): batch.at for batch in batches for id_ in batch.rows if id_ in lost.get(batch.kind, ())
    }
    affected = last_written.values()
    if not affected:
        return None
    now = clock.now()

    def instant(at: float) -> datetime:
        return now - timedelta(seconds=monotonic - at)

    return Rewind(
        new_id(now), node_name, now, instant(min(affected)), instant(max(affected)),
        {kind: len(lost[kind]) for kind in KINDS},
        {kind: sorted(lost[kind])[:MAX_EXAMPLES] for kind in KINDS if lost[kind]},
    )  # fmt: skip
